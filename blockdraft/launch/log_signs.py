"""Reads the progress of another engine's start from its log.

Log lines change between versions, so they are only shown. HTTP decides whether an engine is ready.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock

from blockdraft.phases import StartProgress

PHASES = ("launch", "fetch", "load", "compile", "capture", "warm", "verify")
_READ = PHASES[:-2]  # our own code enters the last two

_PERCENT = r"(?P<percent>\d+)%"
_DOWNLOADS = (
    ("fetch", rf"^(?:Fetching \d+ files|Downloading [^:]*):\s+{_PERCENT}"),
    ("fetch", rf"^(?P<detail>[\w./-]+\.(?:safetensors|bin|gguf|json|pt))[^:]*:\s+{_PERCENT}"),
    ("fetch", r"Time spent downloading weights"),
)
_SHARDS = ("load", rf"^(?:Multi-thread )?[Ll]oading [\w ]*shards:\s+{_PERCENT}")
_PATTERNS = {
    "vllm": (
        *_DOWNLOADS,
        _SHARDS,
        ("load", rf"^Loading safetensors using [^:]*:\s+{_PERCENT}"),
        ("load", r"(?P<detail>Loading drafter model)"),
        ("load", r"Filesystem type for checkpoints: .*?(?P<detail>Checkpoint size: [\d.]+ \w+)"),
        ("load", r"(?P<detail>Loading weights took [\d.]+ \w+)"),
        ("load", r"(?P<detail>Model loading took [\d.]+ \w+)"),
        ("compile", r"Starting torch\.compile|for vLLM's torch\.compile"),
        ("compile", r"Warming up model for the compilation"),
        ("compile", r"(?P<detail>Dynamo bytecode transform time: [\d.]+ s)"),
        ("compile", r"(?P<detail>Compiling a graph for .* takes [\d.]+ s)"),
        ("compile", r"Directly load (?:the compiled graph|AOT compilation)"),
        ("capture", rf"Capturing (?:[\w -]+ )?CUDA graphs[^:]*:\s+{_PERCENT}"),
        ("capture", r"(?P<detail>Graph capturing finished in \d+ secs)"),
        (None, r"(?P<detail>KV cache size: [\d,]+ tokens)"),
    ),
    "sglang": (
        *_DOWNLOADS,
        _SHARDS,
        ("load", r"Load weight (?:begin|end)"),
        ("compile", r"(?P<detail>Running FlashInfer autotune|DeepGEMM warmup)"),
        ("compile", r"(?P<detail>DeepGEMM JIT [Cc]ompil\w+)|[Cc]ompiling .*torch\.compile"),
        ("capture", r"Capture .*graph (?:begin|end)"),
        ("capture", rf"Capturing batches[^:]*:\s+{_PERCENT}"),
        (None, r"(?P<detail>KV Cache is allocated\. #tokens: \d+)"),
    ),
}
# vLLM: "(Worker pid=7) INFO 11-15 12:56:15 [core.py:402] text"; SGLang: "[2026-11-15 12:56:15 TP0] text".
_HEAD = re.compile(
    r"^(?:\([\w-]+ pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s?|\[\d{4}-\d\d-\d\d [^\]]*\]\s?)?"
)
_ERROR = re.compile(r"^(?:\([\w-]+ pid=\d+\)\s*)?(?:ERROR|CRITICAL)\b|^\w*(?:Error|Exception): ")
_BAR = re.compile(r"\d+%\|| \d+% Completed ")


@dataclass(frozen=True, slots=True)
class Sign:
    """The content of a line: phase (None for the current one), activity, and share done (0 to 1)."""

    phase: str | None
    detail: str | None = None
    progress: float | None = None


def read_sign(engine: str, line: str) -> Sign | None:
    """Return the sign that a line contains; None if it has no information about the start."""
    text = message(line)
    for phase, pattern in _PATTERNS[engine]:
        if found := re.search(pattern, text):
            groups = found.groupdict()
            percent = groups.get("percent")
            progress = None if percent is None else min(1.0, int(percent) / 100)
            return Sign(phase, groups.get("detail"), progress)
    return None


def message(line: str) -> str:
    """Return a line without the prefix of the engine's logger."""
    return line[_HEAD.match(line).end() :]  # type: ignore[union-attr]  # it matches the empty string


def is_error(line: str) -> bool:
    return _ERROR.search(line) is not None


def is_bar(line: str) -> bool:
    """Return whether the line is one state of a progress bar."""
    return _BAR.search(line) is not None


class PhaseTracker:
    """Moves a start through its phases in order, from any thread. Skips phases that the engine leaves out."""

    def __init__(self, startup: StartProgress) -> None:
        self._startup = startup
        self._running = ExitStack()
        self._place = -1  # index in PHASES
        self._lock = RLock()

    def enter(self, name: str) -> None:
        """Begin a phase, unless it or a later phase has already begun."""
        place = PHASES.index(name)
        with self._lock:
            if place <= self._place:
                return
            self._running.close()
            for skipped in PHASES[self._place + 1 : place]:
                self._startup.skip(skipped, "the engine did not log it")
            self._place = place
            self._running.enter_context(self._startup.phase(name))

    def take(self, sign: Sign) -> None:
        """Show a sign of the log. Ignore it during our own phases."""
        with self._lock:
            if self._place >= len(_READ):
                return
            if sign.phase is not None:
                self.enter(sign.phase)
            if sign.detail is not None:
                self._startup.note(sign.detail)
            if sign.progress is not None:
                self._startup.progress(round(sign.progress * 100), 100)

    def close(self) -> None:
        """End the running phase as done."""
        with self._lock:
            self._running.close()

    def fail(self, error: BaseException) -> None:
        """End the running phase as failed."""
        with self._lock:
            self._running.__exit__(type(error), error, error.__traceback__)
