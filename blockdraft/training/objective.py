"""The loss of a batch of blocks, computed in chunks so that not all logits are in memory.

In each block, column k predicts the token k places after the anchor. The loss is cross-entropy with that
token (written by the target itself), or a mixture of it and the divergence from the target's
distribution. Columns are weighted by their worth: a draft counts only if all before it were right.

`dpace` weights (arXiv 2605.18810) follow the drafter's own confidence q along the block, smoothed by alpha:
with s = (1 - alpha) q + alpha, column j weighs sum over m >= j of prod over i <= m of s_i. `decay` is the
fixed exp(-(k - 1) / gamma) of the DFlash paper. Weights have no gradient and sum to one over a batch.

That is the way to a longer block at a random anchor. What a user waits for is the number of steps, and a
place where blocks reach n tokens far costs 1 / n of a step: so with `hardness` h a block's weights are
divided by the h-th power of the length it expects: 2 for anchors drawn evenly, 1 for those where steps begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.training.job import Objective

CHUNK_BYTES = 1 << 30  # of logits at a time


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
    """The target's logits, and the row of each column in them."""

    logits: Tensor  # [T, V]
    rows: Tensor  # [blocks, B - 1]


@dataclass(frozen=True, slots=True)
class Scores:
    """Loss and matches of a batch."""

    loss: Tensor  # with its gradient
    matches: Tensor  # [blocks, B - 1]: the drafter's best guess is the label


def block_loss(
    hidden: Tensor, labels: Tensor, head: Head, objective: Objective, teacher: Teacher | None = None
) -> Scores:
    """Return the loss for hidden states [blocks, B - 1, E] and labels [blocks, B - 1]; -1 is ignored."""
    loss, matches = _BlockLoss.apply(hidden, labels, head, objective, teacher)  # type: ignore[no-untyped-call]
    return Scores(loss, matches)


def column_weights(confidence: Tensor, is_label: Tensor, objective: Objective) -> Tensor:
    """Return weights [blocks, B - 1], not normalised, zero past a document's end."""
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


class _BlockLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, while a chunk's logits are in memory."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        labels: Tensor,
        head: Head,
        objective: Objective,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor]:
        num_blocks, width, size = hidden.shape
        gradient, total = torch.empty_like(hidden), hidden.new_zeros(2, dtype=torch.float32)
        matches = torch.empty_like(labels, dtype=torch.bool)
        most = max(1, min(num_blocks, CHUNK_BYTES // (width * len(head.weight) * hidden.element_size())))
        # Equal chunks if that does not make them much smaller: each size is compiled.
        step = next((size for size in range(most, most // 2, -1) if num_blocks % size == 0), most)
        for first in range(0, num_blocks, step):
            part = slice(first, first + step)
            flat = hidden[part].reshape(-1, size)
            logits = head.logits(flat)
            rows = None if teacher is None else teacher.rows[part].flatten()
            thought = None if teacher is None or rows is None else (teacher.logits, rows)
            share, sums, right = _compiled(hidden.is_cuda)(logits, labels[part], thought, objective)
            if head.cap is not None:
                share = share * (1 - (logits / head.cap) ** 2)
            if head.scale != 1:
                share = share * head.scale
            gradient[part] = (share @ head.weight).view(-1, width, size)
            total += sums
            matches[part] = right
        weight = total[1].clamp(min=1e-6)
        ctx.save_for_backward(gradient, weight)
        ctx.mark_non_differentiable(matches)
        return total[0] / weight, matches

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * (outputs[0] / weight).to(gradient.dtype), None, None, None, None


Chunk = Callable[[Tensor, Tensor, "tuple[Tensor, Tensor] | None", Objective], tuple[Tensor, Tensor, Tensor]]


@functools.cache
def _compiled(is_cuda: bool) -> Chunk:
    return torch.compile(_chunk, dynamic=False) if is_cuda else _chunk


def _chunk(
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
