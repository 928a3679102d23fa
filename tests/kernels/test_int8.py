"""Products in whole numbers: every path of this machine against int64, and its promise on bits."""

import pytest
import torch

from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.choice import Available
from blockdraft.kernels.cpu import product_path, product_paths, why_no_llvm
from blockdraft.kernels.int8 import (
    MAX_ROTATED,
    hadamard,
    reference_int8_linear,
    reference_look_up,
    rotated_columns,
    round_tokens,
    unpack,
)
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.llvm.compiler import assembly
from blockdraft.kernels.llvm.int8 import Int8Kernels, product
from blockdraft.kernels.pick.products import interleave, pack, pick_int8
from blockdraft.models.packed_int8 import Int8Matrix

WHY_NOT = why_no_llvm(torch.float32, torch.device("cpu"))
needs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=f"the CPU kernels are not chosen: {WHY_NOT}")
PATHS = product_paths()
# [N, K]: less than a block, no multiple of anything, turned by little and by much, and more than one chunk.
SHAPES = [(1, 1), (5, 3), (15, 17), (16, 16), (17, 24), (40, 100), (97, 131), (33, 1536), (1003, 200)]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 33]


def make(n, k, num_tokens=33):
    generator = torch.Generator().manual_seed(n * 10_000 + k)
    weight = torch.randn(n, k, generator=generator)
    x = torch.randn(num_tokens, k, generator=generator) * torch.rand(num_tokens, 1, generator=generator).exp()
    factors = factors_of(k, generator)
    return x, interleave(*pack(weight, factors), factors)


def factors_of(columns, generator):
    """Return powers of two, as a loader does."""
    return torch.randint(-3, 4, (columns,), generator=generator).float().exp2()


@pytest.fixture(scope="module", params=PATHS)
def kernels(request):
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    return Int8Kernels(request.param)


def same_bits(one, other):
    """Compare bits; NaN equals NaN."""
    is_nan = one.isnan()
    return torch.equal(is_nan, other.isnan()) and torch.equal(
        one.masked_fill(is_nan, 0).view(torch.int32), other.masked_fill(is_nan, 0).view(torch.int32)
    )


# ---- products


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_is_that_of_whole_numbers_times_both_scales(kernels, n, k):
    """Compare with int64 products, multiplied in float32 in the order of the contract."""
    x, weight = make(n, k)
    bias, onto = torch.linspace(-1, 1, n), torch.linspace(2, 3, len(x) * n).view(len(x), n)
    values, scale = round_tokens(x, weight.rotated, weight.factors)
    sums = (values.long()[:, None] * unpack(weight.packed)[:n].long()).sum(dim=2)
    exact = sums.float() * weight.scale[:n] * scale[:, None]
    for count in COUNTS:
        some = exact[:count]
        assert torch.equal(kernels.linear(x[:count], weight), some)
        assert torch.equal(kernels.linear(x[:count], weight, bias), some + bias)
        assert torch.equal(kernels.linear(x[:count], weight, None, onto[:count]), onto[:count] + some)
        whole = onto[:count] + (some + bias)
        assert torch.equal(kernels.linear(x[:count], weight, bias, onto[:count]), whole)
        assert torch.equal(reference_int8_linear(x[:count], weight, bias, onto[:count]), whole)


def test_the_largest_sums_are_exact(kernels):
    """Every product is 127 * 127, of either sign; float32 could not count so many."""
    k = 4099  # odd: nothing is turned
    ones = torch.ones(k)
    weight = interleave(*pack(torch.stack((ones, -ones)), ones), ones)
    sums = torch.tensor([127 * 127 * k, -127 * 127 * k]).float()
    for sign in (1.0, -1.0):
        assert torch.equal(
            kernels.linear(torch.full((1, k), sign), weight)[0],
            sums * sign * weight.scale[:2] * torch.tensor(1.0).div(127),
        )


def test_the_bits_do_not_depend_on_the_number_of_threads(kernels, threads):
    x, weight = make(1003, 200)
    first, *others = [threads(n) or kernels.linear(x, weight) for n in (1, 2, 3)]
    assert all(torch.equal(one, first) for one in others)


@needs_kernels
def test_a_picked_product_takes_leading_dimensions_and_strided_tensors():
    linear, look_up = pick_int8(Available("llvm"))
    x, weight = make(17, 24, num_tokens=6)
    bias, onto = torch.arange(17.0), torch.arange(6 * 17.0).view(6, 17)
    expected = reference_int8_linear(x, weight, bias, onto)
    assert torch.equal(linear(x.view(2, 3, 24), weight, bias, onto.view(2, 3, 17)).view(6, 17), expected)
    assert torch.equal(linear(torch.stack([x, x], dim=1)[:, 1], weight, bias, onto), expected)
    assert torch.equal(linear(x.T.contiguous().T, weight, bias, onto), expected)
    assert torch.equal(linear(x, weight, bias, torch.stack([onto, onto], dim=1)[:, 1]), expected)
    assert torch.equal(linear(x, weight, torch.stack([bias, bias], dim=1)[:, 1], onto), expected)
    assert linear(x[:0], weight, bias, None).shape == (0, 17)
    rows = torch.tensor([[16, 3], [0, 7], [3, 3]])
    assert torch.equal(look_up(rows[:, 1], weight), reference_look_up(rows[:, 1], weight))


@needs_kernels
def test_the_products_of_other_processors_compile():
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for path, (processor, features) in {
        "sdot": ("aarch64", "+dotprod"), "generic": ("aarch64", ""), "avx2": ("x86_64", "+avx2"),
        "vnni": ("x86_64", "+avx512f,+avx512vnni"),
    }.items():  # fmt: skip
        target = llvm.Target.from_triple(f"{processor}-unknown-linux-gnu")
        module = llvm.parse_assembly(assembly(product, path=path))
        assert target.create_target_machine(features=features, opt=3).emit_object(module)


# ---- rounding

ODD = {
    "zeros": [0.0] * 19,
    "negative zeros": [-0.0] * 19,
    "one value": [0.0] * 18 + [-3.0],
    "halves": [127.0, *(i + 0.5 for i in range(-9, 9))],
    "tiny": [1e-38 * i for i in range(-9, 10)],
    "denormal": [1e-44 * i for i in range(-9, 10)],
    "tiny beside large": [1e30, *(1e-30 * i for i in range(18))],
    "huge": [3.4e38, -3.4e38, *[1e38] * 17],
    "infinite": [float("inf"), *map(float, range(18))],
    "both infinite": [float("inf"), float("-inf"), *map(float, range(17))],
    "undefined": [*map(float, range(18)), float("nan")],
    "undefined first": [float("nan"), *map(float, range(18))],
    "negative undefined": [1.0, -float("nan"), *map(float, range(17))],
    "undefined and infinite": [float("nan"), float("inf"), *map(float, range(17))],
}


def odd(name, rotated):
    """Return a token that repeats values of ODD, and a usual token."""
    size = max(rotated, 19) + -max(rotated, 19) % rotated
    usual = torch.linspace(-1, 2, size)
    return torch.stack((torch.tensor(ODD[name]).repeat(-(-size // 19))[:size], usual))


@pytest.mark.parametrize("rotated", [2**i for i in range(10)])
def test_tokens_are_rounded_as_the_reference_does(kernels, rotated):
    assert rotated <= MAX_ROTATED
    generator = torch.Generator().manual_seed(rotated)
    for factor in (1, 3):
        x = torch.randn(5, rotated * factor, generator=generator)
        assert_rounded_alike(kernels, x, rotated, factors_of(x.shape[1], generator))
    for name in ODD:
        x = odd(name, rotated)
        assert_rounded_alike(kernels, x, rotated, torch.ones(x.shape[1]))


def assert_rounded_alike(kernels, x, rotated, factors):
    values, scale = kernels.round(x, rotated, factors, is_weight=True)
    expected, its_scale = round_tokens(x, rotated, factors)
    assert same_bits(scale, its_scale)
    is_number = its_scale.isfinite()  # else the whole numbers mean nothing
    assert torch.equal(values[is_number], expected[is_number])
    raised, same_scale = kernels.round(x, rotated, factors)
    assert same_bits(same_scale, scale)
    flip = -128 if kernels.path == "vnni" else 0
    assert torch.equal(raised, values ^ flip)


@pytest.mark.parametrize("rotated", [1, 2, 16, 512])
def test_rounded_tokens_are_near_and_zeros_stay(rotated):
    """The error is at most half a 127th of the largest value, for every magnitude."""
    for name in ("zeros", "one value", "halves", "tiny", "denormal", "tiny beside large"):
        x = odd(name, rotated)
        values, scale = round_tokens(x, rotated, torch.ones(x.shape[1]))
        turned = hadamard(x, rotated)
        near = values[:, : x.shape[1]].double() * scale[:, None].double()
        largest = turned.double().abs().amax(dim=1, keepdim=True)
        least = 1e-36  # below it there is nothing left to divide by
        assert ((near - turned.double()).abs() <= largest * (0.5 / 127 + 1e-6) + least).all(), name
        assert not values[:, x.shape[1] :].any()


@pytest.mark.parametrize("rotated", [1, 8, 64])
@pytest.mark.parametrize("name", [name for name in ODD if "inf" in name or "undef" in name or name == "huge"])
def test_what_is_no_number_never_becomes_one(kernels, name, rotated):
    """The token beside it has the same bits as alone."""
    x = odd(name, rotated)
    generator, ones = torch.Generator().manual_seed(1), torch.ones(x.shape[1])
    weight = interleave(*pack(torch.randn(21, len(ones), generator=generator), ones), ones)
    weight = weight._replace(rotated=rotated)
    got = kernels.linear(x, weight)
    if name != "huge" or rotated > 1:
        assert not got[0].isfinite().any()
    if "undefined" in name:
        assert got[0].isnan().all()
    assert torch.equal(got[1:], kernels.linear(x[1:], weight))
    assert got[1].isfinite().all()


@pytest.mark.parametrize("columns", [1, 2, 3, 12, 64, 100, 576, 1536, 4096])
def test_turning_twice_gives_back_what_was(columns):
    rotated = rotated_columns(columns)
    assert columns % rotated == 0
    assert rotated == MAX_ROTATED or columns // rotated % 2 == 1
    x = torch.arange(3.0 * columns).view(3, columns).sub(columns).fmod(13)  # whole numbers: exact
    assert torch.equal(hadamard(hadamard(x, rotated), rotated), x * rotated)


# ---- weights


@needs_kernels
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_are_packed_as_without_kernels(n, k, monkeypatch):
    generator = torch.Generator().manual_seed(n + k)
    weight, factors = torch.randn(n, k, generator=generator), factors_of(k, generator)
    rows = torch.randint(0, n, (4, 3), generator=generator)
    native = interleave(*pack(weight, factors), factors)
    assert torch.equal(pick_int8(Available("llvm"))[1](rows, native), reference_look_up(rows, native))
    monkeypatch.setattr("blockdraft.kernels.pick.products._is_native", lambda: False)
    for mine, its in zip(native, interleave(*pack(weight, factors), factors), strict=True):
        assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its


@pytest.mark.parametrize(("n", "k"), [(1, 1), (40, 100), (33, 1536)])
def test_a_matrix_is_near_what_it_was_made_of(n, k):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    matrix = Int8Matrix.of(weight.split(7), weight.shape)
    assert matrix.shape == (n, k)
    got = matrix.dequantise(torch.float32)
    rotated = rotated_columns(k)
    # A value is the mean of `rotated` turned ones, each of which is off by half a 127th of the largest.
    bound = hadamard(weight, rotated).abs().amax(dim=1, keepdim=True) * (0.5 / 127 + 1e-5)
    assert ((got - weight).abs() <= bound).all()
    assert (got - weight).abs().mean() < 0.02 * weight.abs().mean()
    assert torch.equal(matrix.look_up(torch.arange(n), REFERENCE), got)


def test_factors_bring_columns_nearer_to_each_other():
    """The columns differ by much; multiplying by a power of two rounds nothing by itself."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-8, 9, (99,), generator=generator).float().exp2()
    x, weight = (
        torch.randn(5, 99, generator=generator) / factors,
        torch.randn(31, 99, generator=generator) * factors,
    )
    exact = x.double() @ weight.double().T
    with_them, without = (
        (Int8Matrix.of([weight], weight.shape, given).matmul(x) - exact).abs().mean()
        for given in (factors, None)
    )
    assert with_them < 0.02 * exact.abs().mean() < without


@pytest.mark.parametrize("begin", [0, 16, 32, 5, 24, 39])
def test_a_matrix_without_its_first_rows(begin):
    x, weight = make(40, 100, num_tokens=3)
    matrix = Int8Matrix(weight)
    whole = matrix.matmul(x)[:, begin:]
    rest = matrix.rows_from(begin)
    assert rest.shape == (40 - begin, 100)
    if begin % 16 == 0:
        assert torch.equal(rest.matmul(x), whole)
        assert torch.equal(rest.dequantise(torch.float32), matrix.dequantise(torch.float32)[begin:])
    else:
        assert (rest.matmul(x) - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_no_number_is_refused(value):
    weight = torch.ones(20, 12)
    weight[17, 5] = value
    with pytest.raises(ModelError, match="infinite or undefined"):
        Int8Matrix.of([weight[:9], weight[9:]], weight.shape)


# ---- which path


def test_the_fastest_path_is_taken_or_the_one_asked_for_if_this_processor_has_it(monkeypatch):
    choose = product_path.__wrapped__
    monkeypatch.delenv("BLOCKDRAFT_PRODUCTS", raising=False)
    assert choose() == PATHS[0]
    assert PATHS[-1] == "generic"
    for path in PATHS:
        monkeypatch.setenv("BLOCKDRAFT_PRODUCTS", path)
        assert choose() == path
    missing = next(path for path in ("sdot", "vnni") if path not in PATHS)
    monkeypatch.setenv("BLOCKDRAFT_PRODUCTS", missing)
    with pytest.raises(SettingsError) as error:
        choose()
    assert all(word in str(error.value) for word in ("BLOCKDRAFT_PRODUCTS", missing, *PATHS))
