"""Numbers that several processes take one after the other, as the streams of one process take the next ask.

They lie in a file that all have open: reading moves the place where the next one reads, in all processes at
once (POSIX: a read is one with the moving of the offset). Nobody waits for anybody else.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

_SIZE = array("I").itemsize


def refill(file: int, count: int) -> None:
    """Put the numbers below `count` in; nobody may be taking any meanwhile."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    data = memoryview(array("I", range(count)).tobytes())
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)


def take_all(file: int) -> Iterator[int]:
    """Yield the next number that nobody has taken, until there is none."""
    while data := os.read(file, _SIZE):
        yield array("I", data)[0]
