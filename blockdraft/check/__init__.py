"""Checks at the start that this machine computes kernels, layers and drafts correctly."""
