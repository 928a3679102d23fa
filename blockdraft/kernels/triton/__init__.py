"""The fast paths on a CUDA device, written in Triton; imported when a model on one gets its Kernels."""
