"""Runs the probe in its own process and reads its output, even if the process crashed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockdraft.doctor.shapes import SHAPE_NAMES
from blockdraft.jsonl import as_object
from blockdraft.settings.settings import child_environment

TIMEOUT_S = 900.0  # limit of one process: on a slow card, compiling every kernel takes minutes


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts that torch reports about itself and the first GPU."""

    version: str
    cuda: str | None
    hip: str | None
    has_gpu: bool
    num_gpus: int = 0
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()  # the architectures that torch's kernels were compiled for
    free_bytes: int | None = None
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class KernelPath:
    """The fast path of an operation on this machine. If unused, `taken` is None and `why_not` says why."""

    operation: str
    taken: str | None
    why_not: str | None


@dataclass(frozen=True, slots=True)
class ShapeCheck:
    """An operation of one shape, compared with its reference. A non-finite error is None."""

    shape: str
    operation: str
    where: str
    error: float | None
    tolerance: float
    num_comparisons: int
    is_passed: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The stage at which a process failed, with the error."""

    what: str  # "torch", "a product on cuda", "the choice of kernels", or a shape's name
    how: str


@dataclass(slots=True)
class Probe:
    """The results of the probe."""

    torch: Torch | None = None
    device: str | None = None
    is_product_right: bool = True
    paths: tuple[KernelPath, ...] = ()
    checks: tuple[ShapeCheck, ...] = ()
    failures: tuple[Failure, ...] = ()


class ProbeOutcome(NamedTuple):
    """The output of a process. `code` is None if the process was stopped after TIMEOUT_S."""

    out: str
    err: str
    code: int | None


Run = Callable[[str], ProbeOutcome]


def probe_torch(device: str, *, with_kernels: bool = True, run: Run | None = None) -> Probe:
    """Run the probe. If a shape crashes the process, a new process continues with the next shape."""
    run = run or run_probe
    remaining = SHAPE_NAMES if with_kernels else ()
    probe = Probe()
    while True:
        outcome = run(json.dumps({"device": device, "shapes": remaining}))
        ended_at = _read(probe, outcome.out)
        if ended_at is None:
            return probe
        probe.failures += (Failure(ended_at, _describe_end(outcome)),)
        if ended_at not in remaining[:-1]:
            return probe
        remaining = remaining[remaining.index(ended_at) + 1 :]


def run_probe(argument: str) -> ProbeOutcome:
    """Run the probe with its own folder for temporary files, which is removed even after a crash."""
    command = (sys.executable, "-m", "blockdraft.doctor.probe", argument)
    code: int | None = None
    with tempfile.TemporaryDirectory(prefix="blockdraft-doctor-") as folder:
        env = child_environment(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder))
        try:
            done = subprocess.run(command, env=env, capture_output=True, timeout=TIMEOUT_S)
            out, err, code = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as stopped:
            out, err = stopped.stdout or b"", stopped.stderr or b""
    return ProbeOutcome(out.decode(errors="replace"), err.decode(errors="replace"), code)


def _read(probe: Probe, text: str) -> str | None:
    """Add the output of a process to `probe`. Return the stage that did not end; None if all ended."""
    begun: str | None = "torch"
    for line in text.splitlines():
        entry: dict[str, Any] = as_object(line)  # empty for a line that a library printed
        match entry.pop("kind", None):
            case "begin":
                begun = entry["what"]
            case "end":
                begun = None
            case "torch":
                lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
                probe.torch = Torch(**entry | lists)
            case "device":
                probe.device, probe.is_product_right = entry["name"], entry["is_right"]
            case "path":  # the last line on an operation counts
                paths = {path.operation: path for path in (*probe.paths, KernelPath(**entry))}
                probe.paths = tuple(paths.values())
            case "check":
                probe.checks += (ShapeCheck(**entry),)
    return begun


def _describe_end(outcome: ProbeOutcome) -> str:
    if outcome.code is None:
        return f"it did not end within {TIMEOUT_S:.0f} s"
    if outcome.code < 0:
        return f"the process was killed by {_signal_name(-outcome.code)}"
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    errors = [line for line in lines if not line[0].isspace() and "Error" in line.split(":")[0]]
    last = (errors or lines)[-1:]  # compilers add lines below an error
    return last[0].strip()[:400] if last else f"the process ended with code {outcome.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
