"""The connection between the server's process and the engine's."""
