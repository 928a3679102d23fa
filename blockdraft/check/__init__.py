"""Checks when the server starts that this machine computes kernels, layers and drafts correctly."""
