"""The device side: what one step computes."""
