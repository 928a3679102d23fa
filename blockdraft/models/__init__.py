"""What to compute: configurations, checkpoints, layers and families."""
