"""StartProgress: how far a start has come and whether it serves, readable from any thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal

PHASES = ("fetch", "load", "allocate", "capture", "warm", "verify")

PhaseState = Literal["waiting", "running", "done", "skipped", "failed"]
State = Literal["starting", "ready", "draining", "failed"]


@dataclass(slots=True)
class Phase:
    """One phase of a start."""

    name: str
    state: PhaseState = "waiting"
    start_s: float = 0.0
    seconds: float | None = None
    detail: str | None = None
    progress: float | None = None  # 0 to 1


@dataclass(frozen=True, slots=True)
class StartState:
    """All of a start at one moment, for another process. Times are of the machine's one clock."""

    state: State
    seconds: float | None
    phases: tuple[Phase, ...]
    warnings: tuple[str, ...]
    chosen: tuple[str, ...]
    speculation: str
    error: str | None


class StartProgress:
    """The phases of a start, their times, and what went wrong. `report` receives a line per event."""

    def __init__(
        self,
        report: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[str] = PHASES,
    ) -> None:
        self.on_change: Callable[[StartState], object] = lambda progress: None  # for whoever follows
        self._report = report
        self._clock = clock
        self._lock = Lock()
        self._start_s = clock()
        self._phases = {name: Phase(name) for name in names}
        self._state: State = "starting"
        self._seconds: float | None = None  # from the beginning until ready
        self._warnings: list[str] = []
        self._chosen: list[str] = []
        self._speculation = ""
        self._error: str | None = None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
            self.on_change(self._exported())

    def _exported(self) -> StartState:
        phases = tuple(replace(phase) for phase in self._phases.values())
        warnings, chosen = tuple(self._warnings), tuple(self._chosen)
        return StartState(
            self._state, self._seconds, phases, warnings, chosen, self._speculation, self._error
        )

    def follow(self, other: StartState) -> None:
        """Be where the progress in another process is; whoever drains here goes on doing so."""
        with self._lock:
            if self._state != "draining" or other.state == "failed":
                self._state = other.state
            self._seconds, self._error = other.seconds, other.error
            self._phases = {phase.name: phase for phase in other.phases}
            self._warnings, self._chosen = list(other.warnings), list(other.chosen)
            self._speculation = other.speculation

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; an exception marks it failed and goes on to the caller."""
        phase = self._phases[name]
        with self._changing():
            phase.state, phase.start_s = "running", self._clock()
        try:
            yield
        except BaseException:
            self._end(phase, "failed")
            raise
        self._end(phase, "done")

    def _end(self, phase: Phase, state: PhaseState) -> None:
        with self._changing():
            phase.state, phase.seconds = state, self._clock() - phase.start_s
            phase.progress = None
        detail = f": {phase.detail}" if phase.detail else ""
        self._report(f"{phase.name} {state} in {phase.seconds:.1f} s{detail}")

    def rewind(self, name: str) -> None:
        """Phase `name` and all after it wait once more: what they did has to be done again."""
        with self._changing():
            names = list(self._phases)
            for later in names[names.index(name) :]:
                self._phases[later] = Phase(later)

    def skip(self, name: str, why: str) -> None:
        with self._changing():
            self._phases[name].state, self._phases[name].detail = "skipped", why

    def note(self, text: str) -> None:
        """Say what the running phase is doing."""
        with self._changing():
            for phase in self._phases.values():
                if phase.state == "running":
                    phase.detail = text

    def progress(self, done: int, total: int) -> None:
        with self._changing():
            for phase in self._phases.values():
                if phase.state == "running":
                    phase.progress = done / total if total else None

    def warn(self, text: str) -> None:
        """Something a user must see and that does not stop the start."""
        with self._changing():
            self._warnings.append(text)
        self._report(f"warning: {text}")

    def tell_chosen(self, text: str) -> None:
        """Something that the start has decided for the user, and why."""
        with self._changing():
            self._chosen.append(text)
        self._report(text)

    def tell_speculation(self, text: str) -> None:
        """Whether drafts will be made to begin with, and why."""
        with self._changing():
            self._speculation = text

    def ready(self) -> None:
        """The start has ended well; a server that has been told to end meanwhile goes on draining."""
        with self._changing():
            self._seconds = self._clock() - self._start_s
            if self._state == "starting":
                self._state = "ready"
        self._report(f"ready in {self._seconds:.1f} s")

    def drain(self) -> None:
        """No new requests; those under way end."""
        with self._changing():
            if self._state != "failed":
                self._state = "draining"

    def fail(self, error: str) -> None:
        with self._changing():
            self._state, self._error = "failed", error

    @property
    def state(self) -> State:
        return self._state

    @property
    def warnings(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._warnings)

    @property
    def speculation(self) -> str:
        """Empty where nobody has found out yet, or another engine serves."""
        return self._speculation

    def phases(self) -> tuple[Phase, ...]:
        """Copies, as they are now."""
        with self._lock:
            return tuple(replace(phase) for phase in self._phases.values())

    def snapshot(self) -> dict[str, object]:
        """Everything, as plain values."""
        with self._lock:
            seconds = self._seconds if self._seconds is not None else self._clock() - self._start_s
            return {
                "state": self._state,
                "seconds": round(seconds, 3),
                "phases": [self._shown(phase) for phase in self._phases.values()],
                "warnings": list(self._warnings),
                "chosen": list(self._chosen),
                "error": self._error,
            }

    def _shown(self, phase: Phase) -> dict[str, object]:
        seconds = self._clock() - phase.start_s if phase.state == "running" else phase.seconds
        return {
            "name": phase.name,
            "state": phase.state,
            "seconds": None if seconds is None else round(seconds, 3),
            "detail": phase.detail,
            "progress": phase.progress,
        }
