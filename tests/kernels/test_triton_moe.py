"""The kernels for mixtures of experts against their PyTorch reference, in the interpreter or on the card."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from blockdraft.kernels import moe as contract
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.moe import Activation, Beside, ExpertChoice, Matrices, Onto, Parts, Shared
from blockdraft.kernels.pick import mixtures
from blockdraft.kernels.triton import moe, routing
from blockdraft.kernels.triton.pointwise import rms_norm
from blockdraft.models.config import MoEConfig
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.layers import RMSNorm
from blockdraft.models.moe import Experts, MoE, SharedExpert
from blockdraft.models.packed import Dense, Scaled, Stacked, quantise_fp8, quantise_int8
from blockdraft.models.packed_groups import Fp4Groups, IntGroups, pack_nibbles
from tests.kernels.implementations import DEVICE, HALF, HAS_CARD, assert_close, normal, on_card
from tests.matrix import slow_but

SILU = Activation("silu")
ACTIVATIONS = [SILU, Activation("gelu"), Activation("swiglu_clamped", 0.5), Activation("swiglu_clamped")]


def build(num_experts, hidden, inner, *, dtype, bias=False, activation=SILU, pack=None, seed=0):
    """Experts with drawn weights; `pack` makes a stored format of what a loader reads, part by part."""
    config = MoEConfig(num_experts=num_experts, num_chosen=1, inner_size=inner)
    experts = Experts(hidden, config, bias=bias, activation=activation).to(DEVICE, dtype)
    for index, part in enumerate((experts.gate_up, experts.down)):
        _, rows, columns = part.weight.shape
        values = normal(num_experts, rows, columns, seed=seed + index) * columns**-0.5
        weight = torch.nn.Parameter(values.to(dtype)) if pack is None else pack(values, part.parts)
        del part.weight
        part.weight = weight
        if bias:
            part.bias.data = normal(num_experts, rows, dtype=dtype, seed=seed + 9 + index)
    return experts.requires_grad_(False)


def drawn(num_tokens, num_chosen, num_experts, seed=0):
    """Weights and distinct experts per token."""
    scores = normal(num_tokens, num_experts, seed=seed + 77)
    return contract.reference_route(scores, num_chosen, "renormalised")


def build_with_shared(num_experts, hidden, inner, *, dtype, bias=False, pack=None):
    """Experts, and one more in the same format, stored elsewhere."""
    experts = build(num_experts + 1, hidden, inner, dtype=dtype, bias=bias, pack=pack)
    shared = SharedExpert(hidden, inner, bias=bias)
    routed = torch.arange(num_experts, device=DEVICE)
    for part, own in ((experts.gate_up, shared.gate_up), (experts.down, shared.down)):
        weight = part.weight
        del part.weight, own.weight
        part.weight, own.weight = (
            torch.nn.Parameter(cut.clone()) if isinstance(cut, torch.Tensor) else cut
            for cut in (weight[routed], weight[num_experts])
        )
        if bias:
            own.bias.data = part.bias[num_experts].clone()
            part.bias.data = part.bias[:num_experts].clone()
    return experts.requires_grad_(False), shared.requires_grad_(False)


def fast(experts, x, choice, beside=None, onto=None, configs=None):
    stacked, single = experts.gate_up.matrices(), experts.down.matrices()
    parts = Parts(*stacked, *single)
    return moe.run_experts(x, parts, choice, experts.activation, beside, onto, configs)[0]


def slow(experts, x, choice, shared=None, onto=None):
    """By the references of the products too: stored weights are widened, tokens stay as they are."""
    return contract.reference_experts(
        x, experts.gate_up, experts.down, choice, experts.activation, shared, onto
    )[0]


# ---- routing


def _distinct(count, seed):
    """Logits that differ in bfloat16 too."""
    steps = normal(count, seed=seed).argsort() - count // 2
    return steps / 32.0


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "dtype", "weighing"),
    slow_but(
        [
            (*sizes, dtype, weighing)
            for sizes in ((3, 1), (3, 3), (32, 4), (60, 10), (512, 8))
            for dtype in (torch.float32, torch.bfloat16)
            for weighing in ("all", "renormalised", "chosen")
        ],
        (3, 1, torch.float32, "chosen"),
        (3, 3, torch.float32, "renormalised"),
        (60, 10, torch.bfloat16, "all"),
        (512, 8, torch.float32, "renormalised"),
    ),
    ids=str,
)
def test_route_agrees_with_its_reference(weighing, num_experts, num_chosen, dtype):
    logits = torch.stack([_distinct(num_experts, seed) for seed in range(5)]).to(dtype)
    weights, ids = routing.route(logits, num_chosen, is_over_all=weighing == "all")
    expected, expected_ids = contract.reference_route(logits.float(), num_chosen, weighing)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


def test_route_scales_by_expert():
    logits, scale = normal(4, 6), normal(6, seed=1)
    weights, ids = routing.route(logits, 2, is_over_all=False, expert_scale=scale)
    expected, expected_ids = contract.reference_route(logits, 2, "renormalised", scale)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_route_gives_ties_to_the_lowest_id(dtype):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0]], device=DEVICE, dtype=dtype)
    weights, ids = routing.route(logits, 4, is_over_all=False)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]
    zeros = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]], device=DEVICE, dtype=dtype)
    assert routing.route(zeros, 3, is_over_all=False)[1].tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -0.0])
def test_route_stays_in_range_and_distinct_whatever_the_logits(value, dtype):
    logits = torch.full((2, 5), value, device=DEVICE, dtype=dtype)
    logits[1, 3] = 1.0
    for is_over_all in (False, True):
        weights, ids = routing.route(logits, 3, is_over_all=is_over_all)
        assert ids.tolist() == [[0, 1, 2], [3, 0, 1]]
        assert weights.isfinite().all()
        assert (weights[0] == (1 / 5 if is_over_all else 1 / 3)).all()


# ---- grouping


def expand(order, tiles, num_experts):
    """The pairs of every expert, as the tiles name them."""
    found = {expert: [] for expert in range(num_experts)}
    for expert, first, count in tiles.T.tolist():
        if expert >= 0:
            assert count >= 1
            found[expert] += [order[first + i].item() for i in range(count)]
    return found


ROUTINGS = {
    "one token": torch.tensor([[2, 0]]),
    "all to one": torch.full((40, 1), 1),
    "drawn": torch.randint(0, 7, (33, 4), generator=torch.Generator().manual_seed(0)),
    "one each": torch.arange(7)[:, None],
    "many": torch.randint(0, 7, (600, 2), generator=torch.Generator().manual_seed(1)),  # in two launches
}


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", ROUTINGS)
def test_tiles_name_every_pair_once_in_order(name, block_m):
    ids = ROUTINGS[name].to(DEVICE)
    order, tiles = routing.group(ids, 7, block_m)
    assert tiles.shape[1] == routing.max_tiles(ids.numel(), 7, block_m)
    assert int(tiles[2][tiles[0] >= 0].max()) <= block_m
    found = expand(order.cpu(), tiles.cpu(), 7)
    for expert in range(7):
        assert found[expert] == torch.where(ids.flatten() == expert)[0].tolist()


# Pairs, experts, most programs: one pair more than are compared, broken chunks, several to a program.
LARGE = [
    (1025, 1, 128), (1280, 7, 128), (4096, 256, 128), (2000, 255, 3),
    (5000, 512, 128), (17000, 32, 128), (40000, 3, 128),
]  # fmt: skip


@pytest.mark.parametrize(("num_pairs", "num_experts", "max_shares"), slow_but(LARGE, *LARGE[:4]))
@pytest.mark.parametrize("is_uneven", [False, True])
def test_a_large_sort_is_stable(num_pairs, num_experts, max_shares, is_uneven, monkeypatch):
    monkeypatch.setattr(routing, "MAX_SHARES", max_shares)
    generator = torch.Generator().manual_seed(num_pairs)
    drawn_ids = torch.randint(0, num_experts, (num_pairs,), generator=generator)
    if is_uneven:  # most pairs have the last expert, many experts none
        drawn_ids = torch.where(drawn_ids % 3 == 0, drawn_ids, num_experts - 1)
    ids = drawn_ids.view(-1, 1).to(DEVICE)
    order, tiles = routing.group(ids, num_experts, 64)
    ranked, expected = ids.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected)
    is_used = tiles[0] >= 0
    assert torch.equal(torch.where(is_used, tiles, -1).cpu(), tiles_of(ranked, num_experts, 64, len(is_used)))


def tiles_of(ranked, num_experts, block_m, num_tiles):
    """The tiles of sorted ids, expert by expert, and -1 in the unused ones."""
    found, counts = [], torch.bincount(ranked, minlength=num_experts).tolist()
    for expert, count in enumerate(counts):
        begin = sum(counts[:expert])
        found += [(expert, begin + at, min(block_m, count - at)) for at in range(0, count, block_m)]
    return torch.tensor(found + [(-1, -1, -1)] * (num_tiles - len(found)), dtype=torch.int32).T


def test_no_routing_needs_more_tiles_than_the_bound():
    for num_pairs, num_experts, block_m in itertools.product(range(1, 7), range(1, 4), (2, 3)):
        for counts in itertools.product(range(num_pairs + 1), repeat=num_experts):
            if sum(counts) == num_pairs:
                num_tiles = sum(-(-count // block_m) for count in counts)
                assert num_tiles <= routing.max_tiles(num_pairs, num_experts, block_m)


# ---- experts


@pytest.mark.parametrize("activation", slow_but(ACTIVATIONS, *ACTIVATIONS[1:3]), ids=str)
def test_every_activation_with_biases(activation):
    experts = build(5, 48, 40, dtype=torch.float32, bias=True, activation=activation)
    x, choice = normal(4, 48, seed=3), drawn(4, 2, 5)
    assert_close(fast(experts, x, choice), slow(experts, x, choice))


# Experts of each of up to 16 tokens: one takes all, some have several pairs, each has one.
FEW_CHOICES = {
    "one": [[1]] * 16,
    "several": [[4, 1], [0, 2], [1, 0], [5, 4], [0, 1]],
    "distinct": [[3, 0, 5], [1, 2, 4]],
    "one token": [[5, 2, 0]],
}


@pytest.mark.parametrize(
    ("name", "has_shared"),
    slow_but(
        [(name, has_shared) for name in FEW_CHOICES for has_shared in (False, True)],
        *((name, name == "several") for name in FEW_CHOICES),
    ),
)
def test_pairs_of_few_tokens_are_found_without_grouping(name, has_shared, monkeypatch):
    experts, shared = build_with_shared(6, 40, 32, dtype=HALF)
    ids = torch.tensor(FEW_CHOICES[name], device=DEVICE)
    tokens = (
        normal(len(ids), 40, dtype=HALF),
        normal(*ids.shape, seed=3),
        ids,
        normal(len(ids), 1, dtype=HALF),
    )

    def run(x, weights, ids, gate):
        beside = Beside(gate, shared.parts()) if has_shared else None
        return fast(experts, x, ExpertChoice(weights, ids), beside)[: len(tokens[0])]

    grouped = run(*(torch.cat([part, part[:1].expand(17, -1)]) for part in tokens))
    monkeypatch.setattr(moe, "group", None)
    assert torch.equal(run(*tokens), grouped)


FEW_TILES = [(gated, last) for *_, gated in moe._FEW_GATED for *_, last in moe._FEW_DOWN]
MANY_TILES = [*((gated, last) for _, gated, last in moe._BY_PAIRS), (moe.MANY, moe.MANY)]
EVERY_TILE = [*dict.fromkeys(FEW_TILES), *MANY_TILES]


@pytest.mark.parametrize("configs", EVERY_TILE, ids=lambda configs: f"{configs[0].block_m} high")
def test_every_tile(configs):
    experts = build(2, 80, 48, dtype=HALF, bias=True)
    x, choice = normal(70, 80, dtype=HALF, seed=7), drawn(70, 1, 2)
    got = fast(experts, x, choice, configs=configs)
    assert_close(got, slow(experts, x, choice))
    if HAS_CARD:  # a tensor core adds in one way, the interpreter's NumPy does not
        assert torch.equal(got, fast(experts, x, choice, configs=EVERY_TILE[-1]))


def parts_of(num_experts, dtype=HALF, scale=None):
    stored = Matrices(torch.empty(num_experts, 64, 64, dtype=dtype), scale, (1, 64))
    return Parts(stored, stored, stored)


def test_the_height_of_tiles_follows_the_pairs_per_expert():
    def heights(num_pairs, num_experts, **options):
        configs = moe.choose_configs(parts_of(num_experts, **options), HALF, num_pairs)
        return [config.block_m for config in configs]

    assert heights(routing.MAX_FEW, 1) == [16, 16], "the groups of few pairs are of low tiles"
    assert heights(2048, 256) == [16, 16]
    assert heights(4096, 256) == [32, 32]
    assert heights(8192, 256) == [64, 64]
    assert heights(16384, 256) == [128, 128]
    scaled = {"dtype": torch.int8, "scale": torch.ones(256, 64, 1)}
    assert heights(2048, 256, **scaled) == heights(16384, 256, **scaled) == [64, 64]


def test_tiles_fit_a_smaller_device(monkeypatch):
    monkeypatch.setattr(moe, "shared_memory", lambda device: 100 * 1024)
    for num_pairs in (1024, 4096, 16384):
        gated, last = moe.choose_configs(parts_of(256), HALF, num_pairs)
        assert gated.block_m == last.block_m
        assert gated.fits(2, DEVICE)
        assert last.fits(1, DEVICE)


def test_no_tokens():
    experts = build(3, 16, 16, dtype=HALF)
    choice = ExpertChoice(normal(0, 2), torch.empty(0, 2, dtype=torch.int64, device=DEVICE))
    assert fast(experts, normal(0, 16, dtype=HALF), choice).shape == (0, 16)


@pytest.mark.parametrize("has_onto", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_combine_rounds_as_its_reference(has_onto, has_shared, dtype):
    size = 608  # a program's share and some
    outputs, weights = normal(3, 4, size, dtype=dtype), normal(3, 4, seed=1)
    logits = normal(3, 5, dtype=dtype, seed=2)  # the gate is a column of them
    beside = Beside(logits[:, 4:], normal(3, size, dtype=dtype, seed=3)) if has_shared else None
    onto = stream_and_norm(3, size, dtype=dtype) if has_onto else None
    got, normed = moe.combine(outputs, weights, beside, onto)
    expected, _ = contract.reference_combine(outputs, weights, beside, onto)
    # The order of the sum over the places is PyTorch's own; one unit in the last place may come of it.
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * spacing, atol=8 * spacing)
    if not HAS_CARD:  # a GPU fuses products and sums
        assert (got == expected).double().mean() > 0.9
    if onto is None:
        assert normed is None
    else:
        assert torch.equal(normed, rms_norm(got, onto.weight, onto.eps))


@pytest.mark.parametrize(("size", "num_chosen"), [(2048, 8), (2880, 4), (5120, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_norm_of_the_sum_has_the_bits_of_the_norm_alone(size, num_chosen, dtype):
    outputs, weights = normal(17, num_chosen, size, dtype=dtype), normal(17, num_chosen, seed=1)
    onto = stream_and_norm(17, size, dtype=dtype)
    total, normed = moe.combine(outputs, weights, None, onto)
    assert torch.equal(normed, rms_norm(total, onto.weight, onto.eps))


def stream_and_norm(num_tokens, size, dtype=HALF, seed=4):
    weight = 1 + 0.1 * normal(size, seed=seed + 1)
    return Onto(normal(num_tokens, size, dtype=dtype, seed=seed), weight, 1e-5)


def test_a_tokens_norm_does_not_depend_on_its_neighbours():
    outputs, weights, onto = normal(5, 2, 40, dtype=HALF), normal(5, 2, seed=1), stream_and_norm(5, 40)
    whole, normed = moe.combine(outputs, weights, None, onto)
    alone = moe.combine(outputs[3:4], weights[3:4], None, onto._replace(stream=onto.stream[3:4]))
    assert torch.equal(alone[0], whole[3:4])
    assert torch.equal(alone[1], normed[3:4])


# ---- a shared expert


def beside_of(shared, x):
    return Shared(normal(len(x), 1, dtype=x.dtype, seed=21), shared)


@pytest.mark.parametrize("has_shared", slow_but([False, True], True))
def test_a_tokens_bits_do_not_depend_on_its_neighbours(has_shared):
    """Nor do they when a neighbour's numbers are undefined."""
    experts, shared = build_with_shared(3, 48, 32, dtype=HALF, bias=True)
    x, choice, gate = normal(20, 48, dtype=HALF, seed=8), drawn(20, 2, 3), normal(20, 1, dtype=HALF, seed=9)

    def run(some):
        index = torch.tensor(list(some), device=DEVICE)
        chosen = ExpertChoice(choice.weights[index], choice.ids[index])
        return fast(experts, x[index], chosen, Beside(gate[index], shared.parts()) if has_shared else None)

    whole = run(range(20))
    for some in ([19], [17, 2, 12], range(3, 20)):
        assert torch.equal(run(some), whole[list(some)])
    x[1] = float("nan")
    got = run(range(20))
    assert got[1].isnan().all()
    keep = [0, *range(2, 20)]
    assert torch.equal(got[keep], whole[keep])


def on_kernels(experts, dtype=HALF):
    """Bound to the kernels, in the interpreter too; a shared expert's own product does not count."""
    return with_kernels(experts, kernels_for(dtype, DEVICE, is_interpreted=True))


def alone(monkeypatch):
    """Record the calls of a shared expert by itself."""
    calls, right = [], SharedExpert.forward
    monkeypatch.setattr(SharedExpert, "forward", lambda self, x: calls.append(len(x)) or right(self, x))
    return calls


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "hidden", "inner"),
    slow_but(
        [(1, 1, 3, 16, 16), (1, 4, 64, 32, 80), (33, 2, 3, 48, 24), (17, 1, 3, 48, 40), (2, 2, 3, 144, 40)],
        (1, 1, 3, 16, 16),
        (2, 2, 3, 144, 40),
    ),
)
def test_a_shared_expert_runs_with_the_routed(
    num_tokens, num_chosen, num_experts, hidden, inner, monkeypatch
):
    experts, shared = build_with_shared(num_experts, hidden, inner, dtype=HALF)
    x, onto = normal(num_tokens, hidden, dtype=HALF, seed=4), stream_and_norm(num_tokens, hidden)
    choice, beside = drawn(num_tokens, num_chosen, num_experts), beside_of(shared, x)
    expected = slow(experts, x, choice, beside, onto)
    calls = alone(monkeypatch)
    assert_close(on_kernels(experts)(x, choice, beside, onto)[0], expected)
    assert calls == []


def another_size(shared):
    return build_with_shared(3, 32, 64, dtype=HALF)[1]


def another_format(shared):
    return build_with_shared(3, 32, 32, dtype=HALF, pack=whole(quantise_int8))[1]


def odd_address(shared):
    shared.down.weight.data = normal(32 * 32 + 1, dtype=HALF, seed=1)[1:].view(32, 32)
    return shared


def unread_format(shared):
    weight = shared.down.weight.data
    del shared.down.weight
    shared.down.weight = Dense(weight)
    return shared


@pytest.mark.parametrize("other", [another_size, another_format, odd_address, unread_format])
def test_a_shared_expert_that_is_stored_differently_runs_alone(other, monkeypatch):
    experts, shared = build_with_shared(3, 32, 32, dtype=HALF)
    shared = other(shared)
    x, choice = normal(2, 32, dtype=HALF, seed=4), drawn(2, 2, 3)
    beside = beside_of(shared, x)
    expected = slow(experts, x, choice, beside)
    calls = alone(monkeypatch)
    assert_close(on_kernels(experts)(x, choice, beside)[0], expected)
    assert calls == [2]


def test_rows_with_other_gaps_do_not_join():
    routed, shared = Matrices(normal(3, 16, 32)), Matrices(normal(1, 16, 32))
    assert mixtures._can_join(shared, routed)
    assert not mixtures._can_join(Matrices(normal(1, 16, 40)[:, :, :32]), routed)
    assert not mixtures._can_join(shared._replace(bias=normal(1, 16)), routed)
    assert not mixtures._can_join(shared._replace(block=(1, 32)), routed)


def test_for_many_pairs_a_shared_expert_runs_alone(monkeypatch):
    monkeypatch.setattr(mixtures, "_MAX_JOINED", 9)
    experts, shared = build_with_shared(3, 32, 32, dtype=HALF)
    calls = alone(monkeypatch)
    for num_tokens in (4, 5):
        x = normal(num_tokens, 32, dtype=HALF, seed=4)
        on_kernels(experts)(x, drawn(num_tokens, 2, 3), beside_of(shared, x))
    assert calls == [5]


# ---- stored formats


def whole(quantise):
    return lambda values, parts: quantise(values)


def by_part(quantise):
    return lambda values, parts: Stacked([quantise(part.contiguous()) for part in values.split(parts, 1)])


def blocks(rows, columns, dtype=torch.int8):
    """One scale per block; rows or columns None: all of them."""

    def pack(values, parts):
        block = (rows or values.shape[1], columns or values.shape[2])
        grid = [-(-size // side) for size, side in zip(values.shape[1:], block, strict=True)]
        scale = normal(values.shape[0], *grid, seed=11).abs() * 0.01 + 0.01
        stored = (values * 40).clamp(-100, 100).to(dtype)
        return Scaled(stored, scale, block=block)

    return pack


def mxfp4(values, parts):
    codes = (normal(*values.shape, seed=12) * 1000).long().remainder(16).to(torch.uint8)
    groups = (*values.shape[:2], values.shape[2] // 32)
    exponents = 124 + normal(*groups, seed=13).round().clamp(-2, 2)
    exponents[0, 0] = 0  # the smallest there is
    return Fp4Groups(pack_nibbles(codes), exponents.to(torch.uint8).view(torch.float8_e8m0fnu))


def int4(group, *, has_zero=True, scale=torch.bfloat16):
    def pack(values, parts):
        codes = (normal(*values.shape, seed=12) * 1000).long().remainder(16).to(torch.uint8)
        sizes = (*values.shape[:2], values.shape[2] // (group or values.shape[2]))
        buffers = {
            "codes": pack_nibbles(codes),
            "scale": (normal(*sizes, seed=13).abs() * 0.03 + 0.01).to(scale),
            "zero": (normal(*sizes, seed=14) * 99).long().remainder(16).to(torch.uint8) if has_zero else None,
            "group_index": None,
        }
        return IntGroups(values.shape, buffers, bits=4, group_size=group or values.shape[2])

    return pack


def nvfp4(second):
    def pack(values, parts):
        codes = (normal(*values.shape, seed=12) * 1000).long().remainder(16).to(torch.uint8)
        sizes = (*values.shape[:2], values.shape[2] // 16)
        scale = (normal(*sizes, seed=13) * 1000).long().remainder(127).to(torch.uint8)
        whole = (0.5 + normal(values.shape[0], 1, 1, seed=15).abs()) * 1e-3
        given = {second: whole if second == "multiplier" else 1 / whole}
        return Fp4Groups(pack_nibbles(codes), scale.view(torch.float8_e4m3fn), **given)

    return pack


CODES = {
    "int4": int4(32),
    "int4 by part": by_part(lambda values: int4(16, scale=torch.float16)(values, ())),
    "int4 of rows": int4(None, has_zero=False, scale=torch.float32),
    "nvfp4 multiplied": by_part(lambda values: nvfp4("multiplier")(values, ())),
    "nvfp4 divided": nvfp4("divisor"),
}


@pytest.mark.parametrize("block_k", slow_but([32, 64], 64))
@pytest.mark.parametrize("name", CODES)
def test_codes_are_widened_to_the_bits_of_dequantise(name, block_k):
    """Each token is one column of the weight; 96 columns are no whole steps of 64."""
    experts = build(3, 96, 64, dtype=HALF, pack=CODES[name])
    config = moe.Config(16, 32, block_k, num_warps=1, num_stages=2)
    columns = torch.arange(0, 96, 5, device=DEVICE)
    x = torch.eye(96, dtype=HALF, device=DEVICE)[columns]
    weight = experts.gate_up.weight.dequantise(HALF)
    ids = torch.arange(len(columns), device=DEVICE)[:, None] % 3
    expected = weight[ids[:, 0], :, columns]
    assert expected.isfinite().all()
    for matrices, wanted in zip(experts.gate_up.matrices(), expected.split(64, dim=1), strict=True):
        out = torch.empty(len(columns), 64, dtype=HALF, device=DEVICE)
        groups = routing.group(ids, 3, 16)
        moe._launch(x, out, (matrices,), None, ids=ids, groups=groups, config=config)
        assert torch.equal(out, wanted)


def compile_for_a_card(code, is_few):
    """Its columns are in order, as those of plain weights; nothing is spilled or left unwaited."""
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config, kernel = moe._FEW_CODES if is_few else moe.MANY, moe._experts_kernel
    names = kernel.arg_names
    kinds = {
        "*bf16": "x out", "*u8": "first_values second_values first_scale second_scale",
        "*i64" if is_few else "*i32": "ids order tiles", "i32": "num_tiles num_tokens stride_expert "
        "stride_row stride_scale_expert stride_scale_row",
    }  # fmt: skip
    kinds |= {"int4": {"*i8": "first_zero second_zero"}, "nvfp4": {"*fp32": "first_whole second_whole"}}.get(
        code, {}
    )
    signature = {name: kind for kind, listed in kinds.items() for name in listed.split()}
    if code == "int4":
        signature |= {"first_scale": "*bf16", "second_scale": "*bf16"}
    constants = {
        "stride_bias": 0, "NUM_EXPERTS": 128, "NUM_CHOSEN": 8, "CHOSEN_PAD": 8, "ROWS": 768, "COLUMNS": 2048,
        "SCALE_ROWS": 1, "SCALE_COLUMNS": {"int4": 128, "nvfp4": 16, "mxfp4": 32}[code], "CODE": code,
        "IS_DIVISOR": False, "IS_CARD": True, "KIND": "silu", "PRECISION": "tf32", "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "IS_FEW": is_few, "IS_SINGLE": False,
        "PDL": True,
    }  # fmt: skip
    constants = {name: constants.get(name) for name in names if name not in signature}
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in signature if "num_" not in name},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert set(re.findall(r"kWidth = (\d+)", made.asm["ttgir"])) == ({"2"} if is_few else set())
    loop = re.search(r"scf\.for.*?scf\.yield", made.asm["ttgir"], re.DOTALL)[0]
    assert set(re.findall(r"warp_group_dot_wait.*?pendings = (\d+)", loop)) <= {"0"}
    assert ".local" not in made.asm["ptx"], "nothing is spilled"


@pytest.mark.slow
@pytest.mark.parametrize("code", ["int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("tiles", ["few", "many"])
def test_the_columns_of_codes_stay_in_order(code, tiles):
    """Otherwise few tokens would be added up in another order than many."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_triton_moe", code, tiles]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


FORMATS = {
    "int8": whole(quantise_int8),
    "int8 by part": by_part(quantise_int8),
    "int8 per tensor": blocks(None, None),
    "int8 in blocks": blocks(16, 32),
    "mxfp4": mxfp4,
    "mxfp4 by part": by_part(lambda values: mxfp4(values, ())),
    "fp8": whole(quantise_fp8),
    "fp8 by part": by_part(quantise_fp8),
    "fp8 in blocks": blocks(32, 32, torch.float8_e4m3fn),
}


@pytest.mark.parametrize(
    "name", slow_but([*FORMATS, *CODES], "int8 in blocks", "mxfp4 by part", "int4 by part", "nvfp4 divided")
)
def test_stored_formats_with_a_shared_expert(name, monkeypatch):
    if name.startswith("fp8") and not HAS_CARD:
        pytest.skip("the interpreter does not know fp8")
    experts, shared = build_with_shared(4, 96, 64, dtype=HALF, bias=True, pack=(FORMATS | CODES)[name])
    x, choice = normal(5, 96, dtype=HALF, seed=14), drawn(5, 2, 4)
    beside = beside_of(shared, x)
    expected = slow(experts, x, choice, beside)
    calls = alone(monkeypatch)
    assert_close(on_kernels(experts)(x, choice, beside)[0], expected)
    assert bool(calls) == (name in CODES and name != "int4 of rows"), "with zero points or second scales"


def test_weights_that_cannot_be_cut_between_gate_and_up_have_no_matrices():
    dense = build(3, 32, 32, dtype=HALF, pack=lambda v, parts: Stacked([Dense(p) for p in v.split(parts, 1)]))
    assert dense.gate_up.matrices() is None
    uneven = build(3, 32, 24, dtype=HALF, pack=blocks(16, 32))
    assert uneven.gate_up.matrices() is None, "a block of scales has rows of gate and of up"
    assert uneven.down.matrices() is not None


def exponent_scales(values, parts):
    scale = torch.full((*values.shape[:2], 1), 127, dtype=torch.uint8, device=DEVICE)
    stored = values.to(torch.int8)
    return Scaled(stored, scale.view(torch.float8_e8m0fnu), block=(1, values.shape[2]))


UNREAD = {
    "groups that steps do not divide": (int4(24), torch.bfloat16, "groups of 24 columns"),
    "codes in float32": (int4(32), torch.float32, "int4 only in half-precision"),
    "another dtype": (None, torch.float16, "float16"),
    "scales are exponents": (exponent_scales, torch.bfloat16, "float8_e8m0fnu"),
    "scales of few columns": (blocks(1, 8), torch.bfloat16, "every 8 columns"),
    "fp4 beside float32": (mxfp4, torch.float32, "float32"),
    "dense behind the packed interface": (lambda v, parts: Dense(v), torch.bfloat16, "format"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_formats_that_no_kernel_reads_say_so(name):
    pack, dtype, reason = UNREAD[name]
    experts = build(3, 32, 32, dtype=torch.bfloat16, pack=pack)
    assert reason in on_kernels(experts, dtype).why_not_captured()


def across(tensor):
    """The same values, but those of a column are next to each other."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("buffer", ["values", "scale"])
def test_experts_whose_columns_lie_apart_are_run_one_by_one(buffer):
    """The kernels read whole rows, so with such experts they would be wrong."""
    experts = build(3, 32, 32, dtype=HALF, pack=blocks(16, 16))
    weight = experts.down.weight
    setattr(weight, buffer, across(getattr(weight, buffer)))
    x, choice = normal(5, 32, dtype=HALF, seed=14), drawn(5, 2, 3)
    served = on_kernels(experts)
    assert "next to each other" in served.why_not_captured()
    assert_close(served(x, choice)[0], slow(experts, x, choice))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_plain_experts_whose_columns_lie_apart_have_no_kernel(name):
    experts = build(3, 32, 32, dtype=HALF, bias=True)
    parameter = getattr(experts.down, name)
    parameter.data = across(parameter.data)
    assert "next to each other" in on_kernels(experts).why_not_captured()


@pytest.mark.parametrize(
    "pack", [None, blocks(16, 32), mxfp4, int4(32)], ids=["plain", "int8", "mxfp4", "int4"]
)
def test_formats_that_kernels_read_can_be_captured(pack):
    experts = build(3, 32, 32, dtype=torch.bfloat16, pack=pack)
    assert on_kernels(experts, torch.bfloat16).why_not_captured() is None


# ---- the choice of a path


def test_a_cpu_takes_the_reference_and_says_why():
    experts = build(3, 16, 16, dtype=torch.float32).cpu()
    kernels = kernels_for(torch.float32, torch.device("cpu"))
    assert "cpu" in with_kernels(experts, kernels).why_not_captured()


@on_card
@pytest.mark.parametrize("num_tokens", [3, 9])
@pytest.mark.parametrize("shared_size", [None, 32, 64])
def test_a_graph_holds_for_every_routing(num_tokens, shared_size):
    config = MoEConfig(num_experts=16, num_chosen=4, inner_size=64, shared_size=shared_size)
    mixture = MoE(128, config).to(DEVICE, HALF).requires_grad_(False)
    for index, parameter in enumerate(mixture.parameters()):
        parameter.data = normal(*parameter.shape, dtype=HALF, seed=index) * parameter.shape[-1] ** -0.5
    norm = RMSNorm(128, 1e-6).to(DEVICE, HALF).requires_grad_(False)
    norm.weight.fill_(1.0)
    mixture, norm = on_kernels(mixture), on_kernels(norm)
    x = normal(num_tokens, 128, dtype=HALF, seed=20)
    mixture(x, norm, next_norm=norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(x, norm, next_norm=norm)
    for seed in range(5):
        x.copy_(normal(num_tokens, 128, dtype=HALF, seed=30 + seed))
        graph.replay()
        expected = mixture(x, norm, next_norm=norm)
        torch.cuda.synchronize()
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])


REAL = {  # hidden, experts, chosen, inner, has biases
    "Qwen3.5-35B-A3B": (2048, 256, 8, 512, False),
    "gpt-oss-20b": (2880, 32, 4, 2880, True),
    "Gemma-4-26B-A4B": (2816, 128, 8, 704, False),
}


@on_card
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 700])
@pytest.mark.parametrize("pack", [None, whole(quantise_fp8), mxfp4], ids=["plain", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes(name, pack, num_tokens):
    hidden, num_experts, num_chosen, inner, bias = REAL[name]
    experts = build(min(num_experts, 32), hidden, inner, dtype=HALF, bias=bias, pack=pack)
    x, choice = normal(num_tokens, hidden, dtype=HALF, seed=15), drawn(num_tokens, num_chosen, 32)
    # The reference rounds widened weights; of two million numbers, one is further off than elsewhere.
    assert_close(fast(experts, x, choice), slow(experts, x, choice), tolerance=4e-2)


@on_card
@pytest.mark.parametrize("name", ["mxfp4", *CODES])
def test_codes_have_the_bits_of_unpacked_weights_for_any_number_of_tokens(name):
    experts = build(8, 2048, 768, dtype=torch.bfloat16, pack={"mxfp4": mxfp4, **CODES}[name])
    unpacked = build(8, 2048, 768, dtype=torch.bfloat16)
    for part, other in ((unpacked.gate_up, experts.gate_up), (unpacked.down, experts.down)):
        part.weight.data = other.weight.dequantise(torch.bfloat16)
    x, choice = normal(700, 2048, dtype=torch.bfloat16, seed=15), drawn(700, 4, 8)
    expected = fast(unpacked, x, choice)
    for count in (1, 2, 16, 17, 100, 700):
        some = ExpertChoice(choice.weights[:count], choice.ids[:count])
        assert torch.equal(fast(experts, x[:count], some), expected[:count])


@on_card
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@pytest.mark.parametrize("pack", [None, whole(quantise_fp8), mxfp4], ids=["plain", "fp8", "mxfp4"])
def test_a_shared_expert_at_a_real_shape(pack, num_tokens, monkeypatch):
    hidden, _, num_chosen, inner, _ = REAL["Qwen3.5-35B-A3B"]
    experts, shared = build_with_shared(32, hidden, inner, dtype=HALF, pack=pack)
    x, onto = normal(num_tokens, hidden, dtype=HALF, seed=15), stream_and_norm(num_tokens, hidden)
    choice, beside = drawn(num_tokens, num_chosen, 32), beside_of(shared, x)
    calls = alone(monkeypatch)
    got, _ = on_kernels(experts)(x, choice, beside, onto)
    assert calls == []
    assert_close(got, slow(experts, x, choice, beside, onto))


if __name__ == "__main__":
    compile_for_a_card(sys.argv[1], sys.argv[2] == "few")
