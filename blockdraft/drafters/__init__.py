"""Models that propose a block for the target to verify."""
