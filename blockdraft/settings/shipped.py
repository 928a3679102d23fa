"""Finds the drafters that come with blockdraft. "auto" is the model's drafter, if there is one.

"dflash2" is the DFlash2 head of that drafter, in a subfolder. Head and drafter share their body. On a GPU
"auto" includes the head; on a CPU, with its small widths, the head does not help.
"""

from __future__ import annotations

import re
from pathlib import Path

from blockdraft.settings.model_source import known_name, public_id

FOLDER = Path(__file__).parents[1] / "drafters"
DRAFTERS = {"default": "smollm2-135m-instruct"}  # by the user's name of the model
_TITLES = {  # our drafters' titles, in the style of other drafters' names
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct-DFlash-b16",
    "smollm2-135m-instruct/dflash2": "SmolLM2-135M-Instruct-DFlash2-b16",
}
_GGUF_END = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)


def shipped_drafter(model: str, *, part: str = "") -> Path | None:
    """Return the folder of the shipped drafter for `model`, or of its `part`; None if missing."""
    model = known_name(model)
    if model not in DRAFTERS:
        return None
    folder = FOLDER / DRAFTERS[model] / part
    return folder if (folder / "config.json").is_file() else None


def model_title(name: str) -> str:
    """Return a readable name, never a path, for a model named on the command line."""
    path = Path(name)
    if path.is_relative_to(FOLDER) and (title := _TITLES.get(path.relative_to(FOLDER).as_posix())):
        return title
    if path.parent.name == "snapshots":  # models--org--name/snapshots/0123 in the hub's cache
        return path.parents[1].name.rpartition("--")[2]
    last = public_id(name).rstrip("/").rpartition("/")[2]
    return _GGUF_END.sub("", last) or name
