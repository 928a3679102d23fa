"""What the user asked for: settings, where their values come from, recipes, names of models."""
