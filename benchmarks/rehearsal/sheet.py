"""Steps that are run one after the other, what became of each, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

State = Literal["ok", "FAILED", "skipped"]


class Failure(Exception):
    """Why a step failed, in one line, and what it had found until then."""

    def __init__(self, says: str, values: Mapping[str, object] | None = None) -> None:
        super().__init__(says)
        self.values = values or {}


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a successful step: a line for the table, and values for the file."""

    says: str
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One step; it is skipped where one that it needs did not go well."""

    name: str
    run: Callable[[], Found]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step."""

    name: str
    state: State
    seconds: float
    says: str
    values: Mapping[str, object] = field(default_factory=dict)
    commands: tuple[str, ...] = ()  # as a shell would take them


def run_steps(
    steps: Sequence[Step], *, take_commands: Callable[[], Sequence[str]] = tuple
) -> Iterator[Outcome]:
    """Each step's outcome as soon as it is known. `take_commands` gives those since the last call."""
    went_well: set[str] = set()
    for step in steps:
        missing = [name for name in step.needs if name not in went_well]
        if missing:
            yield Outcome(step.name, "skipped", 0.0, f"it needs '{missing[0]}', which did not go well")
            continue
        outcome = _run(step, take_commands)
        if outcome.state == "ok":
            went_well.add(step.name)
        yield outcome


def _run(step: Step, take_commands: Callable[[], Sequence[str]]) -> Outcome:
    begin_s = time.monotonic()
    state: State = "ok"
    try:
        found = step.run()
    except Failure as failure:
        found, state = Found(one_line(str(failure)), failure.values), "FAILED"
    except (OSError, ValueError, LookupError) as error:  # a connection, or an answer of another shape
        found, state = Found(one_line(f"{type(error).__name__}: {error}")), "FAILED"
    seconds = time.monotonic() - begin_s
    return Outcome(step.name, state, seconds, found.says, found.values, tuple(take_commands()))


def one_line(text: str) -> str:
    return " ".join(text.split())


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(one.state == "ok" for one in outcomes) else 1


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the table, and a line with counts."""
    rows = [("step", "", "s", "what was found")]
    rows += [(one.name, one.state, f"{one.seconds:.1f}", one.says) for one in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, state, seconds, says in rows:
        line = f"{name.ljust(widths[0])}  {state.ljust(widths[1])}  {seconds.rjust(widths[2])}  {says}"
        yield line.rstrip()
    failed = [one.name for one in outcomes if one.state != "ok"]
    total = f"{sum(one.seconds for one in outcomes):.0f} s"
    if failed:
        names = ", ".join(failed)
        yield f"NOT READY: {len(failed)} of {len(outcomes)} steps did not go well ({names}), {total}"
    else:
        yield f"all {len(outcomes)} steps went well, {total}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    return {
        "went_well": exit_code(outcomes) == 0,
        "seconds": sum(one.seconds for one in outcomes),
        "steps": [asdict(one) for one in outcomes],
    }
