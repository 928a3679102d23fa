"""Facts about this computer: memory, cards, limits, and advice for a card that does not work."""
