"""Trains, evaluates and exports drafters."""
