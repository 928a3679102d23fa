"""Before anything is started: what fits, how fast it should be, and what to change. No torch here."""
