"""blockdraft bench: what a server does under load, with the baseline beside it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_settings, flags_of, given_settings, settings_from
from blockdraft.cli.masking import masked
from blockdraft.errors import BenchError
from blockdraft.settings.merge import flag_of
from blockdraft.settings.settings import Settings, environment_api_key, forget_environment_settings
from blockdraft.settings.shipped import with_drafter

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.bench.figures import BenchReport
    from blockdraft.bench.options import Options
    from blockdraft.bench.session import Session

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="URL", help="or: compare A.json B.json")
    _add_server(parser)
    _add_load(parser)
    add = parser.add_argument_group("output").add_argument
    add(
        "--out",
        metavar="PATH",
        help="write PATH.json, PATH.md and PATH.html (default: blockdraft-bench-TIME; none: no files)",
    )
    add("--json", dest="prints_json", action="store_true", help="print the JSON, not the table")
    add_settings(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--name", help="which of the server's models (default: the only one)")
    add("--api-key", metavar="KEY", help="(default: $BLOCKDRAFT_API_KEY)")
    add(
        "--arms",
        metavar="ARMS",
        help="plain,speculative: start, measure and end a server for each, one after the other on the one "
        "card; for --engine vllm and sglang, whose requests cannot do without speculation",
    )
    add("--engine-python", metavar="PYTHON", help="of the environment that has vllm or sglang")
    add("--baseline", metavar="URL", help="the same model without speculation, elsewhere")
    add("--no-baseline", action="store_true", help="do not measure plain decoding beside speculation")
    add(
        "--start",
        metavar="COMMAND",
        help="start this server first and measure its start; {port} becomes a free port, e.g. "
        "'vllm serve NAME --port {port}'",
    )
    add(
        "--also-eager",
        action="store_true",
        help="of our own server: also start it with --no-graphs, to compare",
    )
    add("--start-timeout", type=float, default=1800.0, metavar="S", help="(default: 1800)")
    add("--timeout", type=float, default=600.0, metavar="S", help="per request (default: 600)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add(
        "--workload",
        action="append",
        metavar="NAMES",
        help="built-in classes (code, reasoning, dialogue, prose, qa, json, long_code, summarise, or all of "
        "these), program (a short prompt, a long answer), "
        "gsm8k, math500, humaneval, mbpp, mt_bench, spec_bench, random[:N], or a JSONL file; several with "
        "commas or by repeating (default: code,reasoning,dialogue,prose)",
    )
    add("--concurrency", metavar="N,…", help="requests at a time (default: 1)")
    add("--rate", type=float, metavar="R", help="instead: R requests per second, at random times")
    add("--depth", default="0", metavar="N,…", help="tokens of context before each prompt")
    add("--temperature", metavar="T,…", help="(default: 0, greedy)")
    add(
        "--max-tokens",
        metavar="N",
        help="per answer (default: 256); of single workloads: NAME=N, several with commas",
    )
    add("--runs", type=int, metavar="N", help="measure everything so often, and show the spread (default: 1)")
    add("--num-prompts", type=int, metavar="N", help="requests per cell and arm, at least (default: 8)")
    add("--max-turns", type=int, metavar="N", help="of a conversation (default: all)")
    add("--ignore-eos", action="store_true", help="answers of exactly --max-tokens")
    add("--cached", action="store_true", help="let prefix caches help: prompts as they are")
    add("--thinking", choices=["on", "off"], help="of models that can (default: the model's own)")
    add("--data", type=Path, metavar="DIR", help="where data sets lie, e.g. gsm8k_test.jsonl.gz")
    add("--offline", action="store_true", help="do not look for data sets on the hub")
    add("--prompt-seed", type=int, default=0, metavar="N", help="of samples and arrivals")
    add("--processes", type=int, metavar="N", help="to send from, at most (default: half of the cores)")
    add("--no-headroom", action="store_true", help="do not measure what this client can read, 1 s per load")
    add("--table", metavar="NAME", help="the shape of a published table: z-lab, spark, forum or mt-bench")


def run(args: argparse.Namespace) -> int:
    from blockdraft.bench.loop import run_in_loop
    from blockdraft.bench.session import ENDINGS

    if args.target[:1] == ["compare"]:
        return _compare(args.target[1:], out=args.out or "none", prints_json=args.prints_json)
    if len(args.target) > 1:
        raise BenchError(f"one URL at a time, not {len(args.target)}: '{args.target[1]}' is one too many.")
    options = _options(args)
    # A server of our own ends with us, whatever ends us.
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDINGS}
    try:
        return run_in_loop(_measure(args, options))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BenchError as error:  # a server's log may hold the key
        key = options.api_key
        raise BenchError(str(error).replace(key, "***") if key else str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _options(args: argparse.Namespace) -> Options:
    from blockdraft.bench.options import Options

    given = {field.name: getattr(args, field.name) for field in fields(Options) if field.name in args}
    python = [] if args.engine_python is None else ["--engine-python"]
    return Options(
        **given
        | {
            "url": args.target[0] if args.target else None,
            "api_key": args.api_key or environment_api_key(),
            "engine": [*(flag_of(*item) for item in given_settings(args).items()), *python],
        }
    )


async def _measure(args: argparse.Namespace, options: Options) -> int:
    """All of it runs in the loop, which takes signals: a second one does not interrupt the writing."""
    from blockdraft.bench.report import output_paths

    session = _session(args, options)
    paths = output_paths(args.out)
    report, outcome = await session.run()
    _show(report, paths, prints_json=args.prints_json)
    if outcome.is_stopped:
        return EXIT_INTERRUPT
    if outcome.failure is not None:
        print("blockdraft: error:", outcome.failure, file=sys.stderr)
        return EXIT_TROUBLE
    return 0


def _show(report: BenchReport, paths: Sequence[Path], *, prints_json: bool) -> None:
    """Write the report, then print it: who reads it may have left. Without --out there is no path."""
    from rich.console import Console

    from blockdraft.bench.html_page import render
    from blockdraft.bench.layout import markdown, terminal
    from blockdraft.bench.published import published_tables
    from blockdraft.bench.report import to_json
    from blockdraft.bench.sheet import to_rich

    tables = published_tables(report)
    texts = (to_json(report), markdown(report, tables), render(report, tables)) if paths else ()
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    if prints_json:
        print(to_json(report), end="")
    else:
        _stdout().print(terminal(report))
        for sheet in tables:
            _stdout().print(to_rich(sheet))
    for path in paths:
        Console(stderr=True, highlight=False, markup=False).print(f"written: {path}", soft_wrap=True)


def _session(args: argparse.Namespace, options: Options) -> Session:
    from rich.console import Console

    from blockdraft.bench.session import Session

    grid = options.grid()
    console = Console(stderr=True, highlight=False, markup=False)
    if options.url is not None or options.start is not None:
        return Session(options, grid, console)
    settings = settings_from(args)
    forget_environment_settings()  # they are among the flags now
    if "speculative" in options.arms_in_turn and with_drafter(settings).draft in (None, "none"):
        raise BenchError(f"--arms {options.arms}: no drafter is known for '{settings.model}': give --draft.")
    python = [] if args.engine_python is None else ["--engine-python", args.engine_python]
    flags, plain = ([*flags_of(one), *python] for one in (settings, _without_drafter(settings)))
    return Session(options, grid, console, server_flags=flags, plain_flags=plain, shown_flags=masked(flags))


def _without_drafter(settings: Settings) -> Settings:
    """The same with plain decoding, and without what is said of a drafter."""
    return replace(
        settings,
        draft="none",
        draft_ngram="auto",
        width="auto",
        draft_quantization="auto",
        draft_attention_backend=None,
        synthetic_acceptance=None,
    )


def _compare(paths: Sequence[str], *, out: str, prints_json: bool) -> int:
    """Two runs of one kind side by side; a plain one and a speculative one joined into one report."""
    from blockdraft.bench import compare
    from blockdraft.bench.join import is_joinable, join
    from blockdraft.bench.report import load_report, output_paths

    if len(paths) != 2:
        raise BenchError("compare takes two reports: blockdraft bench compare A.json B.json")
    a, b = (load_report(Path(path)) for path in paths)
    names = _short_names(paths)
    compare.refuse_other_models(a, b, names)
    if is_joinable(a, b):
        _show(join(a, b, names), output_paths(out), prints_json=prints_json)
        return 0
    comparison = compare.compare(a, b, names)
    if prints_json:
        print(compare.to_json(comparison), end="")
    else:
        _stdout().print(compare.terminal(comparison))
    return 0


def _short_names(paths: Sequence[str]) -> tuple[str, str]:
    """The files' names, without folders where they differ: a report may be shown to others."""
    short = Path(paths[0]).name, Path(paths[1]).name
    return short if short[0] != short[1] else (paths[0], paths[1])


def _stdout() -> Console:
    """Files and pipes have no width: nothing is cut for them."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)
