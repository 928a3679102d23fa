"""The fast path on a CPU: machine code that llvmlite compiles at start-up. Import it only if it is chosen."""
