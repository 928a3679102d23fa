"""The losses of a batch of blocks, computed in chunks so that not all logits are in memory at once.

In each block, column k predicts the token k places after the anchor. The loss of a DFlash drafter is the
cross-entropy with that token (which the target wrote), or a mixture of this cross-entropy and the divergence
from the target's distribution. DFlash2's selector chooses among the best tokens of a column, given the true
token of the column before. The Markov head of DSpark also sees that token. DSpark's loss is 0.1 cross-entropy
+ 0.9 total variation between the distributions of drafter and target; a draft is accepted with probability
one minus the total variation.

Columns are weighted, because a draft counts only if all drafts before it are right. Weights have no gradient
and sum to one over a batch. `decay` is the fixed exp(-(k - 1) / gamma) of the DFlash paper. `dpace` weights
(arXiv 2605.18810) follow the drafter's own confidence q along the block, smoothed by alpha: with
s = (1 - alpha) q + alpha, column j weighs sum over m >= j of prod over i <= m of s_i.

With `hardness` h, a block's weights are divided by the h-th power of its expected length. The reason: the
number of steps sets the speed, and where blocks commit n tokens, a token costs 1 / n of a step. Use 2 for
anchors drawn evenly, and 1 for anchors drawn where steps begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.models.dflash import CandidateSelector
from blockdraft.training.job import Objective

CHUNK_BYTES = 1 << 30  # of logits at a time
SPARK_CHUNK_BYTES = 1 << 28  # as CHUNK_BYTES, for DSpark: its gradient needs about ten times as much
CE_SHARE = 0.1  # DeepSpec's; the rest of DSpark's loss is total variation
GROUP = 64  # tokens whose largest logit is compared first

Chunk = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Head:
    """Maps hidden states to logits: cap * tanh(scale * (hidden @ weight^T) / cap), or without a cap."""

    weight: Tensor  # [V, E], frozen
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.weight.T
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's logits, and for each column the index of its logits."""

    logits: Tensor  # [T, V]
    rows: Tensor  # [blocks, B - 1]


@dataclass(frozen=True, slots=True)
class Scores:
    """The loss of a batch, and where its best guesses match the labels."""

    loss: Tensor  # with its gradient
    matches: Tensor  # [blocks, B - 1]: the drafter's best guess is the label


def column_weights(confidence: Tensor, is_label: Tensor, objective: Objective) -> Tensor:
    """Return column weights [blocks, B - 1], not normalised, and zero past a document's end."""
    if objective.weighting == "dpace":
        smooth = ((1 - objective.alpha) * confidence + objective.alpha) * is_label
        reach = smooth.cumprod(dim=1)
        weights = reach.flip(1).cumsum(dim=1).flip(1) * is_label
        if objective.hardness == 0:
            return weights
        length = 1 + (confidence * is_label).cumprod(dim=1).sum(dim=1, keepdim=True)
        return weights / length**objective.hardness
    column = torch.arange(confidence.shape[1], device=confidence.device)
    gamma = objective.gamma if objective.weighting == "decay" else float("inf")
    return torch.exp(-column / gamma) * is_label


def _scores(total: Tensor, given: Sequence[Tensor], gradients: Sequence[Tensor], matches: Tensor) -> Scores:
    """Return the mean loss of `total` [loss, weight], with known `gradients` for the tensors `given`."""
    known = zip(given, gradients, strict=True)
    zero = torch.stack([((one - one.detach()) * gradient).sum() for one, gradient in known]).sum()
    return Scores((total[0] + zero) / total[1].clamp(min=1e-6), matches)


def _in_chunks(chunk: Chunk, by_block: Sequence[Tensor], shared: Sequence[Tensor], step: int) -> Scores:
    """Return the scores of all blocks; compute losses and gradients for `step` blocks at a time.

    `chunk` gets a slice, the tensors `by_block` cut to that slice, and the tensors `shared`. It returns the
    sum of the losses, the sum of the weights, and where the best guess was right.
    """
    given = (*by_block, *shared)
    gradients = [torch.zeros_like(one) for one in given]
    totals, matches = [], []
    for first in range(0, len(by_block[0]), step):
        part = slice(first, first + step)
        with torch.enable_grad():
            pieces = [one.detach()[part].requires_grad_() for one in by_block]
            pieces += [one.detach().requires_grad_() for one in shared]
            loss, weight, right = chunk(part, *pieces)
            found = torch.autograd.grad(loss, pieces)
        for place, one in enumerate(found):
            (gradients[place][part] if place < len(by_block) else gradients[place]).add_(one)
        totals.append(torch.stack((loss.detach(), weight)))
        matches.append(right)
    return _scores(torch.stack(totals).sum(dim=0), given, gradients, torch.cat(matches))


# ---- DFlash


def block_loss(
    hidden: Tensor, labels: Tensor, head: Head, objective: Objective, teacher: Teacher | None = None
) -> Scores:
    """Return the loss for hidden states [blocks, B - 1, E] and labels [blocks, B - 1]; -1 is ignored."""
    (num_blocks, width, size), states = hidden.shape, hidden.detach()
    gradient, total = torch.empty_like(states), hidden.new_zeros(2, dtype=torch.float32)
    matches = torch.empty_like(labels, dtype=torch.bool)
    most = max(1, min(num_blocks, CHUNK_BYTES // (width * len(head.weight) * hidden.element_size())))
    # Prefer equal chunks if they are not much smaller, because each size is compiled.
    step = next((size for size in range(most, most // 2, -1) if num_blocks % size == 0), most)
    for first in range(0, num_blocks, step):
        part = slice(first, first + step)
        logits = head.logits(states[part].reshape(-1, size))
        thought = None if teacher is None else (teacher.logits, teacher.rows[part].flatten())
        share, sums, matches[part] = _compiled(hidden.is_cuda)(logits, labels[part], thought, objective)
        if head.cap is not None:
            share = share * (1 - (logits / head.cap) ** 2)
        if head.scale != 1:
            share = share * head.scale
        gradient[part] = (share @ head.weight).view(-1, width, size)
        total += sums
    return _scores(total, [hidden], [gradient], matches)


@functools.cache
def _compiled(is_cuda: bool) -> Chunk:
    return torch.compile(_block_chunk, dynamic=False) if is_cuda else _block_chunk


def _block_chunk(
    logits: Tensor, labels: Tensor, thought: tuple[Tensor, Tensor] | None, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits' gradient [n, V], the summed [loss, weight], and where the best guess was right."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    label = labels.flatten().clamp(min=0)[:, None]
    own = wide.gather(1, label)
    top = wide.amax(dim=1, keepdim=True)
    total = torch.logsumexp(wide, dim=1, keepdim=True)
    entropy = total - own  # cross-entropy with the label, [n, 1]
    is_label = labels >= 0
    weights = column_weights(torch.exp(-entropy).view(labels.shape), is_label, objective)
    weight = weights.reshape(-1, 1)
    chance = torch.exp(wide - total)
    column = torch.arange(wide.shape[1], device=wide.device)
    wanted = (column == label).to(wide.dtype)
    loss = entropy
    if thought is not None and objective.distill > 0:
        said = thought[0][thought[1]].to(wide.dtype)
        belief = torch.log_softmax(said, dim=1)
        likely = torch.exp(belief)
        divergence = (likely * (belief - (wide - total))).sum(dim=1, keepdim=True)
        loss = torch.lerp(entropy, divergence, objective.distill)
        wanted = torch.lerp(wanted, likely, objective.distill)
    gradient = (weight * (chance - wanted)).to(logits.dtype)
    sums = torch.stack(((weight * loss).sum(), weight.sum())).float()
    return gradient, sums, (own == top).view(labels.shape) & is_label


# ---- DFlash2


def selector_loss(
    hidden: Tensor,
    labels: Tensor,
    before: Tensor,
    head: Head,
    selector: CandidateSelector,
    objective: Objective,
    teacher: Teacher | None = None,
) -> Scores:
    """Return the selector's loss for hidden states [blocks, B - 1, E] and labels [blocks, B - 1].

    `before` [blocks, B - 1] has the true token before each label. A column whose label is not among the
    candidates has no loss: the selector would learn to prefer a wrong token. The candidates' own scores have
    no gradient here; `block_loss` trains them.
    """

    def chunk(
        part: slice, hidden: Tensor, predecessors: Tensor, successors: Tensor, projection: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            logits = head.logits(hidden)
            ids = best_ids(logits, selector.top_k)
            unary = logits.gather(-1, ids)
            unary = unary.to(torch.promote_types(unary.dtype, torch.float32))
        is_label = ids == labels[part][..., None]
        place, is_found = is_label.long().argmax(dim=-1), is_label.any(dim=-1)
        mixture = functional.linear(hidden.to(projection.dtype), projection)
        if selector.skips_first:
            mixture[:, 0] = 0
        mixed = predecessors[before[part]] * mixture
        scores = unary + (successors[ids] @ mixed[..., None]).squeeze(-1)
        drafted = scores.log_softmax(dim=-1)
        loss = entropy = -drafted.gather(-1, place[..., None]).squeeze(-1)
        if teacher is not None and objective.distill > 0:
            thought = teacher.logits[teacher.rows[part][..., None], ids]
            belief = thought.to(drafted.dtype).log_softmax(dim=-1)
            divergence = (torch.exp(belief) * (belief - drafted)).sum(dim=-1)
            loss = torch.lerp(entropy, divergence, objective.distill)
        confidence = torch.exp(-entropy.detach()) * is_found
        weights = column_weights(confidence, labels[part] >= 0, objective) * is_found
        is_right = (scores.detach().argmax(dim=-1) == place) & is_found
        return (weights * loss).sum(), weights.sum(), is_right

    weight = selector.hidden_projection.weight
    assert isinstance(weight, Tensor)
    shared = (selector.predecessor_codebook, selector.successor_codebook, weight)
    return _in_chunks(
        chunk, [hidden], shared, max(1, CHUNK_BYTES // (labels.shape[1] * len(head.weight) * 4))
    )


def best_ids(logits: Tensor, top_k: int) -> Tensor:
    """Return the ids of the largest logits […, V], best first: […, top_k]."""
    # These ids are in the `top_k` groups with the largest maxima, so V is read only once.
    size = GROUP if logits.shape[-1] % GROUP == 0 else 1
    groups = logits.view(*logits.shape[:-1], -1, size)
    chosen = groups.amax(dim=-1).topk(min(top_k, groups.shape[-2]), dim=-1).indices
    members = groups.gather(-2, chosen[..., None].expand(*chosen.shape, size))
    best = members.flatten(-2).topk(top_k, dim=-1).indices
    return chosen.gather(-1, best // size) * size + best % size


# ---- DSpark


def spark_loss(
    hidden: Tensor,
    latents: Tensor,
    after: Tensor,
    labels: Tensor,
    *,
    head: Head,
    objective: Objective,
    teacher: Teacher,
) -> Scores:
    """Return the loss for hidden states [blocks, B - 1, E] and labels [blocks, B - 1]; -1 is ignored.

    `latents` [blocks, B - 1, rank] are rows of the Markov head's table `before`; `after` is its second table.
    """

    def chunk(part: slice, hidden: Tensor, latents: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = head.logits(hidden) + latents.to(hidden.dtype) @ after.to(hidden.dtype).T
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        beliefs = wide.log_softmax(dim=-1)
        label, is_label = labels[part].clamp(min=0), labels[part] >= 0
        entropy = -beliefs.gather(2, label[..., None])[..., 0]
        thought = teacher.logits[teacher.rows[part]].to(wide.dtype).softmax(dim=-1)
        apart = 0.5 * (beliefs.exp() - thought).abs().sum(dim=-1)
        loss = CE_SHARE * entropy + (1 - CE_SHARE) * apart
        weights = column_weights(torch.exp(-entropy.detach()), is_label, objective)
        return (weights * loss).sum(), weights.sum(), (wide.detach().argmax(dim=-1) == label) & is_label

    step = max(1, SPARK_CHUNK_BYTES // (4 * labels.shape[1] * len(head.weight)))
    return _in_chunks(chunk, [hidden, latents], [after], step)
