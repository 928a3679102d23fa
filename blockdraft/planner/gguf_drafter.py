"""The drafter of a GGUF file whose metadata names a model that drafters are known for.

It is taken where it is on this disk already. Nothing is downloaded that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blockdraft.checkpoints.on_disk import stored_models
from blockdraft.planner.known_pairs import pairs_of


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """A drafter that was trained for a model."""

    name: str  # its hub id
    target: str
    is_here: bool  # in the hub's cache, with its weights


def known_drafter(names: Iterable[str]) -> KnownDrafter | None:
    """Return the drafter for a model that is called one of `names`; one that is on this disk goes first."""
    pairs = pairs_of(names)
    if not pairs:
        return None
    here = {model.name for model in stored_models() if model.has_weights}
    found = next((pair for pair in pairs if pair.drafter in here), pairs[0])
    return KnownDrafter(found.drafter, found.target, found.drafter in here)
