"""Reads what DFlash2 adds to a drafter: both layouts name it alike, with the same defaults."""

from __future__ import annotations

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.models.draft_config import Dflash2Head

# In the order of Dflash2Head, with their defaults.
SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SKIPS_FIRST = "selector_skips_first"  # ours; others choose the first draft by pairs, too
DFLASH2_KEYS = (*SIZES, SKIPS_FIRST)
MAX_CANDIDATES = 64  # that a kernel holds at once, and all pairs of them; published drafters have 16


def read_dflash2(section: Fields, top: Fields, hidden_size: int, vocab_size: int) -> Dflash2Head:
    """What a DFlash2 drafter adds, by the keys of `section`."""
    draft_vocab_size = top.positive("draft_vocab_size", vocab_size)
    if draft_vocab_size != vocab_size:
        why = f"but a DFlash2 drafter has all {vocab_size} tokens of its target"
        raise top.wrong("draft_vocab_size", draft_vocab_size, why)
    taps, group, rank, top_k = (section.positive(key, default) for key, default in SIZES.items())
    head = Dflash2Head(taps, group, rank, top_k, section.get(SKIPS_FIRST, bool, False))
    if hidden_size % head.conv_group:
        why = f"which does not divide the hidden size of {hidden_size}"
        raise section.wrong("conv_group_size", head.conv_group, why)
    most = min(MAX_CANDIDATES, vocab_size)
    if head.top_k > most:
        raise section.wrong("selector_top_k", head.top_k, f"but at most {most} are walked")
    return head
