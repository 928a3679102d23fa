"""Makes a ready engine from settings: load, fit into memory, warm up, measure, verify."""
