"""A card is prepared on a thread of its own: the one that will be used, and only where there is a driver."""

import ctypes
import subprocess
import sys
import threading

import pytest

from blockdraft.start import while_importing as module
from blockdraft.start.while_importing import prepare_card


class Driver:
    """What is asked of libcuda, by its names."""

    def __init__(self, *, has_card=True):
        self.has_card, self.asked = has_card, []

    def cuInit(self, flags):
        self.asked.append("init")
        return 0 if self.has_card else 100

    def cuDeviceGet(self, card, index):
        self.asked.append(index)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, card):
        self.asked.append("context")
        return 0


@pytest.fixture
def prepared(monkeypatch):
    """Set when the thread has come to its end."""
    ended = threading.Event()
    monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(module, "_hash_triton", ended.set)
    return ended


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_card_that_is_asked_for_gets_a_context(monkeypatch, prepared, device, index):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    prepare_card(device)
    assert prepared.wait(10)
    assert driver.asked == ["init", index, "context"]


def test_a_driver_without_a_card_is_asked_once(monkeypatch, prepared):
    driver = Driver(has_card=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    prepare_card("auto")
    assert prepared.wait(10)
    assert driver.asked == ["init"]


def test_a_driver_without_its_library_is_left_to_pytorch(monkeypatch, prepared):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    prepare_card("auto")
    assert prepared.wait(10)


def test_nothing_begins_for_the_cpu_or_without_a_driver(monkeypatch, prepared):
    monkeypatch.setattr(module, "_make_context", lambda index: pytest.fail("there is no card"))
    prepare_card("cpu")
    monkeypatch.setattr(module, "may_have_gpu", lambda: False)
    prepare_card("auto")
    assert not any(thread.name == "prepare-card" for thread in threading.enumerate())


def test_triton_hashes_itself_without_pytorch():
    pytest.importorskip("triton")
    asked = (
        "import sys; from blockdraft.start import while_importing as one; one._hash_triton(); "
        "from triton.runtime.cache import triton_key; "
        "sys.exit(triton_key.cache_info().currsize != 1 or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", asked], check=True)
