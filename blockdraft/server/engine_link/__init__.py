"""The line between the server's process and the engine's."""
