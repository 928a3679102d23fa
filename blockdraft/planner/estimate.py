"""Estimates the seconds of a step and the tokens a second of answers, from bandwidth and shapes.

A decode step reads every weight once (of the experts, only those that its tokens choose), and the keys and
values of its rows. It also launches kernels, and wide batches are limited by arithmetic. In a small model,
each kernel takes its minimum time, which grows with the number of tokens. Reading experts and scanning
recurrent states do not overlap with other kernels' arithmetic, so their times are added. The constants are
our engine's efficiency, measured on an H200 with Qwen3-8B and SmolLM2-135M (benchmarks/results: gpu,
draft-heads, governor, rehearsal), and with mixtures (results: products; docs/gpu.md).
tests/planner/test_estimate.py compares: single steps agree within 15 %, steps of other days, the experts of
one layer and answers over HTTP within 25 %. Other GPUs are assumed to be as efficient. vLLM and SGLang have
estimates of their own (engine_step.py).

An answer over HTTP also waits for its first token, and for the process that sends every row's tokens to its
client. With many rows of a small model, that process is busier than the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from blockdraft.cache.spec import Recurrent, Windowed
from blockdraft.kernels.packed_speeds import MEASURED, NOT_MEASURED, KernelSpeed
from blockdraft.kernels.tree_size import tree_size
from blockdraft.machine.cards import Card
from blockdraft.models.mtp_config import MtpConfig
from blockdraft.planner.kv_formats import token_bytes
from blockdraft.planner.memory import cache_specs, held_parts
from blockdraft.planner.memory_fit import Fit
from blockdraft.planner.pair import Pair
from blockdraft.planner.plan import ELEMENT_BYTES
from blockdraft.planner.shape import Shape
from blockdraft.planner.stored import WeightParts
from blockdraft.settings.acceptance_profile import acceptance_rates

STREAM_SHARE = 0.88  # of the published bandwidth, as a large copy reaches
PACKED_SHARE = 0.85  # of a copy's bandwidth, for weights of a byte or less
CACHE_SHARE = 0.66  # of a copy's bandwidth, for keys and values
COMPUTE_SHARE = 0.63  # of the published bf16 rate, in wide steps
EXPERT_COMPUTE_SHARE = 0.38  # of the same rate, in experts' products
EMPTY_PAIRS = 16  # pairs (token, expert) that each touched expert's last tile is short of, on average
# Tokens of a block choose similar experts: each draft counts as this share of an independent token. Measured
# with random weights: the bytes that `benchmarks.gpu_step` counts.
INDEPENDENT_SHARE = 0.8
# bf16 operations in the time of updating one value of a recurrent state, by one token. Measured in
# Qwen3.5-35B-A3B's shape: 128 tokens x 524,288 values take 37 us a layer.
SCAN_FLOPS = 520
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
# Tokens per step in greedy decoding with trees of so many tokens, relative to a chain of a whole block: mean
# of GSM8K, MT-Bench and HumanEval, default pair (benchmarks/results: trees-cpu). 128 was not measured.
TREE_GAINS = {16: 1.18, 32: 1.27, 64: 1.35, 128: 1.35}
_TREE_LAUNCHES = 6.0  # kernels that find a tree's tokens and copy its keys and values
_PLAIN_LAUNCHES = 9.6  # kernels of a layer: attention and a dense part
_OTHER_LAUNCHES = 12.8  # with experts or a state
_DRAFT_LAUNCHES = 16.0  # of a drafter's layer: the block, and the context it absorbs


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of `rows` sequences with `context` tokens each, with trees of `tree` tokens if any."""

    rows: int
    context: int
    width: int
    seconds: float
    weight_bytes: int
    cache_bytes: int
    flops: float
    num_kernels: float = 0.0  # of our engine
    parts: tuple[tuple[str, float], ...] = ()  # seconds by name, of other engines
    tree: int = 0


def estimate_step(
    fit: Fit, pair: Pair, card: Card, *, rows: int, context: int, width: int, tree: int = 0
) -> Step:
    """Estimate one step; `width` 1 is plain decoding, without the drafter. `tree`: tokens of a row's tree."""
    verified = tree or width
    tokens, target = rows * verified, pair.target.shape
    parts = _read_parts(fit, pair, card, tokens=tokens)
    is_unpacked, sizes = unpacks_weights(fit, pair, card), cache_token_bytes(fit, pair)
    choosing = rows * (1 + INDEPENDENT_SHARE * (verified - 1))
    stream = _speed(pair, card).stream
    dense = _dense(parts, target, card, tokens=tokens, is_unpacked=is_unpacked, stream=stream)
    experts = expert_products(parts, target, card, tokens=tokens, choosing=choosing, is_unpacked=is_unpacked)
    attended = rows * attended_bytes(target, context, sizes[0])
    kernels = target.num_layers * (_PLAIN_LAUNCHES if target.is_plain else _OTHER_LAUNCHES)
    if tree:
        attended *= tree_size(tree, width).branches
        kernels += _TREE_LAUNCHES
    if width > 1 and pair.draft is not None:
        runs = width - 1 if isinstance(pair.draft_config, MtpConfig) else 1
        if isinstance(pair.draft_config, MtpConfig):
            for part in _head_run(fit, pair, card, rows=rows):
                dense += part.times(runs)
        else:
            dense += _drafter(fit, pair, card, rows=rows)
        attended += runs * rows * attended_bytes(pair.draft.shape, context, sizes[1])
        kernels += runs * pair.draft.shape.num_layers * _DRAFT_LAUNCHES
    dense += Products(0, 0.0, attended / (_stream(card) * CACHE_SHARE), 0.0)
    spread_s = kernels * SPREAD_S * math.sqrt(tokens)
    seconds = kernels * LAUNCH_S + math.hypot(dense.seconds, spread_s) + experts.seconds
    seconds += _states_s(target, card, rows=rows, tokens=tokens)
    weight_bytes, flops = dense.num_bytes + experts.num_bytes, dense.flops + experts.flops
    cache_bytes = attended + rows * state_bytes(target)
    return Step(rows, context, width, seconds, weight_bytes, cache_bytes, flops, kernels, tree=tree)


def _speed(pair: Pair, card: Card) -> KernelSpeed:
    """Return what was measured of the kernel that reads the target's code."""
    code = pair.target.code
    return NOT_MEASURED if code is None else MEASURED.get((card.capability, code), NOT_MEASURED)


def _read_parts(fit: Fit, pair: Pair, card: Card, *, tokens: int) -> WeightParts:
    """Return the bytes of the target's weights that a step reads: of two forms, the faster one's."""
    plan = fit.plan
    if plan is None or plan.quantization != "both" or tokens > _speed(pair, card).plain:
        return fit.parts[0]
    return held_parts(pair.target, "keep", ELEMENT_BYTES[plan.dtype])


def unpacks_weights(fit: Fit, pair: Pair, card: Card | None) -> bool:
    """Return whether our engine unpacks the target's weights in every forward.

    Its kernels read fp8, MXFP4 of experts, and codes that were measured on the card, as stored.
    """
    if card is not None and (card.capability, pair.target.code) in MEASURED:
        return False
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
    parts, target, tokens = fit.parts[0], pair.target.shape, rows * prompt
    is_unpacked = unpacks_weights(fit, pair, card)
    dense = _dense(parts, target, card, tokens=tokens, is_unpacked=is_unpacked)
    experts = expert_products(parts, target, card, tokens=tokens, choosing=tokens, is_unpacked=is_unpacked)
    states_s = _states_s(target, card, rows=rows, tokens=tokens)
    return FIRST_S * (1 + CROWDING * math.sqrt(rows - 1)) + dense.seconds + experts.seconds + states_s


def served_per_s(
    step: Step, committed_per_step: float, first_s: float, *, answer: int = ANSWER_TOKENS
) -> float:
    """Return the tokens a second of whole answers to all rows over HTTP, prompts included."""
    step_s = max(step.seconds, step.rows * SEND_S)
    return step.rows * answer / (first_s + answer / committed_per_step * step_s)


def _stream(card: Card) -> float:
    """Return the bytes a second at which weights are read."""
    return card.bandwidth * STREAM_SHARE


@dataclass(frozen=True, slots=True)
class Products:
    """Products with weights. Reading and computing overlap, but not fully if both are large.

    `flops` include the empty places of experts' tiles.
    """

    num_bytes: int
    flops: float
    read_s: float
    compute_s: float

    def __add__(self, other: Products) -> Products:
        return Products(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def times(self, count: int) -> Products:
        return Products(*(count * getattr(self, name) for name in self.__slots__))

    @property
    def seconds(self) -> float:
        return math.hypot(self.read_s, self.compute_s)


def _products(
    card: Card,
    num_bytes: int,
    flops: float,
    share: float,
    *,
    is_packed: bool,
    unpacked: float = 0.0,
    stream: float = 1.0,
) -> Products:
    """`share`: of the card's arithmetic. `unpacked`: the number of values that are unpacked first.

    `stream`: the share of a copy's bandwidth that a kernel of packed weights was measured to reach.
    """
    share_read = min(PACKED_SHARE, stream) if is_packed else 1.0
    read_s = (num_bytes / share_read + UNPACK_BYTES * unpacked) / _stream(card)
    return Products(num_bytes, flops, read_s, flops / (card.bf16_flops * share))


def _dense(
    parts: WeightParts, shape: Shape, card: Card, *, tokens: int, is_unpacked: bool, stream: float = 1.0
) -> Products:
    """Return the products with the head, and with all weights of the layers but the experts."""
    values = layer_values(parts, shape)
    return _products(
        card,
        parts.layers + (parts.head or parts.embedding),  # tied: the embedding is the head
        2.0 * tokens * (values + shape.vocab_size * shape.hidden_size),
        COMPUTE_SHARE,
        is_packed=parts.layers < 1.5 * values,
        unpacked=values if is_unpacked else 0.0,
        stream=stream,
    )


def expert_products(
    parts: WeightParts, shape: Shape, card: Card, *, tokens: int, choosing: float, is_unpacked: bool = False
) -> Products:
    """Return the products with experts. `choosing`: how many independent tokens would touch as many."""
    values = parts.experts / 2 if shape.values is None else shape.values.experts
    touched = experts_touched(shape, choosing)
    pairs = tokens * shape.num_chosen / max(shape.num_experts, 1)  # of an expert
    return _products(
        card,
        int(parts.experts * touched),
        2.0 * values * (pairs + EMPTY_PAIRS * touched),
        EXPERT_COMPUTE_SHARE,
        is_packed=parts.experts < 1.5 * values,
        unpacked=values * touched if is_unpacked else 0.0,
    )


def _drafter(fit: Fit, pair: Pair, card: Card, *, rows: int) -> Products:
    """Return the products of the drafter's forward."""
    assert pair.draft is not None
    draft, parts = pair.draft.shape, fit.parts[1]
    # It multiplies by the target's head once more, unless it brings its own.
    head = parts.head or fit.parts[0].head or fit.parts[0].embedding
    tables = 0 if draft.values is None else draft.values.tables
    values = layer_values(parts, draft)
    return _products(
        card,
        parts.layers + head - 2 * tables,  # a step reads only a few rows of the tables
        2.0 * rows * pair.block * (values + draft.vocab_size * draft.hidden_size),
        COMPUTE_SHARE,
        is_packed=parts.layers < 1.5 * values,
    )


def _head_run(fit: Fit, pair: Pair, card: Card, *, rows: int) -> tuple[Products, Products]:
    """Return the products of one run of an MTP head: its layer and the target's head, and its experts."""
    assert pair.draft is not None
    draft, parts, target = pair.draft.shape, fit.parts[1], fit.parts[0]
    whole = replace(parts, head=target.head or target.embedding)
    return (
        _dense(whole, draft, card, tokens=rows, is_unpacked=False),
        expert_products(parts, draft, card, tokens=rows, choosing=rows),
    )


def _states_s(shape: Shape, card: Card, *, rows: int, tokens: int) -> float:
    """Return the seconds of scanning recurrent states (with a tape as output) and of folding the tape.

    At width 1 the scan updates the states itself. A fold reads and writes them.
    """
    specs = [spec for spec in shape.specs if isinstance(spec, Recurrent)]
    states = rows * state_bytes(shape)
    tape_bytes = sum(spec.bytes_per_row(2, tokens) for spec in specs) - state_bytes(shape)
    updates = tokens * sum(spec.num_heads * spec.key_dim * spec.value_dim for spec in specs)
    scan_s = math.hypot((states + tape_bytes) / _stream(card), updates * SCAN_FLOPS / card.bf16_flops)
    return scan_s + (1 if tokens == rows else 2) * states / _stream(card)


def experts_touched(shape: Shape, tokens: float) -> float:
    """Return the share of experts that at least one token chooses, if all experts are equally likely."""
    if not shape.num_experts:
        return 0.0
    return 1.0 - math.pow(1.0 - shape.num_chosen / shape.num_experts, tokens)


def layer_values(parts: WeightParts, shape: Shape) -> float:
    """Return the number of values in the layers' projections."""
    return parts.layers / 2 if shape.values is None else shape.values.projections


def cache_token_bytes(fit: Fit, pair: Pair) -> list[tuple[int, ...]]:
    """Return a token's cache bytes by model and layer; exact values take two bytes."""
    if fit.plan is None:
        return [token_bytes(model.shape.specs, fit.kv_dtype) for model in pair.models]
    return [tuple(spec.bytes_per_token(2) for spec in specs) for specs in cache_specs(pair, fit.plan)]


def attended_bytes(shape: Shape, context: int, sizes: tuple[int, ...]) -> int:
    """Return the bytes of keys and values that one row's attention reads."""
    windows = [spec.window if isinstance(spec, Windowed) else context for spec in shape.specs]
    return sum(min(context, window) * size for window, size in zip(windows, sizes, strict=True))


def state_bytes(shape: Shape) -> int:
    """Return the bytes of one row's recurrent states."""
    return sum(spec.bytes_per_row(2, 0) for spec in shape.specs if isinstance(spec, Recurrent))
