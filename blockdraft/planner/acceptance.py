"""Acceptance: tokens committed per step, the target's own included, by kind of text, in greedy decoding.

For a drafter that known_pairs.toml lists, it is the measured value. A drafter made by `blockdraft train` has
its own value in fit.json. For other drafters it is the value published for the target. If the pair is not
listed, it is the usual value of drafters of this kind, and the estimate says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import mean
from typing import Any, Literal

from blockdraft.checkpoints.fit_file import FIT_FILE, read_fit
from blockdraft.models.draft_config import DraftKind
from blockdraft.planner.known_pairs import read_file

KINDS = ("code", "maths", "chat")

# The categories of prompts in fit.json for each kind of text. If fit.json has none of them, the others count.
_CATEGORIES = {
    "code": ("code", "humaneval", "mbpp"),
    "maths": ("math", "gsm8k"),
    "chat": ("dialogue", "qa", "mt-bench"),
}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens per step with a whole block, by kind of text."""

    code: float
    maths: float
    chat: float
    source: str
    is_of_pair: bool = True
    by_position: tuple[tuple[int, float], ...] = ()  # drafts from 1, and how often each was accepted
    block: int | None = None  # the block of the measurement; None: the drafter's own
    by_category: tuple[tuple[str, float], ...] = ()  # tokens per step, the fewest first
    kind_note: str = ""  # a note on drafters of this kind, if this drafter's own figures are not known

    def committed(self, kind: str) -> float:
        return {"code": self.code, "maths": self.maths, "chat": self.chat}[kind]


def own_acceptance(fit_file: Mapping[str, object], *, name: str) -> Acceptance:
    """Return the acceptance in a drafter's fit.json."""
    committed = {category: 1 + sum(shares) for category, shares in read_fit(fit_file, name=name).items()}

    def of(categories: Iterable[str]) -> float:
        return mean([committed[one] for one in categories if one in committed] or committed.values())

    code, maths, chat = (of(_CATEGORIES[kind]) for kind in KINDS)
    source, weakest = (
        f"held-out prompts, in the drafter's {FIT_FILE}",
        sorted(committed.items(), key=itemgetter(1)),
    )
    return Acceptance(code, maths, chat, source, by_category=tuple(weakest))


def published_acceptance(target: str, draft: str, kind: DraftKind | Literal["mtp"] = "dflash") -> Acceptance:
    """Return the acceptance published for a pair. Look for both names, because a folder may have any name."""
    found = _by_name(target, draft, kind)
    notes: Mapping[str, str] = read_file()["acceptance_elsewhere"]["kinds"]
    return found if found.is_of_pair else replace(found, kind_note=notes.get(kind, ""))


def drafter_acceptance(draft: str) -> Acceptance | None:
    """Return the acceptance measured with the drafter of this name, or None if it is not listed."""
    for entry in read_file()["acceptance"]:
        if "drafter" in entry and re.search(entry["drafter"], draft.casefold()):
            return _published(entry, is_own=True)
    return None


def _by_name(target: str, draft: str, kind: DraftKind | Literal["mtp"]) -> Acceptance:
    file = read_file()
    elsewhere = file["acceptance_elsewhere"]
    if kind == "mtp":
        heads = (one for one in file["acceptance"] if one.get("kind") == kind)
        own = next((one for one in heads if re.search(one["pattern"], target.casefold())), None)
        typical = Acceptance(**elsewhere["typical_mtp"], is_of_pair=False)
        return typical if own is None else _published(own, is_own=True)
    measured = drafter_acceptance(draft)
    if measured is not None:
        return measured
    is_own = kind == "dflash" and re.search(elsewhere["other_drafters"], draft.casefold()) is None
    for text in (target.casefold(), draft.casefold()):
        for entry in file["acceptance"]:
            if "pattern" in entry and "kind" not in entry and re.search(entry["pattern"], text):
                return _published(entry, is_own=is_own)
    return Acceptance(**elsewhere["typical"], is_of_pair=False)


def _published(entry: Mapping[str, Any], *, is_own: bool) -> Acceptance:
    """Read a published entry. `is_own`: it is for this drafter, not for z-lab's for the same target."""
    source = entry["source"] + ("" if is_own else ", of z-lab's drafter: yours may differ")
    by_position = tuple((draft, share) for draft, share in entry.get("by_position", ())) if is_own else ()
    tokens = (entry["code"], entry["maths"], entry["chat"])
    return Acceptance(*tokens, source, is_own, by_position, entry.get("block"))


def fading(context: int) -> float:
    """Return the acceptance after `context` tokens, as a share of a short text's."""
    shares = [share for length, share in read_file()["acceptance_elsewhere"]["fading"] if context >= length]
    return shares[-1] if shares else 1.0
