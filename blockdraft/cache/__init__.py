"""What a forward may read and write."""
