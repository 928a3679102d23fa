"""Drafters: made from a target and prompts, measured, written down."""
