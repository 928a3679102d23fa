"""A rehearsal: the shipped pair through every command, as its user runs it, on the device that is there.

    python -m benchmarks.rehearsal [--quick] [--device cuda] [--out FILE]

Every command is a process of its own. One table says what each step found; the exit code is 1 where one
failed. Without --quick it adds: 64 and 256 streams, starts of Qwen3-8B's shape with random weights, the times
of its steps, the table of benchmarks.equality, a minute of training; and it compares itself with the last
result of the same kind of machine in benchmarks/results. A start, a step of one stream or a number of graphs
that is more than 10 % worse is a failure, and so is an answer that differs.
"""
