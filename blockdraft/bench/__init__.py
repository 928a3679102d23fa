"""Measure any OpenAI-compatible server so that its numbers can be compared."""
