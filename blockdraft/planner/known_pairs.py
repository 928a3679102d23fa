"""Reads the model families, target/drafter pairs and published runs known by name.

They are in known_pairs.toml; published_tables.toml has more runs, as tables.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from blockdraft.checkpoints.on_disk import stored_models
from blockdraft.settings.recipe import Expectation, recipes_by_drafter

FILE = Path(__file__).with_name("known_pairs.toml")
TABLES = Path(__file__).with_name("published_tables.toml")
BYTES_PER_PARAMETER = 2  # bfloat16
_WORKLOADS = {  # by task
    "Math500": "reasoning",
    "GSM8K": "reasoning",
    "HumanEval": "code",
    "MBPP": "code",
    "LiveCodeBench": "code",
    "MT-Bench": "dialogue",
    "Alpaca": "dialogue",
}


@dataclass(frozen=True, slots=True)
class KnownFamily:
    """A family of targets that this version supports."""

    name: str  # as in checkpoints/families.py
    architectures: tuple[str, ...]
    kind: str
    models: tuple[str, ...]
    rope: str
    notes: str = ""


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target and a drafter that was trained for it. A field is None if the sources do not say."""

    target: str
    drafter: str
    layout: Literal["z-lab", "speculators", "DeepSpec", "SpecForge", "other"]
    family: str | None = None  # None: a family that we do not support
    block: int | None = None  # anchor included
    draft_layers: int | None = None
    target_billions: float | None = None  # parameters, only of the text part of multimodal targets
    draft_billions: float | None = None
    refused: str = ""  # why it does not run here; "" when it does
    notes: str = ""

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def target_gb(self) -> float | None:
        """Return the approximate bfloat16 weights in GB; a quantised target needs less."""
        return _gigabytes(self.target_billions)

    @property
    def recipes(self) -> tuple[str, ...]:
        """Return the names of the recipes with this drafter, of any checkpoint of the target."""
        return recipes_by_drafter().get(self.drafter, ())

    @property
    def draft_gb(self) -> float | None:
        return _gigabytes(self.draft_billions)


@dataclass(frozen=True, slots=True)
class KnownModels:
    """The families and pairs that a query finds, and the file's `date` and `sources`."""

    date: str
    sources: tuple[str, ...]
    families: tuple[KnownFamily, ...]
    pairs: tuple[KnownPair, ...]

    def as_json(self) -> dict[str, object]:
        """Return the models as plain values, including the properties."""
        derived = ("runs", "target_gb", "draft_gb", "recipes")
        pairs = [asdict(pair) | {name: getattr(pair, name) for name in derived} for pair in self.pairs]
        return asdict(self) | {"pairs": pairs}


@cache
def read_file() -> dict[str, Any]:
    """Read known_pairs.toml once, with the runs of published_tables.toml. Do not change the result."""
    file, tables = (tomllib.loads(path.read_text(encoding="utf-8")) for path in (FILE, TABLES))
    return file | {"published": [*file["published"], *map(_as_entry, tables["table"])]}


def _as_entry(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of published_tables.toml in the form of known_pairs.toml, with a run for each cell."""
    shared = {name: value for name, value in table.items() if not isinstance(value, dict)}
    loads = shared.pop("concurrency")
    runs = [
        {"task": task, "concurrency": load} | _cell(task, cells, place)
        for task, cells in table.items()
        if isinstance(cells, dict)
        for place, load in enumerate(loads)
    ]
    return shared | {"run": runs}


def _cell(task: str, cells: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return the numbers of one cell. Of plain, drafted and speedup, two tell the third."""
    plain, drafted, speedup = (
        cells[name][place] if name in cells else None for name in ("plain", "drafted", "speedup")
    )
    if speedup is not None:
        plain, drafted = plain or round(drafted / speedup, 1), drafted or round(plain * speedup, 1)
    found = {
        "workload": _WORKLOADS.get(task),
        "tokens_per_step": cells.get("tokens_per_step"),
        "baseline_tokens_per_second": plain,
        "tokens_per_second": drafted,
        "speedup": speedup or (round(drafted / plain, 2) if plain and drafted else None),
    }
    return {name: value for name, value in found.items() if value is not None}


def find_models(query: str = "") -> KnownModels:
    """Find families and pairs with `query` in a name, an architecture or a model. Ignore case."""
    file, wanted = read_file(), query.casefold()
    families = [_family(**entry) for entry in file["family"]]
    pairs = [KnownPair(**entry) for entry in file["pair"]]
    return KnownModels(
        date=file["date"],
        sources=tuple(file["sources"]),
        families=tuple(one for one in families if _has(wanted, one.name, *one.architectures, *one.models)),
        pairs=tuple(one for one in pairs if _has(wanted, one.target, one.drafter, one.family or "")),
    )


def pairs_of(names: Iterable[str]) -> tuple[KnownPair, ...]:
    """Return the pairs that we can run whose target is the first of `names` that any such target has.

    Compare without blanks, case and organisation, in which names in files differ from the hub's.
    """
    pairs = [KnownPair(**entry) for entry in read_file()["pair"]]
    for name in names:
        found = tuple(one for one in pairs if one.runs and _bare(one.target) == _bare(name))
        if found:
            return found
    return ()


def _bare(name: str) -> str:
    words = re.sub(r"[\s_-]+", "-", name.rpartition("/")[2].casefold())
    return words.removeprefix("meta-")


def published_runs(target: object, drafter: object) -> tuple[Expectation, ...]:
    """Return the results that others published for this pair."""
    return tuple(
        run
        for entry in read_file()["published"]
        if drafter == entry["drafter"] and target in (entry["target"], *entry.get("also", ()))
        for run in entry_runs(entry)
    )


def entry_runs(entry: Mapping[str, Any]) -> tuple[Expectation, ...]:
    """Return the runs of one entry; its other fields apply to all of them."""
    about = ("target", "also", "drafter", "run")
    shared = {key: value for key, value in entry.items() if key not in about}
    return tuple(Expectation(**shared | run) for run in entry["run"])


def _family(*, architectures: list[str], models: list[str], **rest: str) -> KnownFamily:
    return KnownFamily(architectures=tuple(architectures), models=tuple(models), **rest)


def _has(wanted: str, *texts: str) -> bool:
    return any(wanted in text.casefold() for text in texts)


def _gigabytes(billions: float | None) -> float | None:
    return None if billions is None else round(billions * BYTES_PER_PARAMETER, 1)


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """A drafter that was trained for a model."""

    name: str  # its hub id
    target: str
    is_here: bool  # in the hub's cache, with its weights


def known_drafter(names: Iterable[str]) -> KnownDrafter | None:
    """Return the drafter for a model with one of `names`, or None. Prefer a drafter that is on this disk.

    A GGUF file gets a drafter only if it is on this disk: nothing is downloaded without a request.
    """
    pairs = pairs_of(names)
    if not pairs:
        return None
    here = {model.name for model in stored_models() if model.has_weights}
    found = next((pair for pair in pairs if pair.drafter in here), pairs[0])
    return KnownDrafter(found.drafter, found.target, found.drafter in here)
