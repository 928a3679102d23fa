"""Checks the flags of a benchmark before anything starts, and makes the grid from them."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from blockdraft.bench.records import PLAIN, SPECULATIVE, Arm, OfferedLoad
from blockdraft.bench.run import Grid
from blockdraft.bench.wire import server_root, shown_host
from blockdraft.bench.workloads import load_all, with_turns
from blockdraft.errors import BenchError

_POSITIVE = ("processes", "runs", "num_prompts", "max_turns", "rate", "timeout", "start_timeout")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a published table, or the defaults without --table. presets.toml explains the fields.

    A preset reproduces the shape, not the numbers: your machine, model and engine differ.
    """

    published: str = ""
    workloads: Sequence[str] = ("code", "reasoning", "dialogue", "prose")
    concurrencies: Sequence[int] = (1,)
    max_tokens: int | Mapping[str, int] = 256
    temperature: float = 0.0
    num_prompts: int = 8
    runs: int = 1
    figures: Sequence[str] = ()
    tables: Sequence[str] = ()
    max_turns: int | None = None
    num_warmups: int = 2
    thinking: bool | None = None
    keeps_page: bool = False


_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: Preset(**facts) for name, facts in _TABLE.items()}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(PRESETS)}."
        raise BenchError(f"unknown table '{name}': {hint}")
    return PRESETS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `blockdraft bench`. None means the value of --table, else the default."""

    url: str | None = None  # of a running server
    engine: Sequence[str] = ()  # the flags that were given for our own server
    name: str | None = None
    api_key: str | None = None
    arms: str | None = None  # start our own server for each arm, one after the other
    baseline: str | None = None
    no_baseline: bool = False
    start: str | None = None
    also_eager: bool = False
    start_timeout: float = 1800.0
    timeout: float = 600.0
    workload: Sequence[str] | None = None
    concurrency: str | None = None
    rate: float | None = None
    depth: str = "0"
    temperature: str | None = None
    max_tokens: str | None = None
    num_prompts: int | None = None
    runs: int | None = None
    max_turns: int | None = None
    ignore_eos: bool = False
    cached: bool = False
    thinking: str | None = None
    data: Path | None = None
    offline: bool = False
    prompt_seed: int = 0
    table: str | None = None
    processes: int | None = None  # the largest number of processes
    no_headroom: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and (self.concurrency is not None or self.table is not None):
            raise BenchError("--rate cannot be combined with --concurrency or --table: give one of them.")
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise BenchError(f"--{field.replace('_', '-')} {value} is not a positive number.")
        if self.baseline is not None and self.no_baseline:
            raise BenchError("--baseline contradicts --no-baseline: give one of them.")
        self._check_server()
        self._check_arms()

    def _check_server(self) -> None:
        """Refuse flags that would have no effect."""
        url = None if self.url is None else shown_host(server_root(self.url))
        if url is not None and self.start is not None:
            raise BenchError(f"--start starts a server, but {url} runs already: give one of them.")
        other = url or ("the server of --start" if self.start is not None else None)
        unused = [*self.engine, *(["--also-eager"] if self.also_eager else [])]
        if other is not None and unused:
            raise BenchError(f"{unused[0]} is for our own server, not for {other}: leave it out.")
        if self.start is not None and "{port}" not in self.start:
            raise BenchError("--start must contain {port}, as in 'vllm serve NAME --port {port}'.")

    def _check_arms(self) -> None:
        names = [] if self.arms is None else self.arms.split(",")
        if not set(names) <= {PLAIN, SPECULATIVE} or len(set(names)) < len(names):
            raise BenchError(
                f"--arms '{self.arms}' is unknown: give plain, speculative or plain,speculative."
            )
        others = {
            "a URL": self.url,
            "--start": self.start,
            "--baseline": self.baseline,
            "--no-baseline": self.no_baseline,
            "--also-eager": self.also_eager,
        }
        given = [name for name, value in others.items() if value]
        if names and given:
            raise BenchError(f"--arms starts a server for each arm and cannot use {given[0]}: leave it out.")

    @property
    def arms_in_turn(self) -> tuple[Arm, ...]:
        """Return the arms that each get their own server, in order; empty if one server answers both arms."""
        return cast("tuple[Arm, ...]", tuple(self.arms.split(","))) if self.arms else ()

    @property
    def preset(self) -> Preset:
        return Preset() if self.table is None else find_preset(self.table)

    @property
    def turns(self) -> int | None:
        """Return how many turns of a conversation are sent; None if all."""
        return self.max_turns or self.preset.max_turns

    @property
    def start_command(self) -> list[str]:
        try:
            return shlex.split(self.start or "")
        except ValueError as error:
            raise BenchError(f"--start '{self.start}' is not a valid command: {error}.") from None

    def grid(self) -> Grid:
        """Read the prompts and return the grid to measure."""
        preset = self.preset
        concurrencies = _numbers("--concurrency", self.concurrency, int, 1, 100_000) or preset.concurrencies
        temperatures = _numbers("--temperature", self.temperature, float, 0, 100) or (preset.temperature,)
        names = [name for text in self.workload or preset.workloads for name in text.split(",") if name]
        if not names:
            raise BenchError("--workload is empty: give a class, a data set or a JSONL file.")
        num_prompts = self.num_prompts or preset.num_prompts
        workloads = load_all(
            names, limit=num_prompts, seed=self.prompt_seed, data_dir=self.data, is_offline=self.offline
        )
        max_tokens, max_tokens_of = self._max_tokens([workload.name for workload in workloads])
        return Grid(
            workloads=tuple(with_turns(workload, self.turns) for workload in workloads),
            loads=tuple(map(OfferedLoad, concurrencies))
            if self.rate is None
            else (OfferedLoad(rate=self.rate),),
            depths=_numbers("--depth", self.depth, int, 0, 10_000_000),
            temperatures=temperatures,
            max_tokens=max_tokens,
            max_tokens_of=max_tokens_of,
            num_runs=self.runs or preset.runs,
            num_requests=num_prompts,
            num_warmups=preset.num_warmups,
            ignores_eos=self.ignore_eos,
            is_cached=self.cached,
            thinking=preset.thinking if self.thinking is None else self.thinking == "on",
            seed=self.prompt_seed,
        )

    def _max_tokens(self, workloads: Sequence[str]) -> tuple[int, dict[str, int]]:
        """Return the default token limit of answers, and the limits of workloads that have their own."""
        given = self.preset.max_tokens
        limit, limits = (given, {}) if isinstance(given, int) else (Preset().max_tokens, dict(given))
        assert isinstance(limit, int)
        for word in self.max_tokens.split(",") if self.max_tokens is not None else ():
            name, equals, text = word.rpartition("=")
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise BenchError(f"--max-tokens {word} is not a positive number.")
            if not equals:
                limit, limits = int(text), {}  # one limit for all workloads replaces the table's
            elif name not in workloads:
                raise BenchError(
                    f"--max-tokens names '{name}', which is not measured: use one of {', '.join(workloads)}."
                )
            else:
                limits[name] = int(text)
        return limit, {name: count for name, count in limits.items() if name in workloads}


def _numbers(
    flag: str, text: str | None, kind: type[_Number], low: float, high: float
) -> tuple[_Number, ...]:
    """Return the numbers of a comma-separated list without duplicates; empty if there is no list."""
    if text is None:
        return ()
    try:
        found = tuple(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        raise BenchError(f"{flag} '{text}' is not a list of numbers such as 1,4,8.") from None
    if not all(low <= number <= high for number in found):
        raise BenchError(f"{flag} '{text}': each must be between {low:g} and {high:g}.")
    return found
