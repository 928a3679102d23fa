"""Models: configurations, layers, families, and packed weights."""
