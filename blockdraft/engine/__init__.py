"""The host side: it chooses each step's sequences, emits their tokens, and ends requests."""
