"""Compares every operation that the models use with its reference, at the real shapes and on this device.

A comparison runs an operation twice on the same random numbers: with the served kernel, and with the PyTorch
reference in float64. If the server uses a kernel of PyTorch, that kernel is checked. The check at the start,
`blockdraft doctor` and the tests all use the table OPERATIONS. Each entry yields a comparison for every
distinct use of its operation in an engine's models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.check.choices import (
    compare_acceptance,
    compare_ngram_lookup,
    compare_sampling,
    compare_trees,
    compare_walk,
)
from blockdraft.check.comparison import (
    Comparison,
    Comparisons,
    KernelResult,
    Numbers,
    distinct,
    measure,
    parts_of,
    run,
    wide,
)
from blockdraft.check.delta_rule import compare_delta
from blockdraft.check.expert_tiles import TileRun, mixtures, tile_runs
from blockdraft.check.matrix_products import (
    MAX_OUTPUTS,
    compare_gated,
    compare_linear,
    compare_packed,
    matrix_of,
)
from blockdraft.engine.engine import Engine
from blockdraft.kernels import heads, moe, pointwise
from blockdraft.kernels.attention import Blocks, Mask, reference_attend_paged
from blockdraft.kernels.block_conv import reference_conv_after, reference_conv_before
from blockdraft.kernels.kv_codec import kv_format
from blockdraft.kernels.kv_compressed import (
    Codes,
    CompressedPages,
    Tiles,
    reference_attend_compressed_paged,
    reference_compress,
)
from blockdraft.kernels.kv_formats import SCALE_BYTES, TILE
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.models.dflash import BlockConv, DFlash2, DFlashLayer
from blockdraft.models.gated_delta import GatedAttention
from blockdraft.models.gemma4 import GemmaAttention
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm
from blockdraft.models.moe import Experts, SharedExpert
from blockdraft.models.rotary import Rotary

CONTEXT = 300  # keys; more than one chunk of the attention kernels and of their reference
LONG_PIECE = 80  # tokens of a sequence, for which the GPU's attention has its own code
MAX_WINDOW = 8192  # windows up to this size are tested with a context longer than the window
MAX_MIXED = 3  # tokens through the experts; few, because float64 computes experts one by one


# ---- attention


class _Heads(NamedTuple):
    """The heads and the mask of one kind of attention layer, and how the layer prepares its heads."""

    num_heads: int
    num_kv_heads: int
    dim: int
    mask: Mask
    has_sinks: bool
    format: str | None  # of compressed keys and values; None: exact
    norm_dtype: torch.dtype | None  # of the weights of the heads' norms; None: no norms
    is_written: bool  # `norm_rope_write` normalises, rotates and writes them
    has_context: bool  # keys and values also come without queries

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.dim}"


def _heads(engine: Engine, model: nn.Module) -> list[_Heads]:
    """Return the heads of every attention layer: every module that has a Mask."""
    found = []
    for part in model.modules():
        mask, children = vars(part).get("mask"), dict(part.named_children())
        if isinstance(mask, Mask):
            storage, out = engine.cache.storage[vars(part)["layer"]], children["out"]
            assert isinstance(storage, PagedKV | CompressedLayer)
            assert isinstance(out, Linear)
            keys = storage.keys if isinstance(storage, PagedKV) else storage.pages.exact_keys[0]
            format = None if isinstance(storage, PagedKV) else storage.pages.format.name
            (num_kv_heads, _, dim), norm = keys.shape, children.get("q_norm")
            has_sinks = "sinks" in dict(part.named_parameters(recurse=False))
            norm_dtype = norm.weight.dtype if isinstance(norm, RMSNorm) else None
            kind = (norm_dtype, not isinstance(part, GemmaAttention), isinstance(part, DFlashLayer))
            num_heads = out.weight.shape[1] // dim
            found.append(_Heads(num_heads, num_kv_heads, dim, mask, has_sinks, format, *kind))
    return found


def _compare_attention(engine: Engine, numbers: Numbers) -> Comparisons:
    width, page_size = engine.plan.block, engine.plan.page_size
    found = [kind for model in engine.models.models() for kind in _heads(engine, model)]
    exact = [kind for kind in found if kind.format is None]
    for kind in distinct(exact, lambda kind: kind[:5]):
        window = kind.mask.window
        longest = CONTEXT if window is None or window > MAX_WINDOW else max(CONTEXT, window + 40)
        pieces = [((longest, 5), (width, width)), ((40, 0), (1, 20))]
        if numbers.device.type == "cuda":
            pieces.append(((longest, 5), (LONG_PIECE, 20)))
        for starts, counts in pieces:
            inputs = _attention_inputs(kind, numbers, starts=starts, counts=counts, page_size=page_size)
            where = f"{kind}, window {window}, {counts} tokens after {starts}"
            yield run(where, numbers.kernels.attend, reference_attend_paged, *inputs)


def _attention_inputs(
    kind: _Heads, numbers: Numbers, *, starts: tuple[int, int], counts: tuple[int, int], page_size: int
) -> tuple[object, ...]:
    """Return inputs for two sequences in random pages. Unused slots hold NaN to reveal wrong reads."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    num_pages = -(-max(ends) // page_size)  # of a row
    pages = (numbers.order(2 * num_pages) + 1).view(2, num_pages)  # masked reads go to page 0
    slots = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
    shape = (kind.num_kv_heads, (2 * num_pages + 1) * page_size, kind.dim)
    keys, values = numbers.normal(*shape), numbers.normal(*shape)
    for tensor in (keys, values):
        tensor[:, :page_size] = 0
        for row, end in enumerate(ends):
            tensor[:, slots[row, end:]] = math.nan
    blocks = Blocks(pages=pages, starts=numbers.whole(*starts), counts=counts, page_size=page_size)
    q = numbers.normal(sum(counts), kind.num_heads, kind.dim)
    sinks = numbers.normal(kind.num_heads) if kind.has_sinks else None
    return q, keys, values, blocks, kind.mask, sinks


def _compare_compressed(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare the compression, of which most bytes must be equal, and attention over compressed keys."""
    plan = engine.plan
    found = [kind for model in engine.models.models() for kind in _heads(engine, model)]
    for kind in distinct([kind for kind in found if kind.format is not None], lambda kind: kind[:6]):
        assert kind.format is not None
        rule = engine.cache.compressed[0].pages.rule
        starts, counts = (rule.window + CONTEXT, 5), (plan.block, plan.block)
        blocks, tiles = _compressed_places(
            numbers, rule, starts=starts, counts=counts, page_size=plan.page_size
        )
        num_slots = (blocks.table.numel() + 1) * plan.page_size
        exact = [numbers.normal(1, kind.num_kv_heads, num_slots, kind.dim) for _ in range(2)]
        stores = [_no_codes(kind, num_slots, which, numbers.device) for which in range(2)]
        pages = CompressedPages(
            kv_format(kind.format, kind.dim), rule, exact[0], exact[1], stores[0], stores[1]
        )
        reference_compress(pages, tiles)
        written = pages._replace(keys=_emptied(pages.keys), values=_emptied(pages.values))
        numbers.kernels.compress(written, tiles)
        for name, got, expected in (
            ("keys", written.keys, pages.keys),
            ("values", written.values, pages.values),
        ):
            # Close to the border of two levels, the order of a sum decides.
            same = (got.codes == expected.codes).double().mean().to(numbers.dtype)
            yield Comparison(f"{kind.format} {name}, {kind}", same, torch.ones_like(same).double(), 20)
        q = numbers.normal(sum(counts), kind.num_heads, kind.dim)
        sinks = numbers.normal(kind.num_heads) if kind.has_sinks else None
        where = f"{kind.format}, {kind}, {counts} tokens after {starts}"
        attend = (numbers.kernels.attend_compressed, reference_attend_compressed_paged)
        yield run(where, *attend, q, pages, blocks, kind.mask, sinks, num_steps=2)


def _compressed_places(
    numbers: Numbers, rule: PositionRule, *, starts: tuple[int, int], counts: tuple[int, int], page_size: int
) -> tuple[Blocks, Tiles]:
    """Return blocks of two sequences in random pages, and all tiles to compress."""
    num_pages = -(-(max(starts) + max(counts)) // page_size)  # of a row
    table, exact = ((numbers.order(2 * num_pages) + 1).view(2, num_pages) for _ in range(2))
    begun = numbers.whole(*starts)
    blocks = Blocks(pages=table, exact_pages=exact, starts=begun, counts=counts, page_size=page_size)
    most = max(1, -(-max(starts) // TILE))
    return blocks, Tiles(table, exact, blocks.rows, torch.zeros_like(begun), begun, rule, most, page_size)


def _no_codes(kind: _Heads, num_slots: int, which: int, device: torch.device) -> Codes:
    """Return zeroed codes for keys (`which` = 0) or values (1)."""
    assert kind.format is not None
    form = kv_format(kind.format, kind.dim)
    num_bytes = (form.keys, form.values)[which].num_bytes(kind.dim) - SCALE_BYTES
    shape = (1, kind.num_kv_heads, num_slots)
    codes = torch.zeros((*shape, num_bytes), dtype=torch.uint8, device=device)
    return Codes(codes, torch.zeros(shape, dtype=torch.float16, device=device))


def _emptied(codes: Codes) -> Codes:
    return Codes(*(torch.zeros_like(part) for part in codes))


def _compare_places(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare positions and slots of equal and of ragged blocks with counts in Python."""
    width, page_size = engine.plan.block, engine.plan.page_size
    order, starts = (2, 0, 1), (page_size - 1, 0, 7)
    for counts in ((width, width, width), (3, 1, 2 * page_size + 1)):
        num_pages = (max(starts) + max(counts)) // page_size + 1
        pages = numbers.order(3 * num_pages).view(3, num_pages)
        blocks = Blocks(
            pages=pages,
            counts=counts,
            page_size=page_size,
            locate=numbers.kernels.locate,
            rows=numbers.whole(*order),
            starts=numbers.whole(*starts),
        )
        positions, slots, table = [], [], pages.tolist()
        for row, start, count in zip(order, starts, counts, strict=True):
            for position in range(start, start + count):
                positions.append(position)
                slots.append(table[row][position // page_size] * page_size + position % page_size)
        yield Comparison(f"positions, {counts} tokens", blocks.positions, numbers.whole(*positions))
        yield Comparison(f"slots, {counts} tokens", blocks.write_slots, numbers.whole(*slots))


# ---- the small steps of a layer


def _compare_norms(engine: Engine, numbers: Numbers) -> Comparisons:
    parts = parts_of(engine, RMSNorm)
    for part in distinct(parts, lambda part: (part.weight.shape, part.weight.dtype, part.eps)):
        x = numbers.normal(5, part.weight.shape[0])
        for weight in (part.weight, None):  # some layers normalise without a weight
            norm = (numbers.kernels.rms_norm, pointwise.reference_rms_norm)
            yield run(f"{x.shape[1]} values", *norm, x, weight, part.eps)


def _compare_rotations(engine: Engine, numbers: Numbers) -> Comparisons:
    for kind, angles in _rotated(engine, numbers, lambda kind: (kind.num_heads, kind.dim)):
        x = numbers.normal(len(angles[0]), kind.num_heads, kind.dim)
        where = f"{kind.num_heads} heads of {kind.dim}"
        yield run(where, numbers.kernels.rotate, pointwise.reference_rotate, x, angles)


def _rotated(
    engine: Engine, numbers: Numbers, key: Callable[[_Heads], object]
) -> Iterator[tuple[_Heads, pointwise.Angles]]:
    """Yield the kinds of heads that each Rotary can rotate, with its angles at five positions."""
    for model in engine.models.models():
        kinds = distinct(_heads(engine, model), key)
        for rotary in (part for part in model.modules() if isinstance(part, Rotary)):
            last = rotary.cos.shape[0] - 1
            angles = rotary(numbers.whole(0, 1, last // 3, last // 2, last))
            yield from ((kind, angles) for kind in kinds if 2 * rotary.cos.shape[-1] <= kind.dim)


def _compare_activations(engine: Engine, numbers: Numbers) -> Comparisons:
    gates = [(part.gate, part.down.weight.shape[-1]) for part in parts_of(engine, GatedMLP)]
    for part in parts_of(engine, Experts):
        if part.activation.kind != "swiglu_clamped":  # has no kernel
            gates.append((part.activation.kind, part.down.weight.shape[-1]))
    for gate, size in dict.fromkeys(gates):
        gate_mul = (numbers.kernels.gate_mul, pointwise.reference_gate_mul)
        yield run(f"{gate} of {size} values", *gate_mul, numbers.normal(5, 2 * size), gate)


def _compare_block_conv(engine: Engine, numbers: Numbers) -> Comparisons:
    bodies = [model for model in engine.models.models() if isinstance(model, DFlash2) and model.is_convolved]
    convs = [part for body in bodies for part in body.modules() if isinstance(part, BlockConv)]
    for part in distinct(convs, lambda part: tuple(part.base_kernel.shape)):
        size, block = part.base_kernel.shape[2], engine.plan.block
        x, stream = numbers.normal(2, 2 * block, size)
        base, last_base = part.base_kernel
        projection = numbers.normal(*part.kernel_projection.weight.shape) / size**0.5
        own, weight = numbers.normal(2 * block, *part.shape[1:]), numbers.normal(size)
        where = f"{size} channels, 2 blocks of {block}"
        before = map(_joined, (part.kernels.conv_before, reference_conv_before))
        yield run(f"{where}, by a product", *before, x, base, projection, block, num_steps=3)
        after = map(_joined, (part.kernels.conv_after, reference_conv_after))
        inputs = (x, last_base, own, block, stream, weight, 1e-6)
        yield run(f"{where}, normalised", *after, *inputs, num_steps=3)


def _joined(operation: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *inputs: torch.cat([result.flatten() for result in operation(*inputs)])


# ---- heads


def _compare_heads(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare queries and a whole small cache, which reveals writes to wrong slots."""
    for kind, angles in _rotated(engine, numbers, lambda kind: (*kind[:3], *kind[6:])):
        if kind.is_written:
            yield from _compare_writing(kind, angles, numbers)


def _compare_writing(kind: _Heads, angles: pointwise.Angles, numbers: Numbers) -> Comparisons:
    num_tokens, norms = len(angles[0]), None
    sizes = (kind.num_heads, kind.num_kv_heads, kind.num_kv_heads)
    q, k, v = torch.split(numbers.normal(num_tokens, sum(sizes), kind.dim), list(sizes), dim=1)
    if kind.norm_dtype is not None:  # not the model's, as large weights make rounding look like a fault
        q_weight, k_weight = 0.5 + numbers.uniform(2, kind.dim, dtype=kind.norm_dtype)
        norms = heads.HeadNorms(q_weight, k_weight, 1e-6)
    place = numbers.order(2 * num_tokens)[:num_tokens]
    keys, values = numbers.normal(2, kind.num_kv_heads, 2 * num_tokens, kind.dim)
    slots, alone = (heads.Slots(keys.clone(), values.clone(), place) for _ in range(2))
    queries, keys, values = _reference_write(*wide((q, k, v, norms, angles, slots)))
    got = numbers.kernels.norm_rope_write(q, k, v, norms, angles, slots)
    assert got is not None
    yield Comparison(f"queries, {kind}", got, queries, num_steps=4)
    yield Comparison(f"keys, {kind}", slots.keys, keys, num_steps=4)
    yield Comparison(f"values, {kind}", slots.values, values)
    if kind.has_context:
        numbers.kernels.norm_rope_write(None, k, v, norms, angles, alone)
        yield Comparison(f"keys of the context, {kind}", alone.keys, keys, num_steps=4)
        yield Comparison(f"values of the context, {kind}", alone.values, values)


def _reference_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: heads.HeadNorms | None,
    angles: pointwise.Angles,
    slots: heads.Slots,
) -> tuple[Tensor, ...]:
    if norms is not None:
        q, k = (pointwise.reference_rms_norm(x, by, norms.eps) for x, by in ((q, norms.q), (k, norms.k)))
    heads.write(pointwise.reference_rotate(k, angles), v, slots)
    return pointwise.reference_rotate(q, angles), slots.keys, slots.values


def _compare_head_gates(engine: Engine, numbers: Numbers) -> Comparisons:
    parts = parts_of(engine, GatedAttention)
    for num_heads, dim in dict.fromkeys((part.num_heads, part.head_dim) for part in parts):
        x = numbers.normal(5, num_heads, dim)
        gate = 4 * numbers.normal(5, 2 * num_heads, dim)[:, 1::2]  # strided, as in the model
        expected = x.double() * torch.sigmoid(gate.double())
        got = numbers.kernels.gate_heads(x, gate)
        yield Comparison(f"{num_heads} heads of {dim}", got, expected, num_steps=2)


# ---- mixtures


def _compare_routes(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare the logits of the chosen experts, because among equal logits any expert may be chosen."""
    for mixture in mixtures(engine):
        num_experts, num_chosen = mixture.experts.gate_up.weight.shape[0], mixture.num_chosen
        logits, where = 3 * numbers.normal(7, num_experts), f"{num_chosen} of {num_experts} experts"
        weights, ids = numbers.kernels.route(logits, num_chosen, mixture.weighing, mixture.expert_scale)
        expected, likeliest = moe.reference_route(logits.double(), num_chosen, mixture.weighing)
        if mixture.expert_scale is not None:
            expected = expected * mixture.expert_scale.double()[ids]
        yield Comparison(f"choice, {where}", logits.gather(1, ids), logits.double().gather(1, likeliest))
        num_distinct = numbers.whole(*(len(set(chosen)) for chosen in ids.tolist()))
        yield Comparison(f"choice, {where}", num_distinct, torch.full_like(num_distinct, num_chosen))
        yield Comparison(f"weights, {where}", weights, expected)


def _compare_experts(engine: Engine, numbers: Numbers) -> Comparisons:
    for mixture in mixtures(engine):
        experts, shared = mixture.experts, mixture.shared
        num_experts, _, hidden = experts.gate_up.weight.shape
        x, onto = numbers.normal(MAX_MIXED, hidden), numbers.normal(MAX_MIXED, hidden)
        gate = numbers.normal(MAX_MIXED, 1)
        scores = numbers.normal(MAX_MIXED, num_experts, dtype=torch.float32)
        choice = numbers.kernels.route(scores, mixture.num_chosen, mixture.weighing, None)
        routed = _reference_experts(experts, x.double(), choice)
        where = str(mixture)
        yield Comparison(where, experts(x, choice)[0], routed, num_steps=4)
        expected = onto.double() + routed
        if shared is not None:
            expected += torch.sigmoid(gate.double()) * _reference_mlp(shared, x.double())
        beside = None if shared is None else moe.Shared(gate, shared)
        got, normed = experts(x, choice, beside, moe.Onto(onto, torch.ones_like(onto[0]), eps=1e-6))
        yield Comparison(f"{where}, onto the stream", got, expected, num_steps=4)
        expected = pointwise.reference_rms_norm(expected, None, 1e-6)
        yield Comparison(f"{where}, and its norm", normed, expected, num_steps=4)
        for run_of_tiles in tile_runs(engine, mixture, numbers):
            yield _worst_tokens(run_of_tiles)


def _worst_tokens(found: TileRun) -> Comparison:
    """Return the comparison of the tokens that differ most, as float64 of all would need much memory."""
    off = (found.got.float() - found.expected.float()).abs().amax(dim=1)
    worst = off.topk(min(len(off), MAX_OUTPUTS)).indices  # NaN counts as the largest
    return Comparison(found.where, found.got[worst], found.expected[worst].double(), num_steps=4)


def _reference_experts(experts: Experts, x: Tensor, choice: moe.ExpertChoice) -> Tensor:
    """Return the weighted sum of each token's experts, computed one by one."""
    routed = torch.zeros_like(x)
    for token, ids in enumerate(choice.ids.tolist()):
        for weight, expert in zip(choice.weights[token].double(), ids, strict=True):
            routed[token] += weight * _reference_mlp(experts, x[token], expert)
    return routed


def _reference_mlp(part: Experts | SharedExpert, x: Tensor, expert: int | None = None) -> Tensor:
    activation = part.activation if isinstance(part, Experts) else moe.Activation(part.gate)
    inner = activation.function(pointwise.reference_gate_mul)(matrix_of(part.gate_up, expert).reference(x))
    return matrix_of(part.down, expert).reference(inner)


OPERATIONS: dict[str, Callable[[Engine, Numbers], Comparisons]] = {
    "linear": compare_linear,
    "packed product": compare_packed,
    "attention": _compare_attention,
    "compressed attention": _compare_compressed,
    "norm": _compare_norms,
    "rotation": _compare_rotations,
    "activation": _compare_activations,
    "gated product": compare_gated,
    "heads": _compare_heads,
    "heads' gates": _compare_head_gates,
    "gated delta": compare_delta,
    "routing": _compare_routes,
    "experts": _compare_experts,
    "slots": _compare_places,
    "sampling": compare_sampling,
    "acceptance": compare_acceptance,
    "block convolution": _compare_block_conv,
    "walk": compare_walk,
    "trees": compare_trees,
    "lookup": compare_ngram_lookup,
}


@torch.inference_mode()
def check_kernels(engine: Engine) -> Iterator[KernelResult]:
    """Yield one result for each operation that the engine's models use."""
    for operation, compare in OPERATIONS.items():
        found = [measure(operation, comparison) for comparison in compare(engine, Numbers(engine))]
        if found:
            worst = max(found, key=lambda result: result.error / max(result.tolerance, 1e-300))
            yield replace(worst, num_comparisons=len(found))
