"""The Triton kernels for CUDA devices, imported when the Kernels for such a device are built."""
