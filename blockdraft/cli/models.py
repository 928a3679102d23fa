"""blockdraft models: the families and target/drafter pairs that are known by name."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from blockdraft.errors import SettingsError
from blockdraft.planner.known_pairs import KnownFamily, KnownModels, KnownPair, find_models

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
    found = find_models(args.query)
    if not found.families and not found.pairs:
        raise SettingsError(
            f"no known family, target or drafter contains '{args.query}': leave it out to see all of them."
        )
    print(json.dumps(found.as_json(), indent=2) if args.json else _text(found))
    return 0


def _text(found: KnownModels) -> str:
    """Families, pairs that run, pairs that do not; a part without entries is left out."""
    parts = [["Families", *_family_lines(found.families)]] if found.families else []
    for title, runs in (("Pairs that run", True), ("Pairs that do not run", False)):
        pairs = [pair for pair in found.pairs if pair.runs == runs]
        title = f"{title} (as of {found.date}; GB of bfloat16 weights, approximate)"
        parts += [[title, *_pair_lines(pairs)]] if pairs else []
    return "\n\n".join("\n".join(part) for part in parts)


def _family_lines(families: Sequence[KnownFamily]) -> Iterator[str]:
    width = max(len(family.name) for family in families)
    for family in families:
        indent = " " * (width + 4)
        yield f"  {family.name:{width}}  {family.kind}"
        yield from _wrapped(", ".join(family.architectures), indent)
        yield from _wrapped(f"{', '.join(family.models)}. Rope: {family.rope}. {family.notes}", indent)


def _pair_lines(pairs: Sequence[KnownPair]) -> Iterator[str]:
    rows = [
        (one.drafter, one.layout, *map(_shown, (one.block, one.draft_layers, one.draft_gb))) for one in pairs
    ]
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
