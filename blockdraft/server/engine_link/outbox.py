"""Outbox: messages to another process, sent by callers that never wait for it; Inbox: those that arrive.

A message is written at once if the socket has room for it, which is nearly always so. If the other process
does not read, a separate thread writes the waiting messages in order. Messages that the event loop sends in
one turn are written together: a write wakes the other process, which costs as much as making a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Condition, Thread
from typing import Any

# The length before a message, as multiprocessing's Connection reads it.
_LENGTH = struct.Struct("!i")
MAX_HOLD_S = 0.003  # that a message waits for others; arbitrary
READ_BYTES = 1 << 18  # asked for in one read; arbitrary
_DONT_WAIT: int | None = getattr(socket, "MSG_DONTWAIT", None)  # None on Windows, where the thread writes all


def packed(message: tuple[object, ...]) -> bytes:
    """Return the message pickled for `Connection.recv`, without its length. Raises RecursionError."""
    return bytes(ForkingPickler.dumps(message))


class Outbox:
    """Writes messages to `connection`. No other code may write to it. Any thread may call."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed = Condition()
        self._held: list[bytes] = []  # for the end of the event loop's turn
        self._held_s = 0.0  # when the first of them came
        self._waiting: deque[bytes] = deque()  # complete messages, without their length
        self._rest = b""  # the rest of a message that was written in part
        self._num_waiting_bytes = 0  # including what the thread is writing
        self._is_open = True
        self._thread: Thread | None = None  # started with the first message that has to wait
        self._socket: socket.socket | None = None
        if _DONT_WAIT is not None:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    @property
    def num_waiting_bytes(self) -> int:
        """Return the number of bytes that are not yet in the socket."""
        return self._num_waiting_bytes

    def put(self, message: bytes) -> None:
        """Send a packed message, in order. It is dropped if the other process has gone."""
        with self._changed:
            self._held.append(message)
            self._send_held()

    def put_soon(self, message: bytes) -> None:
        """Do `put` at the end of the running event loop's turn, or in MAX_HOLD_S if the turn is long."""
        with self._changed:
            is_first = not self._held
            if is_first:
                self._held_s = time.monotonic()
            self._held.append(message)
            if not is_first and time.monotonic() - self._held_s > MAX_HOLD_S:
                self._send_held()
        if is_first:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._held:
            with self._changed:
                self._send_held()

    def _send_held(self) -> None:
        held, self._held = self._held, []
        if not (self._is_open and held):
            return
        if not self._num_waiting_bytes and self._socket is not None:
            parts = [part for message in held for part in (_LENGTH.pack(len(message)), message)]
            self._rest = self._write_now(b"".join(parts))
            if not self._rest:
                return
            self._num_waiting_bytes = len(self._rest)
        else:
            self._waiting.extend(held)
            self._num_waiting_bytes += sum(map(len, held))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="engine outbox", daemon=True)
            self._thread.start()
        self._changed.notify()

    def close(self) -> None:
        """Drop the waiting messages, and end the thread."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other process has gone
                self._socket.shutdown(socket.SHUT_WR)  # ends a blocked write
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()

    def _write_now(self, data: bytes) -> bytes:
        """Write what the socket takes without waiting, and return the rest."""
        assert self._socket is not None
        assert _DONT_WAIT is not None
        num_sent = 0
        try:
            while num_sent < len(data):
                num_sent += self._socket.send(memoryview(data)[num_sent:], _DONT_WAIT)
        except BlockingIOError:
            return data[num_sent:]
        except OSError:
            pass  # the other process has gone; the reader of this side notices
        return b""

    # ---- on the thread

    def _run(self) -> None:
        while (data := self._next()) is not None:
            rest, message = data
            try:
                if self._socket is not None and rest:
                    self._socket.sendall(rest)
                else:
                    self._connection.send_bytes(message)
            except OSError:
                return
            with self._changed:
                self._num_waiting_bytes -= len(rest) or len(message)

    def _next(self) -> tuple[bytes, bytes] | None:
        """Wait, and return (rest of a message, b"") or (b"", next message); None if the outbox is closed."""
        with self._changed:
            while self._is_open and not self._rest and not self._waiting:
                self._changed.wait()
            if not self._is_open:
                return None
            rest, self._rest = self._rest, b""
            return (rest, b"") if rest else (b"", self._waiting.popleft())


class Inbox:
    """Reads the messages of a connection. One thread calls `recv`, and no other code may read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._read = bytearray()  # and not yet taken

    def recv(self) -> Any:  # noqa: ANN401  # whatever was sent
        """Wait for the next message. Raise EOFError or OSError if the other process has gone.

        `Connection.recv` reads a message's length and its content apart, and waits for Python's lock twice.
        """
        if _DONT_WAIT is None:
            return self._connection.recv()
        num_bytes = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return ForkingPickler.loads(self._take(num_bytes))

    def _take(self, num_bytes: int) -> bytes:
        while len(self._read) < num_bytes:
            data = os.read(self._connection.fileno(), READ_BYTES)
            if not data:
                raise EOFError
            self._read += data
        taken = bytes(self._read[:num_bytes])
        del self._read[:num_bytes]
        return taken
