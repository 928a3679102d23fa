"""Whether a recipe is for a card: refused where it says that it does not work, else said where it is not."""

from __future__ import annotations

from blockdraft.errors import SettingsError
from blockdraft.machine.cards import Card, card_by_key, family_of
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.settings.recipe import Recipe, load_recipe
from blockdraft.settings.settings import Settings


def check_recipe_card(settings: Settings, machine: Machine | None) -> tuple[str, ...]:
    """A warning where the recipe is for other cards. Raises SettingsError where it excludes this one."""
    if settings.recipe is None or settings.device == "cpu" or machine is None or not machine.gpus:
        return ()
    recipe, gpu = load_recipe(settings.recipe), machine.gpus[0]
    family = family_of(gpu.capability) or "of no family that we know"
    named = {family, *([] if gpu.card is None else [gpu.card.key])}
    is_own_model = settings.model == recipe.settings.get("model")  # which the reasons are about
    for exclusion in recipe.excludes if is_own_model else ():
        if named.intersection(exclusion.cards):
            where = f"{_title(gpu)} ({family.capitalize()})"
            raise SettingsError(f"recipe '{recipe.name}' will not work on {where}: {exclusion.why}.")
    cards = recipe_cards(recipe)
    if not cards or any(_is_as_good(gpu, card) for card in cards):
        return ()
    titles = ", ".join(card.title for card in cards)
    return (f"recipe '{recipe.name}' is for {titles}: nobody has reported it to run on {_title(gpu)}",)


def recipe_cards(recipe: Recipe) -> list[Card]:
    return [card for key in recipe.cards if (card := card_by_key(key)) is not None]


def _is_as_good(gpu: Gpu, card: Card) -> bool:
    """Whether it is that card, or one of the same capability with as much memory."""
    own = gpu.card
    if own is not None and own.key == card.key:
        return True
    return gpu.capability == card.capability and gpu.memory_bytes >= card.memory_bytes


def _title(gpu: Gpu) -> str:
    return gpu.name if gpu.card is None else gpu.card.title
