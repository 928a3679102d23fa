"""Tapes of recorded steps: a replay is what running it again would be, in memory that lives long enough."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from blockdraft.kernels.cpu import why_no_llvm

if why_no_llvm(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("the CPU kernels are not chosen", allow_module_level=True)

from blockdraft.kernels.llvm import pool as pool_module
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.copies import lowered
from blockdraft.kernels.llvm.jit import Jit, NotRecordable, new_pool, pool, recorder, repeat
from blockdraft.kernels.llvm.language import Floats, Int, Longs, invoke, load_shared, pause
from blockdraft.kernels.llvm.pool import TICKET, Pool
from blockdraft.kernels.llvm.tape import Arena, StepTape

ROWS, COLUMNS = 4, 6
aten = torch.ops.aten


@kernel
def halve_and_add(count: Int, x: Floats, y: Floats) -> None:
    for i in taken(count):
        y[i] = x[i] * 0.5 + 1.0


HALVE = Jit(halve_and_add)


def halved(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    HALVE(x.numel(), x.contiguous(), y)
    return y


# ---- programs


def changed_range(x):
    constant = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    part = constant[:, 2:]
    part.mul_(0.125).add_(x[:, 2:])
    return constant


HOST = {"adds": 1.0}  # the host knows it, and it changes between replays


def asked_again(x):
    out = torch.empty(ROWS, COLUMNS)
    repeat(lambda: out.copy_(x * 0.5 + HOST["adds"]))
    return out


INDEX = torch.tensor([3, 0, -1, 0])
NEW = {  # of two tensors [ROWS, COLUMNS], one
    "a kernel": lambda x, y: halved(x),
    "a kernel of two": lambda x, y: halved(halved(x) - y),
    "PyTorch": lambda x, y: (x - y).sin(),
    "two results": lambda x, y: torch.sub(*torch.sort(x, dim=1)[:1], y),
    "a view": lambda x, y: x[:, :],
    "another view": lambda x, y: x.reshape(COLUMNS, ROWS).T,
    "a copy": lambda x, y: x.T.contiguous().T,
    "a copy as it lies": lambda x, y: x.T.clone().T,
    "parts": lambda x, y: torch.cat((x[:1], y[1:, :]), dim=0),
    "columns": lambda x, y: torch.cat((x[:, 4:], y[:, :4]), dim=1),
    "rows": lambda x, y: x[INDEX],
    "a changed constant": lambda x, y: torch.full((ROWS, COLUMNS), 3.0).add_(x),
    "a changed range": lambda x, y: changed_range(x),
    "zeros": lambda x, y: torch.zeros(ROWS, COLUMNS).add_(x),
    "filled": lambda x, y: x.new_full(x.shape, 0.25) + x,
    "Python": lambda x, y: asked_again(x),
}
CHANGES = {  # the first of two
    "added": lambda x, y: x.add_(y).mul_(0.5),
    "written": lambda x, y: x.copy_(y.flip(0)),
    "one row": lambda x, y: x[2].copy_(y[1]),
    "by index": lambda x, y: x.index_put_((INDEX[:2],), y[:2]),
    "filled": lambda x, y: x.masked_fill_(y > 0.5, 0.75),
}
numbers = st.integers(0, 7)
programs = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(NEW)), numbers, numbers),
        st.tuples(st.sampled_from(sorted(CHANGES)), numbers, numbers),
        st.tuples(st.just("forget"), numbers, numbers),
    ),
    min_size=1,
    max_size=14,
)


def run(program, given):
    """Run the operations on `given`, which may change; return all tensors that are left."""
    tensors = [given]
    for name, one, two in program:
        x, y = tensors[one % len(tensors)], tensors[two % len(tensors)]
        if name in NEW and (name not in CHANGES or one % 2):
            tensors.append(NEW[name](x, y))
        elif name in CHANGES:
            CHANGES[name](x, y.clone())
        elif len(tensors) > 1:
            del tensors[one % len(tensors)]
        del x, y
    return torch.cat([one[None] for one in tensors])


def record(program, given, arena, **how):
    tape = StepTape(arena, **how)
    with torch.inference_mode(), tape:
        out = run(program, given)
    return tape, out


def draw(seed):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def assert_replayed(program, tape, out, given, seed):
    """Replay with another input; check the result and the changed input."""
    given.copy_(draw(seed))
    expected_given = given.clone()
    expected = run(program, expected_given)
    tape.replay()
    assert torch.equal(out, expected)
    assert torch.equal(given, expected_given)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=programs, other=programs)
def test_a_replay_is_what_running_it_again_would_be(program, other):
    """Replay two tapes in one memory by turns, while the host's numbers change."""
    arena, given, second = Arena(), draw(0), draw(1)
    HOST["adds"] = 1.0
    expected = run(program, given.clone())
    tape, out = record(program, given, arena)
    assert torch.equal(out, expected), "it runs while it is recorded"
    tape_too, out_too = record(other, second, arena)
    for seed in range(2, 4):
        HOST["adds"] = float(seed)
        assert_replayed(program, tape, out, given, seed)
        assert_replayed(other, tape_too, out_too, second, seed + 10)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(program=programs, other=programs)
def test_a_tape_that_goes_on_reads_what_the_one_before_has_left(program, other):
    arena, given = Arena(), draw(0)
    HOST["adds"] = 1.0
    tape, between = record(program, given, arena)
    tape_too, out = record(other, between[0], arena, goes_on=True)
    for seed in range(1, 3):
        given.copy_(draw(seed))
        left = run(program, given.clone())
        expected = run(other, left[0])
        tape.replay()
        assert torch.equal(between[1:], left[1:])
        tape_too.replay()
        assert torch.equal(out, expected)
        assert torch.equal(between[1:], left[1:])


def chained(x, count):
    """Run `count` kernels, each on the result of the one before."""
    for _ in range(count):
        x = halved(x)
    return x


def record_chain(given, count):
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        out = chained(given, count)
    assert len(tape) == 1, "one call for all kernels"
    return tape, out


@pytest.mark.parametrize(("recorded", "size"), [(1, 7000), (2, 7000), *((3, size) for size in (0, 1, 2, 5))])
def test_a_replay_by_any_number_of_threads_has_the_same_bits(recorded, size, threads):
    """Also other numbers than it was recorded with, and more threads than work."""
    threads(recorded)
    given = torch.randn(size)
    tape, out = record_chain(given, 20)
    for seed in range(30):
        given.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
        expected = given
        for _ in range(20):
            expected = expected * 0.5 + 1.0
        threads((recorded, 1, 4, 2, 3)[seed % 5])
        tape.replay()
        assert torch.equal(out, expected)


NAP_S = 0.02


@kernel
def nap_and_add(count: Int, sleep: Longs, x: Floats, y: Floats) -> None:
    """Sleep over the first part, as if the system had taken the core away."""
    for i in taken(count):
        if i == 0:
            invoke(sleep, count * 0 + int(1e6 * NAP_S))
        y[i] = x[i] + 1.0


def test_threads_sleep_while_one_of_them_is_late(threads):
    threads(3)
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    given, jit = torch.randn(100), Jit(nap_and_add)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        out = torch.empty_like(given)
        jit(given.numel(), sleep, given, out)
        out = halved(out)
    before, cpu_s, begun_s = sum(pool().naps), time.process_time(), time.perf_counter()
    for seed in range(5):
        given.copy_(torch.randn(100, generator=torch.Generator().manual_seed(seed)))
        tape.replay()
        assert torch.equal(out, halved(given + 1.0))
    assert sum(pool().naps) - before >= 5, "nobody gave its core away"
    assert time.perf_counter() - begun_s >= 5 * NAP_S
    assert time.process_time() - cpu_s < 3 * NAP_S, "two threads polled all the time"


def test_a_helper_that_never_comes_holds_up_nobody(threads, monkeypatch):
    threads(2)
    given = torch.randn(1000)
    tape, out = record_chain(given, 20)
    monkeypatch.setattr(Pool, "_help", lambda pool, number: None)  # as if it never got a core
    alone = new_pool()
    monkeypatch.setattr("blockdraft.kernels.llvm.jit.pool", lambda: alone)
    given.fill_(1.0)
    tape.replay()
    assert torch.equal(out, torch.full((1000,), 2 - 0.5**20))
    assert alone.naps == (0, 0), "it waited"


take_part = pool_module.take_part


@inlined
def take_part_late(state, ticket, seen, number, hint):
    """Delay the leader until the helper has done the kernel, as if it had lost its core."""
    while (number == 0) & (load_shared(state) >> TICKET == ticket):
        pause(ticket, hint)
    return take_part(state, ticket, seen, number, hint)


def test_a_leader_that_comes_too_late_for_its_last_kernel_does_not_wait_for_another(
    threads, monkeypatch, tmp_path
):
    threads(2)
    given = torch.full((1000,), 3.0)
    tape, out = record_chain(given, 1)
    monkeypatch.setattr("blockdraft.kernels.llvm.jit.cache_dir", lambda: tmp_path)  # compiled anew
    monkeypatch.setattr(pool_module, "take_part", take_part_late)
    late = new_pool()
    monkeypatch.setattr("blockdraft.kernels.llvm.jit.pool", lambda: late)

    def replay():
        torch.set_num_threads(2)  # of this thread
        for _ in range(10):
            tape.replay()

    leader = threading.Thread(target=replay, daemon=True)
    leader.start()
    leader.join(30)
    assert not leader.is_alive(), "it sleeps, and nobody wakes it"
    assert torch.equal(out, torch.full((1000,), 2.5))


def test_several_threads_replay_at_once(threads):
    threads(2)

    def replay(value):
        torch.set_num_threads(2)  # of this thread
        given = torch.full((500,), value)
        tape, out = record_chain(given, 20)
        for step in range(100):
            given.fill_(value + step)
            tape.replay()
            assert torch.equal(out, torch.full((500,), (value + step - 2) * 0.5**20 + 2))

    with ThreadPoolExecutor(3) as started:
        assert len(list(started.map(replay, (1.0, 2.0, 3.0)))) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_replays_too(threads):
    threads(2)
    given = torch.full((1000,), 3.0)
    tape, out = record_chain(given, 20)
    tape.replay()
    child = os.fork()
    if child == 0:
        with torch.inference_mode():
            out.zero_()
        tape.replay()
        os._exit(0 if float(out[-1]) == 2 + 0.5**20 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0, 0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x[0, 0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: torch.arange(4).repeat_interleave(x[:, 0].abs().long()),
        lambda x: torch.where(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
    ],
)
def test_a_step_that_asks_for_numbers_is_not_recorded(ask):
    given = draw(0)
    with torch.inference_mode(), pytest.raises(NotRecordable), StepTape(Arena()):
        ask(given)
    assert recorder.tape is None
    assert_replayed([("a kernel", 0, 0)], *record([("a kernel", 0, 0)], given, Arena()), given, 3)


def test_python_may_ask_for_numbers():
    given, seen = draw(0), []
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        middle = halved(given)
        repeat(lambda: seen.append(middle.tolist()[0][0] + middle[0, 0].item()))
    given.fill_(4.0)
    tape.replay()
    assert seen == [draw(0)[0, 0].item() + 2.0, 6.0]
    repeat(lambda: seen.append(None))
    assert seen[2:] == [None], "it runs where nothing records, too"


# ---- memory


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 70), st.integers(1, 30))))
def test_tensors_that_live_never_share_memory(steps):
    """Some tensors live on only as a view."""
    arena, living = Arena(), []
    for number, (is_new, which, rows, columns) in enumerate(steps):
        if is_new or not living:
            dtype = (torch.float32, torch.int64, torch.bool)[which % 3]
            made = arena.empty((rows, columns), dtype)
            assert made.shape == (rows, columns)
            assert made.dtype == dtype
            assert made.is_contiguous()
            assert made.data_ptr() % 64 == 0 or not made.numel()
            made.fill_(number % 2)
            living.append((made[rows // 2 :] if which > 2 else made, number % 2))
        else:
            del living[which % len(living)]
        assert all(bool((tensor == value).all()) for tensor, value in living)
        assert all(tensor in arena for tensor, _ in living if tensor.numel())


def test_memory_of_what_died_is_taken_again():
    arena = Arena()
    first, second = (arena.empty((1000,), torch.float32) for _ in range(2))
    place = first.data_ptr()
    del first
    assert arena.empty((1000,), torch.float32).data_ptr() == place
    held = second[10:20]
    del second
    assert not (place < arena.empty((1500,), torch.float32).data_ptr() < held.data_ptr())
    before = arena.num_bytes
    for _ in range(100):
        arena.empty((before // 4,), torch.float32)
    assert arena.num_bytes <= 2 * before
    large = arena.empty((3 * before,), torch.uint8)
    assert large in arena
    assert torch.empty(5) not in arena


def test_a_long_step_needs_little_memory_and_another_begins_at_the_front():
    arena, given = Arena(), torch.randn(1 << 18)
    for _ in range(2):
        with torch.inference_mode(), StepTape(arena):
            out = given
            for _ in range(12):
                out = halved(out)
    assert arena.num_bytes < 10 * given.nbytes


def test_memory_that_is_not_the_arena_s_is_held_as_long_as_the_tape():
    weights = [torch.randn(ROWS, COLUMNS) for _ in range(3)]
    refs = [StorageWeakRef(one.untyped_storage()) for one in weights]
    expected = halved(weights[0]) + halved(weights[1]) * weights[2]
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        out = halved(weights[0]) + halved(weights[1]) * weights[2]
    weights.clear()
    assert not any(ref.expired() for ref in refs)
    with torch.inference_mode():
        out.zero_()
    tape.replay()
    assert torch.equal(out, expected)
    del tape
    assert all(ref.expired() for ref in refs)


# ---- copies

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8]


def own(shape, dtype):
    """Return memory full of a wrong value."""
    return torch.full(tuple(shape), 77).to(dtype)


@st.composite
def strided(draw):
    """Draw a tensor with sliced, permuted and expanded dimensions."""
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(x.dim()):
        begin = draw(st.integers(0, x.shape[dim]))
        x = x[(slice(None),) * dim + (slice(begin, None, draw(st.sampled_from([1, 1, 2]))),)]
    if x.dim() < 3 and draw(st.booleans()):
        place = draw(st.integers(0, x.dim()))
        x = x.unsqueeze(place).expand(*x.shape[:place], draw(st.integers(0, 3)), *x.shape[place:])
    return x


@st.composite
def copies(draw):
    """Draw an operation that moves memory, its arguments, and whether a kernel has to do it."""
    x, kind = draw(strided()), draw(st.sampled_from(["clone", "copy", "join", "gather"]))
    is_flat = x.dim() <= 2
    if kind == "clone":
        wanted = draw(st.sampled_from([torch.preserve_format, torch.contiguous_format]))
        return (
            aten.clone.default,
            (x,),
            {"memory_format": wanted},
            is_flat and wanted != torch.preserve_format,
        )
    if kind == "copy" or x.dim() == 0 or x.shape[0] == 0:
        into = own((*x.shape[:1], 3, *x.shape[1:]), x.dtype)
        part = into.select(min(1, x.dim()), draw(st.integers(0, 2)))
        return aten.copy_.default, (part, x), {}, is_flat and x.numel() > 0
    if kind == "join":
        dim, sizes = draw(st.integers(-x.dim(), x.dim() - 1)), draw(st.lists(st.integers(0, 4), max_size=3))
        shapes = [[*x.shape[: dim % x.dim()], size, *x.shape[dim % x.dim() + 1 :]] for size in sizes]
        parts = [x, *(torch.ones(shape).to(x.dtype) for shape in shapes)]
        args, kwargs = draw(st.sampled_from([((parts, dim), {}), ((parts,), {"dim": dim})]))
        return aten.cat.default, args, kwargs, is_flat and any(part.numel() for part in parts)
    shape, dtype = (
        draw(st.lists(st.integers(0, 4), max_size=2)),
        draw(st.sampled_from([torch.int64, torch.int32])),
    )
    index = torch.randint(-x.shape[0], x.shape[0], shape, dtype=dtype)
    return aten.index.Tensor, (x, [index]), {}, dtype == torch.int64 and x.is_contiguous()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(copies())
def test_what_a_kernel_moves_is_what_pytorch_moves(copy):
    func, args, kwargs, is_kernels = copy
    if func is aten.copy_.default:
        into = args[0]._base.clone()
        expected = into.as_strided(args[0].shape, args[0].stride(), args[0].storage_offset()).copy_(args[1])
    else:
        into, expected = None, func(*args, **kwargs)
    got = lowered(func, args, kwargs, own)
    assert got is not None or not is_kernels
    if got is not None:
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype
        assert into is not None or got.numel() < 2 or got.is_contiguous() == expected.is_contiguous()
        assert into is None or torch.equal(args[0]._base, into), "beside the part, too"


def test_what_is_no_plain_copy_is_left_to_pytorch():
    x, rows = torch.randn(3, 4), torch.tensor([0, 2])
    for func, args in [
        (aten.index.Tensor, (x, [x[:, 0] > 0])),
        (aten.index.Tensor, (x, [None, rows])),
        (aten.index.Tensor, (x, [rows, rows])),
        (aten.index.Tensor, (x, [torch.stack((rows, rows), dim=1)[:, 0]])),
        (aten.index.Tensor, (x.T, [rows])),
        (aten.copy_.default, (x.clone(), x.long())),
        (aten.copy_.default, (x.clone(), x[:1])),
        (aten.cat.default, ([x, x.long()],)),
        (aten.cat.default, ([x[:0], x[:0]],)),
        (aten.clone.default, (torch.randn(3, 4, 5, 6)[::2, ::2, ::2, ::2],)),
        (aten.add.Tensor, (x, x)),
    ]:
        assert lowered(func, args, {}, own) is None
