"""Answer prompts (yours, or those of `blockdraft bench`) with the drafter and report the tokens committed per
step, by category and position in the block. Then try one change at a time (taps, causality, mask token,
embedding scale, chat template, quantisation) and report which ones help, or that more training is needed.
The exit code is 0 if the drafter fits, and 1 if it commits fewer than 1.2 tokens per step.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags, dataclass_from, table
from blockdraft.errors import SettingsError
from blockdraft.settings.settings import DTYPES, QUANTIZATIONS

if TYPE_CHECKING:
    from blockdraft.training.fit_report import FitReport

SUMMARY = "test how well a drafter predicts a target on a workload, and find what holds it back"
USAGE = "blockdraft fit [TARGET] [DRAFTER] [flags]"
EXIT_DOES_NOT_FIT = 1
SHOWN_POSITIONS = 15
FLAGS = f"""
--model NAME: the same as TARGET
--draft NAME: the same as DRAFTER
--prompts FILE: file of JSON lines {{"messages": […], "category": "…"}}, also .gz or .xz; only the first turn
  of each is asked (default: built-in prompts, twelve of each category)
--limit N: prompts per category (default: 16)
--max-tokens N: longest answer in tokens (default: 256)
--width N: tokens verified per step (default: the drafter's block)
--draft-ngram N: draft what followed the last occurrence of the last N tokens; 0: never (default: 1 with
  'ngram', else 0)
--temperature X: sampling temperature (default: 0, greedy)
--device NAME: cpu, cuda or cuda:N (default: auto)
--dtype {{{",".join(DTYPES)}}}: number format of both models (default: auto)
--quantization {{{",".join(QUANTIZATIONS)}}}: weights of the target (default: auto)
--quick: measure only, without looking for causes
--json: print one JSON object instead of text
--quiet: show no progress on stderr
"""
DEFAULTS = {"limit": 16, "max_tokens": 256, "temperature": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target_help = "folder, hub id, GGUF file, or 'default' (default: default)"
    drafter_help = (
        "folder, hub id, 'ngram', 'mtp' (the head in the target's checkpoint), 'auto' (the drafter that "
        "ships for the target, else 'mtp') or 'dflash2' (its DFlash2 head) (default: auto)"
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help=target_help)
    parser.add_argument("drafter", nargs="?", metavar="DRAFTER", help=drafter_help)
    autos = dict.fromkeys(("device", "dtype", "quantization"), "auto")
    add_flags(parser, FLAGS, **DEFAULTS, **autos, quick={"dest": "is_quick"})


def run(args: argparse.Namespace) -> int:
    from blockdraft.start.driver_warmup import quick_imports
    from blockdraft.start.preflight import pin_cpu_threads

    pin_cpu_threads(args.device)
    with quick_imports():
        from blockdraft.cli.progress import stage_bars, stage_shower
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
    """Print Python warnings as plain lines, without the line of code that raised them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        yield


def _one_of(what: str, word: str | None, flag: str | None) -> str | None:
    """Return the value of the argument or the flag, or None. If both are given, they must be equal."""
    if word is not None and flag is not None and word != flag:
        raise SettingsError(f"two {what} were given, '{word}' and '{flag}': give one.")
    return word if word is not None else flag


def lines(report: FitReport) -> Iterator[str]:
    question = report.question
    made = f"{report.quantization} weights, " if report.quantization in ("int8", "fp8", "int4") else ""
    facts = f"{report.title}, width {report.width}, {made}{report.dtype}"
    yield f"{question.drafter} for {question.target}: {facts}"
    yield f"prompts: {question.source}"
    yield ""
    rows = [
        (name, str(fit.num_documents), f"{fit.committed:.2f}", _percents(fit.by_position))
        for name, fit in {**report.categories, "all": report.overall}.items()
    ]
    reached = ("where reached", "", "", _percents(report.overall.where_reached))
    yield from table([("category", "prompts", "per step", "accepted by position, %"), *rows, reached])
    if report.num_left_out:
        yield f"{report.num_left_out} prompts were left out: they are longer than the context."
    if found := report.weak.lines():
        yield from ("", "Weak:", *(f"  {line}" for line in found))
    yield ""
    yield from _speed(report)
    yield ""
    yield from _verdict(report)


def _percents(rates: Sequence[float | None]) -> str:
    shown = (f"{100 * rate:3.0f}" if rate is not None else "  -" for rate in rates[:SHOWN_POSITIONS])
    return " ".join(shown)


def _speed(report: FitReport) -> Iterator[str]:
    if not report.costs:
        yield "Speed: unknown, the context has no room to time a step."
    else:
        rows = [("width", "step", "breaks even at", "commits", "against plain decoding")]
        for cost in report.costs:
            about = "" if cost.width == report.width else "about "
            found = f"{about}{cost.committed:.2f}", f"{about}{cost.speed_up:.2f}x"
            rows.append((str(cost.width), f"{cost.step_ms:.1f} ms", f"{cost.break_even:.2f}", *found))
        yield from ("One stream on this machine:", *table(rows))
    if report.tried:
        yield from ("", "Changes tried, on greedy answers (tokens per step before → after):")
        changes = [(one.name, one.what, f"{one.before:.2f} → {one.after:.2f}") for one in report.tried]
        yield from table(changes)
        yield from (f"not tried: {text}" for text in report.untried)


def _verdict(report: FitReport) -> Iterator[str]:
    committed, cause, prospect = report.overall.committed, report.cause, report.prospect
    word = "FITS" if report.fits else "DOES NOT FIT"
    yield f"{word}: {committed:.2f} tokens committed per step of {report.width}"
    if report.agreement is not None and not report.agreement.agrees:
        yield f"WARNING: {_disagreement(report)}"
    if report.kind == "ngram":
        yield "n-grams have neither a configuration to change nor weights to train."
    if report.kind == "mtp":
        yield "An MTP head has no configuration to change, and `blockdraft train` trains none."
    if cause is not None:
        yield (
            f"Likely cause: {cause.name}. If it {cause.what}, it commits {cause.after:.2f} "
            f"instead of {cause.before:.2f} tokens per step on greedy answers."
        )
        yield f"Do: {cause.advice}; then run fit again."
    if prospect is not None:
        if report.tried:
            yield "No change of the configuration helps."
        worth = {True: "worth it", False: "not worth it", None: "unknown"}[prospect.is_worth_it]
        yield f"Training further: {worth}."
        yield from (f"  {line}" for line in (*prospect.reasons, prospect.command))


def _disagreement(report: FitReport) -> str:
    found = report.agreement
    assert found is not None
    return (
        f"on the same {found.num_documents} greedy answers the engine commits {found.engine:.3f} tokens per "
        f"step, the simulation {found.simulated:.3f}: this is a bug, or the dtype is too coarse "
        "(try --dtype float32)."
    )
