"""The live page, and the numbers it and /metrics show."""
