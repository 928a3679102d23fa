"""Measure an OpenAI-compatible server (blockdraft, vLLM, SGLang, llama.cpp). Without URL, start `blockdraft
serve` with the engine flags below and measure its start too. Speculation is compared with plain decoding: our
server can switch it off per request; for other servers give --baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags, add_settings, flags_of, given_settings, masked, settings_from
from blockdraft.errors import BenchError
from blockdraft.planner.pair import drafts
from blockdraft.planner.resolver import asked_otherwise
from blockdraft.settings.merge import flag_of
from blockdraft.settings.settings import environment_api_key, forget_environment_settings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.bench.figures import BenchReport
    from blockdraft.bench.options import Options
    from blockdraft.bench.session import Session

SUMMARY = "measure a server: speed, latency, acceptance, against plain decoding"
USAGE = "blockdraft bench [URL] [flags]\n       blockdraft bench compare A.json B.json"
EXIT_TROUBLE = 2
EXIT_INTERRUPT = 130
FILE_WIDTH = 160  # characters of a line in a file or pipe; arbitrary
SERVER_FLAGS = """
--name NAME: the model to ask, if the server has several
--api-key KEY: key to send to the server (default: $BLOCKDRAFT_API_KEY)
--arms ARMS: plain,speculative: measure a server without drafts, then one with; for --engine vllm and sglang,
  which cannot switch speculation off per request
--engine-python PYTHON: Python of the environment that has vllm or sglang
--baseline URL: another server of the same model, without speculation
--no-baseline: do not measure plain decoding
--start COMMAND: start and measure this server: 'vllm serve NAME --port {port}'; {port} becomes a free port
--also-eager: then measure our own server with --no-graphs too, to compare its start and its warm speed
--start-timeout S: seconds a server may take to start (default: 1800)
--timeout S: seconds a request may take (default: 600)
"""
LOAD_FLAGS = """
--workload NAMES...: prompts: a built-in class (code, reasoning, dialogue, prose, qa, json, long_code,
  summarise), all of these (all), program or page (short prompt, long answer), a data set (gsm8k, math500,
  humaneval, mbpp, mt_bench, spec_bench), random words (random[:N]) or a JSONL file; give several with commas
  or by repeating (default: code,reasoning,dialogue,prose)
--concurrency N,…: requests at a time (default: 1)
--rate X: send X requests per second, instead of --concurrency
--depth N,…: tokens of context before each prompt (default: 0)
--temperature X,…: sampling temperature (default: 0, greedy)
--max-tokens N,…: longest answer in tokens (default: 256); NAME=N sets it for one workload
--runs N: measure everything N times and show the spread (default: 1)
--num-prompts N: send at least N requests per measurement (default: 8)
--max-turns N: turns to ask of a conversation (default: all)
--ignore-eos: every answer has exactly --max-tokens tokens
--cached: allow prefix caching (default: every prompt is made unique)
--thinking {on,off}: let the model think or not (default: the model's own)
--data FOLDER: folder of data sets, such as gsm8k_test.jsonl.gz
--offline: do not download data sets
--prompt-seed N: seed of prompts and arrival times (default: 0)
--processes N: send requests from at most N processes (default: half of the cores)
--no-headroom: skip the test of how fast this client can read (1 s per load)
--table NAME: measure the rows of a published table: z-lab, spark, forum, mt-bench or page
  (one page of HTML, which is kept beside the report)
"""
OUTPUT_FLAGS = """
--out PATH: write PATH.json, PATH.md and PATH.html (default: blockdraft-bench-TIME; 'none': no files)
--json: print JSON instead of the table
"""

WITHOUT_DRAFTER: dict[str, object] = {
    "draft": "none",
    "draft_ngram": "auto",
    "width": "auto",
    "draft_quantization": "auto",
    "draft_attention_backend": None,
    "synthetic_acceptance": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group
    parser.add_argument(
        "target", nargs="*", metavar="URL", help="a running server; or: compare A.json B.json"
    )
    add_flags(add("server"), SERVER_FLAGS, start_timeout=1800.0, timeout=600.0)
    add_flags(add("load"), LOAD_FLAGS, depth="0", prompt_seed=0)
    add_flags(add("output"), OUTPUT_FLAGS, json={"dest": "prints_json"})
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    from blockdraft.bench.load import run_in_loop
    from blockdraft.bench.session import ENDINGS

    if args.target[:1] == ["compare"]:
        return _compare(args.target[1:], out=args.out or "none", prints_json=args.prints_json)
    if len(args.target) > 1:
        raise BenchError(f"bench measures one URL, but {len(args.target)} were given: {args.target[1]}.")
    options = _options(args)
    # Our own server must end when this process ends, for any reason.
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDINGS}
    try:
        return run_in_loop(_measure(args, options))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BenchError as error:  # a server's log may contain the key
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
    """Run everything in the event loop. It handles signals, so a second one cannot interrupt the writing."""
    from blockdraft.bench.kept_page import keep_page
    from blockdraft.bench.report import output_paths

    session = _session(args, options)
    paths = output_paths(args.out)
    report, outcome = await session.run()
    _show(report, paths, prints_json=args.prints_json)
    if options.preset.keeps_page and paths:
        page = paths[-1].with_name(f"{paths[-1].stem}-page.html")
        print(keep_page(outcome.groups, page), file=sys.stderr)
    if outcome.is_stopped:
        return EXIT_INTERRUPT
    if outcome.failure is not None:
        print("blockdraft: error:", outcome.failure, file=sys.stderr)
        return EXIT_TROUBLE
    return 0


def _show(report: BenchReport, paths: Sequence[Path], *, prints_json: bool) -> None:
    """Write the report to `paths`, and only then print it: stdout may be closed."""
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
    forget_environment_settings()  # the child gets these settings as flags
    if "speculative" in options.arms_in_turn and not drafts(settings):
        raise BenchError(f"--arms {options.arms}: no drafter is known for '{settings.model}': give --draft.")
    if options.also_eager and not settings.graphs:
        raise BenchError("--also-eager: this server runs without graphs already; add --graphs.")
    python = [] if args.engine_python is None else ["--engine-python", args.engine_python]
    plain_settings = asked_otherwise(settings, **WITHOUT_DRAFTER)
    flags, plain = ([*flags_of(one), *python] for one in (settings, plain_settings))
    return Session(options, grid, console, server_flags=flags, plain_flags=plain, shown_flags=masked(flags))


def _compare(paths: Sequence[str], *, out: str, prints_json: bool) -> int:
    """Compare two runs, or join them into one report if one is plain and the other speculative."""
    from blockdraft.bench import compare
    from blockdraft.bench.join import is_joinable, join
    from blockdraft.bench.report import load_report, output_paths

    if len(paths) != 2:
        usage = "blockdraft bench compare A.json B.json"
        raise BenchError(f"compare takes two reports, not {len(paths)}: {usage}")
    a, b = (load_report(Path(path)) for path in paths)
    short = Path(paths[0]).name, Path(paths[1]).name  # without folders: reports may be shared
    names = short if short[0] != short[1] else (paths[0], paths[1])
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


def _stdout() -> Console:
    """Return a console that does not cut lines in files and pipes."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)
