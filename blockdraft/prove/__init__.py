"""Tests whether a server gives equal answers to one question that is sent in different ways."""
