"""Reads which of DSpark's heads a drafter has: all layouts name them alike, and keep them in two places."""

from __future__ import annotations

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.models.draft_config import MARKOV_KINDS, SparkConfig

SPECULATORS_RANK = 256  # of a speculators 'dspark' that names none, as that library has it


def read_spark(section: Fields, top: Fields, *, is_dspark: bool) -> SparkConfig | None:
    """DSpark's heads by the keys of `section`, then of `top`; None: it has none of them."""
    is_speculators = is_dspark and "speculators_model_type" in top.raw
    rank = _at(section, "markov_rank", top).get("markov_rank", int, SPECULATORS_RANK if is_speculators else 0)
    place = _at(section, "enable_confidence_head", top)
    has_confidence = place.optional("enable_confidence_head", bool)
    if has_confidence is None:  # SpecForge may name the weight of its loss alone
        alpha = _at(section, "confidence_head_alpha", top).optional("confidence_head_alpha", float)
        has_confidence = is_speculators if alpha is None else alpha > 0
    if rank < 0:
        raise top.wrong("markov_rank", rank, "expected none, or a positive number")
    if not rank and not has_confidence:
        return None
    if not is_dspark and "sample_from_anchor" not in {**top.raw, **section.raw}:
        raise top.error(
            f"has DSpark's heads (markov_rank = {rank}), but does not say whether column k predicts its own "
            "token or the next one: set dflash_config.sample_from_anchor to false or true"
        )
    kind_place = _at(section, "markov_head_type", top)
    kind_place.refuse("markov_head_type", *MARKOV_KINDS)
    kind = kind_place.get("markov_head_type", str, "vanilla")
    place = _at(section, "confidence_head_with_markov", top)
    reads_token = place.get("confidence_head_with_markov", bool, is_speculators)
    if has_confidence and reads_token and not rank:
        raise place.wrong("confidence_head_with_markov", True, "but markov_rank = 0")
    return SparkConfig(
        rank=rank,
        kind=next(one for one in MARKOV_KINDS if one == kind),
        has_confidence=has_confidence,
        confidence_reads_token=has_confidence and reads_token,
    )


def _at(section: Fields, key: str, top: Fields) -> Fields:
    """Where `key` is."""
    return section if section.raw.get(key) is not None else top
