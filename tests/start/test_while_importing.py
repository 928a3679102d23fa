"""A card is woken on a thread of its own: the one that will be used, and only where there is a driver."""

import contextlib
import ctypes
import gc
import signal
import threading

import pytest

from blockdraft.start.driver_warmup import quick_imports, wake_card


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


def wait():
    for thread in threading.enumerate():
        if thread.name == "wake-card":
            thread.join(10)


@pytest.fixture(autouse=True)
def has_driver(monkeypatch):
    monkeypatch.setattr("blockdraft.machine.machine.may_have_gpu", lambda: True)


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_card_that_is_asked_for_gets_a_context(monkeypatch, device, index):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    wake_card(device)
    wait()
    assert driver.asked == ["init", index, "context"]


def test_a_driver_without_a_card_is_asked_once(monkeypatch):
    driver = Driver(has_card=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    wake_card("auto")
    wait()
    assert driver.asked == ["init"]


def test_a_driver_without_its_library_is_left_to_pytorch(monkeypatch):
    asked = []

    def missing(name):
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    wake_card("auto")
    wait()
    assert asked == ["libcuda.so.1"]


def test_nobody_is_woken_for_the_cpu_or_without_a_driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    wake_card("cpu")
    monkeypatch.setattr("blockdraft.machine.machine.may_have_gpu", lambda: False)
    wake_card("auto")
    wait()
    assert driver.asked == []


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_ends_the_process_itself_while_modules_are_imported(fails):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # another test's event loop may have set its own
    with contextlib.suppress(ZeroDivisionError), quick_imports():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        _ = 1 / (0 if fails else 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert gc.isenabled()


def test_a_signal_that_somebody_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with quick_imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
