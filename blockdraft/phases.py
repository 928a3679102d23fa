"""StartProgress: the phases of a start and its state, readable from any thread."""

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
    """A snapshot of a start, for another process; times are of the machine's monotonic clock."""

    state: State
    seconds: float | None
    phases: tuple[Phase, ...]
    warnings: tuple[str, ...]
    chosen: tuple[str, ...]
    speculation: str
    error: str | None


class StartProgress:
    """The phases of a start, their times, and errors. `report` receives a line per event."""

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
        """Copy the progress of another process; draining here is not undone."""
        with self._lock:
            if self._state != "draining" or other.state == "failed":
                self._state = other.state
            self._seconds, self._error = other.seconds, other.error
            self._phases = {phase.name: phase for phase in other.phases}
            self._warnings, self._chosen = list(other.warnings), list(other.chosen)
            self._speculation = other.speculation

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run one phase; an exception marks it failed and is raised again."""
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
        """Reset phase `name` and all after it, which have to run again."""
        with self._changing():
            names = list(self._phases)
            for later in names[names.index(name) :]:
                self._phases[later] = Phase(later)

    def skip(self, name: str, why: str) -> None:
        with self._changing():
            self._phases[name].state, self._phases[name].detail = "skipped", why

    def note(self, text: str) -> None:
        """Set the text of the running phase."""
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
        """Add a warning that users must see."""
        with self._changing():
            self._warnings.append(text)
        self._report(f"warning: {text}")

    def tell_chosen(self, text: str) -> None:
        """Add a decision of the start, with its reason."""
        with self._changing():
            self._chosen.append(text)
        self._report(text)

    def tell_speculation(self, text: str) -> None:
        """Set the note on whether speculation is on at first, and why."""
        with self._changing():
            self._speculation = text

    def ready(self) -> None:
        """Mark the start as complete; a server that is draining keeps draining."""
        with self._changing():
            self._seconds = self._clock() - self._start_s
            if self._state == "starting":
                self._state = "ready"
        self._report(f"ready in {self._seconds:.1f} s")

    def drain(self) -> None:
        """Refuse new requests and let running ones end."""
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
        """Return the note on speculation; empty if unknown."""
        return self._speculation

    def phases(self) -> tuple[Phase, ...]:
        """Return copies of the phases."""
        with self._lock:
            return tuple(replace(phase) for phase in self._phases.values())

    def snapshot(self) -> dict[str, object]:
        """Return everything as plain values."""
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
