"""Ctrl-C may come between any two instructions. Afterwards no page is lost and the next answers are right."""

import random
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import blockdraft
from blockdraft import LLM, RequestError, SamplingParams
from blockdraft.engine.engine import Launched
from blockdraft.engine.scheduler import Outcome
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm.jit import recorder
from blockdraft.step.captures import OnCpu
from tests import tiny
from tests.lossless import families

PAGES = ("engine/page_allocator", "engine/exact_pages", "engine/saved_states")
ENGINE = ("engine/engine", "engine/scheduler", "engine/sequence", *PAGES)
RECORDING = ("kernels/llvm/tape", "step/captures", "step/graphs", "cache/rows")
CALLER = ("llm", "engine/turns")
PROMPTS = [[*range(3, 20)], [*range(3, 15), 7, 7, 9], [5, 6, 7], [*range(3, 20)]]


class CtrlC:
    """Interrupts this thread before the `at`-th instruction inside of these modules; None: only counts."""

    def __init__(self, *modules, at=None):
        package = Path(blockdraft.__file__).parent
        self.files = {str(package / f"{module}.py") for module in modules}
        self.at, self.count = at, 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def _called(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame, event, arg):
        self.count += event == "opcode"
        if event == "opcode" and self.count == self.at:
            raise KeyboardInterrupt  # Python stops tracing with it
        return self._traced


def draws(count, number, seed=0):
    """`number` of the instructions 1 … `count`, one from each part of equal size."""
    draw = random.Random(seed)
    return [1 + int(count * (part + draw.random()) / number) for part in range(number)]


def interrupted(run, modules, at):
    """Say if Ctrl-C came before `run` had ended."""
    try:
        with CtrlC(*modules, at=at):
            run()
    except (KeyboardInterrupt, RequestError):
        return True
    return False


# ---- the engine, stepped by hand

KINDS = {
    "plain": {},
    "overlap": {"overlap": True},
    "compressed": {"kv_dtype": "int8", "kv_window": 16},
    "hybrid": {"num_states": 12},
}


def params(number, **changes):
    wishes = {"temperature": number % 2, "seed": number, "max_tokens": 10, "ignore_eos": True}
    return SamplingParams(**{**wishes, **changes})


def tight(kind):
    """More requests than rows, prefixes that are shared, and too few pages for all of them."""
    plan = {"max_num_seqs": 3, "page_size": 4, "num_pages": 17, "prefix_cache": True, **KINDS[kind]}
    if kind == "hybrid":
        return families.engine(families.pair("qwen3_next-whole"), **plan)
    return tiny.engine(**plan)


def without_model(engine):
    """Steps that take no time: a token is a function of its position, and blocks commit 1 to 4 of them."""

    def outcome(batch, launched):
        if batch.kind == "prefill":
            return Outcome()
        starts = [len(sequence.token_ids) for sequence in batch.sequences]
        return Outcome(tuple(tuple((3 * at + 5 * k) % 50 for k in range(1 + at % 4)) for at in starts))

    engine._launch, engine._outcome = lambda batch: Launched(0.0), outcome
    return engine


def serve(engine):
    """Requests, one of two choices, one aborted on its way. The tokens of those that end."""
    ids = [engine.add(one, params(number, n=1 + number % 2)) for number, one in enumerate(PROMPTS)]
    dropped = engine.add([9, 8, 7, 6, 5], params(9, max_tokens=40))
    found = {(request_id, index): [] for request_id in ids for index in range(2)}
    for step in range(200):
        if not engine.has_work:
            break
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if step == 5:
            engine.abort(dropped)
    assert not engine.has_work, "it steps without getting anywhere"
    return [found[request_id, index] for request_id in ids for index in range(2)]


def empty(engine):
    """End what an interrupt has left waiting."""
    engine.check()
    for request_id in engine.live_ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    engine.check()


def check_interrupts(engine, modules, num_draws, *, is_each_answered):
    """Draw interrupts; after each all pages are there, and the next answers are those of before."""
    with CtrlC(*modules) as counted:
        expected = serve(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0
    num_interrupts = 0
    for at in draws(counted.count, num_draws):
        num_interrupts += interrupted(lambda: serve(engine), modules, at)
        empty(engine)
        assert not is_each_answered or serve(engine) == expected, f"after one at instruction {at}"
    assert num_interrupts > 0.8 * num_draws
    assert serve(engine) == expected


@pytest.mark.parametrize("num_draws", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_the_engine_loses_no_page(kind, num_draws):
    check_interrupts(without_model(tight(kind)), ENGINE, num_draws, is_each_answered=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_anywhere_in_a_step_answers_are_right(kind):
    check_interrupts(tight(kind), (*ENGINE, "cache/rows"), 60, is_each_answered=True)


# ---- recording


def is_recording():
    """Say if this thread is still bound to a tape, which forbids `tolist`."""
    return recorder.tape is not None or _len_torch_dispatch_stack() > 0 or torch.ones(2).tolist() != [1, 1]


def test_an_interrupt_anywhere_around_a_recording_leaves_no_tape_behind():
    captures = OnCpu()

    def record():
        graph, found = captures.capture(lambda: torch.arange(3).clone())
        graph.replay()
        assert found.tolist() == [0, 1, 2]

    record()
    with CtrlC(*RECORDING) as counted:
        record()
    for at in range(1, counted.count + 1):
        assert interrupted(record, RECORDING, at), at
        assert not is_recording(), at
    record()


@pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="no step is recorded on this CPU"
)
@pytest.mark.parametrize("num_draws", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_an_interrupt_while_a_step_is_recorded_ends_that_step_alone(num_draws):
    def make():
        return tiny.engine(dtype="float32", is_captured=True, max_num_seqs=1)

    def ask(engine):
        engine.add(PROMPTS[0], params(0, max_tokens=4))
        return [token for delta in tiny.drain(engine) for token in delta.token_ids]

    expected = ask(make())  # the first one also sets up what all share
    with CtrlC(*RECORDING) as counted:
        assert ask(make()) == expected
    for at in draws(counted.count, num_draws):
        engine = make()
        assert interrupted(lambda: ask(engine), RECORDING, at), at  # noqa: B023
        assert not is_recording()
        empty(engine)
        assert ask(engine) == expected, f"after one at instruction {at}"


@pytest.mark.parametrize("num_draws", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="no kernel runs on this CPU"
)
def test_an_interrupt_while_kernels_get_other_threads_stops_none_of_them(num_draws):
    """A mutex that stayed locked would stop every kernel that comes later."""
    from blockdraft.kernels.llvm.jit import new_pool

    alone = new_pool()
    resize = ("kernels/llvm/pool",)

    def change(num_threads):
        alone._resize(num_threads)

    change(2)
    with CtrlC(*resize) as counted:
        change(3)
        change(1)
    num_interrupts = 0
    for at in draws(counted.count, num_draws):
        change(2)
        num_interrupts += interrupted(lambda: (change(3), change(1)), resize, at)
        after = threading.Thread(target=change, args=(2,), daemon=True)
        after.start()
        after.join(30)
        assert not after.is_alive(), f"after one at instruction {at}"
        assert [one.is_alive() for one in alone._helpers] == [True]
    change(1)
    assert num_interrupts > 0.8 * num_draws


# ---- the Python API


@pytest.mark.parametrize("num_draws", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_after_an_interrupt_anywhere_no_stream_misses_a_token_and_the_next_call_answers(num_draws):
    small = {"device": "cpu", "dtype": "float64", "max_model_len": 200, "max_num_seqs": 3, "page_size": 4}
    llm = LLM(tiny.TARGET, tiny.DRAFT, **small)
    without_model(llm.engine)
    modules, greedy = (*CALLER, *ENGINE), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def ask():
        return [result.token_ids for result in llm.generate(PROMPTS[:2], greedy)]

    expected = ask()
    whole = tuple(token for delta in llm.stream(PROMPTS[2], greedy) for token in delta.token_ids)
    with CtrlC(*modules) as counted:
        ask()
    for at in draws(counted.count, num_draws):
        stream = llm.stream(PROMPTS[2], greedy)
        tokens = next(stream).token_ids
        assert interrupted(ask, modules, at), at
        try:
            rest = tuple(token for delta in stream for token in delta.token_ids)
        except RequestError:
            pass  # it says that it was cut short
        else:
            assert tokens + rest == whole, f"after one at instruction {at}"
        assert ask() == expected, f"after one at instruction {at}"
        assert not llm.engine.has_work
        llm.engine.check()
