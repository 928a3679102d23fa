"""Picks the implementation of each operation: its kernel, or the reference of its contract."""
