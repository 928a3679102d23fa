"""The host side: who runs next, what is emitted, when a request ends."""
