"""Merges the layers of settings: defaults < recipe < environment < flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from blockdraft.errors import SettingsError
from blockdraft.settings.recipe import Recipe, load_recipe
from blockdraft.settings.settings import Settings, read_variables, variable_of

# A later layer adds to these settings: new flags must not remove those of a recipe.
ADDED_UP = ("engine_args", "engine_env")
# These settings are written for one engine, so they are useless for another.
ENGINE_WORDS = ("engine_version", "engine_args", "engine_env", "attention_backend", "draft_attention_backend")


@dataclass(frozen=True, slots=True)
class MergedSettings:
    """Settings with the source of every value."""

    settings: Settings
    sources: Mapping[str, str]  # "default", "recipe NAME", "BLOCKDRAFT_WIDTH", "--width"
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()  # parts of the recipe that were left out, and why


def merge_settings(flags: Mapping[str, object], *, uses_environment: bool = True) -> MergedSettings:
    """Merge the settings of all layers. `flags` has only the flags that were given, by field name."""
    environment = read_variables() if uses_environment else {}
    name = flags.get("recipe", environment.get("recipe"))
    recipe = None if name is None else load_recipe(str(name))
    asked = flags.get("engine", environment.get("engine"))
    recipe_values = {} if recipe is None else _for_engine(recipe, asked)
    layers = [("the recipe", recipe_values), ("the environment", environment), ("the flags", flags)]
    engines = [given["engine"] for _, given in layers if "engine" in given]
    values: dict[str, object] = {}
    sources = {item.name: "default" for item in fields(Settings)}
    engine: object = "native"
    final, notes = engines[-1] if engines else "native", list[str]()
    for title, given in layers:
        engine = given.get("engine", engine)
        # Our own engine ignores ENGINE_WORDS: with it they are meant for an engine that a later layer names.
        is_stale = engine not in ("native", final)
        dropped = [field for field in ENGINE_WORDS if is_stale and field in given]
        if dropped:
            notes.append(f"{', '.join(dropped)} of {title} left out: for {engine}, not for {final}")
        for field, value in given.items():
            if field in dropped:
                continue
            own = {"the recipe": f"recipe {name}", "the environment": variable_of(field)}
            source = own.get(title, flag_of(field, value))
            if field in ADDED_UP and field in values:
                value, source = _added(field, values[field], value), f"{sources[field]}, {source}"
            values[field], sources[field] = value, source
    return MergedSettings(_made(values, sources), sources, recipe, tuple(notes))


def flag_of(field: str, value: object = None) -> str:
    """Return a field's flag, such as --max-num-seqs, or --no-graphs for a switch that is off."""
    return f"--{'no-' if value is False else ''}{field.replace('_', '-')}"


def _for_engine(recipe: Recipe, engine: object) -> Mapping[str, object]:
    """Return the recipe's settings for an engine, from the engine's own table if there is one."""
    if engine not in recipe.others or engine == recipe.settings.get("engine"):
        return recipe.settings
    kept = {name: value for name, value in recipe.settings.items() if name not in ENGINE_WORDS}
    return {**kept, "engine": engine, **recipe.others[str(engine)]}


def _added(field: str, below: object, above: object) -> object:
    assert isinstance(below, tuple)
    assert isinstance(above, tuple)
    # The last value of a variable wins. For repeated flags, the engine's parser takes the last one.
    return tuple(dict((*below, *above)).items()) if field == "engine_env" else (*below, *above)


def _made(values: Mapping[str, object], sources: Mapping[str, str]) -> Settings:
    try:
        return Settings(**values)  # type: ignore[arg-type]
    except SettingsError as error:
        message = str(error)
        words = set(re.findall(r"\w+", message))
        far = [name for name in words & set(values) if not sources[name].startswith("--")]
        origins = ", ".join(f"{name} is from {sources[name]}" for name in sorted(far))
        raise SettingsError(f"{message} ({origins})" if origins else message) from None
