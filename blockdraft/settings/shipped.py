"""The drafters that come with blockdraft: "auto" is the one that belongs to the model, or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from blockdraft.settings.model_source import public_id
from blockdraft.settings.settings import Settings

FOLDER = Path(__file__).parents[1] / "drafters"
DRAFTERS = {"default": "smollm2-135m-instruct"}  # by the model as the user names it
_TITLES = {"smollm2-135m-instruct": "SmolLM2-135M-Instruct-DFlash-b16"}  # as others call theirs
_GGUF_END = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)


def shipped_drafter(model: str) -> Path | None:
    """The folder of the drafter that belongs to `model`, if it is here."""
    if model not in DRAFTERS:
        return None
    folder = FOLDER / DRAFTERS[model]
    return folder if (folder / "config.json").is_file() else None


def model_title(name: str) -> str:
    """What people call a model that was named so on the command line: never a path."""
    path = Path(name)
    if path.parent == FOLDER and path.name in _TITLES:
        return _TITLES[path.name]
    if path.parent.name == "snapshots":  # models--org--name/snapshots/0123 in the hub's cache
        return path.parents[1].name.rpartition("--")[2]
    last = public_id(name).rstrip("/").rpartition("/")[2]
    return _GGUF_END.sub("", last) or name


def with_drafter(settings: Settings, report: Callable[[str], None] = lambda line: None) -> Settings:
    """The same with a drafter that is named, or "none". `report` hears of one that should be here.

    Raises SettingsError where something else was asked for that needs one.
    """
    if settings.draft != "auto":
        return settings
    folder = shipped_drafter(settings.model)
    if folder is None and settings.model in DRAFTERS:
        report(f"no drafter: '{DRAFTERS[settings.model]}' is not in {FOLDER}, so decoding is plain")
    return replace(settings, draft="none" if folder is None else str(folder))
