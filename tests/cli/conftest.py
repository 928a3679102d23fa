"""What all commands share: the pair of models, a terminal, an environment that is put back."""

import io

import pytest

PINS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Threads are pinned in the environment; setenv first, so that it is undone."""
    for name in PINS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
