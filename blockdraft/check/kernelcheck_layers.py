"""The comparisons of what a layer is made of besides products and attention, and of what follows the head.

Heads on their way in, gated delta layers, mixtures of experts; sampling, acceptance, places in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.cache.recurrent import RecurrentState, RecurrentStates, Scan
from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.cache.spec import Recurrent
from blockdraft.check.comparison import Comparison, Numbers, models_of, parts_of
from blockdraft.engine.engine import Engine
from blockdraft.kernels import gated_delta
from blockdraft.kernels.acceptance import count_accepted
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.choice import use
from blockdraft.kernels.gated_delta import DeltaWeights, gated_norm
from blockdraft.kernels.heads import HeadNorms, Slots, enter, enter_context, open_heads
from blockdraft.kernels.moe import Shared, Weighing, reference_experts, reference_route, route
from blockdraft.kernels.rows import Angles
from blockdraft.kernels.sampling import SamplingBatch, choose, choose_reference
from blockdraft.kernels.sampling_tables import Real
from blockdraft.models.dflash import DFlashLayer
from blockdraft.models.gated_delta import GatedAttention, GatedDelta
from blockdraft.models.gemma4 import GemmaFeedForward
from blockdraft.models.gpt_oss import GptOssMoE
from blockdraft.models.layers import Attention
from blockdraft.models.moe import ExpertLinear, Experts, MoE, SharedExpert
from blockdraft.models.packed import Packed
from blockdraft.models.rotary import Rotary

NEAR = 1e-4  # of a score: closer tokens are as good as equal, and rounding decides between them
MAX_MIXED = 3  # tokens through the experts: each wants its own, and float64 takes one after another


# ---- heads


class _Entering(NamedTuple):
    """What one kind of layer does with its heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_dtype: torch.dtype | None  # of the norms' weights; None: no norms
    has_context: bool  # keys and values also come alone


def compare_heads(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """Queries, and all of a small cache: a write beside its slots shows as well."""
    for model in models_of(engine):
        kinds = dict.fromkeys(kind for part in model.modules() if (kind := _entering(part)) is not None)
        for rotary in (part for part in model.modules() if isinstance(part, Rotary)):
            positions = numbers.order(min(rotary.cos.shape[0], 20))[:5]
            for kind in kinds:
                if 2 * rotary.cos.shape[-1] <= kind.head_dim:
                    yield from _enter(kind, rotary(positions), numbers)


def _entering(part: object) -> _Entering | None:
    if isinstance(part, GatedAttention):
        return _Entering(
            part.num_heads, part.num_kv_heads, part.head_dim, part.q_norm.weight.dtype, has_context=False
        )
    if isinstance(part, Attention):
        norms = part.norms()
        return _Entering(
            *part.heads[:2], part.head_dim, None if norms is None else norms.q.dtype, has_context=False
        )
    if isinstance(part, DFlashLayer):
        return _Entering(*part.heads[:2], part.head_dim, part.q_norm.weight.dtype, has_context=True)
    return None


def _enter(kind: _Entering, angles: Angles, numbers: Numbers) -> Iterator[Comparison]:
    num_tokens, dim = len(angles[0]), kind.head_dim
    sizes = (kind.num_heads, kind.num_kv_heads, kind.num_kv_heads)
    q, k, v = torch.split(numbers.normal(num_tokens, sum(sizes), dim), list(sizes), dim=1)
    norms = None
    if (
        kind.norm_dtype is not None
    ):  # not the model's weights: beside a large one, rounding looks like a fault
        weights = 0.5 + numbers.uniform(2, dim, dtype=kind.norm_dtype)
        norms = HeadNorms(weights[0], weights[1], 1e-6)
    caches = numbers.normal(2, kind.num_kv_heads, 2 * num_tokens, dim)
    place = numbers.order(2 * num_tokens)[:num_tokens]
    slots, wide_slots = _slots(caches.clone(), place), _slots(caches.double().clone(), place)
    got = enter(q, k, v, norms=norms, angles=angles, slots=slots)
    with use("reference"):
        wide_norms = None if norms is None else HeadNorms(norms.q.double(), norms.k.double(), norms.eps)
        wide = {"norms": wide_norms, "angles": (angles[0].double(), angles[1].double())}
        expected = enter(q.double(), k.double(), v.double(), **wide, slots=wide_slots)  # type: ignore[arg-type]
    where = f"{kind.num_heads}/{kind.num_kv_heads} heads of {dim}"
    yield Comparison(f"queries, {where}", got, expected, num_steps=4)
    yield Comparison(f"keys, {where}", slots.keys, wide_slots.keys, num_steps=4)
    yield Comparison(f"values, {where}", slots.values, wide_slots.values)
    if kind.has_context:
        slots = _slots(caches.clone(), place)
        enter_context(k, v, norms=norms, angles=angles, slots=slots)
        yield Comparison(f"keys of the context, {where}", slots.keys, wide_slots.keys, num_steps=4)
        yield Comparison(f"values of the context, {where}", slots.values, wide_slots.values)


def _slots(caches: Tensor, place: Tensor) -> Slots:
    return Slots(caches[0], caches[1], place)


def compare_open_heads(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    parts = [part for part in parts_of(engine) if isinstance(part, GatedAttention)]
    for num_heads, head_dim in dict.fromkeys((part.num_heads, part.head_dim) for part in parts):
        x = numbers.normal(5, num_heads, head_dim)
        gate = 4 * numbers.normal(5, 2 * num_heads, head_dim)[:, 1::2]  # as the model lays them out
        with use("reference"):
            expected = open_heads(x.double(), gate.double())
        yield Comparison(f"{num_heads} heads of {head_dim}", open_heads(x, gate), expected, num_steps=2)


# ---- gated delta layers


def compare_delta_layers(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """Prompt tokens and a block through a state of its own, kept in part; then the norm behind it."""
    found: dict[Recurrent, GatedDelta] = {}
    for part in parts_of(engine):
        if isinstance(part, GatedDelta):
            storage = engine.cache.storage[part.layer]
            assert isinstance(storage, RecurrentState)
            found.setdefault(storage.spec, part)
    for spec, part in found.items():
        yield from _scan_layer(spec, part, numbers, width=max(engine.models.plan.width, 2))
        yield _gate_norm(spec, part, numbers)


def _scan_layer(spec: Recurrent, part: GatedDelta, numbers: Numbers, *, width: int) -> Iterator[Comparison]:
    """Rows 2 and 0 of three: 5 and 3 known tokens, then a block of which they keep all and one.

    In two layers of the same weights, each with its own tokens: they are committed together.
    """
    sizes = (spec.conv_channels, spec.num_heads, spec.num_heads)
    known, kept = (5, 3), (width, 1)
    weights = DeltaWeights(part.conv[:, 0], part.decay_log, part.gate_bias)
    states = RecurrentStates(spec, num_layers=2, num_rows=3, dtype=numbers.dtype, device=numbers.device)
    states.state.fill_(math.nan)  # a row that begins has no past
    states.tail.fill_(math.nan)
    layers = [RecurrentState(states, index) for index in range(2)]
    rows, starts = numbers.whole(2, 0), numbers.whole(*known)
    begin = Scan(rows, starts * 0, known, True, numbers.whole(0, known[0], sum(known)), max(known))
    block = Scan(rows, starts, (width, width), False, numbers.whole(0, width, 2 * width), width)
    inputs = [[numbers.normal(count + width, sum(sizes)) for count in known] for _ in layers]  # of each row
    reads: list[list[Tensor]] = [[], []]  # of each layer: its rows' known tokens, then their block
    for where, first, last in ((begin, (0, 0), known), (block, known, (None, None))):
        assert where.counts is not None
        for layer, tokens, found in zip(layers, inputs, reads, strict=True):
            stream = torch.cat([tokens[row][first[row] : last[row]] for row in range(2)])
            x, beta, gate = torch.split(stream, list(sizes), dim=1)
            found += torch.split(layer.scan(x, beta, gate, weights, where), list(where.counts))
    states.commit(rows, starts, numbers.whole(*kept))
    for layer, tokens, found in zip(layers, inputs, reads, strict=True):
        for index, row in enumerate((2, 0)):
            got = torch.cat((found[index], found[2 + index]))
            length = known[index] + kept[index]
            yield from _compare_row(layer, row, tokens[index], got, weights, length)


def _compare_row(
    layer: RecurrentState, row: int, inputs: Tensor, reads: Tensor, weights: DeltaWeights, length: int
) -> Iterator[Comparison]:
    """Reads of all of a row's tokens, and what the layer holds of the first `length`."""
    spec = layer.spec
    name = f"{spec.num_key_heads}/{spec.num_heads} heads of {spec.key_dim} x {spec.value_dim}"
    expected, state = _delta_reference(spec, inputs.double(), weights, length)
    yield Comparison(f"reads, {name}", reads, expected, num_steps=6)
    # In the stream's dtype: what the state was made from had no more digits.
    yield Comparison(f"state, {name}", layer.state[row].to(reads.dtype), state, num_steps=6)
    last = inputs[length - spec.conv_width + 1 : length, : spec.conv_channels]
    yield Comparison(f"last inputs, {name}", layer.tail[row], last.double())


def _delta_reference(
    spec: Recurrent, inputs: Tensor, weights: DeltaWeights, length: int
) -> tuple[Tensor, Tensor]:
    """Reads of all tokens, and the state after `length` of them."""
    wide = DeltaWeights(*(weight.double() for weight in weights))
    x, beta, gate = torch.split(inputs, [spec.conv_channels, spec.num_heads, spec.num_heads], dim=1)
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    state = x.new_zeros(1, spec.num_heads, spec.key_dim, spec.value_dim)
    with use("reference"):
        rate, decay = gated_delta.gates(beta, gate, wide)
        tail = x.new_zeros(1, spec.conv_width - 1, spec.conv_channels)
        mixed = gated_delta.convolve(x[None], tail, wide.conv)
        q, k, v = torch.split(mixed, [keys, keys, values], dim=2)
        lead = (1, len(inputs))
        q, k = (part.reshape(*lead, spec.num_key_heads, spec.key_dim) for part in (q, k))
        v = v.reshape(*lead, spec.num_heads, spec.value_dim)
        reads, tape = gated_delta.scan(q, k, v, decay[None], rate[None], state)
        gated_delta.fold(state, tape, torch.tensor([length], device=x.device))
    return reads[0], state[0]


def _gate_norm(spec: Recurrent, part: GatedDelta, numbers: Numbers) -> Comparison:
    weight, eps = part.norm.weight, part.norm.eps
    read = numbers.normal(5, spec.num_heads, spec.value_dim)
    z = numbers.normal(5, spec.num_heads * (spec.value_dim + 1))[:, spec.num_heads :]  # part of a projection
    with use("reference"):
        expected = gated_norm(read.double(), z.double(), weight.double(), eps)
    where = f"norm, {spec.num_heads} heads of {spec.value_dim}"
    return Comparison(where, gated_norm(read, z, weight, eps), expected, num_steps=2)


# ---- mixtures


class _Mixture(NamedTuple):
    """Experts, and how a token's are chosen."""

    experts: Experts
    num_chosen: int
    weighing: Weighing
    expert_scale: Tensor | None = None
    shared: SharedExpert | None = None

    def kind(self) -> tuple[object, ...]:
        parts = (self.experts.gate_up, self.experts.down)
        stored = tuple((tuple(part.weight.shape), type(part.weight), part.bias is None) for part in parts)
        return stored, self.experts.activation, *self[1:3], self.expert_scale is None, self.shared is None


def _mixtures(engine: Engine) -> list[_Mixture]:
    """One of each kind."""
    found: dict[tuple[object, ...], _Mixture] = {}
    for part in parts_of(engine):
        mixture = None
        if isinstance(part, MoE):
            mixture = _Mixture(part.experts, part.num_chosen, part.weighing, shared=part.shared)
        elif isinstance(part, GptOssMoE):
            mixture = _Mixture(part.experts, part.num_chosen, "chosen")
        elif isinstance(part, GemmaFeedForward) and part.has_experts:
            router = part.router
            mixture = _Mixture(part.experts, router.num_chosen, "renormalised", router.expert_scale)
        if mixture is not None:
            found.setdefault(mixture.kind(), mixture)
    return list(found.values())


def compare_routes(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """Which of several equal logits are chosen is left open: it is the logits that must agree."""
    for mixture in _mixtures(engine):
        num_experts = mixture.experts.gate_up.weight.shape[0]
        logits = 3 * numbers.normal(7, num_experts)
        weights, ids, _ = route(logits, mixture.num_chosen, mixture.weighing, mixture.expert_scale)
        expected, likeliest, _ = reference_route(logits.double(), mixture.num_chosen, mixture.weighing)
        if mixture.expert_scale is not None:
            expected = expected * mixture.expert_scale.double()[ids]
        where = f"{mixture.num_chosen} of {num_experts} experts"
        yield Comparison(f"choice, {where}", logits.gather(1, ids), logits.double().gather(1, likeliest))
        num_distinct = [len(set(chosen)) for chosen in ids.tolist()]
        yield Comparison(
            f"choice, {where}", numbers.whole(*num_distinct), numbers.whole(*[ids.shape[1]] * len(ids))
        )
        yield Comparison(f"weights, {where}", weights, expected)


def compare_experts(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    for mixture in _mixtures(engine):
        experts = mixture.experts
        num_experts, _, hidden = experts.gate_up.weight.shape
        x, onto = numbers.normal(MAX_MIXED, hidden), numbers.normal(MAX_MIXED, hidden)
        gate = numbers.normal(MAX_MIXED, 1)
        scores = numbers.normal(MAX_MIXED, num_experts, dtype=torch.float32)
        choice = route(scores, mixture.num_chosen, mixture.weighing)
        products = _Wide(experts.gate_up), _Wide(experts.down)
        with use("reference"):
            wide = choice._replace(weights=choice.weights.double())
            routed = reference_experts(x.double(), *products, wide, experts.activation)
        where = f"{mixture.num_chosen} of {num_experts} experts, {list(experts.down.weight.shape[1:])}"
        yield Comparison(where, experts(x, choice), routed, num_steps=4)
        expected, shared = onto.double() + routed, None
        if mixture.shared is not None:
            shared = Shared(gate, mixture.shared)
            value = _through(mixture.shared, x.double())
            expected = expected + torch.sigmoid(gate.double()) * value
        got = experts(x, choice, shared, onto)
        yield Comparison(f"{where}, onto the stream", got, expected, num_steps=4)


class _Wide:
    """An expert's product in float64, one expert at a time."""

    def __init__(self, part: ExpertLinear) -> None:
        self._part = part

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self._part.bias is None else self._part.bias[expert]
        return _wide_product(x, self._part.weight[expert], bias)

    def matrices(self) -> None:
        return None


def _through(shared: SharedExpert, x: Tensor) -> Tensor:
    """The shared expert in float64."""
    with use("reference"):
        inner = shared.activate(_wide_product(x, shared.gate_up.weight, shared.gate_up.bias))
    return _wide_product(inner, shared.down.weight, shared.down.bias)


def _wide_product(x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
    values = weight.dequantise(torch.float32) if isinstance(weight, Packed) else weight
    product = x @ values.double().T
    return product if bias is None else product + bias.double()


# ---- behind the head


RULES = (
    RowSampling(),
    RowSampling(repetition=1.3, presence=0.4, frequency=0.3, output_start=2),
    RowSampling(temperature=0.8, seed=-3),
    RowSampling(temperature=1.1, top_k=20, min_p=0.02, seed=5),
    RowSampling(temperature=0.9, top_p=0.8, seed=2**40, bias=((1, 3.0),), stop_ids=(0,), min_end=9),
)


def compare_sampling(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    vocab_size = engine.models.config.vocab_size
    rows = _placed(vocab_size, numbers)
    starts, recent = rows.length[rows.active], numbers.integers(min(vocab_size, 9), len(RULES), 2)
    logits = 3 * numbers.normal(len(RULES), 2, vocab_size)
    got = choose(logits, starts, recent, rows.sampling())
    expected = _nearest(got, logits.double(), starts, recent, rows.sampling())
    for row, rule in enumerate(RULES):
        kind = "random" if rule.is_random else "greedy"
        rules = f"{'filtered ' * rule.is_filtered}{'penalised ' * rule.is_penalised}{kind}"
        yield Comparison(f"{rules}, {vocab_size} tokens", got[row], expected[row])


def _placed(vocab_size: int, numbers: Numbers) -> Rows:
    rows = Rows(
        max_rows=len(RULES), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=numbers.device
    )
    for row, rule in enumerate(RULES):
        rows.place(row, numbers.integers(min(vocab_size, 9), 6 + row).tolist(), 5 + row, rule)
    rows.activate(range(len(RULES)))
    return rows


def _nearest(got: Tensor, logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch) -> Tensor:
    """What the reference chooses; `got` itself where it would do so with numbers NEAR the given ones."""
    expected = choose_reference(logits, starts, recent, batch)
    if torch.equal(got, expected):
        return expected
    in_reach = got.clamp(0, logits.shape[2] - 1)[..., None]
    nudged = logits.scatter_add(2, in_reach, torch.full_like(logits[..., :1], NEAR))
    for top_p in (1.0, 1 - NEAR, 1 + NEAR):
        real = batch.real.clone()
        real[:, Real.TOP_P] *= top_p
        for near in (logits, nudged):
            found = choose_reference(near, starts, recent, replace(batch, real=real))
            expected = torch.where(found == got, got, expected)
    return expected


def compare_acceptance(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    width = max(engine.models.plan.width, 2)
    sampled, block = numbers.integers(2, 8, width), numbers.integers(2, 8, width)
    sampled[0, :-1] = block[0, 1:]  # all right
    sampled[1, :-1] = 1 - block[1, 1:]  # all wrong
    agrees = (sampled[:, :-1] == block[:, 1:]).tolist()
    counted = [1 + (row.index(False) if False in row else len(row)) for row in agrees]
    got = count_accepted(sampled, block)
    yield Comparison(f"blocks of {width}", got, numbers.whole(*counted))
    kernel, reference = (_placed(9, Numbers(engine)) for _ in range(2))
    step = block[: len(RULES)], sampled[: len(RULES)], numbers.whole(*counted[: len(RULES)])
    kernel.advance(*step)
    with use("reference"):
        reference.advance(*step)
    penalised = [row for row, rule in enumerate(RULES) if rule.is_penalised]
    after = f"after blocks of {width}"
    yield Comparison(f"lengths {after}", kernel.length, reference.length)
    yield Comparison(f"anchors {after}", kernel.anchor, reference.anchor)
    mine, theirs = (rows.sampling().output_counts[penalised].long() for rows in (kernel, reference))
    yield Comparison(f"counts {after}", mine, theirs)


def compare_places(engine: Engine, numbers: Numbers) -> Iterator[Comparison]:
    """Positions and slots of a ragged stream and of blocks, by counting."""
    width, page_size = engine.models.plan.width, engine.models.plan.page_size
    for counts in ((width, width, width), (3, 1, 2 * page_size + 1)):
        starts = (page_size - 1, 0, 7)
        num_pages = (max(starts) + max(counts)) // page_size + 1
        pages, rows = numbers.order(3 * num_pages).view(3, num_pages), [2, 0, 1]
        blocks = Blocks(
            pages=pages,
            starts=numbers.whole(*starts),
            counts=counts,
            page_size=page_size,
            rows=numbers.whole(*rows),
        )
        table, expected = pages.tolist(), []
        for row, start, count in zip(rows, starts, counts, strict=True):
            for position in range(start, start + count):
                page, offset = divmod(position, page_size)
                expected.append((position, table[row][page] * page_size + offset))
        positions, slots = zip(*expected, strict=True)
        yield Comparison(f"positions, {counts} tokens", blocks.positions, numbers.whole(*positions))
        yield Comparison(f"slots, {counts} tokens", blocks.write_slots, numbers.whole(*slots))
