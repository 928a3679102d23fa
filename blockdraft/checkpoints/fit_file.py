"""fit.json of a drafter's folder: how often each draft of its block was accepted, by category of prompts.

`blockdraft train` writes it, from held-out prompts answered greedily: {"code": {"accepted_by_position":
[0.8, 0.6, …], …}, …, "all": {…}}. The shares fall from position to position, as a draft counts only behind
accepted ones, so 1 + the sum of the first width - 1 is what a step of that width commits.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.errors import ModelError

FIT_FILE = "fit.json"
Acceptance = Mapping[str, tuple[float, ...]]  # by category; [i]: share of the steps that accept draft i + 1


def read_fit(raw: Mapping[str, object], *, name: str) -> Acceptance:
    """The categories without their sum, "all"; empty where there is no file. Raises ModelError."""
    found = {category: _shares(entry, f"'{name}': {FIT_FILE}: {category}") for category, entry in raw.items()}
    return {category: shares for category, shares in found.items() if category != "all"} or found


def _shares(entry: object, where: str) -> tuple[float, ...]:
    shares = entry.get("accepted_by_position") if isinstance(entry, Mapping) else None
    if not isinstance(shares, list) or not shares or not all(_is_share(share) for share in shares):
        raise ModelError(
            f"{where} has no accepted_by_position, a list of shares between 0 and 1. Delete the file: the "
            "width is then chosen without it."
        )
    return tuple(float(share) for share in shares)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
