"""Norms, activations, places and what happens to a head, in Triton: against float64, and their bits."""

import functools

import pytest
import torch

from blockdraft.kernels.heads import HeadNorms, Slots
from blockdraft.kernels.pointwise import reference_gate_mul, reference_rms_norm, reference_rotate
from blockdraft.kernels.triton.pointwise import gate_heads, gate_mul, locate, norm_rope_write, rms_norm
from tests.kernels.implementations import DEVICE, HAS_CARD, normal, on_card, quiet
from tests.matrix import slow_but

NAN = float("nan")
pytestmark = quiet
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 7, 64, 600]
PLACES = {
    "float32": 8,
    "float16": 1.01,
    "bfloat16": 1.01,
}  # units in the last place: half precision rounds once


def assert_rounded(got, expected, size=0.0):
    """`got` is float64's number, rounded once. `size`: of what cancels on the way there, in float32."""
    assert expected.dtype == torch.float64
    places = PLACES[str(got.dtype).removeprefix("torch.")]
    bound = places * torch.finfo(got.dtype).eps * expected.abs() + 1e-6 * size + 1e-7
    assert ((got.double() - expected).abs() <= bound).all()


# ---- norms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [*SIZES, pytest.param(4096, marks=on_card), pytest.param(12288, marks=on_card)]
)
def test_a_norm_is_that_of_float64_rounded_once(size, dtype):
    x = 3 * normal(4, size, dtype=dtype)
    for weight in (None, normal(size, dtype=dtype, seed=1), normal(size, seed=1)):
        got = rms_norm(x, weight, 1e-5)
        assert got.dtype == dtype
        wide = None if weight is None else weight.double()
        assert_rounded(got, reference_rms_norm(x.double(), wide, 1e-5))


def test_eps_counts():
    x = 1e-3 * normal(3, 20)
    assert_rounded(rms_norm(x, None, 1e-2), reference_rms_norm(x.double(), None, 1e-2))
    assert rms_norm(torch.zeros(2, 20, device=DEVICE), None, 1e-6).eq(0).all()


@pytest.mark.parametrize("dim", slow_but([12, 16, 80], 12))
def test_heads_of_a_projection_are_normalised_where_they_lie(dim):
    heads = normal(3, 5, dim, dtype=torch.float16)
    weight = normal(dim, seed=1)
    for x in (heads[:, 2:4], heads[:, 0::2], heads[:, :1], heads[1:2], heads.transpose(0, 1)):
        before = x.clone()
        got = rms_norm(x, weight, 1e-6)
        assert torch.equal(got, rms_norm(x.contiguous(), weight, 1e-6))
        assert_rounded(got, reference_rms_norm(x.double(), weight.double(), 1e-6))
        assert torch.equal(x, before)


def test_no_tokens():
    assert rms_norm(normal(0, 8), None, 1e-6).shape == (0, 8)
    assert gate_mul(normal(0, 8), "silu").shape == (0, 4)


# ---- activations


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, 5000])
def test_activations_are_those_of_float64(size, dtype, gate):
    x = 4 * normal(3, 2 * size, dtype=dtype)
    got = gate_mul(x, gate)
    assert got.dtype == dtype
    reference = functools.partial(reference_gate_mul, gate=gate)
    assert_rounded(got, reference(x.double()), size=x.double().abs().max() ** 2)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_activations_have_no_bad_ends(gate):
    values = torch.tensor([-1e30, -1000, -90, -0.0, 0.0, 90, 1000, 1e12], device=DEVICE)
    got = gate_mul(torch.cat((values, torch.ones_like(values)))[None], gate)[0]
    torch.testing.assert_close(got, values.clamp(min=0), rtol=1e-6, atol=1e-30)
    assert gate_mul(torch.full((1, 2), NAN, device=DEVICE), gate).isnan().all()


def test_activations_of_a_wider_row_and_of_more_dimensions():
    wide = normal(4, 40)
    assert torch.equal(gate_mul(wide[:, 5:35], "silu"), gate_mul(wide[:, 5:35].contiguous(), "silu"))
    assert torch.equal(gate_mul(wide.view(2, 2, 40), "gelu").view(4, 20), gate_mul(wide, "gelu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 1), (3, 12), (8, 80)])
def test_heads_are_opened_by_their_gates(num_heads, dim, dtype):
    x = normal(4, num_heads, dim, dtype=dtype)
    queries = 5 * normal(4, 2 * num_heads + 3, dim, dtype=dtype, seed=1)  # as gates come: every other head
    gate = queries[:, 1 : 2 * num_heads : 2]
    before = x.clone()
    got = gate_heads(x, gate)
    assert got.dtype == dtype
    assert_rounded(got, x.double() * torch.sigmoid(gate.double()))
    assert torch.equal(x, before)


def test_shut_and_open_heads():
    x, gate = torch.ones(1, 1, 3, device=DEVICE), torch.tensor([[[-200.0, 0.0, 200.0]]], device=DEVICE)
    assert gate_heads(x, gate).flatten().tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("size", [7, 600])
def test_bits_of_a_token_do_not_depend_on_its_neighbours(size):
    x, weight = normal(9, 2 * size, dtype=torch.float16), normal(2 * size)
    gate = normal(9, 2 * size, dtype=torch.float16, seed=1)
    for op in (
        lambda index: rms_norm(x[index], weight, 1e-6),
        lambda index: gate_mul(x[index], "silu"),
        lambda index: gate_mul(x[index], "gelu"),
        lambda index: gate_heads(x[index][:, None], gate[index][:, None]),
    ):
        whole = op(torch.arange(9, device=DEVICE))
        for some in ([4], [8, 0, 3], [2, 2, 2, 2, 2]):
            index = torch.tensor(some, device=DEVICE)
            assert torch.equal(op(index), whole[index])


# ---- places


def test_padding_past_the_last_row_is_left_alone():
    """Offsets may say less than the number of tokens; whoever is past them is nobody's."""
    table, zero = torch.full((1, 4), 3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    offsets = torch.tensor([0, 2], device=DEVICE)
    positions, slots = locate(table, zero, zero + 5, offsets, num_tokens=4, page_size=4)
    assert positions[:2].tolist() == [5, 6]
    assert slots[:2].tolist() == [13, 14]


# ---- heads on their way in


class Heads:
    """Inputs of `norm_rope_write` as a projection leaves them, and a cache that holds NaN."""

    def __init__(self, num_tokens, num_heads, num_kv_heads, dim, turned, dtype, weight_dtype=None):
        sizes = (num_heads, num_kv_heads, num_kv_heads)
        projected = normal(num_tokens, 2 * sum(sizes) + 1, dim, dtype=dtype)
        self.q, self.k, self.v = projected[:, 1::2].split(sizes, dim=1)  # something else between two heads
        self.weights = [normal(dim, dtype=weight_dtype or dtype, seed=seed) for seed in (1, 2)]
        angle = normal(num_tokens, 1, turned // 2, seed=3)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.num_slots = 2 * num_tokens + 3
        generator = torch.Generator().manual_seed(4)
        self.place = torch.randperm(self.num_slots, generator=generator)[:num_tokens].to(DEVICE)
        self.keys, self.values = (
            torch.full((num_kv_heads, self.num_slots, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2)
        )

    def write(self, *, has_norm, has_q=True, some=slice(None)):
        return norm_rope_write(
            self.q[some] if has_q else None,
            self.k[some],
            self.v[some],
            HeadNorms(*self.weights, 1e-5) if has_norm else None,
            (self.cos[some].contiguous(), self.sin[some].contiguous()),
            Slots(self.keys, self.values, self.place[some].contiguous()),
        )

    def expected(self, x, weight, *, has_norm):
        """In float64; and the size of what the rotation adds up."""
        wide = x.double()
        if has_norm:
            wide = reference_rms_norm(wide, weight.double(), 1e-5)
        size = wide.abs().amax(dim=-1, keepdim=True)
        return reference_rotate(wide, (self.cos.double(), self.sin.double())), size

    def check(self, got, *, has_norm):
        if got is not None:
            assert got.dtype == self.q.dtype
            assert_rounded(got, *self.expected(self.q, self.weights[0], has_norm=has_norm))
        assert_rounded(
            self.keys[:, self.place].transpose(0, 1),
            *self.expected(self.k, self.weights[1], has_norm=has_norm),
        )
        assert torch.equal(self.values[:, self.place].transpose(0, 1), self.v)
        rest = torch.ones(self.num_slots, dtype=torch.bool, device=DEVICE)
        rest[self.place] = False
        assert self.keys[:, rest].isnan().all()
        assert self.values[:, rest].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "has_norm"),
    slow_but(
        [(dtype, has_norm) for dtype in (torch.float32, torch.bfloat16) for has_norm in (False, True)],
        (torch.float32, True),
        (torch.bfloat16, False),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "turned"),
    slow_but(
        [(1, 1, 2, 2), (8, 1, 12, 12), (3, 3, 12, 4), (8, 8, 80, 20), (9, 3, 64, 64)],
        (1, 1, 2, 2),
        (9, 3, 64, 64),
    ),
)
def test_heads_enter_normalised_and_rotated(num_heads, num_kv_heads, dim, turned, has_norm, dtype):
    heads = Heads(2, num_heads, num_kv_heads, dim, turned, dtype)
    before = [x.clone() for x in (heads.q, heads.k, heads.v)]
    heads.check(heads.write(has_norm=has_norm), has_norm=has_norm)
    assert all(torch.equal(x, y) for x, y in zip((heads.q, heads.k, heads.v), before, strict=True))


def test_weights_may_be_wider_than_heads():
    heads = Heads(3, 4, 2, 16, 16, torch.float16, weight_dtype=torch.float32)
    heads.check(heads.write(has_norm=True), has_norm=True)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "dim", "turned"), [(1, 12, 12), (3, 80, 40), (8, 16, 16)])
def test_a_context_enters_without_queries(num_kv_heads, dim, turned, has_norm):
    heads = Heads(2, 2, num_kv_heads, dim, turned, torch.float16)
    got = heads.write(has_norm=has_norm, has_q=False)
    assert got is None
    heads.check(None, has_norm=has_norm)
    alone, heads.keys = heads.keys.clone(), torch.full_like(heads.keys, NAN)
    heads.write(has_norm=has_norm)
    assert torch.equal(alone[:, heads.place], heads.keys[:, heads.place])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"),
    [
        (3, 8, 12),
        *(
            pytest.param(*shape, marks=on_card)
            for shape in ((8, 8, 16), (9, 3, 64), (64, 8, 64), (32, 8, 128))
        ),
    ],
)
def test_many_tokens_take_larger_tiles_and_keep_their_bits(num_heads, num_kv_heads, dim):
    heads = Heads(65 if HAS_CARD else 9, num_heads, num_kv_heads, dim, 8, torch.float16)
    whole = heads.write(has_norm=True)
    heads.check(whole, has_norm=True)
    keys = heads.keys.clone()
    for some in (slice(0, 1), slice(6, 8)):
        assert torch.equal(heads.write(has_norm=True, some=some), whole[some])
        assert torch.equal(heads.keys[:, heads.place], keys[:, heads.place])


@on_card
def test_a_cache_of_more_values_than_32_bits_count():
    keys = torch.empty(2, 9_000_000, 128, dtype=torch.bfloat16, device=DEVICE)
    values = torch.empty_like(keys)
    k, v = normal(1, 2, 128, dtype=torch.bfloat16), normal(1, 2, 128, dtype=torch.bfloat16, seed=1)
    angle = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([8_999_999], device=DEVICE)
    norm_rope_write(None, k, v, None, (angle + 1, angle), Slots(keys, values, slots))
    assert torch.equal(keys[:, -1], k[0])
    assert torch.equal(values[:, -1], v[0])


@on_card
@pytest.mark.parametrize("num_tokens", [1, 16, 700])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "turned"),
    [(32, 8, 128, 128), (9, 3, 64, 64), (16, 2, 256, 64), (64, 8, 64, 64)],
)
def test_real_heads(num_heads, num_kv_heads, dim, turned, num_tokens):
    for dtype in (torch.bfloat16, torch.float32):
        heads = Heads(num_tokens, num_heads, num_kv_heads, dim, turned, dtype)
        heads.check(heads.write(has_norm=True), has_norm=True)
