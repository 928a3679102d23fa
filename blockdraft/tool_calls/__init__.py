"""How each family of models writes tool calls: reading them from an answer, and forcing them by a grammar."""
