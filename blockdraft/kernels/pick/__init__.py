"""Which implementation of each operation serves: its kernel, or the reference of its contract."""
