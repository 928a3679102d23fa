"""blockdraft fit: does this drafter fit this target and this workload, and if not, why?"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import dataclass_from, table
from blockdraft.errors import SettingsError
from blockdraft.settings.settings import DTYPES, QUANTIZATIONS, Settings

if TYPE_CHECKING:
    from blockdraft.training.evaluate import DrafterFit
    from blockdraft.training.fit_report import FitReport

SUMMARY = "say whether a drafter fits a target and a workload, and why not"
USAGE = "blockdraft fit [TARGET] [DRAFTER] [flags]"
DESCRIPTION = (
    "Answer prompts with the drafter, your own or the built-in ones of `blockdraft bench`, and say what it "
    "commits, by category and position. Then change in "
    "turn what may be wrong (taps, causality, mask token, embedding scale, chat template, quantisation), say "
    "which change commits more, and else whether training further is worth it. Exits with 0 where the "
    "drafter fits, and with 1 where a step commits fewer than 1.2 tokens."
)
EXIT_DOES_NOT_FIT = 1
SHOWN_POSITIONS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    target_help = "folder, hub id, GGUF file, or 'default' (default: default)"
    add("target", nargs="?", metavar="TARGET", help=target_help)
    drafter_help = (
        "folder, hub id, 'ngram', 'auto', the one that ships for the target, or 'dflash2', its DFlash2 head "
        "(default: auto)"
    )
    add("drafter", nargs="?", metavar="DRAFTER", help=drafter_help)
    add("--model", metavar="NAME", help="the same as TARGET")
    add("--draft", metavar="NAME", help="the same as DRAFTER")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines of {"messages": […], "category": "…"}, .gz or .xz too; first turns are asked '
        "(default: the built-in ones, twelve of each kind)",
    )
    add("--limit", type=int, default=16, metavar="N", help="prompts of each category (default: 16)")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    add("--width", type=int, metavar="N", help="tokens verified per step (default: the drafter's block)")
    ngram_help = "draft what followed where the last N tokens occurred before (1 with 'ngram', else 0)"
    add("--draft-ngram", type=int, metavar="N", help=ngram_help)
    add("--temperature", type=float, default=0.0, metavar="N", help="(default: 0, greedy)")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", default="auto", choices=DTYPES, help="of both (default: auto)")
    add("--quantization", default="auto", choices=QUANTIZATIONS, help="the target's (default: auto)")
    add(
        "--quick",
        dest="is_quick",
        action="store_true",
        help="the numbers only: do not look for what is wrong",
    )
    add("--json", action="store_true", help="print one JSON object, not the text")
    add("--quiet", action="store_true", help="do not say on stderr how far it is")


def run(args: argparse.Namespace) -> int:
    from blockdraft.start.driver_warmup import quick_imports
    from blockdraft.start.preflight import pin_cpu_threads

    pin_cpu_threads(Settings(device=args.device))
    with quick_imports():
        from blockdraft.cli.training_progress import stage_bars, stage_shower
        from blockdraft.training.drafter_fit import conversations_of, fit
        from blockdraft.training.fit_report import FitQuestion

    target = _one_of("targets", args.target, args.model) or "default"
    drafter = _one_of("drafters", args.drafter, args.draft) or "auto"
    question = dataclass_from(FitQuestion, args, target=target, drafter=drafter)
    with _warnings_as_lines(), stage_bars(is_quiet=args.quiet) as bars:
        report = fit(question, conversations_of(question), stage_shower(bars, is_quiet=args.quiet))
    if args.json:
        if report.agreement is not None and not report.agreement.agrees:
            print(f"warning: {_disagreement(report)}", file=sys.stderr)
        print(json.dumps(report.to_json(), indent=2))
    else:
        for line in lines(report):
            print(line)
    return 0 if report.fits else EXIT_DOES_NOT_FIT


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """What the engine warns of is a line for people, without a place in our code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        yield


def _one_of(what: str, word: str | None, flag: str | None) -> str | None:
    """What was given by its place or by its flag; None: neither."""
    if word is not None and flag is not None and word != flag:
        raise SettingsError(f"two {what}, '{word}' and '{flag}': give one.")
    return word if word is not None else flag


def lines(report: FitReport) -> Iterator[str]:
    """The report as text."""
    question = report.question
    made = {"int8": "int8 weights, ", "fp8": "fp8 weights, "}.get(report.quantization, "")
    facts = f"{report.title}, width {report.width}, {made}{report.dtype}"
    yield f"{question.drafter} for {question.target}: {facts}"
    yield f"prompts: {question.source}"
    yield ""
    yield from table(
        [
            ("category", "prompts", "per step", "accepted by position, %"),
            *(_row(name, fit) for name, fit in report.categories.items()),
            _row("all", report.overall),
            ("where reached", "", "", _percents(report.overall.where_reached)),
        ]
    )
    if report.num_left_out:
        yield f"{report.num_left_out} prompts are too long for the context and were left out."
    yield from _weak(report)
    yield ""
    yield from _speed(report)
    yield from _tried(report)
    yield ""
    yield from _verdict(report)


def _row(name: str, fit: DrafterFit) -> tuple[str, str, str, str]:
    return name, str(fit.num_documents), f"{fit.committed:.2f}", _percents(fit.by_position)


def _percents(rates: Sequence[float | None]) -> str:
    shown = (f"{100 * rate:3.0f}" if rate is not None else "  -" for rate in rates[:SHOWN_POSITIONS])
    return " ".join(shown)


def _weak(report: FitReport) -> Iterator[str]:
    found = report.weak.lines()
    if found:
        yield ""
        yield "Weak:"
        yield from (f"  {line}" for line in found)


def _speed(report: FitReport) -> Iterator[str]:
    if not report.costs:
        yield "Speed: unknown, there was no room to time a step."
        return
    rows = [("width", "step", "breaks even at", "commits", "against plain decoding")]
    for cost in report.costs:
        about = "" if cost.width == report.width else "about "
        rows.append(
            (
                str(cost.width),
                f"{cost.step_ms:.1f} ms",
                f"{cost.break_even:.2f}",
                f"{about}{cost.committed:.2f}",
                f"{about}{cost.speed_up:.2f}x",
            )
        )
    yield "One stream on this machine:"
    yield from table(rows)


def _tried(report: FitReport) -> Iterator[str]:
    if not report.tried:
        return
    yield ""
    yield "What if, on greedy answers:"
    rows = [(one.name, one.what, f"{one.before:.2f} → {one.after:.2f}") for one in report.tried]
    yield from table(rows)
    yield from (f"not tried: {text}" for text in report.untried)


def _verdict(report: FitReport) -> Iterator[str]:
    committed, cause, prospect = report.overall.committed, report.cause, report.prospect
    word = "FITS" if report.fits else "DOES NOT FIT"
    yield f"{word}: {committed:.2f} tokens committed per step of {report.width}"
    if report.agreement is not None and not report.agreement.agrees:
        yield f"WARNING: {_disagreement(report)}"
    if report.kind == "ngram":
        yield "n-grams have no configuration to try and no weights to train."
    if cause is not None:
        yield (
            f"Likely cause: {cause.name}. Where it {cause.what}, it commits {cause.after:.2f} "
            f"instead of {cause.before:.2f} on greedy answers."
        )
        yield f"Do: {cause.advice}; then ask again."
    if prospect is not None:
        if report.tried:
            yield "No change of its configuration commits more."
        worth = {True: "worth it", False: "not worth it", None: "unknown"}[prospect.is_worth_it]
        yield f"Training further: {worth}."
        yield from (f"  {reason}" for reason in prospect.reasons)
        yield f"  {prospect.command}"


def _disagreement(report: FitReport) -> str:
    found = report.agreement
    assert found is not None
    return (
        f"on the same {found.num_documents} greedy answers the engine commits {found.engine:.3f} per step "
        f"and the simulation {found.simulated:.3f}: a bug, or arithmetic that is too coarse "
        "(try --dtype float32)."
    )
