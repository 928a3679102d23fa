"""Reads fit.json of a drafter's folder: how often each draft of a block was accepted, by prompt category.

`blockdraft train` writes the file, from greedy answers to held-out prompts: {"code": {"accepted_by_position":
[0.8, 0.6, …], …}, …, "all": {…}}. A draft counts only if all drafts before it were accepted, so the shares
never rise. On average a step of width w commits 1 + the sum of the first w - 1 shares.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.errors import ModelError

FIT_FILE = "fit.json"
Acceptance = Mapping[str, tuple[float, ...]]  # category -> [i] is the share of steps that accept draft i + 1


def read_fit(raw: Mapping[str, object], *, name: str) -> Acceptance:
    """Return the acceptance of all categories but "all", or of "all" if there is no other.

    Return {} if `raw` is empty. Raise ModelError if it is invalid.
    """
    found = {category: _shares(entry, f"'{name}': {FIT_FILE}: {category}") for category, entry in raw.items()}
    return {category: shares for category, shares in found.items() if category != "all"} or found


def _shares(entry: object, where: str) -> tuple[float, ...]:
    shares = entry.get("accepted_by_position") if isinstance(entry, Mapping) else None
    if not isinstance(shares, list) or not shares or not all(_is_share(share) for share in shares):
        raise ModelError(
            f"{where} has no accepted_by_position, a list of shares between 0 and 1. Delete the file to "
            "choose the width without it."
        )
    return tuple(float(share) for share in shares)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
