"""The driver is asked for the context of the card that will be used, and by nobody else."""

import ctypes
import threading

import pytest

from blockdraft.machine import wake_card as module
from blockdraft.machine.wake_card import wake_card


class Driver:
    def __init__(self, *, has_card=True):
        self.has_card, self.asked, self.done = has_card, [], threading.Event()

    def cuInit(self, flags):  # the driver's names
        self.asked.append("init")
        if not self.has_card:
            self.done.set()
        return 0 if self.has_card else 100

    def cuDeviceGet(self, card, index):
        self.asked.append(index)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, card):
        self.asked.append("context")
        self.done.set()
        return 0


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_card_that_is_asked_for_gets_a_context(monkeypatch, device, index):
    driver = Driver()
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: driver)
    wake_card(device)
    assert driver.done.wait(10)
    assert driver.asked == ["init", index, "context"]


def test_nothing_is_asked_for_the_cpu_or_without_a_card(monkeypatch):
    driver = Driver(has_card=False)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: driver)
    wake_card("cpu")
    assert driver.asked == []
    wake_card("auto")
    assert driver.done.wait(10)
    assert driver.asked == ["init"]


def test_a_machine_without_the_library_is_left_alone(monkeypatch):
    asked = threading.Event()

    def missing(name):
        asked.set()
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    wake_card("auto")
    assert asked.wait(10)
