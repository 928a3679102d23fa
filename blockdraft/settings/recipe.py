"""Reads recipes: TOML files with the settings for one pair of models, and published results.

    title = "Qwen3-8B with z-lab's drafter"   # one line
    notes = "Why these values."               # optional
    cards = ["h100", "dgx-spark"]             # suitable cards, as in machine/cards.toml; default: all
    model = "Qwen/Qwen3-8B"                   # any setting except draft and engine, which are tables
    max_model_len = 32768

    [draft]                                   # model, width, ngram, quantization, attention_backend
    model = "z-lab/Qwen3-8B-DFlash-b16"

    [engine]                                  # name, version, args, env
    name = "vllm"
    args = ["--tool-call-parser", "hermes"]
    env = { VLLM_LOGGING_LEVEL = "INFO" }

    [sglang]                                  # for --engine sglang: settings, version, args, env
    max_prefill_tokens = 8192

    [[excludes]]                              # unsuitable cards or families: ampere, hopper, ...
    cards = ["hopper"]
    why = "only Blackwell multiplies NVFP4"

    [[expect]]                                # one or more published numbers of one run
    card = "h200"
    workload = "code"
    tokens_per_second = 400.0
    source = "where it was published"

Any other key is an error: a misspelt key must not be ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

from blockdraft.errors import SettingsError
from blockdraft.machine.cards import FAMILIES, Capability, Card, card_by_key, card_hint, family_of
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.settings.settings import CHOICES, FORMER_NAMES, SETTING_NAMES, SETTING_TYPES, Auto, suggestion

FOLDER = Path(__file__).parents[1] / "recipes"
DRAFT_KEYS = {
    "model": "draft",
    "width": "width",
    "ngram": "draft_ngram",
    "quantization": "draft_quantization",
    "attention_backend": "draft_attention_backend",
}
ENGINE_KEYS = {"name": "engine", "version": "engine_version", "args": "engine_args", "env": "engine_env"}
OTHER_ENGINES = ("vllm", "sglang")
_TABLES = {"draft": DRAFT_KEYS, "engine": ENGINE_KEYS}
_IN_TABLES = {field: f"[{table}] {key}" for table, keys in _TABLES.items() for key, field in keys.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Published numbers of one run. Times are medians."""

    source: str
    card: str | None = None
    engine: str | None = None
    workload: str | None = None
    task: str | None = None  # the benchmark's name, if it has one
    concurrency: int = 1
    width: int | None = None  # tokens per step at most, the anchor included; None: the drafter's block
    quantization: str | None = (
        None  # the weights' format (fp8: at load); None: as the checkpoint is published
    )
    depth: int | None = None  # tokens of context before the prompt
    kv: str | None = None  # how keys and values are kept, if not as they are computed
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None  # without a drafter
    tokens_per_step: float | None = None  # including the target's own token
    drafts_accepted: float | None = None  # accepted share of all drafts
    ttft_ms: float | None = None  # time to first token
    tpot_ms: float | None = None  # time per token after the first
    speedup: float | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Cards or families of cards on which a recipe does not work, and the reason."""

    cards: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The content of one file. `settings` has only the fields that the file sets, with the right types."""

    name: str
    title: str
    settings: Mapping[str, object]
    others: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # by engine
    notes: str = ""
    cards: tuple[str, ...] = ()
    excludes: tuple[Exclusion, ...] = ()
    expect: tuple[Expectation, ...] = ()


_NUMBERS = tuple(item.name for item in fields(Expectation) if item.type == "float | None")
_ABOUT = ("title", "notes", "cards", "excludes", "expect", *OTHER_ENGINES)
_PLAIN = tuple(name for name in SETTING_NAMES if name not in (*_IN_TABLES, "recipe"))


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def recipes_by_drafter() -> Mapping[object, tuple[str, ...]]:
    """Return the names of the known recipes with each drafter."""
    found: dict[object, tuple[str, ...]] = {}
    for name in recipe_names():
        drafter = load_recipe(name).settings.get("draft")
        found[drafter] = (*found.get(drafter, ()), name)
    return found


def load_recipe(name: str) -> Recipe:
    """Load a known recipe by name, or a recipe by path. A path contains a slash or ends with .toml."""
    path = Path(name).expanduser()
    if "/" not in name and path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.is_file():
            known = ": `blockdraft recipes` lists the known ones; or give a path such as ./my.toml."
            raise SettingsError(f"there is no recipe '{name}'{suggestion(name, recipe_names()) or known}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"recipe '{name}' cannot be read ({reason}): check the path.") from None
    return read_recipe(text, name=path.stem)


def read_recipe(text: str, *, name: str) -> Recipe:
    """Read a recipe. Raise SettingsError for anything that this module's docstring does not allow."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"recipe '{name}' is not TOML: {error}.") from None
    reader = _Reader(name)
    title = table.get("title")
    if not isinstance(title, str) or not title or "\n" in title:
        raise reader.error("title", "must be one line of text")
    return Recipe(
        name=name,
        title=title,
        settings=reader.settings(table),
        others={name: reader.other_engine(name, table[name]) for name in OTHER_ENGINES if name in table},
        notes=reader.text("notes", table.get("notes", "")).strip(),
        cards=tuple(reader.card("cards", name) for name in reader.texts("cards", table.get("cards", []))),
        excludes=tuple(map(reader.exclusion, reader.tables(table, "excludes"))),
        expect=tuple(map(reader.expectation, reader.tables(table, "expect"))),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checks the values of one recipe. Its errors name the recipe."""

    name: str

    def error(self, key: str, what: str) -> SettingsError:
        return SettingsError(f"recipe '{self.name}': {key} {what}" + ("" if what.endswith("?") else "."))

    def settings(self, table: Mapping[str, object]) -> dict[str, object]:
        values: dict[str, object] = {}
        for written, value in table.items():
            key = FORMER_NAMES.get(written, written)
            if key in _TABLES:
                example = f"{next(iter(_TABLES[key]))} = {value!r}"
                values |= self._table(key, value, _TABLES[key], example)
            elif key in _PLAIN:
                values[key] = self.setting(key, key, value)
            elif key in _IN_TABLES:
                raise self.error(key, f"belongs into a table: write it as {_IN_TABLES[key]}")
            elif key not in _ABOUT:
                raise self._unknown(key, (*_PLAIN, *_TABLES, *_ABOUT))
        if not values:
            raise self.error("the file", "sets nothing: name a model at least")
        return values

    def other_engine(self, engine: str, value: object) -> dict[str, object]:
        """Read the table of another engine: settings by name, and version, args and env."""
        names = {key: name for key, name in ENGINE_KEYS.items() if key != "name"}
        names |= {name: name for name in (*_PLAIN, *DRAFT_KEYS.values()) if name != "model"}
        return self._table(engine, value, names, "what that engine takes")

    def _table(self, table: str, value: object, names: Mapping[str, str], example: str) -> dict[str, object]:
        """Read a table of settings. `names` maps the table's keys to settings."""
        if not isinstance(value, dict):
            raise self.error(table, f"is a table: write [{table}] and below it {example}")
        values = {}
        for written, inner in value.items():
            key = FORMER_NAMES.get(str(written), str(written))
            if key not in names:
                raise self._unknown(key, names, f"[{table}] ")
            values[names[key]] = self.setting(names[key], f"[{table}] {key}", inner)
        return values

    def _unknown(self, key: str, known: Iterable[str], where: str = "") -> SettingsError:
        hint = suggestion(key, known) or f": known are {', '.join(known)}"
        return self.error(f"{where}{key}", f"is no key of a recipe{hint}")

    def setting(self, field: str, key: str, value: object) -> object:
        """Return `value` in the setting's type. Raise SettingsError if it has the wrong type."""
        if field == "engine_args":
            return self.texts(key, value)
        if field == "engine_env":
            if not isinstance(value, dict):
                raise self.error(key, 'is a table of text, such as { VLLM_LOGGING_LEVEL = "INFO" }')
            return tuple((name, self.text(f"{key} {name}", text)) for name, text in value.items())
        if value != "auto" or SETTING_TYPES[field] not in (int | Auto, bool | Auto):
            self._check_type(key, value, SETTING_TYPES[field])
        if field in CHOICES and value not in CHOICES[field]:
            raise self.error(key, f"= {value!r} is unknown: use one of {', '.join(CHOICES[field])}")
        return value

    def _check_type(self, key: str, value: object, hint: object) -> None:
        kinds, what = _KINDS[hint]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, f"= {value!r} is not {what}")

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(key, f"= {value!r} is not text: put it in quotes")
        return value

    def texts(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self.error(key, f"= {value!r} is not a list of texts")
        return tuple(self.text(key, item) for item in value)

    def card(self, key: str, name: str) -> str:
        card = card_by_key(name)
        if card is None:
            raise self.error(key, f"names '{name}', a card that is not known{card_hint(name).rstrip('.')}")
        return card.key

    def exclusion(self, table: dict[str, object]) -> Exclusion:
        unknown = table.keys() - {"cards", "why"}
        if unknown:
            raise self._unknown(min(unknown), ("cards", "why"), "[[excludes]] ")
        names = self.texts("[[excludes]] cards", table.get("cards", []))
        cards = tuple(name if name in FAMILIES else self.card("[[excludes]] cards", name) for name in names)
        why = self.text("[[excludes]] why", table.get("why", ""))
        if not cards or not why:
            raise self.error("[[excludes]]", "needs cards and why")
        return Exclusion(cards, why)

    def tables(self, table: Mapping[str, object], key: str) -> list[dict[str, object]]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"is a list of tables: write [[{key}]]")
        return value

    def expectation(self, table: dict[str, object]) -> Expectation:
        hints = get_type_hints(Expectation)
        for key, value in table.items():
            if key not in hints:
                raise self._unknown(key, hints, "[[expect]] ")
            self._check_type(f"[[expect]] {key}", value, hints[key])
        if not table.get("source"):
            raise self.error("[[expect]]", "without source: say where the numbers were published")
        if not any(name in table for name in _NUMBERS):
            raise self.error("[[expect]]", f"without a number: give one of {', '.join(_NUMBERS)}")
        card = None if "card" not in table else self.card("[[expect]] card", str(table["card"]))
        return Expectation(**table | {"card": card})  # type: ignore[arg-type]


_KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((str, str | None), ((str,), "text: put it in quotes")),
    **dict.fromkeys((int, int | None), ((int,), "a whole number")),
    **dict.fromkeys((float, float | None), ((int, float), "a number")),
    int | Auto: ((int,), 'a whole number or "auto"'),
    int | None: ((int,), "a whole number"),
    bool: ((bool,), "true or false"),
    bool | Auto: ((bool,), 'true, false or "auto"'),
}


# ---- the cards that a recipe is for


def check_recipe_card(name: str | None, model: str, device: str, machine: Machine | None) -> tuple[str, ...]:
    """Return warnings if the recipe is for other cards. Raise SettingsError if it excludes this card."""
    if name is None or device == "cpu" or machine is None or not machine.gpus:
        return ()
    recipe, gpu = load_recipe(name), machine.gpus[0]
    family = family_of(gpu.capability) or "of no family that we know"
    key = None if gpu.card is None else gpu.card.key
    is_own_model = model == recipe.settings.get("model")  # the reasons are about the recipe's model
    for exclusion in recipe.excludes if is_own_model else ():
        if family in exclusion.cards or key in exclusion.cards:
            where = f"{_title(gpu)} ({family.capitalize()})"
            raise SettingsError(f"recipe '{recipe.name}' will not work on {where}: {exclusion.why}.")
    if _suits(recipe, key, gpu.capability, gpu.memory_bytes):
        return ()
    titles = ", ".join(card.title for card in recipe_cards(recipe))
    return (f"recipe '{recipe.name}' is for {titles}: nobody has reported it to run on {_title(gpu)}",)


def is_for_card(recipe: Recipe, card: Card) -> bool:
    """Return whether the recipe names this card, or one of its capability with no more memory, or no card."""
    return _suits(recipe, card.key, card.capability, card.memory_bytes)


def _suits(recipe: Recipe, key: str | None, capability: Capability, memory_bytes: int) -> bool:
    cards = recipe_cards(recipe)
    as_good = (capability == card.capability and memory_bytes >= card.memory_bytes for card in cards)
    return not cards or key in recipe.cards or any(as_good)


def recipe_cards(recipe: Recipe) -> list[Card]:
    return [card for key in recipe.cards if (card := card_by_key(key)) is not None]


def _title(gpu: Gpu) -> str:
    return gpu.name if gpu.card is None else gpu.card.title
