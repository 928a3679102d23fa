"""Finds, reads and unpacks checkpoints."""
