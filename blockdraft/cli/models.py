"""blockdraft models: the families and target/drafter pairs that are known by name."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from blockdraft.errors import SettingsError
from blockdraft.planner.known import DATE, KnownFamily, KnownPair, as_json, find

SUMMARY = "list known models and drafters"
USAGE = "blockdraft models [QUERY] [flags]"
DESCRIPTION = (
    "List the model families that this version computes and the target/drafter pairs that are known by name, "
    "with the approximate memory of their weights in bfloat16. Other pairs may run as well: a checkpoint is "
    "judged by its config.json, not by its name."
)
WIDTH = 110
_COLUMNS = ("drafter", "layout", "block", "layers", "GB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "query", nargs="?", default="", metavar="QUERY", help="part of a family, target or drafter name"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not the text")


def run(args: argparse.Namespace) -> int:
    families, pairs = find(args.query)
    if not families and not pairs:
        raise SettingsError(
            f"no known family, target or drafter contains '{args.query}': leave it out to see all of them."
        )
    if args.json:
        print(json.dumps(as_json(families, pairs), indent=2))
        return 0
    for line in lines(families, pairs):
        print(line)
    return 0


def lines(families: Sequence[KnownFamily], pairs: Sequence[KnownPair]) -> Iterator[str]:
    """Families, pairs that run, pairs that do not; a part without entries is left out."""
    parts = [_family_lines(families)] if families else []
    for runs in (True, False):
        chosen = [pair for pair in pairs if pair.runs == runs]
        if chosen:
            parts.append(_pair_lines(chosen, runs=runs))
    for index, part in enumerate(parts):
        if index:
            yield ""
        yield from part


def _family_lines(families: Sequence[KnownFamily]) -> Iterator[str]:
    yield "Families"
    width = max(len(family.name) for family in families)
    for family in families:
        indent = " " * (width + 4)
        yield f"  {family.name:{width}}  {family.kind}"
        yield from _wrapped(", ".join(family.architectures), indent)
        yield from _wrapped(f"{', '.join(family.models)}. Rope: {family.rope}. {family.notes}", indent)


def _pair_lines(pairs: Sequence[KnownPair], *, runs: bool) -> Iterator[str]:
    title = "Pairs that run" if runs else "Pairs that do not run"
    yield f"{title} (as of {DATE}; GB of bfloat16 weights, approximate)"
    rows = [_cells(pair) for pair in pairs]
    widths = [max(len(row[column]) for row in (_COLUMNS, *rows)) for column in range(len(_COLUMNS))]
    yield f"    {_aligned(_COLUMNS, widths)}"
    for target, group in groupby(zip(pairs, rows, strict=True), key=lambda item: item[0].target):
        members = list(group)
        yield "  " + target + _about(members[0][0])
        for pair, row in members:
            yield f"    {_aligned(row, widths)}"
            if pair.refused:
                yield from _wrapped(f"Refused: {pair.refused}.", " " * 6)
            yield from _wrapped(pair.notes, " " * 6)


def _cells(pair: KnownPair) -> tuple[str, ...]:
    return (pair.drafter, pair.layout, _shown(pair.block), _shown(pair.draft_layers), _shown(pair.draft_gb))


def _about(pair: KnownPair) -> str:
    """The target's family and size, as far as they are known."""
    known = [pair.family or "", "" if pair.target_gb is None else f"{pair.target_gb:g} GB"]
    text = ", ".join(filter(None, known))
    return f" ({text})" if text else ""


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [
        f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(texts).rstrip()


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
