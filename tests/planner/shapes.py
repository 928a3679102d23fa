"""Published shapes as folders with a config.json, and pairs opened from them."""

import json
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.shapes import SHAPES
from blockdraft.machine.cards import card_by_key
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.pair import open_pair
from blockdraft.settings.settings import Settings

_KEPT = tempfile.TemporaryDirectory(prefix="blockdraft-plan-")


@cache
def folders(shape):
    """The folders of a target and of its drafter."""
    base = Path(_KEPT.name)
    found = []
    for name, config in zip((shape, f"{shape}-DFlash"), SHAPES[shape], strict=True):
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
        found.append(str(base / name))
    return tuple(found)


def asked(shape, *, has_draft=True, **settings):
    """Settings for random weights of a shape."""
    target, draft = folders(shape)
    return Settings(model=target, draft=draft if has_draft else None, load_format="dummy", **settings)


def opened(shape, **settings):
    wanted = asked(shape, **settings)
    return wanted, open_pair(wanted)


def on(card):
    return machine_of(card_by_key(card))
