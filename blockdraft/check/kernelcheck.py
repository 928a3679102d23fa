"""Every operation the models use, at their real shapes, on this device, against its reference in float64.

A comparison runs an operation twice on the same random numbers: by whatever path serving takes, and by the
PyTorch reference on the numbers widened to float64. Where no kernel of ours was chosen, it is PyTorch's own
on this device and in this dtype that is held to account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.cache.paged import PagedKV
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.spec import Recurrent
from blockdraft.check import kernelcheck_layers as layers
from blockdraft.check.comparison import Comparison, Numbers, models_of, parts_of
from blockdraft.engine.engine import Engine
from blockdraft.kernels import gated_delta, linear, rows
from blockdraft.kernels.attention import Blocks, Mask, attend_paged
from blockdraft.kernels.choice import use
from blockdraft.kernels.linear import rounded_to_fp8, rounds_tokens
from blockdraft.models.layers import Embedding, GatedMLP, Linear, RMSNorm, attention_config
from blockdraft.models.moe import ExpertLinear, Experts
from blockdraft.models.packed import Packed, Scaled, Stacked
from blockdraft.models.rotary import Rotary

__all__ = ["Finding", "check_kernels", "models_of"]

# Of |result| + the results' root mean square. Measured: 4e-7 in float32, 4e-3 in bfloat16; the rest is room
# for longer sums. What a wrong kernel does is larger by far.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MAX_OUTPUTS = 512  # weight rows whose products are recomputed; all of them are multiplied
EVERY_TILE = (1, 2, 3, 4, 5, 6, 7, 8, 19)  # tokens: each has code of its own in the CPU's matrix product
CONTEXT = 300  # keys: past one chunk of the attention kernels and their reference
LONG_PIECE = 80  # tokens of a row: a card's attention has code of its own for so many
GATED_TILES = (17, 65, 129)  # tokens: on a card each is multiplied by another kernel
MAX_WINDOW = 8192  # windows up to here are reached by a context of their own


@dataclass(frozen=True, slots=True)
class Finding:
    """The comparison of an operation that came closest to its tolerance, or went past it.

    The error of whole numbers is the share that differ; none may.
    """

    operation: str
    where: str
    error: float
    tolerance: float
    num_comparisons: int = 1

    @property
    def is_passed(self) -> bool:
        return self.error <= self.tolerance


@torch.inference_mode()
def check_kernels(engine: Engine) -> Iterator[Finding]:
    """One finding for each operation that the engine's models use."""
    for operation, compare in _OPERATIONS.items():
        found = [_measure(operation, comparison) for comparison in compare(engine, Numbers(engine))]
        if found:
            worst = max(found, key=lambda finding: finding.error / max(finding.tolerance, 1e-300))
            yield replace(worst, num_comparisons=len(found))


def _measure(operation: str, comparison: Comparison) -> Finding:
    where, got, expected, num_steps = comparison
    if got.dtype == torch.int64:
        return Finding(operation, where, float((got != expected).double().mean()), tolerance=0.0)
    scale = expected.abs() + expected.square().mean().sqrt()
    error = float(((got.double() - expected).abs() / scale.clamp(min=1e-300)).max())
    tolerance = num_steps * TOLERANCES[got.dtype]
    return Finding(operation, where, error if math.isfinite(error) else math.inf, tolerance)


# ---- matrix products


def _compare_linear(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    found: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
    for weight, bias in _matrices(engine):
        if isinstance(weight, Tensor):
            found.setdefault((*weight.shape, bias is not None), (weight, bias))
    smallest = min(found, key=math.prod, default=None)
    plan = engine.models.plan
    for key, (weight, bias) in found.items():
        counts = EVERY_TILE if key == smallest else (1, max(plan.width, 5), *_many(weight.device))
        x = numbers.normal(max(counts), weight.shape[1])
        chosen = _sample(weight.shape[0], weight.device)
        with use("reference"):
            wide = None if bias is None else bias[chosen].double()
            expected = linear.linear(x.double(), weight[chosen].double(), wide)
        onto = (
            numbers.normal(max(counts), weight.shape[0]) if weight.shape[0] in _stream_sizes(engine) else None
        )
        for count in counts:
            where = f"{list(weight.shape)} x {count} tokens"
            yield Comparison(where, linear.linear(x[:count], weight, bias)[:, chosen], expected[:count])
            if onto is not None:
                got = linear.linear(x[:count], weight, bias, onto=onto[:count].clone())[:, chosen]
                sums = expected[:count] + onto[:count, chosen].double()
                yield Comparison(f"{where}, onto the stream", got, sums, num_steps=2)


def _stream_sizes(engine: Engine) -> set[int]:
    """The products with this many outputs may be added to the residual stream."""
    draft = engine.models.draft_config
    return {engine.models.config.hidden_size, *([] if draft is None else [draft.hidden_size])}


def _compare_gated(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """Of plain weights each shape, of packed ones the smallest of each format."""
    found: dict[tuple[object, ...], GatedMLP] = {}
    parts = [part for part in parts_of(engine) if isinstance(part, GatedMLP)]
    for part in sorted(parts, key=lambda part: math.prod(part.gate_up.weight.shape)):
        weight = part.gate_up.weight
        kind = _format(weight) if isinstance(weight, Packed) else tuple(weight.shape)
        found.setdefault((kind, part.gate_up.bias is None, part.activate), part)
    for part in found.values():
        weight, bias, inner = part.gate_up.weight, part.gate_up.bias, part.gate_up.parts[0]
        chosen = _sample(inner, numbers.device)
        both = torch.cat((chosen, chosen + inner))
        values, wide = _values(weight, both).double(), None if bias is None else bias[both].double()
        few = max(engine.models.plan.width, 5)
        for count in dict.fromkeys((1, few, *(GATED_TILES if numbers.device.type == "cuda" else ()))):
            x = numbers.normal(count, weight.shape[1])
            with use("reference"):
                expected = part.activate(linear.linear(_multiplied(x, weight).double(), values, wide))
            got = part.gate_up.gated(x, part.activate)[:, chosen]
            yield Comparison(f"{list(weight.shape)} x {count} tokens", got, expected, num_steps=2)


def _multiplied(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """The tokens as they are multiplied: some cards round many of them to fp8, and that is no error."""
    is_rounded = isinstance(weight, Scaled) and weight.has_row_scales and rounds_tokens(x, weight.values)
    return rounded_to_fp8(x) if is_rounded else x


def _values(weight: Tensor | Packed, rows: Tensor) -> Tensor:
    """Some rows, as numbers; a format that cannot be cut there is unpacked as a whole."""
    if isinstance(weight, Tensor):
        return weight[rows]
    try:
        return weight[rows].dequantise(torch.float32)
    except TypeError:
        return weight.dequantise(torch.float32)[rows]


def _compare_packed(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """The smallest matrix of each format, against its own values multiplied in the plain way."""
    found: dict[str, Packed] = {}
    for weight, _ in _matrices(engine):
        if isinstance(weight, Packed):
            name = _format(weight)
            if name not in found or math.prod(weight.shape) < math.prod(found[name].shape):
                found[name] = weight
    for name, weight in found.items():
        chosen = _sample(weight.shape[0], numbers.device)
        values = weight.dequantise(torch.float32)[chosen]
        for count in (5, *_many(numbers.device)):
            x, onto = numbers.normal(count, weight.shape[1]), numbers.normal(count, weight.shape[0])
            expected = _multiplied(x, weight).double() @ values.double().T
            where = f"{name} {list(weight.shape)} x {count} tokens"
            yield Comparison(where, weight.matmul(x)[:, chosen], expected)
            got = weight.matmul(x, onto=onto.clone())[:, chosen]
            sums = expected + onto[:, chosen].double()
            yield Comparison(f"{where}, onto the stream", got, sums, num_steps=2)


def _many(device: torch.device) -> tuple[int, ...]:
    """On a GPU: a number of tokens past what its own kernel takes."""
    return (linear.MAX_TOKENS + 1,) if device.type == "cuda" else ()


def _matrices(engine: Engine) -> Iterator[tuple[Tensor | Packed, Tensor | None]]:
    """Every matrix that activations are multiplied by, with its bias."""
    for model in models_of(engine):
        for part in model.modules():
            if isinstance(part, Linear):
                yield part.weight, part.bias
            elif isinstance(part, ExpertLinear):
                yield part.weight[0], None if part.bias is None else part.bias[0]
            elif isinstance(part, Embedding):
                if engine.models.config.ties_embeddings:
                    yield part.weight, None
            elif not isinstance(part, Packed):  # a router's
                yield from ((p, None) for p in part.parameters(recurse=False) if p.dim() == 2)


def _sample(count: int, device: torch.device) -> Tensor:
    """At most MAX_OUTPUTS of `count` rows, the first and the last included."""
    return torch.linspace(0, count - 1, min(count, MAX_OUTPUTS), dtype=torch.float64).long().to(device)


def _format(weight: Packed) -> str:
    if isinstance(weight, Stacked):
        return " and ".join(sorted({_format(part) for part in weight.members()}))
    return type(weight).__name__


# ---- attention


class _Heads(NamedTuple):
    """What one kind of attention layer asks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask
    has_sinks: bool


def _compare_attention(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    width, page_size = engine.models.plan.width, engine.models.plan.page_size
    for heads in dict.fromkeys(heads for model in models_of(engine) for heads in _heads(engine, model)):
        window = heads.mask.window
        longest = CONTEXT if window is None or window > MAX_WINDOW else max(CONTEXT, window + 40)
        where = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, window {window}"
        pieces = [((longest, 5), (width, width)), ((40, 0), (1, 20))]
        if numbers.device.type == "cuda":
            pieces.append(((longest, 5), (LONG_PIECE, 20)))
        for starts, counts in pieces:
            got, expected = _attend(heads, numbers, starts=starts, counts=counts, page_size=page_size)
            yield Comparison(f"{where}, {counts} tokens after {starts}", got, expected)


def _attend(
    heads: _Heads, numbers: Numbers, *, starts: tuple[int, int], counts: tuple[int, int], page_size: int
) -> tuple[Tensor, Tensor]:
    """Two rows in pages dealt at random. Slots that no row has reached hold NaN: reading one shows."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    num_pages = -(-max(ends) // page_size)  # of a row
    pages = (numbers.order(2 * num_pages) + 1).view(2, num_pages)  # page 0 is where masked reads point
    slots = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
    shape = (heads.num_kv_heads, (2 * num_pages + 1) * page_size, heads.head_dim)
    keys, values = numbers.normal(*shape), numbers.normal(*shape)
    for tensor in (keys, values):
        tensor[:, :page_size] = 0
        for row, end in enumerate(ends):
            tensor[:, slots[row, end:]] = math.nan
    blocks = Blocks(
        pages=pages, starts=torch.tensor(starts, device=pages.device), counts=counts, page_size=page_size
    )
    q = numbers.normal(sum(counts), heads.num_heads, heads.head_dim)
    sinks = numbers.normal(heads.num_heads) if heads.has_sinks else None
    got = attend_paged(q, keys, values, blocks, heads.mask, sinks)
    with use("reference"):
        wide = None if sinks is None else sinks.double()
        expected = attend_paged(q.double(), keys.double(), values.double(), blocks, heads.mask, wide)
    return got, expected


def _heads(engine: Engine, model: nn.Module) -> Iterator[_Heads]:
    """Of every layer that attends: they all keep a Mask, and know their place in the cache."""
    config, draft = engine.models.config, engine.models.draft_config
    for part in model.modules():
        mask = vars(part).get("mask")
        if not isinstance(mask, Mask):
            continue
        layer = vars(part)["layer"]
        storage = engine.cache.storage[layer]
        assert isinstance(storage, PagedKV)
        if layer < config.num_layers:
            num_heads = attention_config(config, layer).num_heads
        else:
            assert draft is not None
            num_heads = draft.num_heads
        has_sinks = any(name == "sinks" for name, _ in part.named_parameters(recurse=False))
        yield _Heads(num_heads, storage.keys.shape[0], storage.keys.shape[2], mask, has_sinks)


# ---- the small steps of a layer


def _compare_norms(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    parts = [part for model in models_of(engine) for part in model.modules() if isinstance(part, RMSNorm)]
    for part in {(part.weight.shape[0], part.weight.dtype, part.eps): part for part in parts}.values():
        size = part.weight.shape[0]
        x = numbers.normal(5, size)
        for weight in (part.weight, None):  # some values are normalised without one
            got = rows.rms_norm(x, weight, part.eps)
            with use("reference"):
                expected = rows.rms_norm(x.double(), None if weight is None else weight.double(), part.eps)
            yield Comparison(f"{size} values", got, expected)


def _compare_rotations(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    for model in models_of(engine):
        shapes = dict.fromkeys((heads.num_heads, heads.head_dim) for heads in _heads(engine, model))
        for rotary in (part for part in model.modules() if isinstance(part, Rotary)):
            last = rotary.cos.shape[0] - 1
            positions = torch.tensor([0, 1, last // 2, last], device=numbers.device)
            cos, sin = rotary(positions)
            for num_heads, head_dim in shapes:
                if 2 * cos.shape[-1] <= head_dim:
                    x = numbers.normal(len(positions), num_heads, head_dim)
                    got = rows.rotate(x, (cos, sin))
                    with use("reference"):
                        expected = rows.rotate(x.double(), (cos.double(), sin.double()))
                    yield Comparison(f"{num_heads} heads of {head_dim}", got, expected)


def _compare_activations(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    names = {rows.silu_mul: "silu", rows.gelu_mul: "gelu"}
    found = {
        (part.activate, int(part.down.weight.shape[-1]))
        for model in models_of(engine)
        for part in model.modules()
        if isinstance(part, GatedMLP | Experts) and part.activate in names
    }
    for activate, size in sorted(found, key=lambda item: (names[item[0]], item[1])):
        x = numbers.normal(5, 2 * size)
        got = activate(x)
        with use("reference"):
            expected = activate(x.double())
        yield Comparison(f"{names[activate]} of {size} values", got, expected)


# ---- the gated delta rule


def _compare_delta(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    states = [storage for storage in engine.cache.storage if isinstance(storage, RecurrentState)]
    for spec in dict.fromkeys(storage.spec for storage in states):
        yield from _compare_scan(spec, numbers, num_tokens=engine.models.plan.block + 3)


def _compare_scan(spec: Recurrent, numbers: Numbers, *, num_tokens: int) -> Iterator[Comparison]:
    """Two rows of a scan, a fold of all tokens of one and of two of the other, and the convolution."""
    wide = torch.promote_types(numbers.dtype, torch.float32)
    lead = (2, num_tokens)
    where = f"{spec.num_key_heads}/{spec.num_heads} heads of {spec.key_dim} x {spec.value_dim}"
    inputs = (
        numbers.normal(*lead, spec.num_key_heads, spec.key_dim),
        numbers.normal(*lead, spec.num_key_heads, spec.key_dim),
        numbers.normal(*lead, spec.num_heads, spec.value_dim),
        -numbers.uniform(*lead, spec.num_heads, dtype=wide),
        numbers.uniform(*lead, spec.num_heads),
    )
    state = numbers.normal(2, spec.num_heads, spec.key_dim, spec.value_dim, dtype=wide)
    counts = torch.tensor([num_tokens, 2], device=numbers.device)
    convolved = (
        numbers.normal(*lead, spec.conv_channels),
        numbers.normal(2, spec.conv_width - 1, spec.conv_channels),
        numbers.normal(spec.conv_channels, spec.conv_width),
    )
    expected_state = state.double().clone()  # folded in place, as the other is
    with use("reference"):
        q, k, v, gate, beta = (x.double() for x in inputs)
        expected, tape = gated_delta.scan(q, k, v, gate, beta, expected_state)
        gated_delta.fold(expected_state, tape, counts)
        expected_mix = gated_delta.convolve(*(x.double() for x in convolved))
    got, tape = gated_delta.scan(*inputs, state)
    gated_delta.fold(state, tape, counts)
    yield Comparison(f"scan, {where}", got, expected)
    yield Comparison(f"fold, {where}", state, expected_state)
    yield Comparison(
        f"convolve, {spec.conv_channels} channels", gated_delta.convolve(*convolved), expected_mix
    )


_OPERATIONS: dict[str, Callable[[Engine, Numbers], Iterator[Comparison]]] = {
    "linear": _compare_linear,
    "packed product": _compare_packed,
    "attention": _compare_attention,
    "norm": _compare_norms,
    "rotation": _compare_rotations,
    "activation": _compare_activations,
    "gated product": _compare_gated,
    "heads": layers.compare_heads,
    "heads' gates": layers.compare_open_heads,
    "gated delta": _compare_delta,
    "gated delta layer": layers.compare_delta_layers,
    "routing": layers.compare_routes,
    "experts": layers.compare_experts,
    "places": layers.compare_places,
    "sampling": layers.compare_sampling,
    "acceptance": layers.compare_acceptance,
}
