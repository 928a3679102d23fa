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


@dataclass(frozen=True, slots=True)
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
    """The current state of a start. Times are of the monotonic clock, which all processes share."""

    phases: dict[str, Phase]  # replaced, never changed in place
    state: State = "starting"
    seconds: float | None = None  # from the beginning until ready
    warnings: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    speculation: str = ""
    error: str | None = None


class StartProgress:
    """The phases of a start, their times, and errors. `report` receives a line per event."""

    def __init__(
        self,
        report: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[str] = PHASES,
    ) -> None:
        self.on_change: Callable[[StartState], object] = lambda progress: None  # the listener
        self._report = report
        self._clock = clock
        self._lock = Lock()
        self._start_s = clock()
        self._now = StartState({name: Phase(name) for name in names})

    def _change(self, make: Callable[[StartState], dict[str, object]]) -> None:
        """Replace the fields that `make` returns, and call the listener."""
        with self._lock:
            self._now = replace(self._now, **make(self._now))  # type: ignore[arg-type]
            self.on_change(self._now)

    def _change_phase(self, name: str, **values: object) -> None:
        self._change(
            lambda now: {"phases": {**now.phases, name: replace(now.phases[name], **values)}}  # type: ignore[arg-type]
        )

    def _change_running(self, **values: object) -> None:
        for phase in self.phases():
            if phase.state == "running":
                self._change_phase(phase.name, **values)

    def follow(self, other: StartState) -> None:
        """Copy the state of another process. A draining server keeps draining unless that one failed."""
        with self._lock:
            is_kept = self._now.state == "draining" and other.state != "failed"
            self._now = replace(other, state="draining") if is_kept else other

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run one phase; an exception marks it failed and is raised again."""
        self._change_phase(name, state="running", start_s=self._clock())
        try:
            yield
        except BaseException:
            self._end(name, "failed")
            raise
        self._end(name, "done")

    def _end(self, name: str, state: PhaseState) -> None:
        phase = self._now.phases[name]
        seconds = self._clock() - phase.start_s
        self._change_phase(name, state=state, seconds=seconds, progress=None)
        detail = f": {phase.detail}" if phase.detail else ""
        self._report(f"{name} {state} in {seconds:.1f} s{detail}")

    def rewind(self, name: str) -> None:
        """Reset phase `name` and all later phases: they will run again."""
        names = list(self._now.phases)
        again = {later: Phase(later) for later in names[names.index(name) :]}
        self._change(lambda now: {"phases": now.phases | again})

    def skip(self, name: str, why: str) -> None:
        self._change_phase(name, state="skipped", detail=why)

    def note(self, text: str) -> None:
        """Set the detail text of the running phase."""
        self._change_running(detail=text)

    def progress(self, done: int, total: int) -> None:
        self._change_running(progress=done / total if total else None)

    def warn(self, text: str) -> None:
        """Add a warning that users must see."""
        self._change(lambda now: {"warnings": (*now.warnings, text)})
        self._report(f"warning: {text}")

    def tell_chosen(self, text: str) -> None:
        """Add a decision that was made during the start, with its reason."""
        self._change(lambda now: {"chosen": (*now.chosen, text)})
        self._report(text)

    def tell_speculation(self, text: str) -> None:
        """Set the note that says whether speculation is on at first, and why."""
        self._change(lambda now: {"speculation": text})

    def ready(self) -> None:
        """Mark the start as complete; a draining or failed server keeps its state."""
        seconds = self._clock() - self._start_s
        self._change(
            lambda now: {"seconds": seconds, "state": "ready" if now.state == "starting" else now.state}
        )
        self._report(f"ready in {seconds:.1f} s")

    def drain(self) -> None:
        """Mark the server as draining: it refuses new requests and finishes the running ones."""
        self._change(lambda now: {"state": "failed" if now.state == "failed" else "draining"})

    def fail(self, error: str) -> None:
        self._change(lambda now: {"state": "failed", "error": error})

    @property
    def state(self) -> State:
        return self._now.state

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._now.warnings

    @property
    def speculation(self) -> str:
        """Return the note on speculation; empty if unknown."""
        return self._now.speculation

    def phases(self) -> tuple[Phase, ...]:
        return tuple(self._now.phases.values())

    def snapshot(self) -> dict[str, object]:
        """Return the state as a dict of JSON values."""
        now = self._now
        seconds = now.seconds if now.seconds is not None else self._clock() - self._start_s
        return {
            "state": now.state,
            "seconds": round(seconds, 3),
            "phases": [self._shown(phase) for phase in now.phases.values()],
            "warnings": list(now.warnings),
            "chosen": list(now.chosen),
            "error": now.error,
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
