"""Training, evaluation and export of drafters."""
