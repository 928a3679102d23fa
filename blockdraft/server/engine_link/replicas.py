"""Replicas: all engines of a server, each in its own process, behind the interface of one.

A request goes to the replica with the least work ahead of it, where prompt tokens that the replica has in its
cache are no work. A replica that is lost is started again while the others serve, and they continue its
answers (live_request.py). A server with one replica ends with it, so that a supervisor can start it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Lock, Thread

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import ANYONE, SamplingParams, Turn, new_request_id
from blockdraft.engine.seeds import mix
from blockdraft.engine.stats import Snapshot, combined
from blockdraft.engine.streams import EngineStopped, Outlets, StepFailed, Stream
from blockdraft.errors import CapacityError, RequestError
from blockdraft.phases import StartProgress, StartState
from blockdraft.server.engine_link.engine_process import start_child
from blockdraft.server.engine_link.live_request import LiveRequest
from blockdraft.server.engine_link.outbox import packed
from blockdraft.server.engine_link.prompt_pages import (
    MAX_SEEN_PAGES,
    PageTree,
    SeenPages,
    page_hashes,
    tree_hashes,
)
from blockdraft.server.engine_link.remote_engine import RemoteEngine
from blockdraft.server.engine_link.replica import Neighbours, Replica, ReplicaPlace, ReplicaStatus, difference
from blockdraft.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LARGE_PROMPT = 4096  # tokens; longer requests are packed in a thread; arbitrary
KEEP_S = 0.05  # between two looks at lost replicas and waiting requests; arbitrary
MAX_REPEATS = 8  # of a request: one that itself kills engines must not kill them for ever; arbitrary
MAX_WAITING = 1024  # new requests that wait while no replica is ready; arbitrary


OnHang = Callable[["Replicas"], None]
Child = tuple[Connection, BaseProcess]
Start = Callable[[ReplicaPlace, Neighbours], Child]


def start_replicas(
    places: Items[ReplicaPlace],
    startup: StartProgress,
    on_hang: OnHang,
    *,
    step_timeout_s: float,
    seed: int = 0,
    closes: Items[socket.socket] = (),
) -> Replicas:
    """Start the replicas. Call it before any thread is started.

    Of those that share a card, the first starts now and the next when it is ready: a start measures the
    memory that is free.
    """
    children: dict[int, Child] = {}
    for index, place in enumerate(places):
        if place.is_card and place.device in [places[other].device for other in children]:
            continue
        ours, theirs = Pipe()
        parents = [connection for connection, _ in children.values()]
        child = start_child(partial(place.work, Neighbours()), theirs, (ours, *parents, *closes))
        theirs.close()
        children[index] = (ours, child)
    return Replicas(places, children, startup, on_hang, step_timeout_s=step_timeout_s, seed=seed)


def _spawned(place: ReplicaPlace, neighbours: Neighbours) -> Child:
    """Start a replica beside the server's threads."""
    ours, theirs = Pipe()
    try:
        return ours, start_child(partial(place.work, neighbours), theirs)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


class Replicas:
    """The engines of one server. `children` are the processes that run already, by replica.

    `startup` is the server's: it is ready while one replica is. `on_hang` is called if the only replica
    hangs; one of several is killed.
    """

    def __init__(
        self,
        places: Items[ReplicaPlace],
        children: dict[int, Child],
        startup: StartProgress,
        on_hang: OnHang,
        *,
        step_timeout_s: float,
        seed: int = 0,
        start: Start | None = None,
    ) -> None:
        self.startup = startup
        self.error: str | None = None  # why all are lost; the server ends
        self.is_hanging = False
        self.engine_info: EngineInfo | None = None  # of the first that was ready: all others are like it
        self.tokenizer: Tokenizer | None = None
        self.num_repeated = 0  # requests that another replica continued
        self._seed = seed
        self._start_child = start or _spawned
        self._on_hang = on_hang
        self._step_timeout_s = step_timeout_s
        self._outlets = Outlets()
        self._numbers = itertools.count()
        self._lock = Lock()  # guards all below; no engine's lock is held when it is taken
        self._is_open = True
        self._shown: StartState | None = None
        self._waiting: deque[LiveRequest] = deque()  # until a replica can take them
        self._replicas = [Replica(index, place) for index, place in enumerate(places)]
        self._is_alone = len(places) == 1
        with self._lock:
            for index, (connection, child) in children.items():
                self._replicas[index].engine = self._engine(connection, child)
        self._stop = Event()
        self._keeper = Thread(target=self._keep, name="replicas", daemon=True)
        if not self._is_alone:
            self._keeper.start()

    def _engine(self, connection: Connection, child: BaseProcess) -> RemoteEngine:
        return RemoteEngine(connection, child, self, step_timeout_s=self._step_timeout_s)

    # ---- what the server asks

    @property
    def engines(self) -> list[RemoteEngine]:
        """Return the engines that run or start."""
        return [one.engine for one in self._replicas if one.engine is not None]

    @property
    def num_live(self) -> int:
        """Return the number of requests that have not ended."""
        return sum(engine.num_live for engine in self.engines) + len(self._waiting)

    @property
    def is_closed(self) -> bool:
        return not self._is_open or self.error is not None

    @property
    def is_silent(self) -> bool:
        """Return whether all processes are silent: they may be stuck, and may recover."""
        return bool(self.engines) and all(engine.is_silent for engine in self.engines)

    def status(self) -> list[ReplicaStatus]:
        return [
            {
                "replica": one.index,
                "device": one.place.device,
                "state": one.state,
                "pid": None if one.engine is None else one.engine.pid,
                "restarts": one.num_restarts,
                "requests": 0 if one.engine is None else one.engine.num_live,
                "error": one.error,
            }
            for one in self._replicas
        ]

    async def submit(self, prompt_ids: Items[int], sampling: SamplingParams, turn: Turn = ANYONE) -> Stream:
        """Queue a prompt. Raise EngineStopped if nobody can take it, and CapacityError if too much waits."""
        if self.error is not None:
            raise EngineStopped(self._why())
        state = self.startup.state
        if state != "ready" and not (state == "starting" and self.engine_info is not None):
            raise EngineStopped(f"the engine is {state}.")
        stream = Stream(new_request_id(), self._outlets.here(), self.abort)
        live = await self._live(stream, prompt_ids, sampling, turn)
        self._route(live, soon=True)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request within one step. Its stream ends with finish reason "abort"."""
        for engine in self.engines:
            engine.abort(request_id)

    async def snapshots(self) -> list[Snapshot | None]:
        """Return the counters of each replica; None for those that are not ready."""

        async def one(replica: Replica) -> Snapshot | None:
            return None if replica.engine is None else await replica.engine.snapshot()

        return list(await asyncio.gather(*(one(replica) for replica in self._replicas)))

    async def snapshot(self) -> Snapshot | None:
        """Return the counters of all replicas together; None before one is ready."""
        return combined([one for one in await self.snapshots() if one is not None])

    def close(self) -> None:
        """End all processes after the steps they are in; live requests end with EngineStopped."""
        with self._lock:
            self._is_open = False
        self._stop.set()
        if self._keeper.ident is not None:
            self._keeper.join()
        engines = self.engines
        for engine in engines:
            engine.begin_close()
        for engine in engines:
            engine.close()
        self._end_waiting()

    def kill(self) -> None:
        """Kill all processes at once."""
        for engine in self.engines:
            engine.kill()

    # ---- requests

    async def _live(
        self, stream: Stream, prompt_ids: Items[int], sampling: SamplingParams, turn: Turn
    ) -> LiveRequest:
        """Return the request, packed. Long prompts and structured outputs are packed in a thread."""
        info = self.engine_info
        page_size = 0 if self._is_alone or info is None or not info.has_prefix_cache else info.page_size
        seed = mix(self._seed, next(self._numbers))  # if `sampling` has none: a repeat gets the same one

        def work() -> LiveRequest:
            message = packed(("add", stream.request_id, prompt_ids, sampling, (*turn,), seed))
            pages = page_hashes(prompt_ids, page_size, sampling.cache_salt) if page_size else ()
            return LiveRequest(
                stream, message, num_choices=sampling.n, num_prompt=len(prompt_ids), pages=pages
            )

        try:
            if len(prompt_ids) > LARGE_PROMPT or sampling.structured_outputs is not None:
                return await asyncio.to_thread(work)
            return work()
        except RecursionError:
            raise RequestError(
                "the structured output's schema nests too deep: flatten it.", "structured_outputs"
            ) from None

    def _route(self, live: LiveRequest, *, soon: bool = False) -> None:
        """Send a request to the best replica, or let it wait until one is ready."""
        while True:
            with self._lock:
                if not self._is_open or self.error is not None:
                    raise EngineStopped(self._why())
                best, num_cached = self._best(live)
                if best is None:
                    self._wait(live)
                    return
                best.num_sent += 1
                engine = best.engine
                assert engine is not None, "it is ready"
            if engine.send(live, num_cached, soon=soon):
                return

    def _best(self, live: LiveRequest) -> tuple[Replica | None, int]:
        """Return the replica for a request, if one is ready, and the number of tokens it probably has."""
        page_size = 0 if self.engine_info is None else self.engine_info.page_size
        ready = [one for one in self._replicas if one.is_ready]
        if not ready:
            return None, 0
        best = min(ready, key=lambda one: one.score(live, page_size)) if len(ready) > 1 else ready[0]
        num_cached = best.seen.match(live.pages) * page_size
        best.seen.add(live.pages)
        return best, num_cached

    def _wait(self, live: LiveRequest) -> None:
        if not live.num_repeats and len(self._waiting) >= MAX_WAITING:
            raise CapacityError(
                f"{len(self._waiting)} requests wait for an engine that is ready: try again later."
            )
        self._waiting.append(live)

    def _repeat(self, live: LiveRequest, why: str) -> None:
        """Let another replica answer a request whose replica is lost, from where the client is."""
        info = self.engine_info
        is_exact = info is not None and info.fingerprint.id is not None
        if live.stream.is_over:
            return
        if live.num_repeats >= MAX_REPEATS or (live.has_begun and not is_exact):
            _end(live, EngineStopped(f"the engine was lost while it answered: {why}"))
            return
        live.begin_repeat()
        self.num_repeated += 1
        try:
            self._route(live)
        except EngineStopped as error:
            _end(live, error)

    def _end_waiting(self) -> None:
        with self._lock:
            lives, self._waiting = self._waiting, deque()
        for live in lives:
            _end(live, EngineStopped(self._why()))

    def _why(self) -> str:
        if self.error is None:
            return "the engine is closed."
        return "the engine failed on an internal error: restart the server."

    # ---- what engines report, on their readers' threads

    def on_change(self, engine: RemoteEngine) -> None:
        with self._lock:
            one = self._of(engine)
            if one is None:
                return
            self.tokenizer, engine.tokenizer = self.tokenizer or engine.tokenizer, None  # one is enough
            if engine.engine_info is not None and not one.is_refused:
                self._compare(one, engine.engine_info)
            if one.is_ready:
                one.num_failed = 0
            self._show()
        if one.is_refused:
            engine.kill()
        elif one.is_ready:
            self._send_waiting()

    def _compare(self, one: Replica, info: EngineInfo) -> None:
        """Take the first engine as the measure, and refuse one that would answer differently."""
        one.seen.max_pages = min(info.num_pages, MAX_SEEN_PAGES)
        if self.engine_info is None:
            self.engine_info = info
        different = difference(self.engine_info, info)
        if different is not None:
            one.is_refused, one.error = True, different
            log.error("%s is not used: %s", one.title, different)

    def on_restored(self, engine: RemoteEngine, tree: PageTree) -> None:
        if self._is_alone or engine.engine_info is None:
            return
        hashes = tree_hashes(tree, engine.engine_info.page_size)  # without the lock, as there may be many
        with self._lock:
            one = self._of(engine)
            if one is not None:
                one.seen.add(hashes)

    def on_hang(self, engine: RemoteEngine) -> None:
        if self._is_alone:
            self.is_hanging = True
            self._on_hang(self)
        else:
            engine.kill()

    def on_refusal(self, engine: RemoteEngine, live: LiveRequest, error: Exception) -> None:
        is_lost = isinstance(error, EngineStopped) and not isinstance(error, StepFailed)
        if not self._is_alone and is_lost and self._is_open:  # the engine fails, and will be heard of
            self._repeat(live, str(error))
        elif live.num_repeats and isinstance(error, CapacityError):  # its queue is full for now
            with self._lock:
                self._waiting.append(live)
        else:
            _end(live, error)

    def on_end(self, engine: RemoteEngine, lives: list[LiveRequest]) -> None:
        error = engine.error
        with self._lock:
            one = self._of(engine)
            if error is not None and one is not None and self._is_open:
                self._lose(one, engine, error)
                if self._is_alone or self._has_failed():
                    self.error = one.error or error
                self._show()
        if self.error is not None:
            self.startup.fail(self.error)
            self._end_waiting()
        for live in lives:
            if error is None or self.error is not None:
                _end(live, EngineStopped(self._why()))
            else:
                self._repeat(live, error)

    def _lose(self, one: Replica, engine: RemoteEngine, error: str) -> None:
        """Note that a replica is lost, and when it may start again."""
        if self._is_alone:
            log.error("%s", error)
            return  # its state is still asked for
        one.engine, one.seen = None, SeenPages(one.seen.max_pages)
        if one.is_refused:
            return
        one.error = error
        if engine.engine_info is None:
            one.fail()
        log.error("%s is lost and will be started again: %s", one.title, error)

    def _has_failed(self) -> bool:
        """Return whether no replica serves or may soon: the last start of each has failed."""
        return all(one.is_refused or (one.engine is None and one.num_failed) for one in self._replicas)

    def _of(self, engine: RemoteEngine) -> Replica | None:
        return next((one for one in self._replicas if one.engine is engine), None)

    def _show(self) -> None:
        """Show the start of the first replica that is ready, or else of the first one that starts."""
        starts = [engine.start for engine in self.engines if engine.start is not None]
        if not self._is_alone:  # one whose start has failed is tried again
            starts = [start for start in starts if start.state != "failed"]
        if starts:
            self._shown = min(starts, key=lambda start: start.state != "ready")
        elif self._shown is not None:
            self._shown = replace(self._shown, state="starting")
        else:
            return
        warnings = [warning for start in starts for warning in start.warnings]
        warnings += [f"{one.title} is not used: {one.error}" for one in self._replicas if one.is_refused]
        self.startup.follow(replace(self._shown, warnings=tuple(dict.fromkeys(warnings))))

    # ---- starting again, on the keeper's thread

    def _keep(self) -> None:
        """Start replicas whose time has come, and send requests that wait, until the end."""
        while not self._stop.wait(KEEP_S):
            for one in self._replicas:
                if self._may_start(one):
                    self._start(one)
            if self._waiting:
                self._send_waiting()

    def _may_start(self, one: Replica) -> bool:
        if one.engine is not None or one.is_refused or time.monotonic() < one.start_s:
            return False
        neighbours = self._on_card(one)
        return all(other.is_ready for other in neighbours if other.engine is not None)

    def _on_card(self, one: Replica) -> list[Replica]:
        """Return the other replicas on a replica's card."""
        if not one.place.is_card:
            return []
        return [
            other for other in self._replicas if other is not one and other.place.device == one.place.device
        ]

    def _start(self, one: Replica) -> None:
        info = self.engine_info
        num_on_card = sum(other.engine is not None for other in self._on_card(one))
        neighbours = Neighbours(None if info is None else info.max_model_len, num_on_card)
        try:
            child = self._start_child(one.place, neighbours)
        except OSError as error:
            one.fail()
            log.error("%s could not be started: %s", one.title, error)
            return
        with self._lock:
            one.num_restarts += one.error is not None
            one.engine = self._engine(*child)

    def _send_waiting(self) -> None:
        """Send the requests that wait, if a replica is ready."""
        with self._lock:
            if not any(one.is_ready for one in self._replicas):
                return
            lives, self._waiting = self._waiting, deque()
        for live in lives:
            try:
                if not live.stream.is_over:
                    self._route(live)
            except (EngineStopped, CapacityError) as error:
                _end(live, error)


def _end(live: LiveRequest, error: Exception) -> None:
    live.stream.outlet.send([(live.stream, error)])
