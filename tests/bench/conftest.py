"""Fixtures of several files of this folder."""

import contextlib

import pytest


@pytest.fixture
def quick_blocks(monkeypatch):
    """Collecting garbage before every block takes longer than these blocks: PyTorch is in memory."""
    monkeypatch.setattr("blockdraft.bench.load.quiet_collector", contextlib.nullcontext)
