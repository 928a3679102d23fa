"""RemoteEngine: one of the server's engines, which runs in its own process.

A process runs only one thread of Python at a time. An engine in the server's process launches hundreds of
kernels per step, and would wait for the event loop at each. The engine's side is engine_worker.py. Messages
are tuples over a private pair of sockets; all deltas of a step are one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Lock, Thread
from typing import Any, Protocol

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import Delta
from blockdraft.engine.stats import Snapshot
from blockdraft.engine.streams import EngineStopped, EventLoopOutlet, Item, Mail, ends_request
from blockdraft.errors import CapacityError
from blockdraft.phases import StartState
from blockdraft.server.engine_link.engine_process import end_of
from blockdraft.server.engine_link.live_request import LiveRequest
from blockdraft.server.engine_link.outbox import Inbox, Outbox, packed
from blockdraft.server.engine_link.prompt_pages import PageTree
from blockdraft.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

UNHEALTHY_S = 10.0  # of silence, after which /health reports a problem; arbitrary
CLOSE_S = 10.0  # for the step that the engine is in; arbitrary
SNAPSHOT_S = 1.0  # after that, the last snapshot is returned
MIN_SILENCE_S = 5.0  # on a busy machine, a healthy process may be silent for less; arbitrary
MAX_LIVE_BYTES = 64 << 20  # of packed requests that have not ended; 4 to 5 bytes per token


class SilenceWatch:
    """Calls `on_silence` once, if `hear` was not called for `limit_s` seconds, counted from `start`.

    Time is counted in ticks of its own thread, so that time in which this process is stopped does not count.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._num_heard = 0
        self._silent_s = 0.0
        self._stop = Event()
        self._thread = Thread(target=self._run, name="silence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hear(self) -> None:
        """Note that the engine is alive. Only one thread calls this."""
        self._num_heard += 1
        self._silent_s = 0.0

    @property
    def is_long(self) -> bool:
        """Return whether the engine has been silent for so long that something is probably wrong."""
        return self._silent_s >= min(UNHEALTHY_S, self._limit_s)

    def close(self) -> None:
        self._stop.set()
        self._on_silence = lambda: None  # else both would hold each other until the garbage is collected

    def _run(self) -> None:
        tick_s, num_heard = min(1.0, self._limit_s / 4), self._num_heard
        while not self._stop.wait(tick_s):
            self._silent_s = 0.0 if self._num_heard != num_heard else self._silent_s + tick_s
            num_heard = self._num_heard
            if self._silent_s >= self._limit_s:
                self._on_silence()
                return


class Owner(Protocol):
    """Hears of an engine's changes, on the thread that reads its messages."""

    def on_change(self, engine: RemoteEngine) -> None:
        """Hear that the start has moved on, or that the tokenizer or the engine's info is known."""

    def on_restored(self, engine: RemoteEngine, tree: PageTree) -> None:
        """Hear which prefixes the engine has read from disk."""

    def on_hang(self, engine: RemoteEngine) -> None:
        """Hear that a step, or the whole process, has stopped."""

    def on_refusal(self, engine: RemoteEngine, live: LiveRequest, error: Exception) -> None:
        """Take back a request that the engine has not queued."""

    def on_end(self, engine: RemoteEngine, lives: list[LiveRequest]) -> None:
        """Hear that the process has ended, and take back its requests."""


class RemoteEngine:
    """The engine in the process `child`, in which `run_engine` has the other end of the connection.

    The owner hears if a step takes longer than `step_timeout_s`, or if the process is silent for that long
    (and at least MIN_SILENCE_S).
    """

    def __init__(
        self, connection: Connection, child: BaseProcess, owner: Owner, *, step_timeout_s: float
    ) -> None:
        self.start: StartState | None = None  # None: the process has not reported yet
        self.error: str | None = None  # why the engine is lost; it never recovers
        self.is_hanging = False
        self.engine_info: EngineInfo | None = None  # None until the engine is ready
        self.tokenizer: Tokenizer | None = None
        self.work = 0  # of the requests that have not ended, in prompt tokens
        self.pid = child.pid
        self._child = child
        self._connection = connection
        self._owner = owner
        self._inbox, self._outbox = Inbox(connection), Outbox(connection)
        self._silence = SilenceWatch(max(step_timeout_s, MIN_SILENCE_S), self._note_silence)
        self._lock = Lock()  # keeps what is sent and what is live consistent
        self._is_open = True
        self._live: dict[str, LiveRequest] = {}
        self._num_live_bytes = 0
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Snapshot | None]] = {}
        self._last_snapshot: Snapshot | None = None
        self._reader = Thread(target=self._read, name="engine mail", daemon=True)
        self._reader.start()

    @property
    def num_live(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._live)

    @property
    def is_ready(self) -> bool:
        return self._is_open and self.start is not None and self.start.state == "ready"

    @property
    def is_silent(self) -> bool:
        """Return whether the process is silent: it may be stuck, and may recover."""
        return self._silence.is_long

    def send(self, live: LiveRequest, num_cached: int = 0, *, soon: bool = False) -> bool:
        """Send a request; its prompt's first `num_cached` tokens are probably in the cache.

        `soon`: with the others of the running event loop's turn.

        Return False if the process has ended. Raise CapacityError if the live requests take too many bytes,
        unless the request is a repeat. Errors of Engine.add arrive later: to wait for them here would cost a
        message and two wake-ups per request.
        """
        with self._lock:
            if not self._is_open:
                return False
            if not live.num_repeats and self._num_live_bytes + len(live.message) > MAX_LIVE_BYTES:
                raise CapacityError(
                    f"requests of {self._num_live_bytes >> 20} MiB wait for the engine, and the server holds "
                    "no more: try again later."
                )
            live.work = live.work_with(num_cached)
            self.work += live.work
            self._live[live.id] = live
            self._num_live_bytes += len(live.message)
            (self._outbox.put_soon if soon else self._outbox.put)(live.message)
        if live.stream.is_over:  # closed while no engine had the request
            self.abort(live.id)
        return True

    def abort(self, request_id: str) -> None:
        """End a request within one step. Its stream ends with finish reason "abort"."""
        with self._lock:
            if self._is_open and request_id in self._live:
                self._send("abort", request_id)

    async def snapshot(self) -> Snapshot | None:
        """Return the engine's counters, or the last known ones if it is busy; None before it is ready."""
        number, answer = next(self._numbers), Future[Snapshot | None]()
        with self._lock:
            is_reading = not self._outbox.num_waiting_bytes
            if not self._is_open or self.engine_info is None or not is_reading:
                return self._last_snapshot
            self._asked[number] = answer
            self._send("snapshot", number)
        try:
            self._last_snapshot = await asyncio.wait_for(asyncio.wrap_future(answer), SNAPSHOT_S)
        except (TimeoutError, EngineStopped):
            pass
        finally:
            self._asked.pop(number, None)
        return self._last_snapshot

    def begin_close(self) -> None:
        """Let the process end after the step it is in."""
        with self._lock:
            is_first, self._is_open = self._is_open, False
            if is_first and self.engine_info is not None:
                self._silence.close()  # while prefixes are written, nothing is heard
                self._send("close")

    def close(self) -> None:
        """End the process after the step it is in. It does not wait for a start to end."""
        self.begin_close()
        info = self.engine_info
        self._reader.join(0.0 if info is None or self.is_hanging else CLOSE_S + info.write_s)
        if self._reader.is_alive():
            self.kill()
            self._reader.join()

    def kill(self) -> None:
        """Kill the process at once."""
        with contextlib.suppress(ValueError):  # it has ended
            self._child.kill()

    def _send(self, *message: object) -> None:
        self._outbox.put(packed(message))

    def _note_silence(self) -> None:
        """Report that the engine's whole process is stuck, with its watchdog. SilenceWatch calls this."""
        log.error("the engine's process has been silent for too long: its interpreter is stuck")
        self._hang()

    def _hang(self) -> None:
        if not self.is_hanging:
            self.is_hanging = True
            self._owner.on_hang(self)

    # ---- everything below runs on the reader's thread

    def _read(self) -> None:
        try:
            while self.error is None:
                message = self._inbox.recv()
                self._silence.hear()
                self._take(message)
            self.kill()  # it has failed and said why: other engines continue its requests
        except (EOFError, OSError):
            pass
        except Exception:  # any: this thread alone ends the requests of an engine that is lost
            log.exception("a message of the engine's process could not be read")
            self.kill()
        self._end(end_of(self._child))

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case "start", state:
                self.error = state.error if state.state == "failed" else None
                self.start = state
                self._owner.on_change(self)
            case "tokenizer", tokenizer:
                self.tokenizer = tokenizer
                self._owner.on_change(self)
            case "info", info:
                self.engine_info = info
                self._owner.on_change(self)
                self._silence.start()  # only now, as a start may compile for minutes
            case "restored", tree:
                self._owner.on_restored(self, tree)
            case ("hanging",):
                self._hang()
            case "snapshot", number, snapshot:
                answer = self._asked.pop(number, None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(snapshot)
            case "refused", request_id, error:
                self._owner.on_refusal(self, self._forget(request_id), error)
            case "deltas", deltas, errors:
                self._take_items([*((values[0], Delta(*values)) for values in deltas), *errors])
            case _:
                assert message == ("beat",)  # a sign of life, which `_read` has noted

    def _forget(self, request_id: str) -> LiveRequest:
        """Forget a request that has ended, and return it."""
        with self._lock:
            live = self._live.pop(request_id)
            self._num_live_bytes -= len(live.message)
            self.work -= live.work
        return live

    def _take_items(self, items: Iterable[tuple[str, Item]]) -> None:
        mail: dict[EventLoopOutlet, Mail] = defaultdict(list)
        for request_id, item in items:
            live = self._live.get(request_id)
            if live is None:
                continue
            rest = self._rest(live, item)
            if rest is not None:
                mail[live.stream.outlet].append((live.stream, rest))
        for outlet, its_mail in mail.items():
            if not outlet.send(its_mail):
                for stream, _ in its_mail:
                    self.abort(stream.request_id)

    def _rest(self, live: LiveRequest, item: Item) -> Item | None:
        """Return what the client does not have of an item; forget a request that ends with it."""
        is_over, rest = ends_request(item), item
        if isinstance(item, Delta):
            if not live.has_begun:
                self._note_begin(live)
            found = live.take(item)
            if found is None:
                return None
            rest = found
        if is_over:
            self._forget(live.id)
        elif ends_request(rest):  # a repeat, whose other choices had ended before
            self.abort(live.id)
            self._forget(live.id)
        return rest

    def _note_begin(self, live: LiveRequest) -> None:
        """Note that a request's prompt has been computed: what is left of its work is the answer."""
        with self._lock:
            left = live.work_with(live.num_prompt)
            self.work -= live.work - left
            live.work = left

    def _end(self, code: int) -> None:
        """Hand all requests back, because the process has ended, by request or by itself."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            lives, self._live, self._num_live_bytes, self.work = [*self._live.values()], {}, 0, 0
            asked, self._asked = self._asked, {}
        self._silence.close()
        self._outbox.close()
        self._connection.close()
        if was_open:
            self.error = self.error or _ended_by_itself(code)
        for answer in asked.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineStopped("the engine is closed."))
        self._owner.on_end(self, lives)


def _ended_by_itself(code: int) -> str:
    if code == -9:  # SIGKILL, which Windows has no name for
        return "the engine's process was killed, perhaps for lack of memory: see the system's log."
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the engine's process ended unexpectedly ({how}): see its log."
