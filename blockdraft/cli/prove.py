"""Ask an OpenAI-compatible server (blockdraft, vLLM, SGLang, llama.cpp) the same questions in many ways and
count the equal answers. Questions are sent with and without drafts, one at a time and in parallel, in another
order, with a prefix hit, streamed, with log-probabilities, with n, with a seed, without optional fields, and
after a restart. Without URL, start `blockdraft serve` with the engine flags below. The exit code is 1 if
answers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags, add_settings, add_verbose, flags_of, given_settings, settings_from
from blockdraft.cli.generate import open_llm
from blockdraft.errors import BenchError
from blockdraft.settings.settings import Settings, environment_api_key, forget_environment_settings

if TYPE_CHECKING:
    from blockdraft.prove.report import ProveReport
    from blockdraft.prove.session import ProveOptions

SUMMARY = "test whether a server gives equal answers however it is asked"
USAGE = "blockdraft prove [URL] [flags]"
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2  # the server could not be asked, or requests failed
EXIT_INTERRUPT = 130
QUICK = (8, 48)  # questions, and tokens of an answer
USUAL = (64, 128)


FLAGS = f"""
--plain-url URL: another server of the same model without drafts, for the baseline
--name NAME: the model to ask, if the server has several
--api-key KEY: key to send to the server (default: $BLOCKDRAFT_API_KEY)
--quick: ask {QUICK[0]} questions of {QUICK[1]} tokens, for a minute or two
--num-prompts N: questions, at most 96 (default: {USUAL[0]})
--max-tokens N: longest answer in tokens (default: {USUAL[1]})
--restart COMMAND: restart the server with COMMAND and ask once more
--timeout S: seconds a request may take (default: 600)
--json FILE: write all findings to FILE
--html FILE: write a page to FILE
--report FILE: write one JSON file with what `blockdraft doctor` says of this machine, all findings, and the
  times of ten kinds of steps; please attach it to reports about cards that docs/hardware.md lacks
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="a running server")
    add_flags(parser, FLAGS, timeout=600.0)
    add_verbose(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    from blockdraft.prove.session import INTERRUPTED

    settings = settings_from(args) if args.url is None else None
    options = _options(args, settings)
    for path in (args.json, args.html, args.report):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"cannot write {path}: there is no such folder.")
    if args.report is not None and args.url is not None:
        raise BenchError(f"--report is about our own engine on this machine, not {args.url}: leave it out.")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # our own server must end too
    try:
        report = asyncio.run(_prove(options))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)
    _show(args, report)
    if report.trouble == INTERRUPTED:
        return EXIT_INTERRUPT
    if args.report is not None and settings is not None:
        _write_report(args, report, settings)
    if not report.is_equal:
        return EXIT_DIFFERENT
    return 0 if report.is_whole else EXIT_TROUBLE


def _options(args: argparse.Namespace, settings: Settings | None) -> ProveOptions:
    """Return the options. `settings` are of our own server; None if there is a URL."""
    from blockdraft.prove.session import ProveOptions

    given = given_settings(args)
    if args.url is not None and given:
        flag = next(iter(given)).replace("_", "-")
        raise BenchError(f"--{flag} is for our own server, not for {args.url}: leave it out.")
    flags = []
    if settings is not None:
        flags = flags_of(settings)
        forget_environment_settings()  # the child gets these settings as flags
    num_prompts, max_tokens = QUICK if args.quick else USUAL
    return ProveOptions(
        url=args.url,
        plain_url=args.plain_url,
        model=args.name,
        api_key=args.api_key or environment_api_key(),
        num_prompts=num_prompts if args.num_prompts is None else args.num_prompts,
        max_tokens=max_tokens if args.max_tokens is None else args.max_tokens,
        restart=args.restart,
        timeout_s=args.timeout,
        server_flags=flags,
    )


async def _prove(options: ProveOptions) -> ProveReport:
    from rich.console import Console

    from blockdraft.prove.session import prove

    return await prove(options, Console(stderr=True, highlight=False, markup=False))


def _write_report(args: argparse.Namespace, report: ProveReport, settings: Settings) -> None:
    """Write the file to attach. Our own server has ended, so its memory is free for an engine here."""
    from blockdraft.doctor.report import as_json, examine

    note = partial(print, file=sys.stderr, flush=True)
    note("examining this machine …")
    diagnosis = as_json(examine("auto", with_kernels=True, note=note))
    note("timing ten kinds of steps …")
    llm, _ = open_llm(args, asdict(settings))
    from blockdraft.prove.step_times import step_times

    steps = [asdict(step) for step in step_times(llm.engine)]
    whole = {"doctor": diagnosis, "prove": report.as_json(), "steps": steps}
    args.report.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for step in steps:
        print(f"{step['kind']} of {step['rows']} x {step['tokens']} tokens: {step['ms']:.2f} ms")
    note(f"written: {args.report}")


def _show(args: argparse.Namespace, report: ProveReport) -> None:
    from rich.console import Console

    from blockdraft.bench.sheet import clean, to_rich

    if args.json is not None:
        args.json.write_text(report.to_json(), encoding="utf-8")
    if args.html is not None:
        args.html.write_text(report.to_html(), encoding="utf-8")
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    table = to_rich(report.sheet())
    names, remarks = table.columns[0], table.columns[-1]
    names.no_wrap, remarks.no_wrap, remarks.justify = True, False, "left"
    console.print(table)
    for line in report.details():
        console.print(clean(line), soft_wrap=True)
    console.print(clean(report.verdict), soft_wrap=True)
    for path in (args.json, args.html):
        if path is not None:
            print(f"written: {path}", file=sys.stderr)
