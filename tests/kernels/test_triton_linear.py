"""Products of a few tokens in Triton, against float64, and their promise on bits.

Without a card they are interpreted, at some milliseconds for each program of a kernel: few strips.
"""

import pytest
import torch

from blockdraft.kernels import linear as contract
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.pointwise import reference_gate_mul
from blockdraft.kernels.triton import linear as module
from blockdraft.kernels.triton import narrow
from blockdraft.kernels.triton.linear import Config, choose, choose_split, counters, linear
from tests.kernels.implementations import DEVICE, HALF, assert_close, normal, on_card, quiet
from tests.matrix import slow_but

pytestmark = quiet
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_card)]
SHAPES = [(1, 1), (5, 3), (16, 64), (33, 70), (17, 200), (64, 129)]  # [N, K]
REAL = {  # weight rows, columns, is gated: half the rows come out
    "Qwen3-8B qkv": (6144, 4096, False),
    "Qwen3-8B out": (4096, 4096, False),
    "Qwen3-8B gate and up": (24576, 4096, True),
    "Qwen3-8B down": (4096, 12288, False),
    "Qwen3-8B head": (151936, 4096, False),
    "Qwen3-8B drafter's fusion": (4096, 20480, False),
    "Qwen3-8B drafter's kv": (2048, 4096, False),
    "SmolLM2-135M qkv": (960, 576, False),
    "SmolLM2-135M out": (576, 576, False),
    "SmolLM2-135M gate and up": (3072, 576, True),
    "SmolLM2-135M down": (576, 1536, False),
    "SmolLM2-135M head": (49152, 576, False),
}


def make(num_outputs, num_inputs, dtype=torch.float32, num_tokens=5):
    return normal(num_tokens, num_inputs, dtype=dtype), normal(num_outputs, num_inputs, dtype=dtype, seed=1)


def assert_exact(got, x, weight, expected):
    """One rounding to the dtype, behind a sum of products in float32."""
    num_inputs = x.shape[1]
    size = x.double().abs() @ weight.double().abs().T  # roundings are a share of the sum of magnitudes
    bound = num_inputs * torch.finfo(torch.float32).eps * size + torch.finfo(got.dtype).eps * expected.abs()
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.fixture(autouse=True)
def _counters_are_left_at_zero():
    yield
    assert not counters(DEVICE).any()


# ---- meaning


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_agree_with_float64(num_outputs, num_inputs, dtype):
    x, weight = make(num_outputs, num_inputs, dtype)
    got = linear(x, weight)
    assert got.dtype == dtype
    assert got.shape == (5, num_outputs)
    assert_exact(got, x, weight, x.double() @ weight.double().T)


@pytest.mark.parametrize("split", slow_but([1, 2, 3, 4, 5], 1, 3))
@pytest.mark.parametrize("num_inputs", slow_but([1, 16, 80, 160, 163], 1, 163))
def test_columns_are_cut_into_any_number_of_parts(split, num_inputs):
    """Also more parts than there are blocks of columns, and columns that no block divides."""
    x, weight = make(20, num_inputs, num_tokens=3)
    config = Config(block_n=16, block_k=16, split=split, warps=1, stages=2)
    assert_exact(linear(x, weight, config=config), x, weight, x.double() @ weight.double().T)


@pytest.mark.parametrize("num_tokens", slow_but([0, 1, 2, 3, 8, 15, 16, 17, 33, 64], 0, 1, 16, 17))
def test_any_number_of_tokens(num_tokens):
    x, weight = make(33, 70, HALF, num_tokens=num_tokens)
    got = linear(x, weight)
    assert got.shape == (num_tokens, 33)
    assert_exact(got, x, weight, x.double() @ weight.double().T)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("bias_dtype", [HALF, torch.float32], ids=str)
def test_a_bias_is_added_before_the_product_is_rounded(split, bias_dtype):
    x, weight = make(33, 70, HALF)
    bias = 5 * normal(33, dtype=bias_dtype, seed=2)
    got = linear(x, weight, bias, config=Config(16, 16, split, warps=1, stages=2))
    assert_exact(got, x, weight, x.double() @ weight.double().T + bias.double())


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_stream_gets_the_rounded_product(split, dtype):
    """The sum has the bits of adding two tensors; `onto` itself stays."""
    x, weight = make(33, 70, dtype)
    bias, onto = normal(33, dtype=dtype, seed=2), 30 * normal(5, 33, dtype=dtype, seed=3)
    config, before = Config(16, 16, split, warps=1, stages=2), onto.clone()
    got = linear(x, weight, bias, onto=onto, config=config)
    assert torch.equal(got, onto + linear(x, weight, bias, config=config))
    assert torch.equal(onto, before)


@pytest.mark.parametrize(("split", "has_bias"), [(1, True), (2, False)])
@pytest.mark.parametrize("gate", ["none", "silu", "gelu"])
def test_int8_rows_have_a_scale_each(gate, has_bias, split):
    x = normal(4, 70, dtype=HALF)
    values = (40 * normal(38, 70, seed=1)).clamp(-127, 127).to(torch.int8)
    scale = normal(38, seed=2).abs() * 0.01
    bias = normal(38, dtype=HALF, seed=3) if has_bias else None
    config = Config(16, 32, split, warps=1, stages=2)
    got = linear(x, values, bias, scale=scale, gate=gate, config=config)
    product = x.double() @ (values.double() * scale.double()[:, None]).T
    assert_close(got, join(product + (0 if bias is None else bias.double()), gate))


@on_card
@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize("shape", [(38, 70), (4096, 4096), (1024, 12288)], ids=str)
def test_fp8_rows_have_a_scale_each(shape, gate):
    x = normal(7, shape[1], dtype=HALF)
    values = normal(*shape, seed=1).to(torch.float8_e4m3fn)
    scale = normal(shape[0], seed=2).abs() * 0.01
    product = x.double() @ (values.double() * scale.double()[:, None]).T
    assert_close(linear(x, values, scale=scale, gate=gate), join(product, gate))


@on_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_fp8_number_is_widened_exactly(dtype):
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    is_number = ~numbers.float().isnan()
    weight = torch.where(is_number, numbers.float(), 0).to(numbers.dtype).expand(40, 256).contiguous()
    unit = torch.eye(256, dtype=dtype, device=DEVICE)
    for first in range(0, 256, 16):
        some = slice(first, first + 16)
        got = linear(unit[some], weight, scale=torch.ones(40, device=DEVICE))
        expected = numbers[some].to(dtype)[:, None].expand(16, 40)
        assert torch.equal(got[is_number[some]], expected[is_number[some]])


def join(product, gate):
    if gate == "none":
        return product
    return reference_gate_mul(product, gate)


@pytest.mark.parametrize(("split", "has_bias"), [(1, False), (3, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gates_join_the_halves(gate, dtype, has_bias, split):
    """19 outputs: the halves begin at rows 0 and 19, and neither ends with a strip."""
    x, weight = make(38, 70, dtype)
    bias = normal(38, dtype=dtype, seed=2) if has_bias else None
    got = linear(x, weight, bias, gate=gate, config=Config(16, 32, split, warps=1, stages=2))
    assert got.shape == (5, 19)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(got, join(product, gate))


def test_a_gated_product_is_added_to_the_stream():
    x, weight, onto = *make(38, 70, HALF), normal(5, 19, dtype=HALF, seed=3)
    assert torch.equal(linear(x, weight, gate="silu", onto=onto), onto + linear(x, weight, gate="silu"))


@pytest.mark.parametrize("gate", ["none", "silu"])
def test_a_token_may_be_part_of_a_wider_row(gate):
    wide, weight = normal(6, 200, dtype=HALF), normal(34, 70, dtype=HALF, seed=1)
    for x in (wide[:, 64:134], wide[::2, :70], wide.new_zeros(1, 70).expand(4, 70)):
        assert torch.equal(linear(x, weight, gate=gate), linear(x.contiguous(), weight, gate=gate))


# ---- bits


CONFIGS = (Config(16, 16, 1, 1, 2), Config(16, 32, 3, 1, 2), None)


@pytest.mark.parametrize(
    ("dtype", "config", "gate"),
    slow_but(
        [
            (dtype, one, gate)
            for dtype in (torch.float32, HALF)
            for one in CONFIGS
            for gate in ("none", "silu")
        ],
        (torch.float32, CONFIGS[0], "silu"),
        (HALF, CONFIGS[1], "none"),
        (torch.float32, CONFIGS[1], "silu"),
        (HALF, None, "silu"),
        (torch.float32, None, "none"),
    ),
    ids=str,
)
def test_a_token_s_bits_depend_neither_on_its_place_nor_on_the_number_of_tokens(dtype, config, gate):
    x, weight = make(18, 163, dtype, num_tokens=16)
    bias = normal(18, dtype=dtype, seed=2)
    whole = linear(x, weight, bias, gate=gate, config=config)
    for some in ([15], [9, 3], range(7), range(15, -1, -1), [4] * 16):
        index = torch.tensor(list(some), device=DEVICE)
        assert torch.equal(linear(x[index], weight, bias, gate=gate, config=config), whole[index])
    x[2] = float("nan")
    got = linear(x, weight, bias, gate=gate, config=config)
    assert got[2].isnan().all()
    keep = [0, 1, *range(3, 16)]
    assert torch.equal(got[keep], whole[keep])


@pytest.mark.parametrize("gate", ["none", "gelu"])
def test_parts_leave_nothing_for_the_next_product(gate):
    """Counters return to zero, and memory of partial sums is written before it is read."""
    config = Config(16, 16, 4, warps=1, stages=2)
    x, weight = make(40, 70)
    first = linear(x, weight, gate=gate, config=config)
    normal(20, 40).fill_(float("nan"))  # the allocator may hand this out again
    for _ in range(2):
        assert not counters(DEVICE).any()
        assert torch.equal(linear(x, weight, gate=gate, config=config), first)


# ---- how a product is cut


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_are_cut_into_whole_blocks(name):
    num_rows, num_inputs, is_gated = REAL[name]
    num_outputs = num_rows // 2 if is_gated else num_rows
    config = choose_split(16, num_outputs, num_inputs, 2, is_gated, DEVICE)
    assert num_outputs % config.block_n == 0
    assert num_inputs % (config.block_k * config.split) == 0
    assert num_outputs // config.block_n <= len(counters(DEVICE))


@pytest.mark.parametrize("kilobytes", [100, 228])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_inputs", [1, 70, 512, 1000, 2880, 4096, 8192 + 64, 20480])
@pytest.mark.parametrize("num_outputs", [1, 33, 2880, 70_000])
def test_no_sum_is_cut_and_what_is_under_way_fits(num_outputs, num_inputs, is_gated, kilobytes, monkeypatch):
    monkeypatch.setattr(module, "shared_memory", lambda device: kilobytes * 1024)
    choose.cache_clear()
    for block_m in (16, 64, 128):
        config = choose(block_m, num_outputs, num_inputs, 2, is_gated, DEVICE)
        assert config.split == 1
        rows = block_m + config.block_n * (2 if is_gated else 1)
        assert config.stages * rows * config.block_k * 2 <= (kilobytes - 1) * 1024
        split = choose_split(16, num_outputs, num_inputs, 2, is_gated, DEVICE)
        assert split.split == 1 or -(-num_outputs // split.block_n) <= len(counters(DEVICE))
    choose.cache_clear()
    choose_split.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """(number of tokens, gate) of every product that the kernel computes."""
    found = []

    def count(x, *arguments, gate="none", **options):
        found.append((x.shape[0], gate))
        return linear(x, *arguments, gate=gate, **options)

    monkeypatch.setattr(module, "linear", count)
    return found


@pytest.mark.parametrize("is_fast", [True, False])
def test_some_tokens_take_the_kernel_and_more_the_library(calls, is_fast, monkeypatch):
    monkeypatch.setattr(narrow, "MAX_ROWS", 32)
    most = contract.MAX_FEW if is_fast else module.MAX_SOME
    multiply = kernels_for(HALF, DEVICE, is_fast=is_fast, is_interpreted=True).linear
    x, weight = make(33, 70, HALF, num_tokens=most + 1)
    onto, expected = normal(most + 1, 33, dtype=HALF, seed=3), x.double() @ weight.double().T
    assert_close(multiply(x[:most], weight), expected[:most])
    assert_close(multiply(x[:most], weight, onto=onto[:most]), onto[:most] + expected[:most])
    assert calls == [(most, "none")] * 2
    assert_close(multiply(x, weight), expected)
    assert_close(multiply(x, weight, onto=onto.clone()), onto + expected)
    assert_close(multiply(x[None], weight), expected[None])
    assert_close(multiply(x, weight, weight[:, 0]), expected + weight[:, 0])
    assert_close(multiply(x, weight, weight[:, 0], onto=onto.clone()), onto + expected + weight[:, 0])
    assert len(calls) == 2


def test_sums_of_float32_are_always_the_kernel_s(calls):
    multiply = kernels_for(torch.float32, DEVICE, is_interpreted=True).linear
    x, weight = make(33, 70, num_tokens=200)
    assert torch.equal(multiply(x, weight)[150:160], multiply(x[150:160], weight))
    assert calls == [(200, "none"), (10, "none")]


@pytest.mark.parametrize("count", slow_but([1, 17, 64, 65, 130], 17, 65))
def test_a_token_has_the_same_bits_in_tiles_of_any_height(count):
    x, weight = make(40, 96, HALF, num_tokens=130)
    first = torch.cat([linear(x[i : i + 16], weight) for i in range(0, 130, 16)])
    assert torch.equal(linear(x[:count], weight), first[:count])


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_product_takes_one_kernel_or_two_steps(gate, calls):
    most = contract.MAX_FEW
    multiply = kernels_for(torch.float32, DEVICE, is_fast=True, is_interpreted=True).gated_linear
    x, weight = make(34, 70, num_tokens=most + 1)
    bias = normal(34, seed=2)
    expected = reference_gate_mul(x.double() @ weight.double().T + bias.double(), gate)
    assert_close(multiply(x[:most], weight, bias, gate), expected[:most])
    assert calls == [(most, gate)]
    assert_close(multiply(x, weight, bias, gate), expected)
    assert len(calls) == 1, "more tokens are the library's"


# ---- on the card


@on_card
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in REAL),
        ("Qwen3-8B down", torch.float16),
        ("Qwen3-8B gate and up", torch.float32),
        ("SmolLM2-135M down", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [5, 16])
def test_real_products(name, dtype, num_tokens):
    num_rows, num_inputs, is_gated = REAL[name]
    x, weight = normal(num_tokens, num_inputs, dtype=dtype), normal(num_rows, num_inputs, dtype=dtype, seed=1)
    gate = "silu" if is_gated else "none"
    got = linear(x, weight, gate=gate)
    half = num_rows // 2
    if is_gated:
        chosen = torch.arange(0, half, 37, device=DEVICE)
        chosen = torch.cat((chosen, chosen + half))
        some = got[:, chosen[: len(chosen) // 2]]
    else:
        chosen = torch.arange(0, num_rows, 37, device=DEVICE)
        some = got[:, chosen]
    assert_close(some, join(x.double() @ weight[chosen].double().T, gate))
    for count in (1, 3, num_tokens):
        assert torch.equal(linear(x[-count:], weight, gate=gate), got[-count:])


@on_card
def test_products_one_after_another_wait_for_each_other():
    """A chain in a graph, each reading what the one before wrote: the same bits every time."""
    x, weight = make(2048, 2048, HALF)
    weight = weight * 2048**-0.5
    expected = x
    for _ in range(20):
        expected = linear(expected, weight, onto=x)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(20):
            out = linear(out, weight, onto=x)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
