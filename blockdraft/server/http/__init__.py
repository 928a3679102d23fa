"""HTTP: connections, who gets in, request bodies, and answers that every API gives alike."""
