"""Formats of tool calls by model family: reading calls from an answer, and forcing them by a grammar."""
