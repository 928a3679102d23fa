"""Repeat answers from the receipts that `blockdraft serve --receipts FILE` wrote, and compare their tokens.
Without URL, an engine with the flags below repeats them in this process. Flags that decide no token, such as
--draft, --width and --max-num-seqs, may differ. The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags, add_settings, add_verbose, given_settings
from blockdraft.cli.generate import open_llm
from blockdraft.cli.progress import stage_bars, stage_shower
from blockdraft.errors import BenchError
from blockdraft.settings.merge import flag_of, merge_settings
from blockdraft.settings.settings import LAUNCH_SETTINGS, environment_api_key

if TYPE_CHECKING:
    from blockdraft.engine.receipt import Receipt
    from blockdraft.prove.replay import Replay, Tell

SUMMARY = "repeat answers from their receipts, bit for bit"
USAGE = "blockdraft replay FILE [URL] [flags]"
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2  # requests failed
CONCURRENCY = 8

FLAGS = f"""
--id ID: only the answer with this id
--name NAME: the model to ask, if the server has several
--api-key KEY: key to send to the server (default: $BLOCKDRAFT_API_KEY)
--concurrency N: requests at a time at a server (default: {CONCURRENCY})
--timeout S: seconds a request may take at a server (default: 600)
--json FILE: write the result to FILE
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="receipts, one per line; may be .gz or .xz")
    parser.add_argument("url", nargs="?", metavar="URL", help="a running server (default: an engine here)")
    add_flags(parser, FLAGS, concurrency=CONCURRENCY, timeout=600.0)
    add_verbose(parser)
    add_settings(parser, leave_out=("engine", "tool_format", *LAUNCH_SETTINGS))


def run(args: argparse.Namespace) -> int:
    from blockdraft.prove.replay import read_receipts

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise BenchError(f"cannot write {args.json}: there is no such folder.")
    receipts = read_receipts(args.file, args.id)
    bars = stage_bars(is_quiet=False)
    with bars:
        show = stage_shower(bars, is_quiet=False)

        def tell(num_done: int) -> None:
            show("replay", num_done / len(receipts), f"{num_done} of {len(receipts)} receipts")

        repeat = _here if args.url is None else _at_server
        replay = repeat(args, receipts, tell)
    if args.json is not None:
        args.json.write_text(json.dumps(replay.as_json(), indent=1) + "\n", encoding="utf-8")
    for line in (*replay.lines(), replay.verdict):
        print(line)
    if replay.differences:
        return EXIT_DIFFERENT
    return EXIT_TROUBLE if replay.errors else 0


def _here(args: argparse.Namespace, receipts: list[Receipt], tell: Tell) -> Replay:
    from blockdraft.prove.replay import repeat_here

    settings = merge_settings(given_settings(args) | {"engine": "native"}).settings
    llm, _ = open_llm(args, asdict(settings))
    return repeat_here(receipts, llm, tell)


def _at_server(args: argparse.Namespace, receipts: list[Receipt], tell: Tell) -> Replay:
    from blockdraft.prove.replay import ReplayOptions, repeat_at

    if given := given_settings(args):
        flag = flag_of(next(iter(given)))
        raise BenchError(f"{flag} is for our own engine, not for {args.url}: leave it out.")
    options = ReplayOptions(
        url=args.url,
        model=args.name,
        api_key=args.api_key or environment_api_key(),
        concurrency=args.concurrency,
        timeout_s=args.timeout,
    )
    return asyncio.run(repeat_at(receipts, options, tell))
