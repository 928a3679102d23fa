"""List the models on this disk (in the hub's cache and in ours) with their sizes. With --known or part of a
name, also list the supported model families and known target/drafter pairs, with the approximate size of
their weights in bfloat16. Other pairs may work too: support depends on config.json, not on the name. `fetch`
downloads models; `rm` removes them from the two caches only.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from blockdraft.checkpoints.on_disk import StoredModel, find_stored, other_bytes, remove, stored_models
from blockdraft.cli.fetch import fetch_models
from blockdraft.cli.flags import add_flags, add_verbose, table
from blockdraft.errors import SettingsError
from blockdraft.planner.known_pairs import KnownFamily, KnownModels, KnownPair, find_models
from blockdraft.settings.model_source import DEFAULT_ID
from blockdraft.settings.settings import cache_dir, cache_dirs

SUMMARY = "list the models on this disk and known pairs; fetch and remove models"
USAGE = """blockdraft models [QUERY] [flags]
       blockdraft models fetch NAME ...
       blockdraft models rm NAME ... [--yes]"""
WIDTH = 110
_COLUMNS = ("drafter", "layout", "block", "layers", f"{'GB':>5}")
FLAGS = """
--known: also list all known families and pairs
--json: print both lists as one JSON object instead of text
--yes: with rm: do not ask
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    query_help = "part of a name or family; or: fetch NAME ..., rm NAME ..."
    parser.add_argument("words", nargs="*", metavar="QUERY", help=query_help)
    add_flags(parser, FLAGS)
    add_verbose(parser)


def run(args: argparse.Namespace) -> int:
    action, *names = args.words or [""]
    if action in ("fetch", "rm"):
        if not names:
            raise SettingsError(f"models {action} needs a name: `blockdraft models` lists names.")
        return fetch_models(names, args) if action == "fetch" else _remove(names, is_agreed=args.yes)
    if names:
        raise SettingsError(
            f"'{action} {names[0]}' is two words: give one part of a name, or `fetch NAME` or `rm NAME`."
        )
    return _list(action, is_json=args.json, shows_known=args.known or action != "")


def _list(query: str, *, is_json: bool, shows_known: bool) -> int:
    found = find_models(query)
    stored = [model for model in stored_models() if query.casefold() in model.name.casefold()]
    if not found.families and not found.pairs and not stored:
        raise SettingsError(
            f"no model on this disk and no known one contains '{query}': run `blockdraft models --known`."
        )
    if is_json:
        shown = [
            {"name": one.name, "bytes": one.num_bytes, "has_weights": one.has_weights, "path": str(one.path)}
            for one in stored
        ]
        print(json.dumps({"on_disk": shown, **found.as_json()}, indent=2))
    else:
        counts = f"{len(found.families)} model families and {len(found.pairs)} target/drafter pairs"
        ways = "`blockdraft models --known` lists them, `blockdraft models NAME` finds one"
        known = _text(found) if shows_known else f"{counts} are known: {ways}"
        print("\n\n".join(filter(None, ["\n".join(_disk_lines(stored, is_all=not query)), known])))
    return 0


def _disk_lines(stored: Sequence[StoredModel], *, is_all: bool) -> Iterator[str]:
    if not stored and not is_all:
        return
    yield f"On this disk (ours in {cache_dir()}, the hub's in {cache_dirs()['hub']})"
    notes = {one.name: "no weights" for one in stored if not one.has_weights}
    notes["default"] = f"{DEFAULT_ID}; its drafter came with blockdraft"
    rows = [(one.name, f"{shown_bytes(one.num_bytes):>8}", notes.get(one.name, "")) for one in stored]
    yield from table(rows) if rows else ["  no model: `blockdraft models fetch NAME`"]
    others = other_bytes() if is_all else 0
    if others:
        yield f"  {shown_bytes(others)} more in our cache: kernels and packed weights, rebuilt when needed"


def shown_bytes(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def _remove(names: Sequence[str], *, is_agreed: bool) -> int:
    """Remove models. If a name is unknown, remove nothing."""
    for model in [find_stored(name) for name in dict.fromkeys(names)]:
        size = shown_bytes(model.num_bytes)
        if not is_agreed and not _agrees(f"remove '{model.name}', {size}, {model.path}? [y/N] "):
            print(f"'{model.name}' was not removed")
            continue
        remove(model)
        print(f"removed '{model.name}': {size} freed")
    return 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise SettingsError("stdin is not a terminal, so nobody can confirm: add --yes.")
    print(question, end="", file=sys.stderr, flush=True)
    try:
        return input().strip().casefold() in ("y", "yes")
    except EOFError:
        return False


def _text(found: KnownModels) -> str:
    """Return families, supported pairs and unsupported pairs as text; empty parts are left out."""
    parts = [["Known families", *_family_lines(found.families)]] if found.families else []
    for title, runs in (("Known pairs that run", True), ("Known pairs that do not run in our engine", False)):
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
    numbers = [(one.block, one.draft_layers, one.draft_gb) for one in pairs]
    shown = [("-" if number is None else f"{number:g}" for number in row) for row in numbers]
    cells = [[f"{cell:>{len(name)}}" for cell, name in zip(row, _COLUMNS[2:], strict=True)] for row in shown]
    rows = [(one.drafter, one.layout, *row) for one, row in zip(pairs, cells, strict=True)]
    header, *lines = table([_COLUMNS, *rows], indent="    ")
    yield header
    for target, group in groupby(zip(pairs, lines, strict=True), key=lambda item: item[0].target):
        members = list(group)
        first = members[0][0]
        about = [first.family, None if first.target_gb is None else f"{first.target_gb:g} GB"]
        known = ", ".join(filter(None, about))
        yield f"  {target} ({known})" if known else f"  {target}"
        for pair, line in members:
            yield line
            if pair.recipes:
                how = "Recipes" if pair.runs else "Recipes, for another engine"
                yield from _wrapped(f"{how}: {', '.join(pair.recipes)}.", " " * 6)
            if pair.refused:
                yield from _wrapped(f"Refused: {pair.refused}.", " " * 6)
            yield from _wrapped(pair.notes, " " * 6)


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text.strip(), WIDTH - len(indent), break_on_hyphens=False)
    return [indent + line for line in lines]
