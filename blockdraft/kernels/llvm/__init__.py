"""The fast kernels on a CPU: machine code that llvmlite compiles at start-up. Import only when used."""
