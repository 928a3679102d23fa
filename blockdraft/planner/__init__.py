"""Plans before a start: what fits, how fast it should be, and what to change. Nothing here imports torch."""
