"""Adds DSpark's Markov head to a drafter, and computes the loss of head and body.

The head sees the true token before each draft. The loss of a draft is 0.1 cross-entropy + 0.9 total variation
between the distributions of drafter and target; one minus that variation is how often the draft is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockdraft.checkpoints.read_draft_config import draft_block, read_draft_config
from blockdraft.models.dflash import DFlash
from blockdraft.training.job import Objective
from blockdraft.training.objective import Head, Scores, Teacher, column_weights

CE_SHARE = 0.1  # DeepSpec's; the rest is total variation
INITIAL = 0.01  # standard deviation of the rows by the token before, as DeepSpec has it
NO_CONFIDENCE = {"enable_confidence_head": False, "confidence_head_with_markov": False}
CHUNK_BYTES = 1 << 28  # of logits at a time; their gradient needs about ten times as much


def spark_json(raw: Mapping[str, object], rank: int) -> dict[str, object]:
    """Return the config.json of a DFlash drafter with `raw` once it has a Markov head of this rank.

    In DeepSpec's layout, which vLLM loads; a speculators drafter stays one.
    """
    heads = {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        **NO_CONFIDENCE,
        "block_size": draft_block(raw) - 1,
    }
    if "speculators_model_type" in raw:
        return {**raw, **heads, "speculators_model_type": "dspark", "sample_from_anchor": True}
    config = read_draft_config(raw, name="the drafter")
    section = raw.get("dflash_config")
    other = {*heads, "sample_from_anchor", "shift_label"}  # keys that are set anew, or dropped
    said = section if isinstance(section, Mapping) else {}
    own = {key: value for key, value in said.items() if key not in other}
    rest = {key: value for key, value in raw.items() if key not in {*other, "auto_map"}}
    places = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    return {
        **rest,
        **places,
        **heads,
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,  # DeepSpec's reader wants one
        "dflash_config": {**own, **places},
    }


def without_confidence(raw: Mapping[str, object]) -> dict[str, object]:
    """Return config.json `raw` of a DSpark drafter without its confidence head, which training drops."""
    kept = {key: value for key, value in raw.items() if not key.startswith("confidence_head")}
    section = raw.get("dflash_config")
    if isinstance(section, Mapping):
        inner = {key: value for key, value in section.items() if not key.startswith("confidence_head")}
        kept["dflash_config"] = {**inner, **NO_CONFIDENCE}
    return {**kept, **NO_CONFIDENCE}


def begin(model: DFlash, generator: torch.Generator) -> None:
    """Initialise a Markov head that adds nothing yet."""
    if model.markov is not None:
        nn.init.zeros_(model.markov.after.weight)
        before = model.markov.before.weight
        before.data.copy_(torch.randn(before.shape, generator=generator) * INITIAL)


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
    """Return the loss of blocks with hidden states [blocks, B - 1, E] and labels [blocks, B - 1].

    `latents` [blocks, B - 1, rank]: rows of the Markov head's `before`; label -1 does not count.
    """
    given = hidden, latents, after
    loss, matches = _SparkLoss.apply(labels, head, objective, teacher, *given)  # type: ignore[no-untyped-call]
    return Scores(loss, matches)


class _SparkLoss(torch.autograd.Function):
    """Some blocks at a time, with their gradients, so that few logits are there at once."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        labels: Tensor,
        head: Head,
        objective: Objective,
        teacher: Teacher,
        *given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden = given[0]
        gradients = [torch.zeros_like(one) for one in given]
        matches, total = torch.empty_like(labels, dtype=torch.bool), hidden.new_zeros(2, dtype=torch.float32)
        step = max(1, CHUNK_BYTES // (4 * labels.shape[1] * len(head.weight)))
        for first in range(0, len(labels), step):
            part = slice(first, first + step)
            with torch.enable_grad():
                pieces = [one.detach()[part].requires_grad_() for one in given[:2]]
                pieces.append(given[2].detach().requires_grad_())
                loss, weight, matches[part] = _chunk(pieces, labels[part], head, objective, teacher, part)
                found = torch.autograd.grad(loss, pieces)
            for place, (gradient, one) in enumerate(zip(gradients, found, strict=True)):
                (gradient if place == 2 else gradient[part]).add_(one)
            total += torch.stack((loss.detach(), weight)).float()
        ctx.save_for_backward(total[1].clamp(min=1e-6), *gradients)
        ctx.mark_non_differentiable(matches)
        return total[0] / total[1].clamp(min=1e-6), matches

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, *gradients = ctx.saved_tensors  # type: ignore[attr-defined]
        share = outputs[0] / weight
        return None, None, None, None, *(one * share.to(one.dtype) for one in gradients)


def _chunk(
    pieces: list[Tensor], labels: Tensor, head: Head, objective: Objective, teacher: Teacher, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss of some blocks, their weight, and where the best guess was right."""
    hidden, latents, after = pieces
    logits = head.logits(hidden) + latents.to(hidden.dtype) @ after.to(hidden.dtype).T
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    beliefs = wide.log_softmax(dim=-1)
    label = labels.clamp(min=0)
    entropy = -beliefs.gather(2, label[..., None])[..., 0]
    thought = teacher.logits[teacher.rows[part]].to(wide.dtype).softmax(dim=-1)
    apart = 0.5 * (beliefs.exp() - thought).abs().sum(dim=-1)
    loss = CE_SHARE * entropy + (1 - CE_SHARE) * apart
    is_label = labels >= 0
    weights = column_weights(torch.exp(-entropy.detach()), is_label, objective)
    right = (wide.detach().argmax(dim=-1) == label) & is_label
    return (weights * loss).sum(), weights.sum(), right
