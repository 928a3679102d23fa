"""What a drafter is called by its kind: "causal DFlash", "DFlash2", "gated DSpark and n-grams of 12"."""

from __future__ import annotations

from blockdraft.models.draft_config import KIND_NAMES, DraftConfig


def drafting_title(draft: DraftConfig | None, ngram: int) -> str | None:
    """What drafts, where `ngram` tokens must occur again (0: never); None: nothing does."""
    if draft is None:
        return "n-grams" if ngram else None
    return f"{kind_title(draft)} and n-grams of {ngram}" if ngram else kind_title(draft)


def kind_title(draft: DraftConfig) -> str:
    title, spark = KIND_NAMES[draft.kind], draft.spark
    if spark is not None:  # which drafts from the anchor, as a rule
        heads = {"vanilla": title, "gated": f"gated {title}", "rnn": f"recurrent {title}"}
        title = heads[spark.kind] if spark.rank else f"{title} without a Markov head"
    elif draft.drafts_from_anchor:
        title += " from the anchor"
    return f"causal {title}" if all(draft.is_causal) else title
