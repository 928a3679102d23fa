"""Tests whether a server gives the same answer to the same question, however it is asked."""
