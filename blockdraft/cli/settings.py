"""Show every setting as `blockdraft serve` would use it with the same flags, and where its value comes from.
A flag beats the environment (BLOCKDRAFT_MAX_NUM_SEQS for --max-num-seqs), which beats the recipe, which beats
the default. Nothing is loaded; `blockdraft plan` shows what `auto` becomes. Flags of the server (--port,
--api-key, ...) are not settings: see `blockdraft serve --help`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from blockdraft.cli import flags
from blockdraft.cli.flags import HIDDEN, is_secret, masked, table
from blockdraft.settings.merge import MergedSettings, merge_settings
from blockdraft.settings.settings import SETTING_NAMES

SUMMARY = "show every setting and where its value comes from"
USAGE = "blockdraft settings [MODEL] [flags]"

FLAGS = """
--changed: show only settings that differ from the default
--json: print one JSON object instead of text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    flags.add_flags(parser, FLAGS)
    flags.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    resolved = merge_settings(flags.given_settings(args))
    if args.json:
        print(json.dumps(as_json(resolved), indent=2))
        return 0
    for line in lines(resolved, shows_all=not args.changed):
        print(line)
    return 0


def as_json(resolved: MergedSettings) -> dict[str, object]:
    settings = {
        name: {"value": _value(resolved, name), "source": resolved.sources[name]} for name in SETTING_NAMES
    }
    return {"settings": settings, "notes": list(resolved.notes)}


def lines(resolved: MergedSettings, *, shows_all: bool) -> Iterator[str]:
    """Yield a line per setting: name, value, source."""
    names = [name for name in SETTING_NAMES if shows_all or resolved.sources[name] != "default"]
    rows = [(name, flags.shown(_value(resolved, name)), resolved.sources[name]) for name in names]
    yield from table(rows, indent="")
    if not shows_all:
        others = len(SETTING_NAMES) - len(rows)
        yield f"{others} other settings have their defaults"
    for note in resolved.notes:
        yield f"note: {note}"


def _value(resolved: MergedSettings, name: str) -> object:
    """Return the value, with possible secrets masked."""
    value = getattr(resolved.settings, name)
    if name == "engine_env":
        return {key: HIDDEN if is_secret(key) else text for key, text in value}
    return masked(value) if name == "engine_args" else value
