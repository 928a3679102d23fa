"""The language of the CPU's kernels: what a kernel computes, what is refused, and in which words."""

from __future__ import annotations

import linecache
import textwrap

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm.compiler import assembly, inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import (
    Floats,
    Int,
    Longs,
    Real,
    Reals,
    Registers,
    Type,
    exp,
    f32,
    f64,
    fma,
    i32,
    i64,
    largest,
    load,
    select,
    sigmoid,
    smallest,
    store,
)

runs = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Share a folder among all tests, so that each kernel is compiled once."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path_factory.getbasetemp()))


def longs(kernel, *given, size=8, **known):
    """Return the `size` integers that `kernel` writes into its first field."""
    out = torch.zeros(size, dtype=torch.int64)
    Jit(kernel, **known)(out, *given, is_small=True)
    return out.tolist()


# ------------------------------------------------------------------------------------------------ control


@kernel
def loops(out: Longs, n: Int) -> None:
    total = 0
    for i in range(n):
        for j in range(i, n, 2):
            total += j
    out[0] = total
    steps = 0
    while total > 1:
        total = total // 2
        steps += 1
    out[1] = steps
    for i in unrolled(2, 8):
        out[i] = i * i


@runs
@pytest.mark.parametrize("n", [0, 1, 7])
def test_loops(n):
    total = sum(j for i in range(n) for j in range(i, n, 2))
    assert longs(loops, n) == [total, max(0, total.bit_length() - 1), 4, 9, 16, 25, 36, 49]


@kernel
def branches(out: Longs, x: Int, *, is_wide: bool) -> None:
    if x < 3:
        size = x + 1
    elif x == 5 or x > 100:
        size = x * 10
    else:
        size = x
    out[0] = size
    found = 1
    if x > 3 and x < 9:
        found = 2
    out[1] = found
    out[2] = x if x > 4 else -x
    if is_wide:
        out[3] = 64
    else:
        out[3] = 32
    if x > 3 and is_wide:
        out[4] = 1
    if is_wide or x > 3:
        out[5] = 1
    if x > 3 and not is_wide:
        out[6] = 1
    if x > 3 or is_wide:
        out[7] = 1


@runs
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("x", [0, 4, 5, 50, 101])
def test_branches_on_what_is_known_and_on_what_is_computed(x, is_wide):
    size = x + 1 if x < 3 else x * 10 if x == 5 or x > 100 else x
    assert longs(branches, x, is_wide=is_wide) == [
        size, 2 if 3 < x < 9 else 1, x if x > 4 else -x, 64 if is_wide else 32, int(x > 3 and is_wide),
        int(is_wide or x > 3), int(x > 3 and not is_wide), int(x > 3 or is_wide),
    ]  # fmt: skip


@kernel
def one_side(out: Longs, *, is_wide: bool) -> None:
    if is_wide:
        out[0] = 64


def test_a_branch_that_is_known_not_to_be_taken_is_not_in_the_code():
    assert "store i64 64" in assembly(one_side, is_wide=True)
    for text in (assembly(one_side, is_wide=False), assembly(loops)[: assembly(loops).index("label")]):
        assert "br i1" not in text


@kernel
def calls(out: Longs, x: Int) -> None:
    out[0] = early(x, True)
    out[1] = early(x, False)
    out[2] = largest_below(x, [2, 3, 5, 7])
    x += 1
    out[3] = x


@inlined
def early(x: Int, is_twice: bool) -> Int:
    x += 0
    if is_twice:
        return x * 2
    x += 5
    return x


@inlined
def largest_below(x: Int, numbers: list[int]) -> Int:
    found = 0
    for number in numbers:
        if number < x:
            found = largest(found, number)
    return found


@runs
def test_an_inlined_function_has_names_of_its_own_and_returns_by_known_branches():
    assert longs(calls, 6, size=4) == [12, 11, 5, 7]


@kernel
def take(out: Longs, n: Int) -> None:
    for item in taken(n):
        out[item] = out[item] + item


@runs
def test_every_item_is_taken_once_by_any_number_of_threads(threads):
    for count in (1, 3):
        threads(count)
        out = torch.ones(1000, dtype=torch.int64)
        Jit(take)(out, 1000)
        assert torch.equal(out, torch.arange(1000) + 1)


@kernel
def names_are_reused(out: Longs, n: Int) -> None:
    for i in unrolled(3):
        out[i] = i
    for k in range(n):
        for i in unrolled(3, 6):  # still known: Registers take it
            kept = Registers((6,), out.zeros(i64))
            kept[i] = k
            out[i] = kept[i]
    k = 5
    for place in [k + 1 for k in range(5, 7)]:
        out[place] = k + place


@runs
def test_the_number_of_an_unrolled_loop_is_known_in_loops_too():
    assert longs(names_are_reused, 5) == [0, 1, 2, 4, 4, 4, 11, 12]


# ------------------------------------------------------------------------------------------------ values


@kernel
def whole_numbers(out: Longs, x: Int, y: Int) -> None:
    out[0] = x // y * 100 + x % y
    out[1] = (x << 3) ^ (x & y) | 1
    out[2] = 7 - x
    out[3] = smallest(x, y) + largest(x, 50) * 1000
    out[4] = x.to(i32).to(i64) >> 1
    out[5] = (x.to(f64) / 4.0 + 0.25).to(i64)
    out[6] = (x == y).to(i64) + (x != y).to(i64) * 2
    out[7] = -y


@runs
def test_whole_numbers():
    x, y = 43, 10
    assert longs(whole_numbers, x, y) == [
        403, (x << 3) ^ (x & y) | 1, 7 - x, 50_010, x >> 1, 11, 2, -10
    ]  # fmt: skip


@kernel
def sums(out: Reals, x: Reals, size: Int, scale: Real, *, real: Type) -> None:
    parts = Registers((2, 2), x.zeros(real.wide(4)))
    for i in range(0, size, 8):
        for half in unrolled(2):
            values = load(x + (i + half * 4), 4)
            parts[half, 0] = parts[half, 0] + values
            parts[half, 1] = fma(values, scale, parts[half, 1])
    out[0] = (parts[0, 0] + parts[1, 0]).halved()
    out[1] = (parts[0, 1] + parts[1, 1]).halved()
    out[2] = parts[0, 0].halved(largest)
    room = x.scratch(real, size)
    for i in range(size):
        room[i] = x[size - 1 - i]
    store(out + 4, load(room, 4).lanes([3, 3, 0, 5], load(x, 4)))


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_registers_vectors_and_room_of_a_thread(dtype):
    x, out = torch.arange(1, 17, dtype=dtype), torch.zeros(8, dtype=dtype)
    Jit(sums, real=REALS[dtype])(out, x, 16, 0.5, is_small=True)
    assert out.tolist() == [136, 68, 16, 0, 13, 13, 16, 2]


@kernel
def functions(size: Int, x: Reals, y: Reals, *, real: Type, name: str) -> None:
    for i in range(0, size, 4):
        values = load(x + i, 4)
        if name == "exp":
            store(y + i, exp(values))
        elif name == "sigmoid":
            store(y + i, sigmoid(values))
        elif name == "rounded":
            store(y + i, round(values))
        else:
            store(y + i, select(values < 0.0, -values, values * 2.0))


def computed(name, x):
    y = torch.empty_like(x)
    Jit(functions, real=REALS[x.dtype], name=name)(x.numel(), x, y, is_small=True)
    return y


def ulps(ours, exact):
    """Return the largest error of `ours` in units of its last place."""
    kind = {torch.float32: torch.int32, torch.float64: torch.int64}[ours.dtype]
    return (ours.view(kind).long() - exact.to(ours.dtype).view(kind).long()).abs().max().item()


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "function"), [("exp", torch.exp), ("sigmoid", torch.sigmoid)])
def test_exp_and_sigmoid_are_within_their_promise(name, function, dtype):
    torch.manual_seed(0)
    low = -80.0 if dtype == torch.float32 else -700.0
    x = torch.cat([torch.rand(40_000) * (79 - low) + low, torch.randn(40_000)]).to(dtype)
    # torch's float64 is itself off by a unit or so where it is all there is to compare with.
    assert ulps(computed(name, x), function(x.double())) <= (2 if name == "exp" else 3)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_exp_and_sigmoid(dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, -800.0, -inf, nan, -1e30, 1.0, -1.0], dtype=dtype)
    y = computed("exp", x)
    assert y[[0, 1, 2, 3, 5]].tolist() == [1, 1, 0, 0, 0]
    assert y[4].isnan()
    x = torch.tensor([0.0, 1e30, -1e30, inf, -inf, nan, -0.0, 800.0], dtype=dtype)
    y = computed("sigmoid", x)
    assert y[[0, 1, 2, 3, 4, 6, 7]].tolist() == [0.5, 1, 0, 1, 0, 0.5, 1]
    assert y[5].isnan()


@runs
def test_rounding_and_choice_lane_by_lane():
    x = torch.tensor([0.5, 1.5, -2.5, 2.4, -0.6, 3.0, -7.0, 1e9])
    assert torch.equal(computed("rounded", x), x.round())
    assert torch.equal(computed("choice", x), torch.where(x < 0, -x, x * 2))


@kernel
def not_contracted(out: Floats, x: Floats) -> None:
    out[0] = x[0] * x[1] + x[2]
    out[1] = fma(x[0], x[1], x[2])
    out[2] = (x[0] + x[2]) + x[3]


@runs
def test_an_operator_rounds_once_and_none_are_joined_or_reordered():
    x, out = torch.tensor([1 + 2.0**-13, 1 - 2.0**-13, -1.0, 2.0**-24]), torch.zeros(3)
    Jit(not_contracted)(out, x, is_small=True)
    assert out[0] == x[0] * x[1] + x[2] == 0.0
    assert out[1] == -(2.0**-26)
    assert out[2] == (x[0] + x[2]) + x[3]


# ------------------------------------------------------------------------------------------------ refusals


REFUSED = [  # the body of a kernel, the line of the mistake in it, and how it is refused
    ("assert n > 3", 1, "not known while it is compiled"),
    ("while True:\n    n += 1", 1, "never end"),
    ("for i in range(n):\n    out[i] = i\n    return", 3, "no return"),
    ("for _ in range(n):\n    break", 2, "a kernel has no 'Break'"),
    ("_ = n in (1, 2)", 1, "a kernel has no 'In'"),
    ("_ = n + nothing_of_that_name", 1, "there is no 'nothing_of_that_name' here"),
    ("_ = n + x[0]", 1, "i64 meets float"),
    ("_ = n + 0.5", 1, "0.5 is no i64"),
    ("out[0] = x[0]", 1, "float goes to i64"),
    ("for i in range(10, 0, -1):\n    out[i] = 0", 1, "counts up"),
    ("total = 0.0\nfor i in range(n):\n    total = total + x[i]", 3, "'total' is the constant 0.0"),
    ("mode = 'small'\nif n > 3:\n    mode = 'large'", 3, "'mode' is the constant 'small'"),
    ("y = x[0]\nfor i in range(n):\n    y = y.to(f64)", 3, "'y' is float and becomes another type"),
    ("at = x\nfor _ in range(n):\n    at = out", 3, "'at' is ptr and becomes another type"),
    ("if n > 3:\n    found = n\nout[0] = found", 3, "there is no 'found' here"),
    ("for i in range(n):\n    found = i\nout[0] = found", 3, "there is no 'found' here"),
    ("y = Registers((4,), n.zeros(f32))\nfor i in range(4):\n    y[i] = y[0]", 3, "has to be known"),
    ("_ = Registers((2, 2), n.zeros(f32))[2, 0]", 1, r"there is no register \(2, 0\)"),
    ("Registers((2,), n.zeros(f32))[0] = n.zeros(f32.wide(4))", 1, "<4 x float> goes to registers of float"),
    ("for i in range(n):\n    out[i] = i\nelse:\n    out[0] = 1", 1, "no 'else'"),
    ("a, b = (1, 2, 3)", 1, "argument 2 is longer"),
    ("_ = 1 // 0", 1, "by zero"),
    ("_ = n.nothing", 1, "no attribute 'nothing'"),
]


@kernel
def inner_mistake(x: Int) -> None:
    with_mistake(x)


@inlined
def with_mistake(x: Int) -> None:
    _ = x + 0.25


@pytest.mark.parametrize(("body", "line", "message"), REFUSED, ids=[one[2] for one in REFUSED])
def test_a_mistake_is_refused_with_the_kernel_and_the_line(body, line, message):
    head, names = "@kernel\ndef wrong(n: Int, x: Floats, out: Longs) -> None:\n", dict(globals())
    text = head + textwrap.indent(body, "    ")
    linecache.cache[body] = (len(text), None, text.splitlines(keepends=True), body)  # where `inspect` looks
    exec(compile(text, body, "exec"), names)  # with this file's `annotations`
    with pytest.raises(TypeError, match=rf"wrong, line {2 + line}: .*{message}"):
        assembly(names["wrong"])


def not_known():
    raise NotImplementedError("by a helper")


@kernel
def asks_helper(out: Longs) -> None:
    out[0] = not_known()


def test_an_error_of_a_helper_passes_as_it_is():
    with pytest.raises(NotImplementedError, match="by a helper"):
        assembly(asks_helper)


def test_the_place_of_a_mistake_is_in_the_function_that_has_it():
    with pytest.raises(TypeError, match=r"with_mistake, line \d+: _ = x \+ 0.25: 0.25 is no i64"):
        assembly(inner_mistake)


def test_a_kernel_is_compiled_for_all_that_it_wants_to_know_and_nothing_else():
    for known in ({}, {"is_wide": True, "real": f32}):
        with pytest.raises(TypeError, match=r"'one_side' is compiled for \['is_wide'\]"):
            assembly(one_side, **known)


def test_kernels_are_not_called_like_functions():
    with pytest.raises(TypeError, match="'early' is part of a kernel"):
        early(3, True)
