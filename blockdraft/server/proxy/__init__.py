"""Our server in front of another engine, whose answers pass through unchanged."""
