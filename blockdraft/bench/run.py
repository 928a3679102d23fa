"""Measures every cell of the grid on warm servers, interleaved with its baseline.

A cell's conversations are sent in blocks. Both arms answer each block, one after the other, and the first arm
alternates. So drift (clocks, heat, other programs) affects both arms alike, and the arms never compete. The
server is idle between blocks; a block is so long that this does not matter.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from blockdraft.bench.client import Client
from blockdraft.bench.endpoint import Endpoint, read_speculation
from blockdraft.bench.filler import filler
from blockdraft.bench.load import MAX_REFUSED, SendBlock, poisson, send_block
from blockdraft.bench.records import (
    Answer,
    Arm,
    Ask,
    Block,
    Group,
    Key,
    OfferedLoad,
    Prompt,
    Speculation,
    Workload,
)
from blockdraft.bench.speculation import difference, total_of
from blockdraft.bench.wire import shown_host
from blockdraft.bench.workloads import deepened, salted

INTERRUPTED = "interrupted: these are the results so far."
LONG_BLOCK = 8  # conversations; more only if the concurrency needs them
WARM_TOKENS = 32  # limit of a warm-up answer
COLD_PROMPT = Prompt("cold", "cold", ("Write a haiku about the sea.",))
CALIBRATION_WORDS = 400  # enough to know the tokens per word to 1 %


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells to measure: each workload under each load, at each depth and temperature."""

    workloads: tuple[Workload, ...]
    loads: tuple[OfferedLoad, ...]
    depths: tuple[int, ...] = (0,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 256
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)  # limits of workloads that have their own
    num_runs: int = 1  # how often the whole grid is measured
    num_requests: int = 16  # conversations per cell; more for high concurrencies
    num_warmups: int = 2  # unmeasured requests to each arm; at least the largest concurrency
    ignores_eos: bool = False
    is_cached: bool = False  # send prompts unchanged: prefix caches may help
    thinking: bool | None = None
    seed: int = 0

    def points(self) -> Iterator[LoadPoint]:
        """Yield every cell, run by run, so that slow drift affects all cells of a run alike."""
        axes = (self.workloads, self.loads, self.depths, self.temperatures)
        for run in range(1, self.num_runs + 1):
            for workload, load, depth, temperature in itertools.product(*axes):
                yield LoadPoint(workload, load, depth, temperature, run)

    @property
    def total(self) -> int:
        """Return the number of conversations of one arm."""
        return sum(self.num_conversations(point.load) for point in self.points())

    def num_conversations(self, load: OfferedLoad) -> int:
        """Return the number of conversations per cell and arm: enough for two blocks at full concurrency."""
        return max(self.num_requests, 4 * load.concurrency if load.concurrency > 1 else 2)


class LoadPoint(NamedTuple):
    """A cell of the grid, for either arm."""

    workload: Workload
    load: OfferedLoad
    depth: int
    temperature: float
    run: int = 1

    @property
    def key(self) -> Key:
        return {
            "workload": self.workload.name,
            "category": "all",
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "depth": self.depth,
            "temperature": self.temperature,
        }


class Server(NamedTuple):
    """One arm's server; the arms may share it."""

    client: Client
    endpoint: Endpoint


class Watcher:
    """Receives the progress of a run; this base class ignores it."""

    def begin(self, point: LoadPoint, num_conversations: int) -> None:
        """Called when a cell begins."""

    def take(self, answer: Answer) -> None:
        """Called when a turn of a cell or of the warm-up has ended."""

    def end(self, groups: Sequence[Group]) -> None:
        """Called when a cell is measured."""


@dataclass(slots=True)
class RunOutcome:
    """The results so far."""

    groups: list[Group] = field(default_factory=list)
    cold: dict[Arm, Answer] = field(default_factory=dict)  # the first request to each server
    warm: list[Answer] = field(default_factory=list)  # excluded from every figure
    trouble: str | None = None  # why the run ended early
    is_stopped: bool = False  # the user stopped the run

    @property
    def failure(self) -> str | None:
        """Return why figures are missing; None if none are missing."""
        answers = [answer for group in self.groups for answer in group.answers]
        if self.trouble is not None or any(answer.is_ok for answer in answers):
            return self.trouble
        errors = [answer.error for answer in answers if answer.error is not None]
        return f"every request failed: {errors[0] if errors else 'none was sent.'}"


class Runner:
    """Runs the grid on the servers of both arms, or of one arm."""

    def __init__(
        self,
        grid: Grid,
        servers: Mapping[Arm, Server],
        *,
        watcher: Watcher | None = None,
        stop: asyncio.Event | None = None,
        send: SendBlock = send_block,
        run_id: str | None = None,
        outcome: RunOutcome | None = None,
    ) -> None:
        self.grid = grid
        self.servers = servers
        self.outcome = RunOutcome() if outcome is None else outcome  # adds to earlier results
        self._watcher = watcher or Watcher()
        self._stop = stop or asyncio.Event()
        self._send = send
        self._run_id = run_id or secrets.token_hex(3)  # two runs with equal ids send equal words
        # A salt in the prompt changes the answer: use it only if no request field avoids the caches.
        endpoints = [server.endpoint for server in servers.values()]
        self._salts_words = not all(endpoint.switches.keeps_caches_out for endpoint in endpoints)
        self._tokens_per_word = 1.5  # an estimate until it is measured

    async def run(self) -> RunOutcome:
        """Measure the grid. A server's failure raises nothing: `trouble` says why the run ended early."""
        await self._warm_up()
        for number, point in enumerate(self.grid.points()):
            if self.outcome.trouble is not None:
                break
            await self._measure(number, point)
        self.outcome.groups = [group for group in self.outcome.groups if group.answers]
        self.outcome.is_stopped = self._stop.is_set()
        return self.outcome

    # ---- warming up

    async def _warm_up(self) -> None:
        """Send one cold request to each server, then warm-up requests at the grid's largest concurrency."""
        point = next(self.grid.points())
        for arm, server in self.servers.items():
            ask = cold_ask(arm, f"{self._run_id}-cold-{arm}", is_raw=point.workload.is_raw)
            self.outcome.cold[arm] = (await self._block(server, [ask], OfferedLoad()))[0]
            if self.outcome.trouble is not None:
                return
        await self._calibrate()
        most = max(load.concurrency for load in self.grid.loads)
        for arm, server in self.servers.items():
            prompts = _repeated(point.workload.prompts, max(most, self.grid.num_warmups))
            asks = [self._ask(arm, point, prompt, f"warm-{arm}", i) for i, prompt in enumerate(prompts)]
            asks = [replace(ask, max_tokens=min(WARM_TOKENS, ask.max_tokens)) for ask in asks]
            self.outcome.warm += await self._block(server, asks, OfferedLoad(concurrency=most))
            if self.outcome.trouble is not None:
                return

    async def _calibrate(self) -> None:
        """Measure the tokens per word of context: add context to the cold prompt."""
        depths = [depth for depth in self.grid.depths if depth]
        if not depths:
            return
        arm = next(iter(self.servers))
        cold = self.outcome.cold[arm]
        notes = filler(min(CALIBRATION_WORDS, -(-min(depths) // 2)), seed="calibration")
        prompt = replace(cold.ask.prompt, turns=(f"{cold.ask.prompt.turns[0]}\n\n{notes}",))
        ask = replace(cold.ask, prompt=prompt, max_tokens=1)
        (answer,) = await self._block(self.servers[arm], [ask], OfferedLoad())
        self.outcome.warm.append(answer)
        added = (answer.prompt_tokens or 0) - (cold.prompt_tokens or 0)
        if answer.is_ok and cold.is_ok and added > 0:
            self._tokens_per_word = added / len(notes.split())

    # ---- measuring

    async def _measure(self, number: int, point: LoadPoint) -> None:
        groups = {arm: Group(point.key, arm, [], 0.0) for arm in self.servers}
        count = self.grid.num_conversations(point.load)
        self._watcher.begin(point, count * len(groups))
        self.outcome.groups += groups.values()
        prompts = _repeated(point.workload.prompts, count)
        for index, (begin, end) in enumerate(_blocks(count, point.load)):
            arms = list(groups) if (number + index) % 2 == 0 else list(groups)[::-1]
            times = poisson(end - begin, point.load.rate, self.grid.seed + index) if point.load.rate else None
            for arm in arms:
                asks = [self._ask(arm, point, prompts[i], f"cell{number}", i) for i in range(begin, end)]
                if times is not None:
                    asks = [replace(ask, at_s=at_s) for ask, at_s in zip(asks, times, strict=True)]
                await self._measure_block(self.servers[arm], groups[arm], asks, point.load)
                if self.outcome.trouble is not None:
                    return
        self._watcher.end(list(groups.values()))

    async def _measure_block(self, server: Server, group: Group, asks: list[Ask], load: OfferedLoad) -> None:
        before = await self._read_meter(server)
        answers = await self._block(server, asks, load)
        group.answers += answers
        after = None if before is None else await self._read_meter(server)
        block = Block(
            start_s=min(answer.sent_s for answer in answers),
            end_s=max(answer.end_s for answer in answers),
            metered=difference(before, after),
        )
        group.blocks.append(block)
        group.busy_s += block.end_s - block.start_s
        if after is not None:
            parts = (group.metered, block.metered)
            group.metered = total_of(part for part in parts if part is not None)

    async def _read_meter(self, server: Server) -> Speculation | None:
        if not server.endpoint.is_metered:
            return None
        return await read_speculation(server.endpoint.url, server.client.api_key, server.endpoint.model)

    async def _block(self, server: Server, asks: list[Ask], load: OfferedLoad) -> list[Answer]:
        ledger = await self._send(server.client, asks, load, on_answer=self._watcher.take, stop=self._stop)
        answers = ledger.all_answers()
        if self._stop.is_set():
            self.outcome.trouble = INTERRUPTED
        elif server.client.num_refused >= min(MAX_REFUSED, len(asks)):
            errors = [answer.error for answer in answers if answer.error is not None]
            self.outcome.trouble = f"the server at {shown_host(server.endpoint.url)} has gone: {errors[-1]}"
        return answers

    def _ask(self, arm: Arm, point: LoadPoint, original: Prompt, cell: str, number: int) -> Ask:
        """Make a request. Both arms get the same words; each has its own salt for the server's cache."""
        grid, prompt, name = self.grid, original, f"{cell}-{number}"
        if point.depth:
            prompt = deepened(
                prompt, num_tokens=point.depth, tokens_per_word=self._tokens_per_word, seed=grid.seed
            )
        if not grid.is_cached and self._salts_words:
            prompt = salted(prompt, f"{self._run_id}-{name}")
        return Ask(
            prompt=prompt,
            arm=arm,
            max_tokens=grid.max_tokens_of.get(point.workload.name, grid.max_tokens),
            temperature=point.temperature,
            seed=grid.seed if point.temperature > 0 else None,
            is_raw=point.workload.is_raw,
            ignores_eos=grid.ignores_eos,
            cache_salt=None if grid.is_cached else f"{self._run_id}-{name}-{arm}",
            thinking=grid.thinking,
            number=number,
            original=original,
        )


def cold_ask(arm: Arm, salt: str, *, is_raw: bool) -> Ask:
    """Return the first request to a server. It is the same for all, so that starts can be compared."""
    return Ask(salted(COLD_PROMPT, salt), arm, WARM_TOKENS, is_raw=is_raw, cache_salt=salt)


def _repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts: repeat the list as often as needed. Each prompt keeps its id."""
    return list(itertools.islice(itertools.cycle(prompts), count))


def _blocks(count: int, load: OfferedLoad) -> list[tuple[int, int]]:
    """Return [begin, end) of each block: at least two, so that each arm is first once. At a rate: two."""
    half = -(-count // 2)
    size = max(2 * load.concurrency, min(LONG_BLOCK, half)) if load.rate is None else half
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
