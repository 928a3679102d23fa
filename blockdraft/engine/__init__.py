"""The host side: choose the next step's sequences, emit their tokens, and end requests."""
