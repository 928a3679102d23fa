"""The fast paths on a CUDA device, in Triton; imported when Kernels for a CUDA device are built."""
