"""Messages between the processes of a load generator, and the queue of asks that they share.

A message is a pickled record with its length in front. The queue is a file of numbers that all processes have
open. Reading one moves the shared file offset, atomically (POSIX), so each number is taken once and nobody
waits.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blockdraft.bench.client import Client
from blockdraft.bench.records import Answer, Ask, OfferedLoad

_LENGTH = struct.Struct("<Q")
_NUMBER_SIZE = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a block; asks with times go by turns, from `place` on."""

    client_number: int  # a process reuses its client of this number
    client: Client
    asks: Sequence[Ask]  # all of the block
    load: OfferedLoad  # of this process
    place: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the block: all processes are ready, and count from this time."""

    start_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn has ended. The ask is not sent back, since prompts may be long."""

    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Done:
    """A process has finished or given up its part of a block."""

    begun_s: dict[int, float]
    ended: set[int]
    num_refused: int
    cpu_s: float


Word = Literal["ready", "end"]  # "end" of a block: give up what still runs
Frame = Share | Begin | Answered | Done | Word


def packed(frame: Frame) -> bytes:
    data = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def next_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return what comes next; None: the other side has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        frame: Frame = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame


# ---- the queue


def fill_queue(file: int, count: int) -> None:
    """Put the numbers below `count` in; nobody may be taking any meanwhile."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    data = memoryview(array("I", range(count)).tobytes())
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)


def take_numbers(file: int) -> Iterator[int]:
    """Yield the next number that nobody has taken, until there is none."""
    while data := os.read(file, _NUMBER_SIZE):
        yield array("I", data)[0]
