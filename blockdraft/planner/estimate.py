"""How long a step takes and how many tokens a second that makes: an estimate, from bandwidth and shape.

A decode step reads every weight once (of experts, those that its tokens choose), and the keys and values of
its rows; beside that it launches kernels, and wide batches are bound by arithmetic. Five numbers say how well
our engine does each, read off Qwen3-8B and SmolLM2-135M on an H200 (benchmarks/results/gpu-h200.json):
those are met within 15 %, which a test holds. On other cards and engines the same shares are assumed.
"""

from __future__ import annotations

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

STREAM_SHARE = 0.88  # of the published bandwidth: what a large copy reaches
PACKED_SHARE = 0.85  # of that, for weights of a byte or less
CACHE_SHARE = 0.66  # of that, for keys and values
COMPUTE_SHARE = 0.63  # of the published bf16 rate, in wide steps
LAUNCH_S = 2.5e-6  # of one kernel in a graph
# Read and written for each value that is unpacked before a product: PyTorch's operations, one after another,
# by their sizes. Nobody measured it.
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
    """`width` 1 is plain decoding: no drafter runs."""
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
        draft_bytes = parts.layers + head - 2 * tables  # of which a few rows are read
        read_s += draft_bytes / _stream(card, is_packed=_is_packed(parts, draft))
        weight_bytes += draft_bytes
        flops += (
            2.0 * rows * pair.block * (_layer_values(parts, draft) + draft.vocab_size * draft.hidden_size)
        )
        cache_bytes += rows * _cache_bytes(draft, context, sizes[1])
        kernels += draft.num_layers * _DRAFT_LAUNCHES
    read_s += cache_bytes / (_stream(card, is_packed=False) * CACHE_SHARE)
    compute_s = flops / (card.bf16_flops * COMPUTE_SHARE)
    # Reading and computing overlap, but not wholly where both are large.
    seconds = kernels * LAUNCH_S + (read_s**2 + compute_s**2) ** 0.5
    return Step(rows, context, width, seconds, weight_bytes, cache_bytes, flops, kernels)


def unpacks_weights(fit: Fit, pair: Pair) -> bool:
    """Whether each forward of our engine unpacks the target's weights before it multiplies by them.

    Its kernels read fp8, and MXFP4 of experts, as they are stored; nothing else that is packed.
    """
    values, method = pair.target.shape.values, pair.target.stored.method
    if fit.plan is None or fit.plan.quantization != "keep" or values is None or method in (None, "mxfp4"):
        return False
    is_small = fit.parts[0].layers + fit.parts[0].experts < 0.8 * (values.projections + values.experts)
    return method == "GGUF" or is_small


def committed(mean: float, *, width: int, block: int) -> float:
    """Tokens per step at `width`, of a drafter that commits `mean` at its whole block."""
    if width < 2:
        return 1.0
    rates = acceptance_rates(f"mean:{max(1.0, min(mean, block))}", width=block, block=block)
    return 1.0 + sum(rates[: width - 1])


def tokens_per_s(step: Step, committed_per_step: float) -> float:
    """Of all rows together."""
    return step.rows * committed_per_step / step.seconds


def _stream(card: Card, *, is_packed: bool) -> float:
    return card.bandwidth * STREAM_SHARE * (PACKED_SHARE if is_packed else 1.0)


def _is_packed(parts: WeightParts, shape: Shape) -> bool:
    """Whether most weights take a byte or less."""
    values = shape.values
    if values is None:
        return False
    return parts.layers + parts.experts < 1.5 * (values.projections + values.experts)


def _bytes_read(parts: WeightParts, shape: Shape, tokens: int) -> int:
    head = parts.head or parts.embedding  # tied: the embedding is the head
    return parts.layers + head + int(parts.experts * experts_touched(shape, tokens))


def experts_touched(shape: Shape, tokens: int) -> float:
    """The share of the experts that some of the tokens choose, were all equally likely."""
    if not shape.num_experts:
        return 0.0
    return 1.0 - (1.0 - shape.num_chosen / shape.num_experts) ** tokens


def _active_values(parts: WeightParts, shape: Shape) -> float:
    """Values that one token is multiplied by."""
    share = shape.num_chosen / shape.num_experts if shape.num_experts else 0.0
    experts = parts.experts / 2 if shape.values is None else shape.values.experts
    return _layer_values(parts, shape) + shape.vocab_size * shape.hidden_size + experts * share


def _expert_values(shape: Shape) -> int:
    return 0 if shape.values is None else shape.values.experts


def _layer_values(parts: WeightParts, shape: Shape) -> float:
    return parts.layers / 2 if shape.values is None else shape.values.projections


def _token_bytes(fit: Fit, pair: Pair) -> list[tuple[int, ...]]:
    """Of one token, of each model layer by layer, in two bytes where nothing is compressed."""
    if fit.plan is None:
        return [token_bytes(model.shape.specs, fit.kv_dtype) for model in pair.models]
    return [tuple(spec.bytes_per_token(2) for spec in specs) for specs in cache_specs(pair, fit.plan)]


def _cache_bytes(shape: Shape, context: int, sizes: tuple[int, ...]) -> int:
    """What one row's attention reads, and its states."""
    total = 0
    for spec, size in zip(shape.specs, sizes, strict=True):
        tokens = min(context, spec.window) if isinstance(spec, Windowed) else context
        total += tokens * size
        if isinstance(spec, Recurrent):
            total += spec.bytes_per_row(2, 0)
    return total
