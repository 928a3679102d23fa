"""Acceptance: tokens committed per step, the target's own included, by kind of text. Greedy decoding.

A drafter that `blockdraft train` made says its own (fit.json). Of others it is what was published, nothing of
it measured by us; where a pair is not listed, what drafters of its kind reach stands in, and the estimate
says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import mean

from blockdraft.checkpoints.draft_fit import FIT_FILE, read_fit

PAPER = "DFlash paper (arXiv 2602.06036)"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens per step at the drafter's own block."""

    code: float
    maths: float
    chat: float
    source: str
    is_of_pair: bool = True

    def committed(self, kind: str) -> float:
        return {"code": self.code, "maths": self.maths, "chat": self.chat}[kind]


KINDS = ("code", "maths", "chat")

# HumanEval, MATH-500 and MT-Bench.
_PUBLISHED: tuple[tuple[str, Acceptance], ...] = (
    (r"qwen3-4b", Acceptance(6.64, 7.84, 4.35, f"{PAPER}, table 1")),
    (r"qwen3-8b", Acceptance(6.50, 7.87, 4.24, f"{PAPER}, table 1")),
    (r"qwen3-coder-30b", Acceptance(8.09, 7.2, 4.0, f"{PAPER}, table 3 (code only; the rest assumed)")),
    (r"qwen3\.5-4b", Acceptance(7.3, 7.1, 5.6, f"{PAPER}, table 11")),
    (r"qwen3\.5-9b", Acceptance(7.9, 7.3, 5.5, f"{PAPER}, table 11")),
    (r"qwen3\.[56]-35b", Acceptance(7.9, 7.2, 5.4, f"{PAPER}, table 11")),
    (r"qwen3\.[56]-27b", Acceptance(9.1, 7.7, 5.5, f"{PAPER}, table 11")),
    (r"qwen3-(coder-)?next", Acceptance(7.2, 6.0, 3.9, f"{PAPER}, table 11")),
    (r"gpt-oss-20b", Acceptance(4.3, 5.1, 4.2, f"{PAPER}, table 11")),
    (r"gpt-oss-120b", Acceptance(4.4, 5.4, 3.7, f"{PAPER}, table 11")),
    (r"llama-3\.1-8b", Acceptance(4.91, 4.32, 3.73, f"{PAPER}, table 5 (block 10)")),
    (r"gemma-4-31b", Acceptance(8.00, 8.59, 4.23, "card of z-lab/gemma-4-31B-it-DFlash")),
)
_TYPICAL = Acceptance(6.5, 7.0, 4.2, "typical of published drafters: yours may differ", is_of_pair=False)

# Categories of prompts in fit.json that stand for a kind of text; where it has none of them, all do.
_CATEGORIES = {
    "code": ("code", "humaneval", "mbpp"),
    "maths": ("math", "gsm8k"),
    "chat": ("dialogue", "qa", "mt-bench"),
}

# Of a drafter that was not tuned for long texts (paper, table 4: HotpotQA to 16K, GovReport at 32K).
_FADING = ((1024, 1.0), (4096, 1.0), (8192, 0.91), (16384, 0.74), (32768, 0.46))


# Whose drafters the published numbers are not of.
_OTHERS = re.compile(r"redhat|speculator|dspark|dflash2|nvidia/|dogacel|aeon")


def own_acceptance(fit_file: Mapping[str, object], *, name: str) -> Acceptance:
    """By fit.json of the drafter."""
    committed = {category: 1 + sum(shares) for category, shares in read_fit(fit_file, name=name).items()}

    def of(categories: Iterable[str]) -> float:
        return mean([committed[one] for one in categories if one in committed] or committed.values())

    code, maths, chat = (of(_CATEGORIES[kind]) for kind in KINDS)
    return Acceptance(code, maths, chat, f"held-out prompts, in the drafter's {FIT_FILE}")


def published_acceptance(target: str, draft: str) -> Acceptance:
    """By the names of both, since a folder may have any name."""
    for text in (target.casefold(), draft.casefold()):
        for pattern, found in _PUBLISHED:
            if re.search(pattern, text):
                return found if _OTHERS.search(draft.casefold()) is None else _of_another(found)
    return _TYPICAL


def _of_another(found: Acceptance) -> Acceptance:
    return replace(found, source=f"{found.source}, of z-lab's drafter: yours may differ", is_of_pair=False)


def fading(context: int) -> float:
    """The share of a short text's acceptance that is left behind `context` tokens."""
    share = 1.0
    for length, left in _FADING:
        if context >= length:
            share = left
    return share
