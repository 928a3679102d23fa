"""Joins the reports of a plain and a speculative run on one card into one report with speed-ups.

Both reports contain their answers, so the figures of a pair are computed as in one run: over the same
prompts, with an interval. Changes of the machine between the runs affect the speed-up; the joined report says
so.
"""

from __future__ import annotations

import itertools

from blockdraft.bench.compare import ASKED
from blockdraft.bench.figures import AnswerColumns, ArmPair, BenchReport, Cell, make_estimate
from blockdraft.bench.layout import fact_text
from blockdraft.bench.records import PLAIN, SPECULATIVE, Answer, Ask, Group, Prompt
from blockdraft.bench.report import NO_BASELINE
from blockdraft.bench.report_rows import key_text, whole_rows
from blockdraft.bench.report_warnings import pair_warnings
from blockdraft.bench.sheet import clean, row_name
from blockdraft.bench.statistics import pair
from blockdraft.errors import BenchError

_MACHINE = ("cpu", "num_cpus", "gpus")


def arms_of(report: BenchReport) -> set[str]:
    return {cell["arm"] for cell in report["cells"]}


def is_joinable(a: BenchReport, b: BenchReport) -> bool:
    """Return whether one report has only the plain arm and the other has only the speculative arm."""
    return sorted([*arms_of(a), *arms_of(b)]) == [PLAIN, SPECULATIVE] and arms_of(a) != arms_of(b)


def join(a: BenchReport, b: BenchReport, names: tuple[str, str] = ("A", "B")) -> BenchReport:
    """Return one report of both runs, with pairs. Raise BenchError if loads or prompts differ."""
    if arms_of(a) == {SPECULATIVE}:
        a, b, names = b, a, (names[1], names[0])
    both = _same_cells(a, b, names)
    joined: BenchReport = {
        **b,
        "baseline": a["endpoint"],
        "startup": [*a["startup"], *b["startup"]],
        "cells": [cell for two in both for cell in two],
        "pairs": [_pair(*two, seed=b["options"].get("seed")) for two in both],
        "warnings": [*_differences(a, b, names), *a["warnings"], *b["warnings"]],
        "notes": _notes(a, b, names),
    }
    for row in whole_rows(joined):
        joined["warnings"] += [] if row.pair is None else pair_warnings(row.pair)
    return joined


def _same_cells(
    plain: BenchReport, speculative: BenchReport, names: tuple[str, str]
) -> list[tuple[Cell, Cell]]:
    """Pair each speculative cell with its plain cell. Raise BenchError if a cell has no partner."""
    others = {key_text(cell["key"]): cell for cell in plain["cells"]}
    mine = {key_text(cell["key"]): cell for cell in speculative["cells"]}
    for one, two, (name, missed) in ((others, mine, names), (mine, others, names[::-1])):
        missing = [cell for key, cell in one.items() if key not in two]
        if missing:
            load = clean(row_name(missing[0]["key"]))
            raise BenchError(f"{name} measured {load}, {missed} did not: join two runs of the same loads.")
    pairs = [(cell, others[key]) for key, cell in mine.items()]
    for (cell, other), name in itertools.product(pairs, ASKED):
        here, there = (one["asked"][name] for one in (other, cell))  # type: ignore[literal-required]
        if here != there:
            said = f"{names[0]} asked with {name} {fact_text(here)}, {names[1]} with {fact_text(there)}"
            load = clean(row_name(cell["key"]))
            raise BenchError(f"{load}: {said}: join two runs of the same questions.")
    return pairs


def _group_of(cell: Cell) -> Group | None:
    """Return the answers of a cell that was read from a file; None if an older report has no answers.

    The hash of an answer replaces its text, so equal answers stay equal.
    """
    kept = cell.get("answers")
    if kept is None:
        return None
    try:
        rows = list(zip(*(kept[name] for name in AnswerColumns.__annotations__), strict=True))  # type: ignore[literal-required]
    except ValueError:
        raise BenchError("a report is damaged: the columns of 'answers' differ in length.") from None
    answers = []
    for prompt, number, turn, tokens, ttft_s, latency_s, text_hash in rows:
        answers.append(
            Answer(
                ask=Ask(Prompt(prompt, "", ("",)), cell["arm"], max_tokens=0, number=number),
                turn=turn,
                planned_s=0.0,
                sent_s=0.0,
                first_s=ttft_s,
                end_s=latency_s,
                completion_tokens=tokens,
                text=text_hash or "",
                error="failed" if text_hash is None else None,
            )
        )
    return Group(cell["key"], cell["arm"], answers, cell["busy_s"])


def _pair(speculative: Cell, plain: Cell, *, seed: object) -> ArmPair:
    groups = _group_of(speculative), _group_of(plain)
    if groups[0] is None or groups[1] is None:
        return _pair_without_answers(speculative, plain)
    found = pair(groups[0], groups[1], seed=seed if isinstance(seed, int) else 0)
    if found["agreement"] is not None:  # hashes do not show where texts differ
        found["agreement"]["divergences"] = []
    return found


def _pair_without_answers(speculative: Cell, plain: Cell) -> ArmPair:
    """Return the pair for reports without answers: only ratios, no intervals and no verdict."""
    speeds = speculative["tokens_per_s"]["value"], plain["tokens_per_s"]["value"]
    tpots = plain["tpot_s"]["p50"], speculative["tpot_s"]["p50"]
    ratios = [above / below if above is not None and below else None for above, below in (speeds, tpots)]
    return {
        "key": speculative["key"],
        "num_prompts": speculative["num_prompts"],
        "num_unmatched": 0,
        "speedup": {"tokens_per_s": make_estimate(ratios[0]), "tpot": make_estimate(ratios[1])},
        "verdict": "too little",
        "agreement": None,
    }


def _differences(plain: BenchReport, speculative: BenchReport, names: tuple[str, str]) -> list[str]:
    """Return a line for each difference between the machines or servers."""
    machines = [("machine", name, plain["machine"], speculative["machine"]) for name in _MACHINE]
    servers = [("server", name, plain["endpoint"], speculative["endpoint"]) for name in ("kind", "version")]
    return [
        f"NOT COMPARABLE: {what} ({name}): {fact_text(one.get(name))} in {names[0]}, "
        f"{fact_text(two.get(name))} in {names[1]}."
        for what, name, one, two in (*machines, *servers)
        if one.get(name) != two.get(name)
    ]


def _notes(plain: BenchReport, speculative: BenchReport, names: tuple[str, str]) -> list[str]:
    """Return the notes of both reports without duplicates and without NO_BASELINE."""
    dates = f"{names[0]} ({plain['date']}) and {names[1]} ({speculative['date']})"
    how = f"plain and speculative are two runs, {dates}: changes in between are part of the speedup."
    notes = dict.fromkeys([how, *plain["notes"], *speculative["notes"]])
    return [note for note in notes if note != NO_BASELINE]
