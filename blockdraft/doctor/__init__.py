"""blockdraft doctor: examine this machine, its kernels, and the known problems it has."""
