"""The engine's side of a RemoteEngine: reads commands, and sends one message per step."""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.loop import EngineLoop
from blockdraft.engine.request import Delta, Deltas, SamplingParams, Turn
from blockdraft.engine.streams import EngineStopped
from blockdraft.engine.watchdog import Watchdog
from blockdraft.errors import BlockdraftError
from blockdraft.phases import StartProgress
from blockdraft.server.engine_link.outbox import Inbox
from blockdraft.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MakeEngine = Callable[[StartProgress, Callable[[Tokenizer], object]], Engine]


def run_engine(
    connection: Connection,
    make_engine: MakeEngine,
    startup: StartProgress,
    *,
    step_timeout_s: float,
    recheck_share: float = 0.0,
    has_tokenizer: bool = False,
    max_wait_s: float = math.inf,
) -> None:
    """Serve until the server sends "close" or is gone.

    `make_engine` sends its tokenizer early, unless the server `has_tokenizer` of another replica.
    """
    server = _Server(connection)
    startup.on_change = functools.partial(server.tell, "start")

    def make(startup: StartProgress) -> Engine:
        tell = functools.partial(server.tell, "tokenizer")
        engine = make_engine(startup, (lambda _: None) if has_tokenizer else tell)
        gc.freeze()  # these objects stay: later collections need not scan them
        server.tell("info", engine_info(engine))
        server.tell("restored", engine.restored.tree)
        engine.restored = engine.restored._replace(tree=())  # it is not needed here
        return engine

    loop = EngineLoop(make, server, startup, recheck_share, max_wait_s)
    watchdog = Watchdog(
        loop,
        step_timeout_s,
        on_hang=functools.partial(server.tell, "hanging"),
        on_tick=functools.partial(server.tell, "beat"),
    )
    for kind, *content in server.messages():
        if kind == "add":
            _add(loop, server, *content)
        elif kind == "abort":
            loop.abort(*content)
        else:
            assert kind == "snapshot", kind
            server.tell("snapshot", *content, loop.snapshot())
    watchdog.close()
    loop.close()


def _add(
    loop: EngineLoop,
    server: _Server,
    request_id: str,
    prompt_ids: list[int],
    sampling: SamplingParams,
    turn: tuple[int, tuple[str, ...]],  # of a Turn, which pickle makes by Python code
    seed: int,
) -> None:
    def reply(added: Future[None]) -> None:
        if added.cancelled():  # aborted before the engine got it: no delta will follow
            ends = [Delta(request_id, i, "", (), finish_reason="abort") for i in range(sampling.n)]
            ends[-1].ends_request = True
            server.send(Deltas(others=ends))
            return
        error = added.exception()
        if error is not None:  # if there is none, deltas follow
            server.tell("refused", request_id, _for_another_process(error))

    loop.add(prompt_ids, sampling, request_id, Turn(*turn), seed).add_done_callback(reply)


def _for_another_process(error: BaseException) -> BaseException:
    """Return known errors as they are; log unexpected ones here and return a RuntimeError."""
    if isinstance(error, BlockdraftError | EngineStopped):
        return error
    log.error("a request could not be queued", exc_info=error)
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Server:
    """The server at the other end; the engine's outlet. Any thread may call `tell`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox = Inbox(connection)
        self._lock = Lock()

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield the server's messages until it sends "close" or is gone."""
        while True:
            try:
                message = self._inbox.recv()
            except (EOFError, OSError):
                return
            if message[0] == "close":
                return
            yield message

    def tell(self, *message: object) -> bool:
        """Send a message. Return False if the server is gone."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            return False
        return True

    def send(self, deltas: Deltas) -> bool:
        return self.tell("deltas", deltas.values(), [])

    def end(self, request_ids: Collection[str], reason: EngineStopped) -> None:
        self.tell("deltas", [], [(request_id, reason) for request_id in request_ids])
