"""The loss of DFlash2's selector, which chooses a column's candidate given the true token before it.

A column's candidates are the best tokens of its logits. Where the label is not among them the walk ends
whatever pairs say, so there is nothing to learn: put in a candidate's place, as others do, it would teach
that unlikely tokens are the right ones. Scores of candidates are given (the other loss teaches those), so
what is learnt here are the codebooks and the mixture, and through the mixture the hidden states. Columns are
weighted as in `objective`, and as there the loss may have a share of the divergence from what the target
thought, here of the candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from blockdraft.models.dflash import CandidateSelector
from blockdraft.training.job import Objective
from blockdraft.training.objective import CHUNK_BYTES, Head, Scores, Teacher, column_weights

GROUP = 64  # tokens whose largest logit is compared first


class Labelled(NamedTuple):
    """Candidates of some blocks and the label's place among them, without a gradient."""

    ids: Tensor  # [n, B - 1, K]
    unary: Tensor  # [n, B - 1, K]
    place: Tensor  # [n, B - 1] of the label among them; 0 where it is not
    is_found: Tensor  # [n, B - 1]


def selector_loss(
    hidden: Tensor,
    labels: Tensor,
    before: Tensor,
    head: Head,
    selector: CandidateSelector,
    objective: Objective,
    teacher: Teacher | None = None,
) -> Scores:
    """Return the loss for hidden states [blocks, B - 1, E], labels [blocks, B - 1] and tokens before."""
    num_blocks, width, _ = hidden.shape
    step = max(1, min(num_blocks, CHUNK_BYTES // (width * len(head.weight) * 4)))
    total, matches = [], []
    for part in torch.split(torch.arange(num_blocks, device=hidden.device), step):
        found = candidates(hidden[part], labels[part], head, selector.top_k)
        thought = None if teacher is None else teacher.logits[teacher.rows[part][..., None], found.ids]
        given = (hidden[part], labels[part], before[part], found, thought)
        # Checkpointed: the looked-up rows of the candidates are large.
        sums, right = checkpoint(_chunk, *given, selector, objective, use_reentrant=False)
        total.append(sums)
        matches.append(right)
    loss, weight = torch.stack(total).sum(dim=0).unbind()
    return Scores(loss / weight.detach().clamp(min=1e-6), torch.cat(matches))


@torch.no_grad()
def candidates(hidden: Tensor, labels: Tensor, head: Head, top_k: int) -> Labelled:
    logits = head.logits(hidden)
    ids = best_ids(logits, top_k)
    is_label = ids == labels[..., None]
    unary = logits.gather(-1, ids)
    wide = torch.promote_types(unary.dtype, torch.float32)
    return Labelled(ids, unary.to(wide), is_label.long().argmax(dim=-1), is_label.any(dim=-1))


def best_ids(logits: Tensor, top_k: int) -> Tensor:
    """Return the ids of the largest logits […, V], best first: […, top_k].

    They are in the `top_k` groups with the largest maxima: all of V is read once.
    """
    size = GROUP if logits.shape[-1] % GROUP == 0 else 1
    groups = logits.view(*logits.shape[:-1], -1, size)
    chosen = groups.amax(dim=-1).topk(min(top_k, groups.shape[-2]), dim=-1).indices
    members = groups.gather(-2, chosen[..., None].expand(*chosen.shape, size))
    best = members.flatten(-2).topk(top_k, dim=-1).indices
    return chosen.gather(-1, best // size) * size + best % size


def pair_part(selector: CandidateSelector, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
    """Return the pair scores of candidates `ids` after the tokens `before` [n, B - 1]: [n, B - 1, K]."""
    weight = selector.hidden_projection.weight
    assert isinstance(weight, Tensor)
    mixture = functional.linear(hidden.to(weight.dtype), weight)
    if selector.skips_first:
        mixture[:, 0] = 0
    mixed = selector.predecessor_codebook[before] * mixture
    return (selector.successor_codebook[ids] @ mixed[..., None]).squeeze(-1)


def _chunk(
    hidden: Tensor,
    labels: Tensor,
    before: Tensor,
    found: Labelled,
    thought: Tensor | None,
    selector: CandidateSelector,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Return the summed [loss, weight] of some blocks, and where the selector is right."""
    scores = found.unary + pair_part(selector, hidden, before, found.ids)
    drafted = scores.log_softmax(dim=-1)
    entropy = -drafted.gather(-1, found.place[..., None]).squeeze(-1)
    loss = entropy
    if thought is not None and objective.distill > 0:
        belief = thought.to(drafted.dtype).log_softmax(dim=-1)
        divergence = (torch.exp(belief) * (belief - drafted)).sum(dim=-1)
        loss = torch.lerp(entropy, divergence, objective.distill)
    with torch.no_grad():
        weights = column_weights(torch.exp(-entropy) * found.is_found, labels >= 0, objective)
        weights = weights * found.is_found
    is_right = (scores.detach().argmax(dim=-1) == found.place) & found.is_found
    return torch.stack(((weights * loss).sum(), weights.sum())), is_right
