"""Settings: their values and sources, recipes, and names of models."""
