"""The live page, its feed of numbers, and /metrics."""
