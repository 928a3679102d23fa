"""blockdraft bench: what a server does under load, with the baseline beside it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from blockdraft.cli.flags import add_settings, flags_of, given_settings, settings_from
from blockdraft.cli.masking import masked
from blockdraft.errors import BenchError
from blockdraft.settings.resolve import flag_of
from blockdraft.settings.settings import environment_api_key, forget_environment_settings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.bench.client import Clock
    from blockdraft.bench.presets import Preset
    from blockdraft.bench.records import Answer, Arm
    from blockdraft.bench.report import Report
    from blockdraft.bench.run import Grid, Outcome, Server
    from blockdraft.bench.served import Started

SUMMARY = "measure a server: speed, latency, acceptance, against plain decoding"
USAGE = "blockdraft bench [URL] [flags]\n       blockdraft bench compare A.json B.json"
DESCRIPTION = (
    "Measure an OpenAI-compatible server (ours, vLLM, SGLang, llama.cpp). Without URL a server of our own "
    "is started with the engine's flags, and its start is measured too. Speculation is paired with plain "
    "decoding: by a switch of each request on our server, by --baseline elsewhere."
)
EXIT_TROUBLE = 2
EXIT_INTERRUPT = 130
FILE_WIDTH = 160  # characters of a line that goes to no terminal; arbitrary
DEFAULT_WORKLOADS = "code,reasoning,dialogue,prose"
ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_Number = TypeVar("_Number", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="URL", help="or: compare A.json B.json")
    server = parser.add_argument_group("server")
    server.add_argument("--name", help="which of the server's models (default: the only one)")
    server.add_argument("--api-key", metavar="KEY", help="(default: $BLOCKDRAFT_API_KEY)")
    server.add_argument("--baseline", metavar="URL", help="the same model without speculation, elsewhere")
    server.add_argument(
        "--no-baseline", action="store_true", help="do not measure plain decoding beside speculation"
    )
    server.add_argument(
        "--start",
        metavar="COMMAND",
        help="start this server first and measure its start; {port} becomes a free port, e.g. "
        "'vllm serve NAME --port {port}'",
    )
    server.add_argument(
        "--also-eager",
        action="store_true",
        help="of our own server: also start it with --no-graphs, to compare",
    )
    server.add_argument("--start-timeout", type=float, default=1800.0, metavar="S", help="(default: 1800)")
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="per request (default: 600)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload",
        action="append",
        metavar="NAMES",
        help="built-in classes (code, reasoning, dialogue, prose, qa, json, long_code, summarise, or all), "
        "gsm8k, math500, humaneval, mbpp, mt_bench, spec_bench, random[:N], or a JSONL file; several with "
        f"commas or by repeating (default: {DEFAULT_WORKLOADS})",
    )
    load.add_argument("--concurrency", metavar="N,…", help="requests at a time (default: 1)")
    load.add_argument(
        "--rate", type=float, metavar="R", help="instead: R requests per second, at random times"
    )
    load.add_argument("--depth", default="0", metavar="N,…", help="tokens of context before each prompt")
    load.add_argument("--temperature", metavar="T,…", help="(default: 0, greedy)")
    load.add_argument("--max-tokens", type=int, metavar="N", help="per answer (default: 256)")
    load.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests per cell and arm, at least (default: 8)",
    )
    load.add_argument("--max-turns", type=int, metavar="N", help="of a conversation (default: all)")
    load.add_argument("--ignore-eos", action="store_true", help="answers of exactly --max-tokens")
    load.add_argument("--cached", action="store_true", help="let prefix caches help: prompts as they are")
    load.add_argument(
        "--thinking", choices=["on", "off"], help="of models that can (default: the model's own)"
    )
    load.add_argument(
        "--data", type=Path, metavar="DIR", help="where data sets lie, e.g. gsm8k_test.jsonl.gz"
    )
    load.add_argument("--offline", action="store_true", help="do not look for data sets on the hub")
    load.add_argument("--prompt-seed", type=int, default=0, metavar="N", help="of samples and arrivals")
    load.add_argument(
        "--table", metavar="NAME", help="the shape of a published table: z-lab, spark or mt-bench"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="PATH",
        help="write PATH.json, PATH.md and PATH.html (default: blockdraft-bench-TIME; none: no files)",
    )
    output.add_argument(
        "--json", dest="prints_json", action="store_true", help="print the JSON, not the table"
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    if args.target[:1] == ["compare"]:
        return _compare(args.target[1:], prints_json=args.prints_json)
    if len(args.target) > 1:
        raise BenchError(f"one URL at a time, not {len(args.target)}: '{args.target[1]}' is one too many.")
    # A server of our own ends with us, whatever ends us.
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDINGS}
    try:
        return asyncio.run(_Bench(args).run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BenchError as error:  # a server's log may hold the key
        key = _api_key(args)
        raise BenchError(str(error).replace(key, "***") if key else str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_endings(act: Callable[[], object]) -> None:
    """From now on the loop acts so when somebody wants us to end."""
    with contextlib.suppress(NotImplementedError):  # no signals on Windows' loop
        for number in (signal.SIGINT, *ENDINGS):
            asyncio.get_running_loop().add_signal_handler(number, act)


def _compare(paths: Sequence[str], *, prints_json: bool) -> int:
    from blockdraft.bench import compare
    from blockdraft.bench.report import load_report

    if len(paths) != 2:
        raise BenchError("compare takes two reports: blockdraft bench compare A.json B.json")
    comparison = compare.compare(*(load_report(Path(path)) for path in paths))
    if prints_json:
        print(compare.to_json(comparison), end="")
    else:
        _stdout().print(compare.terminal(comparison))
    return 0


def _stdout() -> Console:
    """Files and pipes have no width: nothing is cut for them."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


@dataclass(slots=True)
class _Bench:
    """One invocation: what is asked for, found before anything is started."""

    args: argparse.Namespace
    preset: Preset | None = None
    server_flags: list[str] = field(default_factory=list)  # of the server that we start

    def grid(self) -> Grid:
        from blockdraft.bench.presets import preset
        from blockdraft.bench.records import Load
        from blockdraft.bench.run import Grid
        from blockdraft.bench.workloads import load_all, with_turns

        args = self.args
        if args.rate is not None and (args.concurrency is not None or args.table is not None):
            raise BenchError("--rate is instead of --concurrency and --table: give one of them.")
        if args.table is not None:
            self.preset = preset(args.table)
        _fill_in(args, self.preset)
        _check(args)
        names = [name for text in args.workload for name in text.split(",") if name]
        if not names:
            raise BenchError("--workload names nothing to ask: give a class, a data set or a JSONL file.")
        workloads = load_all(
            names,
            limit=args.num_prompts,
            seed=args.prompt_seed,
            data_dir=args.data,
            is_offline=args.offline,
        )
        if args.max_turns is not None:
            workloads = tuple(with_turns(workload, args.max_turns) for workload in workloads)
        concurrencies = _numbers("--concurrency", args.concurrency, int, 1, 100_000)
        loads = [Load(concurrency) for concurrency in concurrencies]
        return Grid(
            workloads=workloads,
            loads=tuple(loads) if args.rate is None else (Load(rate=args.rate),),
            depths=_numbers("--depth", args.depth, int, 0, 10_000_000),
            temperatures=_numbers("--temperature", args.temperature, float, 0, 100),
            max_tokens=args.max_tokens,
            num_requests=args.num_prompts,
            num_warmups=2 if self.preset is None else self.preset.num_warmups,
            ignores_eos=args.ignore_eos,
            is_cached=args.cached,
            thinking=None if args.thinking is None else args.thinking == "on",
            seed=args.prompt_seed,
        )

    async def run(self) -> int:
        from rich.console import Console

        from blockdraft.bench.live import Watch
        from blockdraft.bench.run import Runner

        task = asyncio.current_task()
        assert task is not None
        # Between two steps of the loop, not in the middle of starting a process that then nobody ends.
        _on_endings(task.cancel)
        grid = self.grid()
        paths = self._paths()
        begin_s = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begin_s

        starts: list[dict[str, object]] = []
        console = Console(stderr=True, highlight=False, markup=False)
        async with (
            self._server(grid, console, starts) as (url, started),
            contextlib.AsyncExitStack() as stack,
        ):
            servers = await self._servers(url, clock, stack)
            stop = asyncio.Event()
            _on_endings(stop.set)
            total = sum(grid.num_conversations(point.load) for point in grid.points()) * len(servers)
            with Watch(total, console) as watch:
                outcome = await Runner(grid, servers, clock=clock, watcher=watch, stop=stop).run()
        if started is not None:
            starts.append(started.facts(next(iter(outcome.cold.values()), None)))
        report = self._report(grid, servers, outcome, starts)
        self._write(report, paths)  # before anything is shown: who reads it may have left
        self._show(report, grid)
        for path in paths:
            console.print(f"written: {path}", soft_wrap=True)
        return self._exit_code(outcome, stop)

    @contextlib.asynccontextmanager
    async def _server(
        self, grid: Grid, console: Console, starts: list[dict[str, object]]
    ) -> AsyncIterator[tuple[str, Started | None]]:
        """Where to measure; a server of our own, or the one of --start, runs as long as the context."""
        from blockdraft.bench.served import our_command, served

        args = self.args
        _check_server(args, [flag_of(*item) for item in given_settings(args).items()])
        if args.target:
            yield args.target[0], None
            return
        if args.start is None:
            settings = settings_from(args)
            forget_environment_settings()  # they are among the flags now
            self.server_flags = flags_of(settings)
            command, label = our_command(self.server_flags), "blockdraft serve"
        else:
            command = _words(args.start)
            label = command[0]
        if args.also_eager:
            console.print("starting blockdraft serve --no-graphs …")
            async with served(
                our_command([*self.server_flags, "--no-graphs"]),
                "blockdraft serve --no-graphs",
                args.start_timeout,
            ) as eager:
                starts.append(eager.facts(await self._first_answer(eager.url, grid)))
        console.print(f"starting {label} …")
        async with served(command, label, args.start_timeout) as started:
            yield started.url, started

    async def _first_answer(self, url: str, grid: Grid) -> Answer:
        """A cold request to a server that is started for that alone."""
        from blockdraft.bench.client import Client
        from blockdraft.bench.endpoint import probe
        from blockdraft.bench.records import SPECULATIVE
        from blockdraft.bench.run import cold_ask

        key = _api_key(self.args)
        endpoint = await probe(url, key, self.args.name)
        ask = cold_ask(SPECULATIVE, "cold", is_raw=grid.workloads[0].is_raw)
        async with Client(url, endpoint.model, api_key=key, clock=time.monotonic) as client:
            return (await client.converse(ask))[0]

    async def _servers(self, url: str, clock: Clock, stack: contextlib.AsyncExitStack) -> dict[Arm, Server]:
        from blockdraft.bench.client import Client
        from blockdraft.bench.endpoint import probe
        from blockdraft.bench.records import PLAIN, SPECULATIVE
        from blockdraft.bench.run import Server

        args, key = self.args, _api_key(self.args)

        async def server(url: str) -> Server:
            endpoint = await probe(url, key, args.name)
            client = Client(
                url,
                endpoint.model,
                api_key=key,
                clock=clock,
                timeout_s=args.timeout,
                switches=endpoint.switches,
            )
            return Server(await stack.enter_async_context(client), endpoint, key)

        first = await server(url)
        if first.endpoint.is_speculative is False and args.baseline is None:
            return {PLAIN: first}  # nothing to pair
        servers: dict[Arm, Server] = {SPECULATIVE: first}
        if args.baseline is not None:
            servers[PLAIN] = await server(args.baseline)
        elif not args.no_baseline and first.endpoint.can_switch:
            servers[PLAIN] = first
        return servers

    def _report(
        self, grid: Grid, servers: dict[Arm, Server], outcome: Outcome, starts: list[dict[str, object]]
    ) -> Report:
        from blockdraft.bench.host import machine
        from blockdraft.bench.report import build

        endpoints = [asdict(server.endpoint) for server in servers.values()]
        for endpoint in endpoints:
            endpoint.pop("switches")
        notes = [f"{w.name}: {len(w.prompts)} prompts, {w.source}" for w in grid.workloads]
        if self.preset is not None:
            notes.append(f"table {self.args.table}: {self.preset.published}")
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
                "rate": self.args.rate,
                "depths": list(grid.depths),
                "temperatures": list(grid.temperatures),
                "max_turns": self.args.max_turns,
                "timeout_s": self.args.timeout,
                "engine": list(masked(self.server_flags)),
                "max_tokens": grid.max_tokens,
                "num_requests": grid.num_requests,
                "ignores_eos": grid.ignores_eos,
                "is_cached": grid.is_cached,
                "thinking": grid.thinking,
                "seed": grid.seed,
                "table": self.args.table,
            },
            machine=machine(),
            startup=starts,
            warmup=[*outcome.cold.values(), *outcome.warm],
            notes=notes,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )

    def _show(self, report: Report, grid: Grid) -> None:
        from blockdraft.bench import layout
        from blockdraft.bench.report import to_json
        from blockdraft.bench.sheet import to_rich

        if self.args.prints_json:
            print(to_json(report), end="")
            return
        console = _stdout()
        console.print(layout.terminal(report))
        workloads = [workload.name for workload in grid.workloads]
        concurrencies = [load.concurrency for load in grid.loads]
        for figure in () if self.preset is None else self.preset.figures:
            console.print(to_rich(layout.grid(report, workloads, concurrencies, figure)))

    def _paths(self) -> list[Path]:
        """Where the report goes, made sure of before anything is measured."""
        out = self.args.out or f"blockdraft-bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        if out == "none":
            return []
        paths = [Path(out.removesuffix(".json") + suffix) for suffix in (".json", ".md", ".html")]
        try:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
                if path.stat().st_size == 0:
                    path.unlink()
        except OSError as error:
            raise BenchError(f"--out: cannot write '{error.filename}': {error.strerror}.") from None
        return paths

    def _write(self, report: Report, paths: Sequence[Path]) -> None:
        from blockdraft.bench.layout import markdown
        from blockdraft.bench.page import render
        from blockdraft.bench.report import to_json

        for path, write in zip(paths, (to_json, markdown, render), strict=False):  # none without --out
            path.write_text(write(report), encoding="utf-8")

    def _exit_code(self, outcome: Outcome, stop: asyncio.Event) -> int:
        if stop.is_set():
            return EXIT_INTERRUPT
        answers = [answer for group in outcome.groups for answer in group.answers]
        if outcome.trouble is None and any(answer.is_ok for answer in answers):
            return 0
        errors = [answer.error for answer in answers if answer.error is not None]
        reason = outcome.trouble or f"every request failed: {errors[0] if errors else 'none was sent.'}"
        print("blockdraft: error:", reason, file=sys.stderr)
        return EXIT_TROUBLE


# ---- flags


def _api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or environment_api_key()


def _fill_in(args: argparse.Namespace, preset: Preset | None) -> None:
    """What no flag says: the preset's, or the default."""
    wanted: dict[str, object] = {
        "workload": [DEFAULT_WORKLOADS],
        "concurrency": "1",
        "temperature": "0",
        "max_tokens": 256,
        "num_prompts": 8,
    }
    if preset is not None:
        wanted = {
            "workload": [",".join(preset.workloads)],
            "concurrency": ",".join(map(str, preset.concurrencies)),
            "temperature": str(preset.temperature),
            "max_tokens": preset.max_tokens,
            "num_prompts": preset.num_prompts,
            "max_turns": preset.max_turns,
            "thinking": None if preset.thinking is None else "on" if preset.thinking else "off",
        }
    for name, value in wanted.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _check(args: argparse.Namespace) -> None:
    for flag, value in (
        ("--max-tokens", args.max_tokens),
        ("--num-prompts", args.num_prompts),
        ("--max-turns", args.max_turns),
        ("--rate", args.rate),
        ("--timeout", args.timeout),
        ("--start-timeout", args.start_timeout),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise BenchError(f"{flag} {value} is not a positive number.")
    if args.baseline is not None and args.no_baseline:
        raise BenchError("--baseline and --no-baseline: give one of them.")


def _check_server(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Flags that would have no effect are refused: who gave them expects one."""
    from blockdraft.bench.wire import server_root, shown_host

    url = shown_host(server_root(args.target[0])) if args.target else None
    if args.target and args.start is not None:
        raise BenchError(f"--start starts a server, but {url} runs already: give one of them.")
    other = url or ("the server of --start" if args.start is not None else None)
    if other is not None and (flags or args.also_eager):
        raise BenchError(
            f"{flags[0] if flags else '--also-eager'} is for our own server, not for {other}: leave it out."
        )
    if args.start is not None and "{port}" not in args.start:
        raise BenchError("--start does not say where {port} goes, as in 'vllm serve NAME --port {port}'.")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BenchError(f"--start '{command}' is no command: {error}.") from None


def _numbers(flag: str, text: str, kind: type[_Number], low: float, high: float) -> tuple[_Number, ...]:
    try:
        found = tuple(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        raise BenchError(f"{flag} '{text}' is not a list of numbers such as 1,4,8.") from None
    if not all(low <= number <= high for number in found):
        raise BenchError(f"{flag} '{text}': each must be between {low:g} and {high:g}.")
    return found
