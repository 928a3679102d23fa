"""List the known recipes: settings for one pair of models, and the cards they suit. `show NAME` prints one
with its notes, its settings and published results; NAME may also be the path of a file of yours. To use one:
`blockdraft plan --recipe NAME`, `blockdraft serve --recipe NAME`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby

from blockdraft.cli.flags import add_flags, shown, table
from blockdraft.cli.plan import published_line
from blockdraft.errors import SettingsError
from blockdraft.machine.cards import card_by_key, card_named
from blockdraft.planner.known_pairs import published_runs
from blockdraft.settings.recipe import (
    Expectation,
    Recipe,
    is_for_card,
    load_recipe,
    recipe_cards,
    recipe_names,
)

SUMMARY = "list recipes for known models and cards, and show one"
USAGE = """blockdraft recipes [flags]
       blockdraft recipes show NAME [--json]"""
WIDTH = 110
FLAGS = """
--card NAME: list only recipes for this card: h200, dgx-spark, rtx-5090, ...
--model NAME: list only recipes with this part of a name, of the recipe, its model or its drafter
--json: print one JSON object instead of text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="show NAME", help="show one recipe instead of the list")
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    found = [load_recipe(_named(args))] if args.words else _matching(args.card, args.model)
    if args.json:
        print(json.dumps({"recipes": [_as_json(one) for one in found]}, indent=2))
    else:
        for line in _whole(found[0]) if args.words else _list(found):
            print(line)
    return 0


def _named(args: argparse.Namespace) -> str:
    action, *names = args.words
    if action != "show":
        hint = f"`blockdraft recipes show {action}` shows it" if action in recipe_names() else "use --model"
        raise SettingsError(f"'{action}' is not an action of `blockdraft recipes`: {hint}.")
    if len(names) != 1 or args.card is not None or args.model is not None:
        raise SettingsError("recipes show needs one name and no filter: `blockdraft recipes` lists names.")
    return str(names[0])


def _matching(card: str | None, model: str | None) -> list[Recipe]:
    wanted, found = None if card is None else card_named(card), []
    for recipe in map(load_recipe, recipe_names()):
        names = (recipe.name, recipe.settings["model"], recipe.settings.get("draft", ""))
        if (wanted is None or is_for_card(recipe, wanted)) and (
            model is None or any(model.casefold() in str(name).casefold() for name in names)
        ):
            found.append(recipe)
    if not found:
        about = [f"card '{card}'"] * (card is not None) + [f"a model '{model}'"] * (model is not None)
        raise SettingsError(
            f"no recipe is for {' and '.join(about)}: `blockdraft recipes` lists all; "
            "without one, `blockdraft plan` still plans any pair."
        )
    return found


def published_of(recipe: Recipe) -> tuple[Expectation, ...]:
    """Return the published runs in the recipe, else of its pair."""
    return recipe.expect or published_runs(recipe.settings.get("model"), recipe.settings.get("draft"))


def _as_json(recipe: Recipe) -> dict[str, object]:
    names = ("name", "title", "notes", "cards", "settings", "others", "excludes")
    whole = asdict(recipe)
    published = [asdict(one) for one in published_of(recipe)]
    return {**{name: whole[name] for name in names}, "published": published}


def _list(recipes: list[Recipe]) -> Iterator[str]:
    rows = []
    for one in recipes:
        engine = str(one.settings.get("engine", "native"))
        cards = ", ".join(one.cards) or "any card"
        rows.append((one.name, engine, f"{one.title} ({cards})"))
    yield from table(rows, indent="")


def _whole(recipe: Recipe) -> Iterator[str]:
    yield recipe.title
    yield from textwrap.wrap(recipe.notes, WIDTH)
    cards = ", ".join(card.title for card in recipe_cards(recipe))
    yield f"cards: {cards or 'any, and CPUs'}"
    for exclusion in recipe.excludes:
        yield from textwrap.wrap(f"not on {', '.join(exclusion.cards)}: {exclusion.why}", WIDTH)
    yield from ("", *_rows(recipe.settings))
    for engine, settings in recipe.others.items():
        yield from ("", f"with --engine {engine}", *_rows(settings))
    yield ""
    published = published_of(recipe)
    for source, runs in groupby(published, key=lambda one: (one.source, one.notes)):
        yield from textwrap.wrap(f"published ({'; '.join(filter(None, source))})", WIDTH)
        for one in runs:
            card = None if one.card is None else card_by_key(one.card)
            yield f"  {'' if card is None else card.title + ', '}{published_line(one)}"
    if not published:
        yield "published: no results of this pair are known"


def _rows(settings: Mapping[str, object]) -> Iterator[str]:
    values = dict(settings)
    if "engine_env" in values:
        values["engine_env"] = dict(values["engine_env"])  # type: ignore[call-overload]
    yield from table([(name, shown(value)) for name, value in values.items()])
