"""The drafters that come with blockdraft: "auto" is the one that belongs to the model, or none.

"dflash2" is the DFlash2 head of that one, in a folder inside its own: it has the same body. On a card "auto"
is the head, too; on a CPU, at the widths that pay there, it gains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from blockdraft.errors import SettingsError
from blockdraft.settings.model_source import known_name, public_id
from blockdraft.settings.settings import DFLASH2, Settings

FOLDER = Path(__file__).parents[1] / "drafters"
DRAFTERS = {"default": "smollm2-135m-instruct"}  # by the model as the user names it
_TITLES = {  # as others call theirs
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct-DFlash-b16",
    "smollm2-135m-instruct/dflash2": "SmolLM2-135M-Instruct-DFlash2-b16",
}
_GGUF_END = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)


def shipped_drafter(model: str, *, part: str = "") -> Path | None:
    """The folder of the drafter that belongs to `model`, or of that `part` of it, if it is here."""
    model = known_name(model)
    if model not in DRAFTERS:
        return None
    folder = FOLDER / DRAFTERS[model] / part
    return folder if (folder / "config.json").is_file() else None


def model_title(name: str) -> str:
    """What people call a model that was named so on the command line: never a path."""
    path = Path(name)
    if path.is_relative_to(FOLDER) and (title := _TITLES.get(path.relative_to(FOLDER).as_posix())):
        return title
    if path.parent.name == "snapshots":  # models--org--name/snapshots/0123 in the hub's cache
        return path.parents[1].name.rpartition("--")[2]
    last = public_id(name).rstrip("/").rpartition("/")[2]
    return _GGUF_END.sub("", last) or name


def with_drafter(
    settings: Settings, report: Callable[[str], None] = lambda line: None, *, on_card: bool = False
) -> Settings:
    """The same with a drafter that is named, or "none". `report` hears of one that should be here.

    `on_card`: our engine drafts on a card, where the head gains by its late drafts.
    Raises SettingsError where something else was asked for that needs one, and for a head that is not here.
    """
    model, word = settings.model, settings.draft
    if word not in ("auto", DFLASH2):
        return settings
    takes_head = on_card and settings.load_format != "dummy"  # random convolutions would not be left out
    folder = shipped_drafter(model, part=DFLASH2) if takes_head or word == DFLASH2 else None
    if folder is None and word == DFLASH2:
        raise SettingsError(
            f"no DFlash2 head ships for '{model}', only for {' and '.join(map(repr, DRAFTERS))}: name a "
            f"drafter, or 'auto'. A folder of that name is ./{DFLASH2}."
        )
    folder = folder or shipped_drafter(model)
    known = known_name(model)
    if folder is None and known in DRAFTERS:
        report(f"no drafter: '{DRAFTERS[known]}' is not in {FOLDER}, so decoding is plain")
    return replace(settings, draft="none" if folder is None else str(folder))
