"""The kernels for mixtures of experts against their PyTorch reference, in the interpreter or on the card."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton = pytest.importorskip("triton")

from blockdraft.kernels import moe as contract  # noqa: E402
from blockdraft.kernels.moe import Activation, Choice, Parts, Shared  # noqa: E402
from blockdraft.kernels.triton import moe, routing  # noqa: E402
from blockdraft.models.config import MoEConfig  # noqa: E402
from blockdraft.models.layers import RMSNorm  # noqa: E402
from blockdraft.models.moe import Experts, MoE  # noqa: E402
from blockdraft.models.packed import Dense, Scaled, Stacked, quantise_fp8, quantise_int8  # noqa: E402
from blockdraft.models.packed_groups import Fp4Groups, pack_nibbles  # noqa: E402

ON_CARD = DEVICE == "cuda"
needs_card = pytest.mark.skipif(not ON_CARD, reason="needs a CUDA device")
HALF = torch.bfloat16 if ON_CARD else torch.float16  # the interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SILU = Activation("silu")
ACTIVATIONS = [
    SILU,
    Activation("gelu"),
    Activation("swiglu_clamped", 0.5),
    Activation("swiglu_clamped"),
]


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


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


def fast(experts, x, choice, shared=None, onto=None, configs=None):
    stacked, single = experts.gate_up.matrices(), experts.down.matrices()
    parts = Parts(*stacked, *single)
    outputs = moe.run_experts(x, parts, choice.ids, experts.activation, choice.groups, configs)
    return moe.combine(outputs, choice.weights, shared, onto)


def slow(experts, x, choice, shared=None, onto=None):
    return contract.reference_experts(
        x, experts.gate_up, experts.down, choice, experts.activation, shared, onto
    )


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    wide = expected.double()
    error = (got.double() - wide).abs() / (wide.abs() + wide.square().mean().sqrt())
    assert error.max() <= TOLERANCE[got.dtype], f"off by {error.max():.2g}"


# ---- routing


@pytest.mark.parametrize("weighing", ["all", "renormalised", "chosen"])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(3, 1), (3, 3), (32, 4), (60, 10), (512, 8)])
def test_route_agrees_with_its_reference(weighing, num_experts, num_chosen):
    logits = 3 * normal(5, num_experts, seed=num_experts)
    weights, ids = routing.route(logits, num_chosen, is_over_all=weighing == "all")
    expected, expected_ids, _ = contract.reference_route(logits, num_chosen, weighing)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


def test_route_scales_by_expert():
    logits, scale = normal(4, 6), normal(6, seed=1)
    weights, ids = routing.route(logits, 2, is_over_all=False, expert_scale=scale)
    expected, expected_ids, _ = contract.reference_route(logits, 2, "renormalised", scale)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


def test_route_gives_ties_to_the_lowest_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0]], device=DEVICE)
    weights, ids = routing.route(logits, 4, is_over_all=False)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_route_stays_in_range_and_distinct_whatever_the_logits(value):
    logits = torch.full((2, 5), value, device=DEVICE)
    logits[1, 3] = 1.0
    _, ids = routing.route(logits, 3, is_over_all=True)
    assert ids.tolist() == [[0, 1, 2], [3, 0, 1]]


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
    "many": torch.randint(0, 7, (600, 2), generator=torch.Generator().manual_seed(1)),  # PyTorch sorts
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


# Tokens, experts, chosen: some that are not powers of two, several tiles of one expert, as much as is held.
AT_ONCE = [(1, 256, 8), (1, 3, 3), (2, 5, 1), (5, 60, 10), (16, 32, 4), (40, 3, 2), (30, 200, 8)]


@pytest.mark.parametrize("weighing", ["all", "renormalised"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), AT_ONCE)
def test_route_and_group_are_the_two_in_one(num_tokens, num_experts, num_chosen, weighing):
    wide = 3 * normal(num_tokens, num_experts + 1, dtype=HALF, seed=num_tokens)
    logits, scale = wide[:, :num_experts], normal(num_experts, seed=1)
    options = {"is_over_all": weighing == "all", "expert_scale": scale}
    weights, ids, (order, tiles) = routing.route_and_group(logits, num_chosen, **options)
    expected, expected_ids = routing.route(logits, num_chosen, **options)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected), "a token's bits depend on its neighbours"
    expected_order, expected_tiles = routing.group(ids, num_experts, routing.LOW)
    assert torch.equal(order, expected_order)
    is_used = expected_tiles[0] >= 0
    assert torch.equal(tiles[0], expected_tiles[0])
    assert torch.equal(tiles[:, is_used], expected_tiles[:, is_used])
    close, close_ids, _ = contract.reference_route(logits.float(), num_chosen, weighing, scale)
    # Equal logits, which half precision makes, are the kernel's to order.
    assert torch.equal(logits.gather(1, ids), logits.gather(1, close_ids))
    if torch.equal(ids, close_ids):
        torch.testing.assert_close(weights, close)


def test_undefined_logits_are_grouped_too():
    logits = torch.full((3, 5), float("nan"), device=DEVICE)
    logits[1, 3] = 1.0
    _, ids, (order, tiles) = routing.route_and_group(logits, 2, is_over_all=True)
    assert ids.tolist() == [[0, 1], [3, 0], [0, 1]]
    assert expand(order.cpu(), tiles.cpu(), 5) == {0: [0, 3, 4], 1: [1, 5], 2: [], 3: [2], 4: []}


def test_routing_at_once_is_for_few_pairs():
    assert routing.can_group_at_once(32, 256, 8)
    assert not routing.can_group_at_once(33, 256, 1), "one program cannot hold the logits"
    assert not routing.can_group_at_once(65, 64, 8), "tiles are not low"
    assert not routing.can_group_at_once(0, 256, 8)


def test_no_routing_needs_more_tiles_than_the_bound():
    for num_pairs, num_experts, block_m in [
        (1, 3, 16),
        (17, 3, 16),
        (128, 256, 16),
        (65, 2, 64),
        (40, 5, 16),
    ]:
        in_use = min(num_pairs, num_experts)
        worst = 0
        for used in range(1, in_use + 1):  # one pair to all experts but one, and the rest spread in tiles + 1
            counts = [1] * used
            left = num_pairs - used
            for place in range(used):
                taken = left if place == used - 1 else min(left, left // block_m * block_m)
                counts[place] += taken
                left -= taken
            worst = max(worst, sum(-(-count // block_m) for count in counts))
        assert worst <= routing.max_tiles(num_pairs, num_experts, block_m)


# ---- experts


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_with_biases(activation):
    experts = build(5, 48, 40, dtype=torch.float32, bias=True, activation=activation)
    x, choice = normal(4, 48, seed=3), drawn(4, 2, 5)
    assert_close(fast(experts, x, choice), slow(experts, x, choice))


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "hidden", "inner"),
    [(1, 1, 3, 16, 16), (1, 4, 64, 32, 80), (33, 3, 4, 64, 24), (2, 2, 3, 144, 40)],
)
def test_sizes(num_tokens, num_chosen, num_experts, hidden, inner):
    experts = build(num_experts, hidden, inner, dtype=HALF)
    x, choice = normal(num_tokens, hidden, dtype=HALF, seed=4), drawn(num_tokens, num_chosen, num_experts)
    assert_close(fast(experts, x, choice), slow(experts, x, choice))


def test_one_expert_takes_all_pairs_and_others_none():
    experts = build(4, 32, 32, dtype=HALF)
    x, weights = normal(35, 32, dtype=HALF, seed=5), normal(35, 1, seed=6)
    choice = Choice(weights, torch.full((35, 1), 2, device=DEVICE))
    assert_close(fast(experts, x, choice), slow(experts, x, choice))


def test_a_choice_that_comes_with_its_groups():
    experts, x = build(6, 32, 32, dtype=HALF), normal(20, 32, dtype=HALF, seed=5)
    choice = Choice(*routing.route_and_group(normal(20, 6, seed=6), 3, is_over_all=False))
    assert torch.equal(fast(experts, x, choice), fast(experts, x, choice._replace(groups=None)))


def test_high_tiles():
    experts = build(2, 80, 48, dtype=HALF, bias=True)
    x, choice = normal(70, 80, dtype=HALF, seed=7), drawn(70, 1, 2)
    many = routing.MAX_FEW + 1
    parts = (experts.gate_up.matrices()[0], experts.down.matrices()[0])
    gated, down = (moe.choose_config(part, HALF, many, 2) for part in parts)
    assert gated.block_m == down.block_m > 16
    assert_close(fast(experts, x, choice, configs=(gated, down)), slow(experts, x, choice))


def test_no_tokens():
    experts = build(3, 16, 16, dtype=HALF)
    choice = Choice(normal(0, 2), torch.empty(0, 2, dtype=torch.int64, device=DEVICE))
    assert fast(experts, normal(0, 16, dtype=HALF), choice).shape == (0, 16)


def test_a_tokens_bits_do_not_depend_on_its_neighbours():
    experts = build(3, 48, 32, dtype=HALF, bias=True)
    x, choice = normal(30, 48, dtype=HALF, seed=8), drawn(30, 2, 3)
    whole = fast(experts, x, choice)
    for some in ([0], [7, 29, 12], range(5, 27)):
        index = torch.tensor(list(some), device=DEVICE)
        alone = fast(experts, x[index], Choice(choice.weights[index], choice.ids[index]))
        assert torch.equal(alone, whole[index])


def test_undefined_neighbours_stay_where_they_are():
    experts = build(3, 32, 32, dtype=HALF)
    x, choice = normal(6, 32, dtype=HALF, seed=9), drawn(6, 2, 3)
    clean = fast(experts, x, choice)
    x[3] = float("nan")
    got = fast(experts, x, choice)
    assert got[3].isnan().all()
    keep = torch.tensor([0, 1, 2, 4, 5], device=DEVICE)
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("has_onto", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_combine_rounds_as_its_reference(has_onto, has_shared, dtype):
    size = 600  # a program's share and some
    outputs, weights = normal(3, 4, size, dtype=dtype), normal(3, 4, seed=1)
    beside = normal(3, 5, dtype=dtype, seed=2)  # the gate is a column of the router's logits
    shared = Shared(beside[:, 4:], normal(3, size, dtype=dtype, seed=3))
    shared = shared if has_shared else None
    onto = normal(3, size, dtype=dtype, seed=4) if has_onto else None
    got = moe.combine(outputs, weights, shared, onto)
    expected = contract.reference_combine(outputs, weights, shared, onto)
    # The order of the sum over the places is PyTorch's own; one unit in the last place may come of it.
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * spacing, atol=8 * spacing)
    if DEVICE == "cpu":  # a GPU fuses products and sums
        assert (got == expected).double().mean() > 0.9


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


@pytest.mark.parametrize("name", FORMATS)
def test_stored_formats(name):
    if name.startswith("fp8") and not ON_CARD:
        pytest.skip("the interpreter does not know fp8")
    experts = build(4, 96, 64, dtype=HALF, bias=True, pack=FORMATS[name])
    x, choice = normal(5, 96, dtype=HALF, seed=14), drawn(5, 2, 4)
    assert_close(fast(experts, x, choice), slow(experts, x, choice))


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
    "another dtype": (None, torch.float16, "float16"),
    "scales are exponents": (exponent_scales, torch.bfloat16, "float8_e8m0fnu"),
    "scales of few columns": (blocks(1, 8), torch.bfloat16, "every 8 columns"),
    "fp4 beside float32": (mxfp4, torch.float32, "float32"),
    "dense behind the packed interface": (lambda v, parts: Dense(v), torch.bfloat16, "format"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_formats_that_no_kernel_reads_say_so(name, monkeypatch):
    monkeypatch.setattr(contract, "why_no_triton", lambda dtype, device: None)
    pack, dtype, reason = UNREAD[name]
    experts = build(3, 32, 32, dtype=torch.bfloat16, pack=pack)
    assert reason in experts.why_not_captured(dtype, torch.device(DEVICE))


@pytest.mark.parametrize("pack", [None, blocks(16, 32), mxfp4], ids=["plain", "int8", "mxfp4"])
def test_formats_that_kernels_read_can_be_captured(pack, monkeypatch):
    monkeypatch.setattr(contract, "why_no_triton", lambda dtype, device: None)
    experts = build(3, 32, 32, dtype=torch.bfloat16, pack=pack)
    assert experts.why_not_captured(torch.bfloat16, torch.device(DEVICE)) is None


# ---- the choice of a path


def test_a_cpu_takes_the_reference_and_says_why():
    experts = build(3, 16, 16, dtype=torch.float32).cpu()
    assert "cpu" in experts.why_not_captured(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_dtype_without_kernels_says_so(dtype):
    assert str(dtype) in contract.why_no_triton(dtype, torch.device("cuda"))


@needs_card
def test_a_graph_holds_for_every_routing():
    config = MoEConfig(num_experts=16, num_chosen=4, inner_size=64, shared_size=32)
    mixture = MoE(128, config).to(DEVICE, HALF).requires_grad_(False)
    for index, parameter in enumerate(mixture.parameters()):
        parameter.data = normal(*parameter.shape, dtype=HALF, seed=index) * parameter.shape[-1] ** -0.5
    norm = RMSNorm(128, 1e-6).to(DEVICE, HALF).requires_grad_(False)
    norm.weight.fill_(1.0)
    x = normal(9, 128, dtype=HALF, seed=20)
    mixture(x, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(x, norm)
    for seed in range(5):
        x.copy_(normal(9, 128, dtype=HALF, seed=30 + seed))
        graph.replay()
        expected = mixture(x, norm)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


REAL = {  # hidden, experts, chosen, inner, has biases
    "Qwen3.5-35B-A3B": (2048, 256, 8, 512, False),
    "gpt-oss-20b": (2880, 32, 4, 2880, True),
    "Gemma-4-26B-A4B": (2816, 128, 8, 704, False),
}


@needs_card
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 700])
@pytest.mark.parametrize("pack", [None, whole(quantise_fp8), mxfp4], ids=["plain", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes(name, pack, num_tokens):
    hidden, num_experts, num_chosen, inner, bias = REAL[name]
    experts = build(min(num_experts, 32), hidden, inner, dtype=HALF, bias=bias, pack=pack)
    x, choice = normal(num_tokens, hidden, dtype=HALF, seed=15), drawn(num_tokens, num_chosen, 32)
    assert_close(fast(experts, x, choice), slow(experts, x, choice))
