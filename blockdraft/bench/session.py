"""Runs a benchmark from end to end: start or find servers, measure the grid, build the report."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from rich.console import Console

from blockdraft.bench.client import Client
from blockdraft.bench.endpoint import Endpoint, probe
from blockdraft.bench.figures import BenchReport, GeneratorFigures, Startup
from blockdraft.bench.fleet import Fleet, measure_headroom, most_processes
from blockdraft.bench.machine_facts import machine_facts
from blockdraft.bench.options import Options
from blockdraft.bench.progress import ProgressView
from blockdraft.bench.records import PLAIN, SPECULATIVE, Arm, Group
from blockdraft.bench.report import NO_BASELINE, build
from blockdraft.bench.run import INTERRUPTED, Grid, Runner, RunOutcome, Server
from blockdraft.bench.served import Started, our_command, served
from blockdraft.errors import BenchError

DRIFT = "changes of the machine in between are part of the speedup."
EAGER = "blockdraft serve --no-graphs"
ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(slots=True)
class Measured(RunOutcome):
    """The results of all servers so far."""

    endpoints: dict[Arm, Endpoint] = field(default_factory=dict)
    starts: list[Startup] = field(default_factory=list)
    headroom: list[GeneratorFigures] = field(default_factory=list)
    eager: list[Group] = field(default_factory=list)  # of a server without CUDA graphs


@dataclass(frozen=True, slots=True)
class Session:
    """One run: its options, the flags of our own server, and the console for progress."""

    options: Options
    grid: Grid
    console: Console
    server_flags: Sequence[str] = ()
    plain_flags: Sequence[str] = ()  # server_flags without a drafter
    shown_flags: Sequence[str] = ()  # server_flags without keys
    run_id: str = field(default_factory=lambda: secrets.token_hex(3))

    async def run(self) -> tuple[BenchReport, RunOutcome]:
        task = asyncio.current_task()
        assert task is not None
        # Cancel only between two loop steps: a process that is being started would be left running.
        _on_endings(task.cancel)
        found = Measured()
        if self.options.arms_in_turn:
            await self._measure_in_turn(found, task)
        else:
            async with self._server() as (url, started):
                await self._measure(found, url, started)
            if self.options.also_eager and found.trouble is None:
                await self._measure_eager(found, task)
        return self._report(found), found

    async def _measure_in_turn(self, found: Measured, task: asyncio.Task[object]) -> None:
        """Start, measure and stop a server for each arm. Keep the results if a later server fails."""
        for arm in self.options.arms_in_turn:
            flags = self.plain_flags if arm == PLAIN else self.server_flags
            with _kept(found, f"the {arm} arm", task):
                async with self._started(f"blockdraft serve, {arm}", flags) as started:
                    await self._measure(found, started.url, started, arm)
            if found.trouble is not None:
                return

    async def _measure_eager(self, found: Measured, task: asyncio.Task[object]) -> None:
        """Measure the same grid on a server without CUDA graphs, after the usual one has ended."""
        eager = Measured(headroom=found.headroom)  # the client is measured once
        with _kept(found, "the measurement without graphs", task):
            async with self._started(EAGER, [*self.server_flags, "--no-graphs"]) as started:
                await self._measure(eager, started.url, started)
            found.starts += eager.starts
            found.eager, found.trouble, found.is_stopped = eager.groups, eager.trouble, eager.is_stopped

    async def _measure(
        self, found: Measured, url: str, started: Started | None, arm: Arm | None = None
    ) -> None:
        """Measure the grid on the server at `url`: only `arm`, or all arms if it is None."""
        async with contextlib.AsyncExitStack() as stack:
            if arm is None:
                servers = await self._servers(url, stack)
            else:
                servers = {arm: await stack.enter_async_context(self._connected(url))}
            if started is not None and started.fp4_kernels:
                for name, (client, endpoint) in servers.items():
                    if endpoint.url == started.url:
                        servers[name] = Server(client, replace(endpoint, fp4_kernels=started.fp4_kernels))
            limit = self.options.processes or most_processes()
            fleet = await stack.enter_async_context(Fleet(self.grid.loads, limit))
            if not self.options.no_headroom and not found.headroom:
                self.console.print("measuring the load generator itself …")
                loads = dict.fromkeys(self.grid.loads)
                found.headroom += [await measure_headroom(fleet, load) for load in loads]
            stop = asyncio.Event()
            _on_endings(stop.set)
            with ProgressView(self.grid.total * len(servers), self.console) as watch:
                await Runner(
                    self.grid,
                    servers,
                    watcher=watch,
                    stop=stop,
                    send=fleet.send_block,
                    run_id=self.run_id,
                    outcome=found,
                ).run()
        found.endpoints |= {arm: server.endpoint for arm, server in servers.items()}
        if started is not None:
            found.starts.append(started.facts(found.cold.get(next(iter(servers)))))

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[tuple[str, Started | None]]:
        """Yield the server to measure. If we started it, end it when the context ends."""
        options = self.options
        if options.url is not None:
            yield options.url, None
            return
        label = "blockdraft serve" if options.start is None else options.start_command[0]
        async with self._started(label, self.server_flags) as started:
            yield started.url, started

    def _started(self, label: str, flags: Sequence[str]) -> contextlib.AbstractAsyncContextManager[Started]:
        start = self.options.start
        command = our_command(flags) if start is None else self.options.start_command
        self.console.print(f"starting {label} …")
        return served(command, label, self.options.start_timeout)

    @contextlib.asynccontextmanager
    async def _connected(self, url: str) -> AsyncIterator[Server]:
        key, timeout_s = self.options.api_key, self.options.timeout
        endpoint = await probe(url, key, self.options.name)
        client = Client(url, endpoint.model, api_key=key, timeout_s=timeout_s, switches=endpoint.switches)
        async with client:
            yield Server(client, endpoint)

    async def _servers(self, url: str, stack: contextlib.AsyncExitStack) -> dict[Arm, Server]:
        """Connect to the server of each arm; both arms may have the same server."""
        baseline = self.options.baseline
        first = await stack.enter_async_context(self._connected(url))
        if first.endpoint.is_speculative is False and baseline is None:
            return {PLAIN: first}  # there is no second arm
        servers: dict[Arm, Server] = {SPECULATIVE: first}
        if baseline is not None:
            servers[PLAIN] = await stack.enter_async_context(self._connected(baseline))
        elif not self.options.no_baseline and first.endpoint.can_switch:
            servers[PLAIN] = first
        return servers

    def _report(self, found: Measured) -> BenchReport:
        options, grid = self.options, self.grid
        endpoints = [asdict(found.endpoints[arm]) for arm in (SPECULATIVE, PLAIN) if arm in found.endpoints]
        for endpoint in endpoints:
            endpoint.pop("switches")
        notes = [f"{w.name}: {len(w.prompts)} prompts, {w.source}" for w in grid.workloads]
        if options.table is not None:
            notes.append(f"table {options.table}: {options.preset.published}")
        if len(options.arms_in_turn) > 1:
            notes.append(f"one server after the other, {options.arms}: {DRIFT}")
        is_asked_for = not options.no_baseline and not options.arms_in_turn
        if PLAIN not in found.endpoints and endpoints[0]["is_speculative"] and is_asked_for:
            notes.append(NO_BASELINE)
        if found.trouble is not None:
            notes.append(f"ended early: {found.trouble}")
        if len({endpoint["model"] for endpoint in endpoints}) > 1:
            notes.append(f"the baseline serves another model: {endpoints[1]['model']}")
        return build(
            found.groups,
            endpoint=endpoints[0],
            baseline=endpoints[1] if len(endpoints) > 1 else None,
            options={
                "workloads": [workload.name for workload in grid.workloads],
                "concurrencies": [load.concurrency for load in grid.loads],
                "rate": options.rate,
                "depths": list(grid.depths),
                "temperatures": list(grid.temperatures),
                "max_turns": options.turns,
                "timeout_s": options.timeout,
                "engine": list(self.shown_flags),
                "max_tokens": grid.max_tokens,
                "max_tokens_of": dict(grid.max_tokens_of),
                "num_runs": grid.num_runs,
                "num_requests": grid.num_requests,
                "ignores_eos": grid.ignores_eos,
                "is_cached": grid.is_cached,
                "thinking": grid.thinking,
                "seed": grid.seed,
                "table": options.table,
            },
            machine=machine_facts(),
            startup=found.starts,
            warmup=[*found.cold.values(), *found.warm],
            generator=found.headroom,
            eager=found.eager,
            notes=notes,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )


@contextlib.contextmanager
def _kept(found: Measured, what: str, task: asyncio.Task[object]) -> Iterator[None]:
    """Keep what an earlier server gave if a later one fails, or if its start is interrupted."""
    _on_endings(task.cancel)
    try:
        yield
    except BenchError as error:
        if not found.endpoints:
            raise
        found.trouble = f"{what} is missing: {error}"
    except asyncio.CancelledError:
        if not found.endpoints:
            raise
        task.uncancel()
        found.trouble, found.is_stopped = INTERRUPTED, True


def _on_endings(act: Callable[[], object]) -> None:
    """Call `act` on SIGINT, SIGTERM and SIGHUP from now on."""
    with contextlib.suppress(NotImplementedError):  # no signals on Windows' loop
        for number in (signal.SIGINT, *ENDINGS):
            asyncio.get_running_loop().add_signal_handler(number, act)
