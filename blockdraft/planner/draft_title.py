"""Names a drafter by its kind: "causal DFlash", "DFlash2", "DSpark and n-grams of 12", "MTP"."""

from __future__ import annotations

from blockdraft.models.draft_config import KIND_NAMES
from blockdraft.models.mtp_config import AnyDraftConfig, MtpConfig


def drafting_title(draft: AnyDraftConfig | None, ngram: int) -> str | None:
    """Return the name of what drafts, or None without drafts. `ngram`: the length of n-grams (0: unused)."""
    if draft is None:
        return "n-grams" if ngram else None
    return f"{kind_title(draft)} and n-grams of {ngram}" if ngram else kind_title(draft)


def kind_title(draft: AnyDraftConfig) -> str:
    if isinstance(draft, MtpConfig):
        return "MTP"
    title = KIND_NAMES[draft.kind]
    if draft.kind == "dflash" and draft.drafts_from_anchor:
        title += " from the anchor"
    return f"causal {title}" if all(draft.is_causal) else title
