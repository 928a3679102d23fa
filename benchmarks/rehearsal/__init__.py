"""A rehearsal: the shipped pair through every command, as its user runs it, on the device that is there.

    python -m benchmarks.rehearsal --quick [--device cuda] [--out FILE]

Every command is a process of its own. One table says what each step found; the exit code is 1 where one
failed.
"""
