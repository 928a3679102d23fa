"""From settings to a ready engine: load, fit into memory, warm up, measure, verify."""
