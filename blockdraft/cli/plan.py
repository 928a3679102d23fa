"""Resolve every 'auto' and say why. Compute the memory from the files' headers, without downloading weights.
Report how many sequences fit, at which length, how to make room for more, and the estimated speed. The exit
code is 1 if the model does not fit or is known to fail.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from blockdraft.cli.flags import add_flags, add_model, add_settings, given_settings, noted, table
from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.launch.issues import Issue, check_settings
from blockdraft.launch.launch_request import Combination
from blockdraft.machine.cards import Card, card_by_key, card_named
from blockdraft.machine.machine import Machine, read_machine
from blockdraft.planner.engine_step import calibration, not_calibrated
from blockdraft.planner.estimate import TREE_GAINS
from blockdraft.planner.known_pairs import published_runs
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.replicas import case_of_one, replica_settings, replicas_text
from blockdraft.planner.report import Report, as_json, counted, make_report, spread, times_estimate
from blockdraft.planner.resolver import runs_on_cpu, with_drafter
from blockdraft.planner.shape import Kind
from blockdraft.settings.merge import flag_of, merge_settings
from blockdraft.settings.recipe import Expectation, check_recipe_card, load_recipe
from blockdraft.settings.settings import DFLASH2, MTP, Settings

SUMMARY = "estimate memory and speed before a start or a download"
USAGE = "blockdraft plan [MODEL] [flags]"
EXIT_DOES_NOT_FIT = 1
_WORTH_NAMING = 100e6  # bytes
_WORKING = ("position tables", "row tables", "activations", "graphs", "driver", "reserve")
FLAGS = """
--context N: the same as --max-model-len N
--concurrency N: the same as --max-num-seqs N
--card NAME: plan for another card: h200, dgx-spark, rtx-5090, ...
--explain: show the calculation and every reason
--json: print one JSON object instead of text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_flags(parser, FLAGS)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = noted(merge_settings(_given(args)))
    machine, card = _machine(args.card, settings)
    replicas = replica_settings(settings, machine)
    settings, machine = case_of_one(replicas, machine)
    for warning in check_recipe_card(settings.recipe, settings.model, settings.device, machine):
        print(f"warning: {warning}", file=sys.stderr)
    is_card = settings.engine == "native" and not runs_on_cpu(settings, machine)
    case = Case(settings, machine, open_pair(settings, on_card=is_card), card)
    findings = problems_with(case)
    refused = _refused(findings)
    report = make_report(replace(case, is_allowed=lambda other: _refused(problems_with(other)) <= refused))
    expected = _expected(case)
    if args.json:
        more = {
            "replicas": [one.device for one in replicas],
            "known_problems": [asdict(finding) for finding in findings],
            "published": [
                asdict(one)
                | dict(
                    zip(("plain_times_estimate", "times_estimate"), times_estimate(report, one), strict=True)
                )
                for one in expected
            ],
        }
        print(json.dumps(as_json(report) | more, indent=2))
    else:
        beside = f"{replicas_text(replicas)}: all numbers are of one of them" if len(replicas) > 1 else ""
        for line in lines(report, findings, expected, explains=args.explain, replicas=beside):
            print(line)
    return EXIT_DOES_NOT_FIT if refused or report.verdict == "does not fit" else 0


def problems_with(case: Case) -> list[Issue]:
    """List the known issues of this pair on this machine."""
    target, draft = case.pair.target.stored.full_config, case.pair.draft
    config = None if draft is None else draft.stored.full_config
    settings = with_drafter(case.settings)
    return check_settings(Combination(settings=settings, machine=case.machine, target=target, draft=config))


def _refused(findings: Iterable[Issue]) -> set[str]:
    return {finding.id for finding in findings if finding.severity == "refuse"}


def _expected(case: Case) -> tuple[Expectation, ...]:
    """Return published runs on this card: of the recipe, else of this pair, else of the recipe's pair.

    Those of the same engine come first.
    """
    settings, card = case.settings, case.card
    if card is None:
        return ()
    found = published_runs(settings.model, settings.draft)
    if settings.recipe is not None:
        recipe = load_recipe(settings.recipe)
        of_recipe = published_runs(recipe.settings.get("model"), recipe.settings.get("draft"))
        found = recipe.expect or found or of_recipe
    here = [one for one in found if one.card is not None and card_by_key(one.card) == card]
    return tuple(sorted(here, key=lambda one: one.engine != settings.engine))


def _machine(name: str | None, settings: Settings) -> tuple[Machine, Card | None]:
    """Return the machine to plan for, and its card in our table; a named card is there once per replica."""
    if name is not None:
        card = card_named(name)
        machine = machine_of(card)
        count = 1 if settings.replicas == "auto" else settings.replicas
        return replace(machine, gpus=machine.gpus * max(count, settings.device.count(",") + 1)), card
    machine = read_machine()
    return machine, machine.gpus[0].card if machine.gpus else None


def _given(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings given as flags. --context and --concurrency are aliases of two settings."""
    given = given_settings(args)
    for alias, name in (("context", "max_model_len"), ("concurrency", "max_num_seqs")):
        value = getattr(args, alias)
        if value is not None and given.setdefault(name, value) != value:
            raise SettingsError(f"--{alias} {value} contradicts {flag_of(name)} {given[name]}: give one.")
    return given


# ---- the text


def lines(
    report: Report,
    findings: Sequence[Issue],
    expected: Sequence[Expectation],
    *,
    explains: bool,
    replicas: str = "",
) -> Iterator[str]:
    """Yield the lines of the report; with `explains`, also how values were computed."""
    yield from _head(report, is_refused=bool(_refused(findings)))
    yield from (replicas, "") if replicas else ()
    yield from _memory(report)
    yield from ("",) if expected else ()
    yield from published_lines(expected, shows_all=explains, beside=partial(_beside, report))
    yield from _speed(report, explains=explains)
    yield from _problems(report, findings)
    if report.advice:
        rows = [("you are", "give", "and get"), *((one.who, one.flags, one.result) for one in report.advice)]
        yield from ("", *table(rows))
    hint = ("", "--explain shows the calculation and the reason of every choice")
    yield from _explained(report) if explains else hint


def _head(report: Report, *, is_refused: bool) -> Iterator[str]:
    settings, fit, draft = report.case.settings, report.fit, report.case.pair.draft
    pair = report.case.pair.target.shape.name
    if report.case.pair.draft_config is not None and report.case.pair.draft_config.kind == MTP:
        pair += " + its own MTP head"
    elif draft is not None:
        is_shipped = settings.draft in ("auto", DFLASH2)
        pair += f" + {'the drafter that comes with it' if is_shipped else draft.shape.name}"
        pair += "" if report.title is None else f" ({report.title})"
    elif report.title is not None:
        pair += f" + {report.title}"
    yield f"{pair}, {settings.engine} on {fit.device}"
    known = ", BUT IS KNOWN TO FAIL (see below)" if is_refused else ""
    yield f"{report.verdict.upper()}{known}: {report.sentence}"
    yield ""


def _memory(report: Report) -> Iterator[str]:
    fit = report.fit
    sizes = {item.name: item.num_bytes for item in fit.items}
    weights = {name: size for name, size in sizes.items() if name.endswith("weights")}
    working = {name: size for name, size in sizes.items() if name in _WORKING and size >= _WORTH_NAMING}
    cache = fit.num_bytes - sum(weights.values()) - sum(sizes.get(name, 0) for name in _WORKING)
    states, saved = sizes.get("recurrent states", 0), sizes.get("saved states", 0)
    windows = sizes.get("exact windows", 0)
    rows = [
        ("weights", _gb(sum(weights.values())), _listed(weights, " weights")),
        ("cache", _gb(cache - states - saved - windows), _cache_note(report)),
    ]
    if states:
        rows.append(("states", _gb(states), f"of {fit.max_num_seqs} rows: recurrent layers"))
    if saved and fit.plan is not None:
        rows.append(("prefixes", _gb(saved), f"{fit.plan.num_states} states that prompts can continue from"))
    if windows:
        rows.append(("windows", _gb(windows), f"of {fit.max_num_seqs} rows: keys and values kept exact"))
    listed = f"about: {_listed(working, '')}" if working else "tables and activations, about"
    rows.append(("working", _gb(sum(sizes.get(name, 0) for name in _WORKING)), listed))
    rows.append(("in all", _gb(fit.num_bytes), f"of {_gb(fit.budget)} ({fit.budget_how})"))
    if (asked := report.case.settings).prefix_disk != "off" and fit.plan is not None:
        most, share = asked.prefix_disk_bytes, ", or a tenth of the free disk"
        room = cache - states if most == "auto" else min(cache - states, most)
        rows.append(("disk", _gb(room), f"at most{share if most == 'auto' else ''}: --prefix-disk"))
    yield from table(rows)


def _cache_note(report: Report) -> str:
    footprint, context = report.fit.footprint, report.fit.max_model_len
    target, draft = (
        sum(kind.bytes_per_token for kind in kinds if kind.window is None or not footprint.windows)
        for kinds in report.caches.values()
    )
    text = f"{_kb(footprint.per_token)} a token{' past the windows' if footprint.windows else ''}"
    plan = report.fit.plan
    if plan is not None and plan.kv_dtype != EXACT:
        text += f" ({plan.kv_dtype})"
    if draft:
        text += f", {_kb(footprint.per_token * draft // (target + draft))} of them the drafter's"
    return f"{text}; {_gb(footprint.at(context))} for {context:,} tokens" if context else text


def _speed(report: Report, *, explains: bool) -> Iterator[str]:
    if not report.speeds:
        if report.verdict != "does not fit":
            yield ""
            yield "speed: no estimate, because the memory bandwidth of this machine is unknown"
        return
    yield ""
    head = "speed, ESTIMATE" if spread(report) is None else "tok/s, ESTIMATE"
    rows: list[Sequence[str]] = [(head, "chat", "code", "maths", "plain decoding", "step")]
    for count, speed in report.speeds:
        label = "1 user" if count == 1 else f"{count} users together"
        kinds = [
            _interval(report, speed.by_kind[kind]) if speed.by_kind else "-"
            for kind in ("chat", "code", "maths")
        ]
        rows.append((label, *kinds, _interval(report, speed.plain), f"{speed.step.seconds * 1e3:.1f} ms"))
    yield from table(rows)
    yield f"  counted: {counted(report)}"
    if report.acceptance is not None:
        found, positions = report.acceptance, report.acceptance.by_position if explains else ()
        notes = [found.source, found.kind_note or ""]
        notes += [
            f"the fewest in {name}, {tokens:.2f} tokens a step" for name, tokens in found.by_category[:1]
        ]
        notes += [f"draft {draft} in {share:.0%} of the steps" for draft, share in positions]
        yield from (f"  acceptance: {note}" for note in notes if note)
    yield from _tree_lines(report)
    if report.unpacks_weights:
        method = report.case.pair.target.stored.method
        elsewhere = "" if method == "GGUF" else "; vLLM's do (--engine vllm)"
        yield f"  steps: each unpacks the weights first: no kernel of ours reads {method}{elsewhere}"
    if report.case.settings.engine != "native":
        yield f"  interval: {_interval_note(report)}"


def _tree_lines(report: Report) -> Iterator[str]:
    """Yield what estimates with trees rest on, if trees are planned."""
    if report.fit.plan is None or not report.fit.plan.tree:
        return
    sizes = {count: speed.step.tree for count, speed in report.speeds if speed.step.tree}
    users = {count: "1 user" if count == 1 else f"{count} users" for count in sizes}
    shown = [
        f"{size} tokens for {users[count]}, {TREE_GAINS[size]:g} times a chain's"
        for count, size in sizes.items()
    ]
    yield f"  trees: {'; '.join(shown) or 'none of these, as chains are estimated to be faster'}"
    yield "  trees: the gain is the default pair's on three sets of prompts; each branch reads the context"
    yield "  trees: no step with trees was timed on a card"


def _interval(report: Report, value: float) -> str:
    """Return a speed with its interval, if it has one."""
    factor = spread(report)
    if factor is None:
        return f"{value:,.0f} tok/s"
    digits = 0 if value >= 20 else 1
    return f"{value:,.{digits}f} ({value / factor:,.{digits}f}-{value * factor:,.{digits}f})"


def _interval_note(report: Report) -> str:
    card, found = report.case.card, calibration()
    if spread(report) is None:
        return f"none: {not_calibrated(report.case)}"
    assert card is not None
    where = "" if card.key in found.cards else "; none was of this card"
    held_out = f"each of {found.num_sources} sources left out of the fit in turn"
    numbers = f"{found.share:.0%} of {found.num_numbers} published numbers of vLLM and SGLang"
    return f"a factor of {found.spread:g}, which holds for {numbers}, {held_out}{where}"


def _beside(report: Report, run: Expectation) -> str:
    """Return by how much a published run differs from our estimate, if that is more than the interval."""
    factor, found = spread(report), times_estimate(report, run)
    names = ("without a drafter", "with it")
    outside = [
        f"{ratio:.2g} times our estimate {name}"
        for ratio, name in zip(found, names, strict=True)
        if ratio is not None and factor is not None and not 1 / factor <= ratio <= factor
    ]
    return f"; {' and '.join(outside)}" if outside else ""


def published_lines(
    expected: Sequence[Expectation],
    *,
    shows_all: bool,
    beside: Callable[[Expectation], str] = lambda run: "",
) -> Iterator[str]:
    """Yield lines on the usual runs with one user and with the most users, or on all runs.

    `beside`: what to say of a run beside its numbers.
    """
    ends = {1, max((one.concurrency for one in expected), default=1)}
    usual = [one for one in expected if one.depth is None and one.kv is None]
    shown = expected if shows_all else [one for one in usual if one.concurrency in ends]
    for one in shown:
        notes = f"; {one.notes}" if shows_all and one.notes else ""
        yield f"  published: {published_line(one)}{beside(one)} ({one.source}{notes})"
    if len(shown) < len(expected):
        more = f"{len(expected) - len(shown)} more runs with other numbers of users, contexts or caches"
        yield f"  published: {more} (--explain)"


def published_line(one: Expectation) -> str:
    users = "1 user" if one.concurrency == 1 else f"{one.concurrency} users"
    parts = [
        f"{number:,g} {unit}"
        for number, unit in (
            (one.tokens_per_second, "tok/s"),
            (one.baseline_tokens_per_second, "tok/s without a drafter"),
            (one.speedup, "times plain decoding"),
            (one.tokens_per_step, "tokens a step"),
            (one.drafts_accepted and 100 * one.drafts_accepted, "% of the drafts"),
            (one.ttft_ms, "ms to the first token"),
            (one.tpot_ms, "ms a token"),
        )
        if number is not None
    ]
    width = "" if one.width is None else f"width {one.width}"
    depth = "" if one.depth is None else f"{one.depth:,} tokens of context"
    named = (one.workload, one.task, users, depth, one.engine, one.quantization, one.kv, width)
    about = ", ".join(part for part in named if part)
    return f"{about}: {', '.join(parts)}"


def _problems(report: Report, findings: Sequence[Issue]) -> Iterator[str]:
    for finding in findings:
        yield from ("", f"{finding.severity.upper()} {finding.id}: {finding.symptom}")
        yield f"  {finding.way_out} ({finding.thread})"
    if report.verdict == "fits":
        return
    if not report.fixes:
        way = "use a smaller model, or more or larger GPUs (try --card NAME)"
        yield from ("", f"no single flag makes it fit: {way}")
        return
    fixes = table([(fix.flags, fix.result) for fix in report.fixes])
    yield from ("", "each of these alone makes it fit:", *fixes)


def _explained(report: Report) -> Iterator[str]:
    choices = [(one.name, one.value, one.reason) for one in report.fit.choices]
    memory = [
        (item.name, _gb(item.num_bytes), item.how if item.is_exact else f"about: {item.how}")
        for item in report.fit.items
    ]
    caches = [_kind_row(owner, kind) for owner, kinds in report.caches.items() for kind in kinds]
    for title, rows in (("every choice", choices), ("memory", memory), ("cache by kind of layer", caches)):
        yield from ("", title, *table(rows))
    yield ""
    yield from (f"{model.stored.name}: read from {model.stored.where}" for model in report.case.pair.models)
    for count, speed in report.speeds:
        step = speed.step
        parts = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in step.parts)
        yield (
            f"a step of {count * step.width} tokens ({count} row{'s' if count > 1 else ''}), "
            f"context {step.context:,}: "
            f"{_gb(step.weight_bytes)} of weights, {_gb(step.cache_bytes)} of cache, {step.flops / 1e12:.2f} "
            f"TFLOP, {parts or f'{step.num_kernels:.0f} kernels'}: {step.seconds * 1e3:.2f} ms"
        )


def _kind_row(owner: str, kind: Kind) -> tuple[str, str, str]:
    name = kind.name if kind.window is None else f"{kind.name} ({kind.window:,} tokens)"
    parts = [f"{kind.bytes_per_token:,} bytes a token"] if kind.bytes_per_token else []
    parts += [f"{kind.bytes_per_row:,} bytes a row"] if kind.bytes_per_row else []
    return owner, f"{kind.num_layers} x {name}", ", ".join(parts) or "nothing of their own"


def _listed(sizes: dict[str, int], ending: str) -> str:
    return ", ".join(f"{name.removesuffix(ending)} {_gb(size)}" for name, size in sizes.items())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 5e7 else f"{num_bytes / 1e6:.1f} MB"


def _kb(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:.1f} kB"
