"""The fast paths on a CUDA device, written in Triton; imported when the first CUDA tensor arrives."""
