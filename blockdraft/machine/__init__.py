"""What this computer is: its memory, its cards, its limits, and what to do about a bad card."""
