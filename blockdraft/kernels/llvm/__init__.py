"""The fast path on a CPU: machine code made at start-up by llvmlite. Import only when it is chosen."""
