"""Measurements: each script prints a table and writes JSON with machine, commit and date."""
