"""blockdraft doctor: what this machine is, what runs on it, and what is known to go wrong on it."""
