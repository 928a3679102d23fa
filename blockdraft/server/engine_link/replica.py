"""Replica: one engine of a server, its place, and how it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

from typing_extensions import TypedDict

from blockdraft.engine.info import EngineInfo
from blockdraft.server.engine_link.live_request import LiveRequest
from blockdraft.server.engine_link.prompt_pages import SeenPages
from blockdraft.server.engine_link.remote_engine import RemoteEngine

MAX_WAIT_S = 60.0  # before a start that has failed is tried again; arbitrary


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the start of a replica must know of the others."""

    max_model_len: int | None = None  # of the replicas that serve; None: none has been ready yet
    num_on_card: int = 0  # of the others, those that hold memory of the same card


Work = Callable[[Neighbours, Connection], None]  # the engine's side of a connection
ReplicaWord = Literal["waiting", "starting", "ready", "refused"]


class ReplicaStatus(TypedDict):
    """One replica, for /ready; `error` says why it was lost last, or why it is refused."""

    replica: int
    device: str
    state: ReplicaWord
    pid: int | None
    restarts: int
    requests: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica runs, and what it runs."""

    device: str
    work: Work

    @property
    def is_card(self) -> bool:
        return self.device != "cpu"


@dataclass(slots=True)
class Replica:
    """One engine of a server. `engine` is replaced when it is started again."""

    index: int
    place: ReplicaPlace
    engine: RemoteEngine | None = None  # None: it waits for its start
    seen: SeenPages = field(default_factory=SeenPages)
    num_sent: int = 0  # requests, since the server's start
    num_restarts: int = 0
    num_failed: int = 0  # starts in a row
    start_s: float = 0.0  # when it may start
    error: str | None = None
    is_refused: bool = False

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_ready and not self.is_refused

    @property
    def state(self) -> ReplicaWord:
        if self.is_refused:
            return "refused"
        return "waiting" if self.engine is None else "ready" if self.is_ready else "starting"

    @property
    def title(self) -> str:
        return f"replica {self.index} on {self.place.device}"

    def fail(self) -> None:
        """Note that a start has failed; the next one waits twice as long."""
        self.num_failed += 1
        self.start_s = time.monotonic() + min(2.0**self.num_failed, MAX_WAIT_S)

    def score(self, live: LiveRequest, page_size: int) -> tuple[int, int]:
        """Return the work until the request's first token, in prompt tokens, and the requests so far."""
        assert self.engine is not None, "it is ready"
        new = live.work_with(self.seen.match(live.pages) * page_size)
        return self.engine.work + new, self.num_sent


def difference(first: EngineInfo, other: EngineInfo) -> str | None:
    """Return why two engines cannot answer for each other; None if they can."""
    ours, theirs = first.fingerprint, other.fingerprint
    if ours.id != theirs.id:
        names = [name for name in ours.parts if ours.parts[name] != theirs.parts.get(name)]
        found = "; ".join(f"{name}: {theirs.parts.get(name)} instead of {ours.parts[name]}" for name in names)
        return f"its answers may differ from those of the others ({found or theirs.reason or ours.reason})."
    if first.max_model_len != other.max_model_len:
        return (
            f"it has room for {other.max_model_len} tokens of prompt and answer, the others for "
            f"{first.max_model_len}: set --max-model-len {min(first.max_model_len, other.max_model_len)}."
        )
    return None
