"""The HTTP front of the engine."""
