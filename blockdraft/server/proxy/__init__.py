"""An engine of others behind our door: its answers are passed on untouched."""
