"""One benchmark from end to end: servers are started or found, the grid is measured, the report is built."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from rich.console import Console

from blockdraft.bench.client import Client
from blockdraft.bench.endpoint import probe
from blockdraft.bench.figures import BenchReport, GeneratorFigures, Startup
from blockdraft.bench.fleet import Fleet, most_processes
from blockdraft.bench.headroom import measure_headroom
from blockdraft.bench.host import machine
from blockdraft.bench.live import Watch
from blockdraft.bench.options import Options
from blockdraft.bench.records import PLAIN, SPECULATIVE, Answer, Arm
from blockdraft.bench.report import build
from blockdraft.bench.run import Grid, Runner, RunOutcome, Server, cold_ask
from blockdraft.bench.served import Started, our_command, served

ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True, slots=True)
class Session:
    """One run: what was asked for, the flags of a server that we start, and where progress is told."""

    options: Options
    grid: Grid
    console: Console
    server_flags: Sequence[str] = ()
    shown_flags: Sequence[str] = ()  # the same without keys

    async def run(self) -> tuple[BenchReport, RunOutcome]:
        task = asyncio.current_task()
        assert task is not None
        # Between two steps of the loop, not in the middle of starting a process that then nobody ends.
        _on_endings(task.cancel)
        starts: list[Startup] = []
        async with self._server(starts) as (url, started), contextlib.AsyncExitStack() as stack:
            servers = await self._servers(url, stack)
            limit = self.options.processes or most_processes()
            fleet = await stack.enter_async_context(Fleet(self.grid.loads, limit))
            headroom = [] if self.options.no_headroom else await self._headroom(fleet)
            stop = asyncio.Event()
            _on_endings(stop.set)
            with Watch(self.grid.total * len(servers), self.console) as watch:
                runner = Runner(self.grid, servers, watcher=watch, stop=stop, send=fleet.run_block)
                outcome = await runner.run()
        if started is not None:
            starts.append(started.facts(next(iter(outcome.cold.values()), None)))
        return self._report(servers, outcome, starts, headroom), outcome

    async def _headroom(self, fleet: Fleet) -> list[GeneratorFigures]:
        self.console.print("measuring the load generator itself …")
        return await measure_headroom(fleet, self.grid.loads)

    @contextlib.asynccontextmanager
    async def _server(self, starts: list[Startup]) -> AsyncIterator[tuple[str, Started | None]]:
        """Yield where to measure; a server that we start runs as long as the context."""
        options = self.options
        if options.url is not None:
            yield options.url, None
            return
        if options.also_eager:
            async with self._started("blockdraft serve --no-graphs", ["--no-graphs"]) as eager:
                starts.append(eager.facts(await self._first_answer(eager.url)))
        label = "blockdraft serve" if options.start is None else options.start_command[0]
        async with self._started(label) as started:
            yield started.url, started

    def _started(
        self, label: str, more: Sequence[str] = ()
    ) -> contextlib.AbstractAsyncContextManager[Started]:
        start = self.options.start
        command = our_command([*self.server_flags, *more]) if start is None else self.options.start_command
        self.console.print(f"starting {label} …")
        return served(command, label, self.options.start_timeout)

    async def _first_answer(self, url: str) -> Answer:
        """Send a cold request to a server that is started for that alone."""
        ask = cold_ask(SPECULATIVE, "cold", is_raw=self.grid.workloads[0].is_raw)
        async with self._connected(url) as server:
            return (await server.client.converse(ask))[0]

    @contextlib.asynccontextmanager
    async def _connected(self, url: str) -> AsyncIterator[Server]:
        key, timeout_s = self.options.api_key, self.options.timeout
        endpoint = await probe(url, key, self.options.name)
        client = Client(url, endpoint.model, api_key=key, timeout_s=timeout_s, switches=endpoint.switches)
        async with client:
            yield Server(client, endpoint)

    async def _servers(self, url: str, stack: contextlib.AsyncExitStack) -> dict[Arm, Server]:
        """Connect to the server of each arm; one server may be both."""
        baseline = self.options.baseline
        first = await stack.enter_async_context(self._connected(url))
        if first.endpoint.is_speculative is False and baseline is None:
            return {PLAIN: first}  # nothing to pair
        servers: dict[Arm, Server] = {SPECULATIVE: first}
        if baseline is not None:
            servers[PLAIN] = await stack.enter_async_context(self._connected(baseline))
        elif not self.options.no_baseline and first.endpoint.can_switch:
            servers[PLAIN] = first
        return servers

    def _report(
        self,
        servers: dict[Arm, Server],
        outcome: RunOutcome,
        starts: Sequence[Startup],
        headroom: Sequence[GeneratorFigures],
    ) -> BenchReport:
        options, grid = self.options, self.grid
        endpoints = [asdict(server.endpoint) for server in servers.values()]
        for endpoint in endpoints:
            endpoint.pop("switches")
        notes = [f"{w.name}: {len(w.prompts)} prompts, {w.source}" for w in grid.workloads]
        if options.table is not None:
            notes.append(f"table {options.table}: {options.preset.published}")
        if outcome.trouble is not None:
            notes.append(f"ended early: {outcome.trouble}")
        if len({endpoint["model"] for endpoint in endpoints}) > 1:
            notes.append(f"the baseline serves another model: {endpoints[1]['model']}")
        return build(
            outcome.groups,
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
                "num_requests": grid.num_requests,
                "ignores_eos": grid.ignores_eos,
                "is_cached": grid.is_cached,
                "thinking": grid.thinking,
                "seed": grid.seed,
                "table": options.table,
            },
            machine=machine(),
            startup=starts,
            warmup=[*outcome.cold.values(), *outcome.warm],
            generator=headroom,
            notes=notes,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )


def _on_endings(act: Callable[[], object]) -> None:
    """Make the loop act so from now on, when somebody wants us to end."""
    with contextlib.suppress(NotImplementedError):  # no signals on Windows' loop
        for number in (signal.SIGINT, *ENDINGS):
            asyncio.get_running_loop().add_signal_handler(number, act)
