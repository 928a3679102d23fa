"""Picks the implementation of each operation: a kernel, or the PyTorch reference."""
