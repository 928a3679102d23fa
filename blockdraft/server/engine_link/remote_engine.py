"""RemoteEngine: the server's interface to our engine, which runs in its own process.

A process runs only one thread of Python at a time. An engine in the server's process launches hundreds of
kernels per step, and would wait for the event loop at each. The engine's side is engine_worker.py. Messages
are tuples over a private pair of sockets; all deltas of a step are one message.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Lock, Thread
from typing import Any, NoReturn

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import ANYONE, Delta, SamplingParams, Turn, new_request_id
from blockdraft.engine.stats import Snapshot
from blockdraft.engine.streams import EngineStopped, Mail, Outlet, Outlets, Stream, ends_request
from blockdraft.errors import CapacityError, RequestError
from blockdraft.phases import StartProgress
from blockdraft.server.engine_link.outbox import Inbox, Outbox, packed
from blockdraft.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Work = Callable[[Connection], None]  # the engine's side of a connection
UNHEALTHY_S = 10.0  # of silence, after which /health reports a problem; arbitrary


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

    def _run(self) -> None:
        tick_s, num_heard = min(1.0, self._limit_s / 4), self._num_heard
        while not self._stop.wait(tick_s):
            self._silent_s = 0.0 if self._num_heard != num_heard else self._silent_s + tick_s
            num_heard = self._num_heard
            if self._silent_s >= self._limit_s:
                self._on_silence()
                return


def start_child(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> BaseProcess:
    """Run `work` in its own process. A forked child closes `closes`, which it does not need.

    It forks only on Linux: Windows cannot, and macOS's libraries may crash. Elsewhere `work` is pickled.
    """
    is_forked = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    args = (work, connection, closes if is_forked else ())
    process: BaseProcess = context.Process(target=_be_the_child, args=args)
    process.start()
    atexit.register(process.kill)  # else, if we fail, both processes wait for each other
    return process


def _be_the_child(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> NoReturn:
    """Run `work` and exit. Ignore SIGINT and SIGTERM: the server handles them and ends this process."""
    code = 1
    try:
        for one in closes:
            one.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which our children would inherit
        work(connection)
        code = 0
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)


CLOSE_S = 10.0  # for the step that the engine is in; arbitrary
SNAPSHOT_S = 1.0  # after that, the last snapshot is returned
MIN_SILENCE_S = 5.0  # on a busy machine, a healthy process may be silent for less; arbitrary
LARGE_PROMPT = 4096  # tokens; longer requests are packed in a thread; arbitrary
MAX_LIVE_BYTES = 64 << 20  # of packed requests that have not ended; 4 to 5 bytes per token

log = logging.getLogger(__name__)

OnHang = Callable[["RemoteEngine"], None]


def start_engine_process(
    work: Work,
    startup: StartProgress,
    on_hang: OnHang,
    *,
    step_timeout_s: float,
    closes: Items[socket.socket] = (),
) -> RemoteEngine:
    """Run `work`, the engine's side of a connection, in a child. Call it before any thread is started."""
    ours, theirs = Pipe()
    child = start_child(work, theirs, (ours, *closes))
    theirs.close()
    return RemoteEngine(ours, child, startup, on_hang, step_timeout_s=step_timeout_s)


@dataclass(slots=True)
class _Live:
    stream: Stream
    num_bytes: int  # of the packed request


class RemoteEngine:
    """The engine in the process `child`, in which `run_engine` has the other end of the connection.

    `startup` follows the engine's start. `on_hang` is called if a step takes longer than `step_timeout_s`, or
    if the process is silent for that long (and at least MIN_SILENCE_S).
    """

    def __init__(
        self,
        connection: Connection,
        child: BaseProcess,
        startup: StartProgress,
        on_hang: OnHang,
        *,
        step_timeout_s: float,
    ) -> None:
        self.startup = startup
        self.error: str | None = None  # why the engine is lost; it never recovers
        self.is_hanging = False
        self.engine_info: EngineInfo | None = None  # None until the engine is ready
        self.tokenizer: Tokenizer | None = None
        self._child = child
        self._connection = connection
        self._on_hang = on_hang
        self._inbox, self._outbox = Inbox(connection), Outbox(connection)
        self._silence = SilenceWatch(max(step_timeout_s, MIN_SILENCE_S), self._note_silence)
        self._lock = Lock()  # keeps what is sent and what is live consistent
        self._is_open = True
        self._live: dict[str, _Live] = {}
        self._num_live_bytes = 0
        self._outlets = Outlets()
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
    def is_closed(self) -> bool:
        return not self._is_open

    @property
    def is_silent(self) -> bool:
        """Return whether the process is silent: it may be stuck, and may recover."""
        return self._silence.is_long

    async def submit(self, prompt_ids: Items[int], sampling: SamplingParams, turn: Turn = ANYONE) -> Stream:
        """Queue a prompt. Raises EngineStopped, and CapacityError if the live requests take too many bytes.

        Errors of Engine.add are raised by the stream: to wait for them here would cost a message and two
        wake-ups per request.
        """
        if self.error is not None:
            raise EngineStopped(self._why())
        if self.startup.state != "ready":
            raise EngineStopped(f"the engine is {self.startup.state}.")
        stream = Stream(new_request_id(), self._outlets.here(), self.abort)
        message = await _packed_request(stream.request_id, prompt_ids, sampling, turn)
        with self._lock:
            if not self._is_open:
                raise EngineStopped(self._why())
            if self._num_live_bytes + len(message) > MAX_LIVE_BYTES:
                raise CapacityError(
                    f"requests of {self._num_live_bytes >> 20} MiB wait for the engine, and the server holds "
                    "no more: try again later."
                )
            self._live[stream.request_id] = _Live(stream, len(message))
            self._num_live_bytes += len(message)
            self._outbox.put_soon(message)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request within one step. Its stream ends with finish reason "abort"."""
        with self._lock:
            if self._is_open:
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

    def close(self) -> None:
        """End the process after the step it is in; live requests end with EngineStopped.

        It does not wait for a start to end.
        """
        with self._lock:
            is_first, self._is_open = self._is_open, False
            if is_first and self.engine_info is not None:
                self._send("close")
        self._reader.join(CLOSE_S if self.engine_info is not None and not self.is_hanging else 0.0)
        if self._reader.is_alive():
            self.kill()
            self._reader.join()

    def kill(self) -> None:
        """Kill the process at once."""
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
            self._on_hang(self)

    # ---- everything below runs on the reader's thread

    def _read(self) -> None:
        try:
            while True:
                message = self._inbox.recv()
                self._silence.hear()
                self._take(message)
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a message of the engine's process could not be read")
            self.kill()
        self._child.join()
        self._end(self._child.exitcode or 0)

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case "start", state:
                self.error = state.error if state.state == "failed" else self.error
                self.startup.follow(state)
            case "tokenizer", tokenizer:
                self.tokenizer = tokenizer
            case "info", info:
                self.engine_info = info
                self._silence.start()  # only now, as a start may compile for minutes
            case ("hanging",):
                self._hang()
            case "snapshot", number, snapshot:
                answer = self._asked.pop(number, None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(snapshot)
            case "refused", request_id, error:
                stream = self._live[request_id].stream
                self._forget(request_id)
                stream.outlet.send([(stream, error)])
            case "deltas", items:
                self._take_deltas(items)
            case _:
                assert message == ("beat",)  # a sign of life, which `_read` has noted

    def _forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        with self._lock:
            self._num_live_bytes -= self._live.pop(request_id).num_bytes

    def _take_deltas(self, items: list[tuple[str, tuple[Any, ...] | Exception]]) -> None:
        mail: dict[Outlet, Mail] = defaultdict(list)
        for request_id, values in items:
            live = self._live.get(request_id)
            if live is not None:
                item = values if isinstance(values, Exception) else Delta(*values)
                mail[live.stream.outlet].append((live.stream, item))
                if ends_request(item):
                    self._forget(request_id)
        for outlet, its_mail in mail.items():
            if not outlet.send(its_mail):
                for receiver, _ in its_mail:
                    self.abort(receiver.request_id)

    def _end(self, code: int) -> None:
        """End all requests, because the process has ended, by request or by itself."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            live, self._live, self._num_live_bytes = self._live, {}, 0
            asked, self._asked = self._asked, {}
        self._silence.close()
        self._outbox.close()
        self._connection.close()
        if was_open:
            self.error = self.error or _ended_by_itself(code)
            log.error("%s", self.error)
            self.startup.fail(self.error)
        reason = EngineStopped(self._why())
        for answer in asked.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(reason)
        for one in live.values():
            one.stream.outlet.send([(one.stream, reason)])

    def _why(self) -> str:
        if self.error is None:
            return "the engine is closed."
        return "the engine failed on an internal error: restart the server."


async def _packed_request(
    request_id: str, prompt_ids: Items[int], sampling: SamplingParams, turn: Turn
) -> bytes:
    """Return the packed request. Long prompts and structured outputs are packed in a thread."""
    message = ("add", request_id, prompt_ids, sampling, turn)  # a list: Engine.add makes the tuple
    try:
        if len(prompt_ids) > LARGE_PROMPT or sampling.structured_outputs is not None:
            return await asyncio.to_thread(packed, message)
        return packed(message)
    except RecursionError:
        raise RequestError(
            "the structured output's schema nests too deep: flatten it.", "structured_outputs"
        ) from None


def _ended_by_itself(code: int) -> str:
    if code == -9:  # SIGKILL, which Windows has no name for
        return "the engine's process was killed, perhaps for lack of memory: see the system's log."
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the engine's process ended unexpectedly ({how}): see its log."
