"""A thread pool that runs kernels together, and works well when the cores are busy.

The thread that calls `Pool.run` is the leader: it goes through all kernels, and helpers take part. Threads
take parts of a kernel's work one by one (`taken`), so a kernel is done when no part is left and no thread
works on a part. Then the next kernel begins without waiting for helpers that are not running: a helper
without a core delays the others only if it has taken a part. A waiting thread polls for some microseconds and
then sleeps, which frees its core.

A part's bits do not depend on the thread that computes it.

The progress is one number, the first of `state`: the number of threads inside the open kernel (the low 16
bits), whether a kernel is open (the next bit), and the number of kernels opened before (the other bits).
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from blockdraft.kernels.cpu import architecture
from blockdraft.kernels.llvm.compiler import inlined, kernel
from blockdraft.kernels.llvm.language import (
    Int,
    Longs,
    add_shared,
    i64,
    invoke,
    load_shared,
    pause,
    replace_shared,
    select,
    store_shared,
)

SPIN_NS = 50_000  # polling before a thread sleeps: the usual time of a part of a kernel's work
IDLE_NS = 200_000  # polling of a helper without work: the host's usual time between two runs
POLLS = 32  # between two readings of the clock
_HINTS = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint 1"}

# Indices of shared values of 8 bytes; values that change often have their own cache lines.
IS_ANYONE_ASLEEP, IS_LED, NUM_HELPERS = 16, 32, 33
CALLS, COUNT, FIRST = 48, 49, 50  # the leader's kernels: their table, count, and first number
NAPS = 64  # how often leaders have slept; the next value counts helpers' sleeps
LOCK, UNLOCK, SLEEP, WAKE, MUTEX, CONDITION, CLOCK, MONOTONIC = range(72, 80)
SIZE = 80

_ALIGN = 128  # bytes
_OPAQUE = 128  # bytes; more than a mutex or a condition variable of any system needs
INSIDE = (1 << 16) - 1
TICKET = 16  # number of bits below the ticket, which is odd while a kernel is open


Call: TypeAlias = tuple[int, ctypes.Array[ctypes.c_char]]  # the address of a kernel, and its job


class Pool:
    """The helper threads of this process. If several threads call `run`, all but the first get no help."""

    def __init__(self, *kernels: int) -> None:
        """`kernels` are the addresses of the compiled `lead`, `follow` and `allow`, below."""
        made = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(one) for one in kernels)
        self._lead, self._follow, self._allowed = made
        self._libc = ctypes.CDLL(None)
        self._memory = ctypes.create_string_buffer(8 * SIZE + _ALIGN)
        address = -(-ctypes.addressof(self._memory) // _ALIGN) * _ALIGN
        self._state = (ctypes.c_int64 * SIZE).from_address(address)
        self._mutex, self._condition = (ctypes.create_string_buffer(_OPAQUE) for _ in range(2))
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def run(self, calls: ctypes.Array[ctypes.c_int64], num_threads: int) -> None:
        """Run the kernels of a `table` in order."""
        if num_threads not in (1, self._num_threads):
            with self._resizing:
                self._resize(num_threads)
        address = ctypes.addressof(calls)
        fields = (0, int(num_threads == 1), len(calls) // 2, address, address, ctypes.addressof(self._state))
        job = ctypes.create_string_buffer(struct.pack("6q", *fields))
        self._lead(ctypes.addressof(job))

    @property
    def naps(self) -> tuple[int, int]:
        """How often leaders, and how often helpers, have slept since the start."""
        return self._state[NAPS], self._state[NAPS + 1]

    def _reset(self) -> None:
        """Set the state without helpers, at the start and in a forked process."""
        self._helpers: list[threading.Thread] = []
        self._num_threads = 1
        self._resizing = threading.Lock()
        self._libc.pthread_mutex_init(self._mutex, None)
        self._libc.pthread_cond_init(self._condition, None)
        names = "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"
        values = [_address(getattr(self._libc, name)) for name in names]
        values += [_address(self._mutex), _address(self._condition)]
        values += [_address(self._libc.clock_gettime), time.CLOCK_MONOTONIC]
        ctypes.memset(self._state, 0, ctypes.sizeof(self._state))
        for index, value in enumerate(values, start=LOCK):
            self._state[index] = value

    def _resize(self, num_threads: int) -> None:
        """Stop all helpers and start new ones. If Ctrl-C interrupts this, the next call starts over."""
        self._num_threads = 0
        self._allow(0)
        for helper in self._helpers:
            if helper.is_alive():
                helper.join()
        self._allow(num_threads - 1)
        self._helpers = []
        for number in range(1, num_threads):
            helper = threading.Thread(
                target=self._help, args=(number,), daemon=True, name=f"kernels-{number}"
            )
            self._helpers.append(helper)
            helper.start()
        self._num_threads = num_threads

    def _allow(self, num_helpers: int) -> None:
        job = ctypes.create_string_buffer(struct.pack("3q", 0, num_helpers, ctypes.addressof(self._state)))
        self._allowed(ctypes.addressof(job))

    def _help(self, number: int) -> None:
        _use_all_cores()
        job = ctypes.create_string_buffer(struct.pack("3q", 0, number, ctypes.addressof(self._state)))
        self._follow(ctypes.addressof(job))


def table(calls: Sequence[Call]) -> ctypes.Array[ctypes.c_int64]:
    """Return each kernel's address and its job's, for `Pool.run`; jobs must live as long as the result."""
    addresses = [one for address, job in calls for one in (address, ctypes.addressof(job))]
    return (ctypes.c_int64 * len(addresses))(*addresses)


def pause_hint() -> str:
    """Return this processor's intrinsic, with its argument, for a thread that polls."""
    return _HINTS[architecture()]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _use_all_cores() -> None:
    """Let this thread use all cores: its creator, whose cores it inherits, may be bound to one by OpenMP."""
    openmp = ctypes.CDLL(torch._C.__file__)
    if not hasattr(os, "sched_setaffinity") or not hasattr(openmp, "omp_get_place_proc_ids"):
        return
    cores: set[int] = set()
    for place in range(openmp.omp_get_num_places()):
        ids = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, ids)
        cores.update(ids)
    if cores:
        os.sched_setaffinity(0, cores)


# ---- kernels


@kernel
def lead(is_alone: Int, count: Int, table: Int, calls: Longs, state: Longs, *, hint: str) -> None:
    """Run `count` kernels with helpers, or alone if `is_alone`.

    Also run alone if another thread leads already, or if a late helper is still inside an earlier kernel.
    """
    for i in range(count):
        counter = calls.pointer(2 * i + 1)
        counter[0] = 0
    is_done = 0
    if is_alone == 0:
        is_mine = replace_shared(state + IS_LED, 0, 1)
        if is_mine:
            is_done = led(count, table, state, hint)
            store_shared(state + IS_LED, 0)
    if is_done == 0:
        for i in range(count):
            invoke(calls.pointer(2 * i), calls.pointer(2 * i + 1))


@inlined
def led(count: Any, table: Any, state: Longs, hint: str) -> Any:
    """Run all kernels with helpers and return 1, or run none and return 0."""
    is_done = 0
    word = load_shared(state)
    if word & INSIDE == 0:
        state[CALLS] = table
        state[COUNT] = count
        state[FIRST] = word >> (TICKET + 1)
        if replace_shared(state, word, word + (1 << TICKET)):
            wake(state)
            last = (word >> TICKET) + 2 * count
            ticket = (word >> TICKET) + 1
            seen = word * 0
            while ticket != last:
                seen = take_part(state, ticket, seen, word * 0, hint)
                ticket = load_shared(state) >> TICKET
            is_done = 1
    return is_done


@kernel
def follow(number: Int, state: Longs, *, hint: str) -> None:
    """Take part in kernels until the number of helpers is less than this helper's number."""
    seen = number * 0
    while number <= load_shared(state + NUM_HELPERS):
        ticket = load_shared(state) >> TICKET
        seen = take_part(state, ticket, seen, number, hint)


@kernel
def allow(num_helpers: Int, state: Longs) -> None:
    """Set the number of helpers. This is a kernel because Ctrl-C in Python could leave the mutex locked."""
    store_shared(state + NUM_HELPERS, num_helpers)
    wake(state)


@inlined
def take_part(state: Longs, ticket: Any, seen: Any, number: Any, hint: str) -> Any:
    """Help with the open kernel, or wait for another; return the last ticket that this thread worked on.

    The caller reads the ticket once, to compare it and to pass it here. A leader that waited with a newer
    ticket could sleep after its last kernel, when no other thread opens a kernel.
    """
    if (ticket & 1 == 1) & (ticket != seen):
        seen = entered(state, seen)
    else:
        wait(state, ticket, number, hint)
    return seen


@inlined
def entered(state: Longs, seen: Any) -> Any:
    """Work on the kernel that is open now; the last thread to leave closes it and opens the next."""
    ticket = add_shared(state, 1) >> TICKET
    if ticket & 1 == 1:
        seen = ticket
        at = (ticket >> 1) - state[FIRST]
        calls = state.pointer(CALLS)
        invoke(calls.pointer(2 * at), calls.pointer(2 * at + 1))
        is_last = at + 1 == state[COUNT]
        word = add_shared(state, -1) - 1
        if word & INSIDE == 0:
            after = word + select(is_last, 1 << TICKET, word * 0 + (2 << TICKET))
            if replace_shared(state, word, after):
                wake(state)
    else:
        add_shared(state, -1)
    return seen


@inlined
def wake(state: Longs) -> None:
    if load_shared(state + IS_ANYONE_ASLEEP) != 0:
        invoke(state.pointer(LOCK), state.pointer(MUTEX))
        store_shared(state + IS_ANYONE_ASLEEP, 0)
        invoke(state.pointer(WAKE), state.pointer(CONDITION))
        invoke(state.pointer(UNLOCK), state.pointer(MUTEX))


@inlined
def wait(state: Longs, ticket: Any, number: Any, hint: str) -> None:
    """Wait until the ticket changes: poll first, then sleep."""
    late = ticket * 0
    is_early = load_shared(state) >> TICKET == ticket
    while is_early:
        polls = 0
        while (polls < POLLS) & (load_shared(state) >> TICKET == ticket):
            pause(ticket, hint)
            polls += 1
        now = time_ns(state)
        spin = select(ticket & 1 == 1, SPIN_NS, ticket * 0 + IDLE_NS)
        late = select(late == 0, now + spin, late)
        is_early = (load_shared(state) >> TICKET == ticket) & (now < late)
    if load_shared(state) >> TICKET == ticket:
        sleep(state, ticket, number)


@inlined
def sleep(state: Longs, ticket: Any, number: Any) -> None:
    invoke(state.pointer(LOCK), state.pointer(MUTEX))
    naps = state + select(number == 0, NAPS, number * 0 + NAPS + 1)
    naps[0] = naps[0] + 1
    store_shared(state + IS_ANYONE_ASLEEP, 1)
    while (load_shared(state) >> TICKET == ticket) & (number <= load_shared(state + NUM_HELPERS)):
        invoke(state.pointer(SLEEP), state.pointer(CONDITION), state.pointer(MUTEX))
        store_shared(state + IS_ANYONE_ASLEEP, 1)
    invoke(state.pointer(UNLOCK), state.pointer(MUTEX))


@inlined
def time_ns(state: Longs) -> Any:
    parts = state.scratch(i64, 2)  # seconds and nanoseconds
    clock = (state + MONOTONIC)[0]
    invoke(state.pointer(CLOCK), clock, parts)
    return parts[0] * 1_000_000_000 + parts[1]
