"""HTTP itself: connections, what may come in and what goes out, before anyone knows what it means."""
