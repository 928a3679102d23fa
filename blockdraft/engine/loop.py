"""EngineLoop: the one thread that makes and runs an engine; other threads reach it through a queue.

The thread makes the engine first, so that its memory, its kernels and its OpenMP pool belong to one thread.
Commands go in over one queue; all deltas of a step go out to the outlet together. Between two steps the
thread takes every waiting command, so an abort takes effect within one step. While idle, the thread captures
graphs for later steps and checks answers again, then sleeps until a command arrives.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import EngineInfo
from blockdraft.engine.recheck import Recheck
from blockdraft.engine.request import ANYONE, Deltas, SamplingParams, Turn
from blockdraft.engine.stats import Snapshot
from blockdraft.engine.streams import EngineStopped, Outlet, StepFailed
from blockdraft.errors import BlockdraftError
from blockdraft.grammar.guide import Guide
from blockdraft.phases import StartProgress

T = TypeVar("T")
log = logging.getLogger(__name__)

QUIET_S = 1.0  # idle time before the engine captures graphs for later requests; arbitrary
MAX_FAILURES = 3  # steps in a row that may fail before the engine is given up; arbitrary


@dataclass(frozen=True, slots=True)
class _Add:
    prompt_ids: Items[int]
    sampling: SamplingParams
    request_id: str
    reply: Future[None]
    turn: Turn
    seed: int | None
    guide: Guide | None = None


class EngineLoop:
    """Owns the engine: no other thread may call it until `close` has returned."""

    def __init__(
        self,
        make_engine: Callable[[StartProgress], Engine],
        outlet: Outlet,
        startup: StartProgress | None = None,
        recheck_share: float = 0.0,
        max_wait_s: float = math.inf,
    ) -> None:
        self._recheck_share = recheck_share
        self._max_wait_s = max_wait_s  # for a row; requests that would wait longer are refused
        self.startup = StartProgress() if startup is None else startup
        self.error: str | None = None  # why the engine failed; it never recovers
        self.engine_info: EngineInfo | None = None  # None until the engine is ready
        self.step_began_s: float | None = None  # while a step runs; a watchdog reads it
        self._make_engine = make_engine
        self._outlet = outlet
        self._num_failures = 0
        self._may_prepare = False
        self._served_s = -QUIET_S  # when the last step ended
        self._commands: SimpleQueue[_Add | str | None] = SimpleQueue()  # str: abort it; None: close
        self._closing_lock = Lock()  # no command may enter the queue after `None`: it would get no reply
        self._is_open = True
        self._compilers = ThreadPoolExecutor(2, "structured-outputs")  # its threads start with the first one
        self._compiling: dict[str, Future[None]] = {}
        self._live: dict[str, int] = {}  # choices that have not ended; touched by the engine's thread only
        self._has_started = Event()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait(self) -> EngineLoop:
        """Wait until the start has ended, with success or failure, and return this loop."""
        self._has_started.wait()
        return self

    def snapshot(self) -> Snapshot | None:
        """Return all counters of the engine, or None before it is ready. Any thread may call this."""
        return None if self.engine_info is None else self._engine.snapshot()

    def add(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams,
        request_id: str,
        turn: Turn = ANYONE,
        seed: int | None = None,
    ) -> Future[None]:
        """Queue a prompt, from any thread. The future raises what Engine.add raises, or EngineStopped.

        `seed`: the one to use if `sampling` has none.
        """
        command = _Add(prompt_ids, sampling, request_id, Future(), turn, seed)
        if sampling.structured_outputs is None or self.engine_info is None:
            self._queue(command)
        else:
            self._compiling[request_id] = command.reply
            self._compilers.submit(self._compile, command)  # the engine steps on meanwhile
        return command.reply

    def _compile(self, command: _Add) -> None:
        if not command.reply.cancelled():  # else the request was aborted before it was compiled
            guide = _attempt(functools.partial(self._engine.guide_of, command.sampling))
            if not isinstance(guide, Exception):
                self._queue(replace(command, guide=guide))
            elif command.reply.set_running_or_notify_cancel():
                command.reply.set_exception(guide)
        self._compiling.pop(command.request_id)

    def _queue(self, command: _Add) -> None:
        if not self._send(command) and command.reply.set_running_or_notify_cancel():
            command.reply.set_exception(EngineStopped("the engine is closed."))

    def abort(self, request_id: str) -> None:
        """End a request within one step. Its stream ends with finish reason "abort"."""
        reply = self._compiling.get(request_id)
        if reply is not None:
            reply.cancel()  # the abort below would reach the engine before the request does
        self._send(request_id)

    def close(self) -> None:
        """Stop the thread after its current step. Live requests end with EngineStopped.

        Do not wait for a start that still runs: it cannot be interrupted, and ends with the process.
        """
        with self._closing_lock:
            if self._is_open:
                self._is_open = False
                self._commands.put(None)
        if self._has_started.is_set():
            self._thread.join()

    def _send(self, command: _Add | str) -> bool:
        with self._closing_lock:
            if self._is_open:
                self._commands.put(command)
            return self._is_open

    # ---- everything below runs on the engine's thread

    def _run(self) -> None:
        failure = _attempt(self._start)
        if isinstance(failure, Exception):
            self._give_up(failure)  # later requests get an error
        self._has_started.set()
        while self._drain_commands():
            self._step()
        self._end_all(EngineStopped("the engine is closed."))
        if self.error is None and self._engine.prefix_disk is not None:
            kept = _attempt(self._engine.keep_prefixes)
            log.log(logging.ERROR if isinstance(kept, Exception) else logging.INFO, "%s", kept)

    def _start(self) -> None:
        self._engine = self._make_engine(self.startup)
        self._recheck = Recheck(self._engine, self._recheck_share)
        self.engine_info = engine_info(self._engine)
        self.startup.ready()
        self._may_prepare = True

    def _drain_commands(self) -> bool:
        """Carry out all commands, and wait until the engine has work. Return False if the loop is closed."""
        while True:
            is_idle = self.error is not None or not self._engine.has_work
            try:
                command = self._next_command(is_idle=is_idle)
            except Empty:
                if not is_idle:
                    self._may_prepare = self.error is None  # requests may make other steps likely
                    return True
                self._prepare()
                continue
            if command is None:
                return False
            if isinstance(command, _Add):
                self._add(command)
            else:
                self._drop(command)

    def _next_command(self, *, is_idle: bool) -> _Add | str | None:
        """Return the next command. Raise Empty if the engine can run a step or prepare a graph instead."""
        if is_idle and not self._may_prepare:
            return self._commands.get()
        quiet_s = self._served_s + QUIET_S - time.monotonic() if is_idle else 0.0
        return self._commands.get(block=quiet_s > 0, timeout=max(quiet_s, 0.0))

    def _prepare(self) -> None:
        """Capture one graph, or run one step of a re-check: a command waits for no more. Log a failure."""
        outcome = _attempt(self._engine.prepare)
        if isinstance(outcome, Exception):
            log.warning("a step could not be prepared: %s", outcome)
        elif not outcome:
            outcome = _attempt(self._recheck.step)
            if isinstance(outcome, Exception):
                log.warning("an answer could not be checked again: %s", outcome)
        self._may_prepare = outcome is True

    def _add(self, command: _Add) -> None:
        if not command.reply.set_running_or_notify_cancel():
            return  # the caller has gone
        if self.error is not None:
            command.reply.set_exception(EngineStopped("the engine has failed: restart the server."))
            return
        # `add` queues all choices or none, so its errors concern only this request.
        outcome = _attempt(lambda: self._admit(command))
        if isinstance(outcome, Exception):
            command.reply.set_exception(outcome)
            return
        self._live[command.request_id] = command.sampling.n
        command.reply.set_result(None)

    def _admit(self, command: _Add) -> None:
        self._recheck.pause()
        self._engine.scheduler.check_wait(self._max_wait_s)
        self._engine.add(
            command.prompt_ids,
            command.sampling,
            command.request_id,
            command.guide,
            seed=command.seed,
            turn=command.turn,
        )

    def _step(self) -> None:
        self.step_began_s = time.monotonic()
        outcome = _attempt(self._engine.step)
        self.step_began_s, self._served_s = None, time.monotonic()
        if isinstance(outcome, Exception):
            self._fail(outcome)
        else:
            self._num_failures = 0
            self._deliver(outcome)

    def _deliver(self, deltas: Deltas) -> None:
        for delta in deltas.others:
            if delta.finish_reason is not None and delta.request_id in self._live:
                self._live[delta.request_id] -= 1
                if self._live[delta.request_id] == 0:
                    delta.ends_request = True
                    del self._live[delta.request_id]
        if deltas and not self._outlet.send(deltas):
            for request_id in [*self._live]:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Abort a request in the engine. Ignore the ids of finished requests."""
        if self.error is not None or request_id not in self._live:
            return
        outcome = _attempt(lambda: self._engine.abort(request_id))
        if isinstance(outcome, Exception):
            self._fail(outcome)
            return
        del self._live[request_id]
        for delta in outcome[-1:]:
            delta.ends_request = True
        self._outlet.send(Deltas(others=outcome))

    def _fail(self, error: Exception) -> None:
        """End the requests of a failed step (no memory, or a bug) and continue with the others.

        Give up if too many steps in a row failed, or if the engine's check fails.
        """
        log.error("a step of the engine failed", exc_info=error)
        self._num_failures += 1
        broken = _attempt(self._engine.check)
        if self._num_failures >= MAX_FAILURES or isinstance(broken, Exception):
            self._give_up(error)
        else:
            self._end_lost(StepFailed("the engine failed on an internal error: ask again."))

    def _give_up(self, error: Exception) -> None:
        """Stop serving for good: the engine's state is unknown, or the start failed."""
        if not isinstance(error, BlockdraftError):
            log.error("the engine failed", exc_info=error)
        self.error = str(error) if isinstance(error, BlockdraftError) else f"{type(error).__name__}: {error}"
        self.startup.fail(self.error)
        self._end_all(EngineStopped("the engine failed on an internal error: restart the server."))

    def _end_lost(self, reason: EngineStopped) -> None:
        """End the streams of requests that the engine has dropped; other requests are still in it."""
        lost = self._live.keys() - self._engine.live_ids
        for request_id in lost:
            del self._live[request_id]
        self._outlet.end(lost, reason)

    def _end_all(self, reason: EngineStopped) -> None:
        live, self._live = self._live.keys(), {}
        for request_id in live:
            if self.error is None:
                failure = _attempt(functools.partial(self._engine.abort, request_id))
                if isinstance(failure, Exception):  # the other streams must still be ended
                    log.error("a request could not be aborted", exc_info=failure)
        if live:
            self._outlet.end(live, reason)


def _attempt(action: Callable[[], T]) -> T | Exception:
    """Return the action's result, or its exception, which the caller reports or sends to whoever waits.

    The engine's work runs PyTorch, Triton, drivers and our own bugs, which raise anything. A thread that
    ended here would leave every stream waiting for ever.
    """
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        return error
