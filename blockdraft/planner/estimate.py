"""Estimates the seconds of a step and the tokens a second of answers, from bandwidth and shapes.

A decode step reads every weight once (of the experts, only those that its tokens choose), and the keys and
values of its rows. It also launches kernels, and wide batches are limited by arithmetic. In a small model,
each kernel takes its minimum time, which grows with the number of tokens. The constants are our engine's
efficiency, measured with Qwen3-8B and SmolLM2-135M on an H200 (benchmarks/results: gpu, draft-heads,
governor, rehearsal). tests/planner/test_estimate.py compares: single steps agree within 15 %, steps of other
days and answers over HTTP within 25 %. Other GPUs and engines are assumed to be as efficient.

An answer over HTTP also waits for its first token, and for the process that sends every row's tokens to its
client. With many rows of a small model, that process is busier than the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blockdraft.cache.spec import Recurrent, Windowed
from blockdraft.machine.cards import Card
from blockdraft.planner.kv_formats import token_bytes
from blockdraft.planner.memory import cache_specs
from blockdraft.planner.memory_fit import Fit
from blockdraft.planner.pair import Pair
from blockdraft.planner.shape import Shape
from blockdraft.planner.stored import WeightParts
from blockdraft.settings.acceptance_profile import acceptance_rates

STREAM_SHARE = 0.88  # of the published bandwidth, as a large copy reaches
PACKED_SHARE = 0.85  # of a copy's bandwidth, for weights of a byte or less
CACHE_SHARE = 0.66  # of a copy's bandwidth, for keys and values
COMPUTE_SHARE = 0.63  # of the published bf16 rate, in wide steps
LAUNCH_S = 2.5e-6  # of one kernel in a graph
# A kernel's minimum time, times the root of the step's tokens. It counts if reading and computing take less.
SPREAD_S = 0.14e-6
SEND_S = 11e-6  # of the HTTP process, to send one row's tokens of a step
FIRST_S = 6.4e-3  # until the first token of a single short prompt, over HTTP
# Prompts that arrive together are admitted together, so all of N wait FIRST_S * (1 + this * sqrt(N - 1)).
CROWDING = 2.1
ANSWER_TOKENS = 200  # length of the answers in the estimate
PROMPT_TOKENS = 100  # length of their prompts
# Bytes read and written for each value that is unpacked before a product, added up over PyTorch's operations.
# This was not measured.
UNPACK_BYTES = 30
_PLAIN_LAUNCHES = 9.6  # kernels of a layer: attention and a dense part
_OTHER_LAUNCHES = 12.8  # with experts or a state
_DRAFT_LAUNCHES = 16.0  # of a drafter's layer: the block, and the context it absorbs


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of `rows` sequences with `context` tokens each."""

    rows: int
    context: int
    width: int
    seconds: float
    weight_bytes: int
    cache_bytes: int
    flops: float
    num_kernels: float


def estimate_step(fit: Fit, pair: Pair, card: Card, *, rows: int, context: int, width: int) -> Step:
    """Estimate one step; `width` 1 is plain decoding, without the drafter."""
    tokens = rows * width
    has_draft = width > 1 and pair.draft is not None
    target = pair.target.shape
    weight_bytes = _bytes_read(fit.parts[0], target, tokens)
    read_s = weight_bytes / _stream(card, is_packed=_is_packed(fit.parts[0], target))
    if unpacks_weights(fit, pair):
        unpacked = _layer_values(fit.parts[0], target) + _expert_values(target) * experts_touched(
            target, tokens
        )
        read_s += UNPACK_BYTES * unpacked / _stream(card, is_packed=False)
    flops = 2.0 * tokens * _active_values(fit.parts[0], target)
    sizes = _token_bytes(fit, pair)
    cache_bytes = rows * _cache_bytes(target, context, sizes[0])
    kernels = target.num_layers * (_PLAIN_LAUNCHES if target.is_plain else _OTHER_LAUNCHES)
    if has_draft:
        assert pair.draft is not None
        draft, parts = pair.draft.shape, fit.parts[1]
        # It multiplies by the target's head once more, unless it brings its own.
        head = parts.head or fit.parts[0].head or fit.parts[0].embedding
        tables = 0 if draft.values is None else draft.values.tables
        draft_bytes = parts.layers + head - 2 * tables  # a step reads only a few rows of the tables
        read_s += draft_bytes / _stream(card, is_packed=_is_packed(parts, draft))
        weight_bytes += draft_bytes
        flops += (
            2.0 * rows * pair.block * (_layer_values(parts, draft) + draft.vocab_size * draft.hidden_size)
        )
        cache_bytes += rows * _cache_bytes(draft, context, sizes[1])
        kernels += draft.num_layers * _DRAFT_LAUNCHES
    read_s += cache_bytes / (_stream(card, is_packed=False) * CACHE_SHARE)
    compute_s = flops / (card.bf16_flops * COMPUTE_SHARE)
    spread_s = kernels * SPREAD_S * math.sqrt(tokens)
    # Reading and computing overlap, but not fully if both are large.
    seconds = kernels * LAUNCH_S + math.hypot(read_s, compute_s, spread_s)
    return Step(rows, context, width, seconds, weight_bytes, cache_bytes, flops, kernels)


def unpacks_weights(fit: Fit, pair: Pair) -> bool:
    """Return whether our engine unpacks the target's weights in every forward.

    Its kernels read fp8, and MXFP4 of experts, as stored; no other packed format.
    """
    values, method = pair.target.shape.values, pair.target.stored.method
    if fit.plan is None or fit.plan.quantization != "keep" or values is None or method in (None, "mxfp4"):
        return False
    is_small = fit.parts[0].layers + fit.parts[0].experts < 0.8 * (values.projections + values.experts)
    return method == "GGUF" or is_small


def committed(mean: float, *, width: int, block: int) -> float:
    """Return the tokens per step at `width`, for a drafter that commits `mean` with its whole block."""
    if width < 2:
        return 1.0
    rates = acceptance_rates(f"mean:{max(1.0, min(mean, block))}", width=block, block=block)
    return 1.0 + sum(rates[: width - 1])


def tokens_per_s(step: Step, committed_per_step: float) -> float:
    """Return the tokens a second of all rows together while they decode."""
    return step.rows * committed_per_step / step.seconds


def first_token_s(fit: Fit, pair: Pair, card: Card, *, rows: int, prompt: int = PROMPT_TOKENS) -> float:
    """Return the seconds until `rows` prompts that arrive together have their first tokens, over HTTP."""
    parts, target = fit.parts[0], pair.target.shape
    tokens = rows * prompt
    read_s = _bytes_read(parts, target, tokens) / _stream(card, is_packed=_is_packed(parts, target))
    compute_s = 2.0 * tokens * _active_values(parts, target) / (card.bf16_flops * COMPUTE_SHARE)
    return FIRST_S * (1 + CROWDING * math.sqrt(rows - 1)) + math.hypot(read_s, compute_s)


def served_per_s(
    step: Step, committed_per_step: float, first_s: float, *, answer: int = ANSWER_TOKENS
) -> float:
    """Return the tokens a second of whole answers to all rows over HTTP, prompts included."""
    step_s = max(step.seconds, step.rows * SEND_S)
    return step.rows * answer / (first_s + answer / committed_per_step * step_s)


def _stream(card: Card, *, is_packed: bool) -> float:
    return card.bandwidth * STREAM_SHARE * (PACKED_SHARE if is_packed else 1.0)


def _is_packed(parts: WeightParts, shape: Shape) -> bool:
    """Return whether most weights take a byte or less."""
    values = shape.values
    if values is None:
        return False
    return parts.layers + parts.experts < 1.5 * (values.projections + values.experts)


def _bytes_read(parts: WeightParts, shape: Shape, tokens: int) -> int:
    head = parts.head or parts.embedding  # tied: the embedding is the head
    return parts.layers + head + int(parts.experts * experts_touched(shape, tokens))


def experts_touched(shape: Shape, tokens: int) -> float:
    """Return the share of experts that at least one token chooses, if all experts are equally likely."""
    if not shape.num_experts:
        return 0.0
    return 1.0 - (1.0 - shape.num_chosen / shape.num_experts) ** tokens


def _active_values(parts: WeightParts, shape: Shape) -> float:
    """Return the number of weight values that one token is multiplied by."""
    share = shape.num_chosen / shape.num_experts if shape.num_experts else 0.0
    experts = parts.experts / 2 if shape.values is None else shape.values.experts
    return _layer_values(parts, shape) + shape.vocab_size * shape.hidden_size + experts * share


def _expert_values(shape: Shape) -> int:
    return 0 if shape.values is None else shape.values.experts


def _layer_values(parts: WeightParts, shape: Shape) -> float:
    return parts.layers / 2 if shape.values is None else shape.values.projections


def _token_bytes(fit: Fit, pair: Pair) -> list[tuple[int, ...]]:
    """Return a token's cache bytes by model and layer; exact values take two bytes."""
    if fit.plan is None:
        return [token_bytes(model.shape.specs, fit.kv_dtype) for model in pair.models]
    return [tuple(spec.bytes_per_token(2) for spec in specs) for specs in cache_specs(pair, fit.plan)]


def _cache_bytes(shape: Shape, context: int, sizes: tuple[int, ...]) -> int:
    """Return the bytes that one row's attention reads, and its states."""
    total = 0
    for spec, size in zip(shape.specs, sizes, strict=True):
        tokens = min(context, spec.window) if isinstance(spec, Windowed) else context
        total += tokens * size
        if isinstance(spec, Recurrent):
            total += spec.bytes_per_row(2, 0)
    return total
