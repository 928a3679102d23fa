"""Does this machine compute it right? Kernels, layers and drafts, checked before a start is over."""
