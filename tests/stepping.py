"""Engines with pinned shapes, graphs or not, and ways to compare every bit that their steps leave behind.

Arithmetic is equal at pinned (rows, width) only. So here every decode step runs one number of rows, filled
up as a graph's are, and every prefill step has one prompt of one length.
"""

import functools
from dataclasses import dataclass, replace

import torch

from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.kernels.transfer import to_device
from blockdraft.step.drafter import NoDrafter, Weightless
from blockdraft.step.graphs import Reading, StepGraphs, pack
from blockdraft.step.prefill import prefill_step
from blockdraft.step.prefill_graphs import filled, widest_counts
from tests import tiny
from tests.grammar import json_tokens
from tests.lossless import families
from tests.models.families import CASES

PAGE_SIZE = 4  # one for all: each is a kernel of its own to compile
MAX_ROWS = 4


# ---- engines


@dataclass(frozen=True)
class EagerStep:
    """Stands in for a StepGraph: run kernel by kernel."""

    size: object
    replay: object


class KernelByKernel(StepGraphs):
    """StepGraphs that captures nothing: the same sizes, filled up in the same way."""

    def __init__(self, step, rows, **options):
        super().__init__(step, rows, captures=None, **options)

    def _capture(self, size):
        if self._rows is not None:
            self._activate(size)  # as a capture does: whoever comes has to activate their own
        run = self._run(size)
        return EagerStep(size, lambda: pack(run()))

    def _capture_parts(self, make, size):
        self._activate(size)
        return make(size)


def pin(engine, *, is_captured, sizes=None, now=None):
    """Let every decode step of `engine` run its largest number of rows (or one of `sizes`).

    `now`: the sizes that are captured now and not when they are wanted; None: all.
    """
    plan = engine.plan
    sizes = [plan.max_num_seqs] if sizes is None else sizes
    now = None if now is None else [(size, plan.width) for size in now]
    if is_captured:
        engine.capture(sizes, [plan.width], now)
    else:
        engine.graphs = KernelByKernel(engine.decode, engine.rows)
        engine.graphs.capture(sizes, [plan.width], now)
    return engine


@dataclass(frozen=True)
class Place:
    """The device of a test: a card in bfloat16, or the CPU, where tapes stand in for graphs."""

    device: str
    dtype: str

    @property
    def has_graphs(self):
        return self.device == "cuda" or why_no_llvm(getattr(torch, self.dtype), torch.device("cpu")) is None


CARD, HOST = Place("cuda", "bfloat16"), Place("cpu", "float32")


def tiny_engine(place, drafter="trained", *, is_captured=None, now=None, **plan):
    """The trained pair with pinned rows; captured, where that can be, unless asked otherwise."""
    plan = {
        "max_num_seqs": MAX_ROWS,
        "page_size": PAGE_SIZE,
        "max_prefill_tokens": NUM_PROMPT - 1,
        "prefix_cache": False,
        **plan,
    }
    engine = tiny.engine(drafter, dtype=place.dtype, device=place.device, **plan)
    return pin(engine, is_captured=place.has_graphs if is_captured is None else is_captured, now=now)


OUTPUTS = [
    StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
    StructuredOutputs(regex="([xy]truetrue){4}"),
    None,
    StructuredOutputs(choice=["abc" * 8]),
]


def serve_structured(place, **plan):
    """Serve structured outputs and a free answer, greedy and sampled. Return results and steps in parts."""
    engine = tiny_engine(place, tokenizer=json_tokens.tokenizer(), **plan)
    requests = [
        (
            prompt,
            replace(params, ignore_eos=False, temperature=number % 2, structured_outputs=OUTPUTS[number]),
        )
        for number, (prompt, params) in enumerate(make_requests())
    ]
    results = serve(engine, requests)
    assert results[3].text == "abc" * 8
    assert [one.finish_reason for one in results].count("stop") >= 3
    return results, list(engine.graphs._parts.values())


# ---- a drafter that graphs can hold


class ScriptedDrafter(Weightless):
    """Knows the answers and spoils one draft of each block, or none: every number gets accepted.

    Host and device never speak, so that a graph can hold it. `absorber` keeps the context of a real drafter.
    """

    def __init__(self, answers, *, block, vocab_size, device, shift=0, absorber=None):
        self.block = block
        self.vocab_size = vocab_size
        self.shift = shift
        self.absorber = absorber
        longest = max(len(tokens) for tokens in answers.values()) + block
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in answers.values()]
        self.answers = torch.tensor(padded, device=device)  # [K, positions]
        self.seeds = torch.tensor(list(answers), device=device)  # [K]

    def draft(self, rows, cache, view, width):
        seeds = rows.sampling().integers(Whole.SEED)
        answer = self.answers[
            (seeds[:, None] == self.seeds).long().argmax(dim=1)
        ]  # of any, for the scratch row
        column = torch.arange(width, device=seeds.device)
        places = (view.starts[:, None] + column).clamp(max=answer.shape[1] - 1)
        block = answer.gather(1, places)
        drawn = (view.starts * 40503 + seeds * 7919 + self.shift * 104729) >> 4  # arbitrary: any column
        first_wrong = 1 + drawn % width  # `width`: none
        block = torch.where(column == first_wrong[:, None], (block + 1) % self.vocab_size, block)
        return torch.where(column == 0, rows.anchor[rows.active][:, None], block)

    def absorb(self, features, view):
        if self.absorber is not None:
            self.absorber.absorb(features, view)


def script(models, requests, results, *, block, shift=0, absorber=None):
    """The drafter that knows `results`, of `serve`, of these requests."""
    answers = {
        params.seed: [*prompt, *result.token_ids]
        for (prompt, params), result in zip(requests, results, strict=True)
    }
    return ScriptedDrafter(
        answers,
        block=block,
        vocab_size=models.config.vocab_size,
        device=models.device,
        shift=shift,
        absorber=absorber,
    )


# ---- requests

NUM_PROMPT = 13  # twelve are prefilled: see FAMILY_BLOCK
PROMPTS = [
    [(start + step * i) % 60 for i in range(NUM_PROMPT)]
    for start, step in ((3, 2), (40, 1), (7, 5), (1, 1), (11, 13), (50, 3), (0, 7), (22, 59))
]


def make_requests(count=4, max_tokens=48, **params):
    """Prompts of one length, with seeds of their own."""
    base = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return [(PROMPTS[index], replace(base, seed=30 + index)) for index in range(count)]


@dataclass(frozen=True)
class Result:
    """One answer; `columns` are the places in their blocks that its tokens came from."""

    token_ids: list
    text: str
    finish_reason: str | None
    logprobs: list
    columns: list


def serve(engine, requests, *, later=(), aborted=None):
    """Serve `requests`, five steps on `later` ones; request i is aborted once it has aborted[i] tokens."""
    aborted = aborted or {}
    ids = [engine.add(*request) for request in requests]
    deltas, num_steps = {request_id: [] for request_id in ids}, 0
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        num_steps += 1
        if num_steps == 5:
            new = [engine.add(*request) for request in later]
            ids += new
            deltas |= {request_id: [] for request_id in new}
        for index, least in aborted.items():
            if index < len(ids) and sum(len(delta.token_ids) for delta in deltas[ids[index]]) >= least:
                engine.abort(ids[index])
        engine.check()
    assert num_steps > 5
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_pages
    return [gather(deltas[request_id]) for request_id in ids]


def gather(deltas):
    return Result(
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason if deltas else None,
        logprobs=[one for delta in deltas for one in delta.logprobs],
        columns=[column for delta in deltas for column in range(len(delta.token_ids))],
    )


def tokens_of(results):
    return [result.token_ids for result in results]


def columns_of(results):
    return {column for result in results for column in result.columns}


# ---- everything that steps leave behind


def state_of(engine, row_ids):
    """Copies of what a row is: its numbers, and its committed part of every layer of target and drafter."""
    rows, found = engine.rows, {}
    for row in row_ids:
        place = torch.arange(int(rows.length[row]), device=rows.device)
        slots = rows.page_table[row, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        parts = {
            name: getattr(rows, name)[row] for name in ("length", "anchor", "_output_counts", "page_table")
        }
        for index, layer in enumerate(engine.cache.storage):
            if isinstance(layer, RecurrentState):
                parts |= {f"state {index}": layer.state[row], f"tail {index}": layer.tail[row]}
            else:
                parts |= {f"keys {index}": layer.keys[:, slots], f"values {index}": layer.values[:, slots]}
        found[row] = {name: part.clone() for name, part in parts.items()}
    return found


def assert_same_states(got, expected, when):
    assert got.keys() == expected.keys()
    for row, parts in expected.items():
        for name, part in parts.items():
            assert is_same(got[row][name], part), f"{name} of row {row} {when}"


def is_same(mine, theirs):
    """Say if two tensors have the same bits, NaN included."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    return torch.equal(
        mine.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
    )


def lockstep(one, other, requests):
    """Serve on both, step by step: the same tokens and states after each. Returns the tokens per block."""
    for engine in (one, other):
        for number, request in enumerate(requests):
            engine.add(*request, request_id=str(number))
    counts, num_steps = [], 0
    while one.has_work or other.has_work:
        mine, theirs = ([(d.request_id, d.token_ids, d.text) for d in e.step()] for e in (one, other))
        num_steps += 1
        assert mine == theirs, f"after {num_steps} steps"
        counts += [len(token_ids) for _, token_ids, _ in mine]
        live = [[s.row for s in e.scheduler.running if s.num_placed_pages is not None] for e in (one, other)]
        assert live[0] == live[1]
        assert_same_states(state_of(one, live[0]), state_of(other, live[1]), f"after {num_steps} steps")
    return counts


# ---- rows by hand


@dataclass(frozen=True)
class Scene:
    """The state before a step: the rows' prompts and sampling, the active rows, and a seed for pages."""

    lengths: tuple
    samplings: tuple
    active: tuple = (0, 1, 2, 3)
    seed: int = 0


GREEDY = RowSampling()
WARM = RowSampling(temperature=1.0, seed=11)
FILTERED = RowSampling(temperature=0.8, top_p=0.8, top_k=12, min_p=0.02, seed=12)
PENALISED = RowSampling(temperature=0.7, repetition=1.4, presence=0.5, frequency=0.3, seed=13)
PUSHED = RowSampling(bias=((5, 4.0), (9, -3.0)), stop_ids=(*range(0, 60, 3),), min_end=200, presence=0.4)
SCENES = [
    Scene((20, 2, 30, 9), (GREEDY,) * 4),
    Scene((3, 31, 12, 25), (WARM, FILTERED, PENALISED, PUSHED), active=(2, 0, 3, 1), seed=1),
    Scene((18, 18, 6, 29), (PENALISED, WARM, GREEDY, FILTERED), active=(3, 1, 0), seed=2),
    Scene((19, 5, 2, 28), (WARM,) * 4, active=(1,), seed=3),
]


@torch.inference_mode()
def prepare(engine, scene):
    """Fill the rows as the scene says, prompts prefilled up to their anchors."""
    rows, models = engine.rows, engine.models
    generator = torch.Generator().manual_seed(scene.seed)
    draw = functools.partial(torch.randint, 0, 60, generator=generator)
    prompts = [draw((length,)).tolist() for length in scene.lengths]
    prompts = [[(p[0] + i) % 60 for i in range(len(p))] if n % 2 else p for n, p in enumerate(prompts)]
    max_pages = rows.page_table.shape[1]
    pages = torch.randperm(engine.plan.num_pages, generator=generator) + 2  # the reserved ones
    for row, (prompt, sampling) in enumerate(zip(prompts, scene.samplings, strict=True)):
        rows.place(row, prompt, 0, replace(sampling, output_start=len(prompt)))
        rows.set_pages([(row, 0, pages[row * max_pages : (row + 1) * max_pages].tolist())])
    rows.activate(range(len(prompts)))
    prefill_step(
        target=models.target,
        drafter=models.drafter,
        cache=engine.cache,
        rows=rows,
        token_ids=to_device([token for prompt in prompts for token in prompt[:-1]], models.device),
        next_ids=to_device([token for prompt in prompts for token in prompt[1:]], models.device),
        counts=tuple(len(prompt) - 1 for prompt in prompts),
    )


def play(engine, scene, *, num_steps=4):
    """Steps of the scene through `engine.graphs`; after each the tokens and the states of all rows."""
    prepare(engine, scene)
    seen = []
    for _ in range(num_steps):
        step = engine.graphs.find(len(scene.active), engine.plan.width)
        engine.rows.activate(scene.active, step.size.rows)
        token_ids = Reading(step.replay()).token_ids()[: len(scene.active)]
        seen.append((token_ids, state_of(engine, range(len(scene.lengths)))))
    return seen


def play_directly(engine, scene, *, num_rows=MAX_ROWS, num_steps=4):
    """Play the scene by `engine.decode`, without any StepGraphs."""
    prepare(engine, scene)
    seen = []
    for _ in range(num_steps):
        engine.rows.activate(scene.active, num_rows)
        verdict = engine.decode(engine.plan.width)
        token_ids = [
            tuple(row[:count])
            for row, count in zip(verdict.token_ids.tolist(), verdict.num_committed.tolist(), strict=True)
        ]
        seen.append((token_ids[: len(scene.active)], state_of(engine, range(len(scene.lengths)))))
    return seen


def assert_same_play(got, expected, scene):
    for step, ((tokens, states), (tokens_too, states_too)) in enumerate(zip(got, expected, strict=True)):
        assert tokens == tokens_too, f"step {step} of {scene}"
        assert_same_states(states, states_too, f"after step {step} of {scene}")


# ---- prefills by hand

# (row, tokens) of each step: uneven rows, one token, rows that go on beside a new one until a graph is full.
PREFILLS = (
    ((2, 5), (0, 20)),
    ((1, 1),),
    ((0, 12), (3, 30), (2, 9), (1, 13)),
    ((3, 2),),
    ((2, 33),),
)


@torch.inference_mode()
def play_prefills(engine, steps, run):
    """Prefill by `run(engine, row_ids, token_ids, counts)`; after each step the states of all rows.

    Rows and the scratch row held no numbers before, and row 0 begins anew at the end.
    """
    rows, starts, seen = engine.rows, [0] * MAX_ROWS, []
    prompts = [[(7 * i + 13 * row) % 60 for i in range(80)] for row in range(MAX_ROWS)]
    _poison(engine)
    for row, prompt in enumerate(prompts):
        rows.place(row, prompt, 0, GREEDY)
        rows.set_pages([(row, 0, list(range(2 + row * 20, 22 + row * 20)))])
    for step in (*steps, None):
        if step is None:
            rows.place(0, prompts[0], 0, GREEDY)
            starts[0], step = 0, ((0, 3),)
        row_ids, counts = zip(*step, strict=True)
        stream = [prompts[row][starts[row] : starts[row] + count] for row, count in step]
        run(engine, row_ids, [token for tokens in stream for token in tokens], counts)
        for row, count in step:
            starts[row] += count
        assert rows.length[:MAX_ROWS].tolist() == starts
        assert rows.length[rows.max_rows] == 0, "the scratch row stays"
        seen.append(state_of(engine, range(MAX_ROWS)))
    return seen


def _poison(engine):
    for layer in engine.cache.storage:
        if isinstance(layer, RecurrentState):
            layer.state.fill_(float("nan"))
            layer.tail.fill_(float("nan"))


def prefill_alone(engine, row_ids, token_ids, counts):
    """Kernel by kernel, as many tokens and rows as there are."""
    engine.rows.activate(row_ids)
    token_ids = to_device(token_ids, engine.rows.device)
    engine.prefill(token_ids, token_ids, counts)


def prefill_filled_up(engine, row_ids, token_ids, counts, *, num_tokens, num_rows):
    """Kernel by kernel, what a graph of this shape would run."""
    engine.rows.activate(row_ids, num_rows)
    inputs = to_device(filled(token_ids, token_ids, counts, num_tokens, num_rows), engine.rows.device)
    token_ids, next_ids, offsets = inputs.split((num_tokens, num_tokens, num_rows + 1))
    engine.prefill(token_ids, next_ids, widest_counts(num_tokens, num_rows), offsets)


def prefill_by_graph(engine, row_ids, token_ids, counts):
    graph = engine.prefill_graphs.find(len(token_ids), len(row_ids))
    engine.rows.activate(row_ids, graph.num_rows)
    graph.replay(token_ids, token_ids, counts)


def assert_same_prefills(got, expected):
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_same_states(mine, theirs, f"after prefill {step}")


# ---- families

# Triton compiles anew for numbers that 16 divides. Twelve tokens a step share what was compiled for eight.
FAMILY_BLOCK = 6
FAMILY_ROWS = 2


@functools.cache
def family_pair(name, place):
    """Models and plan. Prompts and pages as in test_gpu_families.py, whose kernels are compiled already."""
    return families.make_pair(
        *CASES[name],
        seed=1,
        block=FAMILY_BLOCK,
        dtype=place.dtype,
        device=place.device,
        max_model_len=300,
        max_num_seqs=FAMILY_ROWS,
        page_size=PAGE_SIZE,
        max_prefill_tokens=4,
        prefix_cache=False,
    )


def family_engine(name, place, drafter, *, is_captured, off=(), **plan):
    """Without the kernels of the operations `off`."""
    models, planned = family_pair(name, place)
    models = replace(models, drafter=drafter)
    for operation in off:
        models = models.with_kernels(models.target.kernels.without(operation))
    return pin(Engine(models, replace(planned, num_pages=400, **plan)), is_captured=is_captured)


def prefill_engine(name, place, *, is_captured):
    """With its own drafter, and with rows and steps that hold PREFILLS."""
    drafter = family_pair(name, place)[0].drafter
    plan = {"max_num_seqs": MAX_ROWS, "max_prefill_tokens": 128}
    return family_engine(name, place, drafter, is_captured=is_captured, **plan)


def family_requests(**params):
    """More than there are rows, greedy and sampled by turns."""
    return [
        (
            prompt[:5],
            SamplingParams(temperature=float(i % 2), seed=70 + i, max_tokens=24, ignore_eos=True, **params),
        )
        for i, prompt in enumerate(PROMPTS[:3])
    ]


@functools.cache
def family_answers(name, place):
    """Plain decoding at the width of speculation, with log-probabilities."""
    engine = family_engine(name, place, NoDrafter(FAMILY_BLOCK), is_captured=False)
    return serve(engine, family_requests(logprobs=0))


def family_script(name, place, shift=0):
    models, _ = family_pair(name, place)
    return script(
        models,
        family_requests(),
        family_answers(name, place),
        block=FAMILY_BLOCK,
        shift=shift,
        absorber=models.drafter,
    )


# ---- what must hold, wherever it runs


def check_padding(captured, eager):
    """Three rows in a bucket of four are the same steps, and the fourth row keeps every bit."""
    scene = Scene((12, 20, 7, 15), (PENALISED, GREEDY, FILTERED, WARM), active=(3, 0, 1), seed=5)
    got, expected = play(captured, scene), play_directly(eager, scene)
    assert_same_play(got, expected, scene)
    assert captured.rows.active.tolist() == [*scene.active, captured.rows.max_rows]
    first, last = got[0][1], got[-1][1]
    assert_same_states({2: last[2]}, {2: first[2]}, "which was not active")
    assert all(int(last[row]["length"]) > int(first[row]["length"]) for row in scene.active)


def mixed_requests():
    """Eight that want different things. Their prompts have one length: each is a prefill step of its own."""
    wishes = [
        {"temperature": 0.0, "max_tokens": 40},
        {"temperature": 1.0, "max_tokens": 60},  # aborted
        {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "max_tokens": 30},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "max_tokens": 25},
        {"temperature": 0.0, "max_tokens": 40, "stop": [" t5"]},
        {"temperature": 0.7, "max_tokens": 15, "logprobs": 2},  # steps with it are not replayed
        {"temperature": 1.0, "max_tokens": 3, "min_tokens": 3, "logit_bias": {7: 3.0}},
        {"temperature": 1.0, "presence_penalty": 0.5, "max_tokens": 60},  # aborted while it waits
    ]
    return [
        (prompt, SamplingParams(seed=90 + index, ignore_eos=index != 2, **wish))
        for index, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=True))
    ]


def serve_mixed(engine, *, has_aborts=False):
    """Eight requests on four rows, in two waves."""
    requests = mixed_requests()
    return serve(engine, requests[:5], later=requests[5:], aborted={1: 4, 7: 0} if has_aborts else None)


def assert_same_mixed(got, expected):
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if index in (1, 7):
            assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            assert mine.text == theirs.text[: len(mine.text)]
            assert len(mine.token_ids) < len(theirs.token_ids)
        else:
            assert (mine.token_ids, mine.text, mine.finish_reason, mine.logprobs) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
                theirs.logprobs,
            ), f"request {index}"
    assert len(got[1].token_ids) >= 4
    assert got[7].token_ids == []
    assert expected[4].finish_reason == "stop"
    assert [len(expected[index].token_ids) for index in (0, 3, 6)] == [40, 25, 3]


FEW_PAGES = 40  # of 4 tokens: one sequence of 61 tokens and two blocks fits, three do not


def serve_tightly(engine):
    """Tokens of sequences that take each other's pages, and how often."""
    engine.scheduler.observe = lambda batch, seconds: None  # else a slow prefill lets others end before it
    results = serve(engine, make_requests(3, temperature=1.0))
    assert engine.scheduler.num_preemptions > 0
    assert [len(result.token_ids) for result in results] == [48] * 3
    return tokens_of(results), engine.scheduler.num_preemptions


def check_lossless(place, *, max_num_seqs, temperature):
    """The trained drafter against none, at the same (rows, width)."""
    requests = make_requests(temperature=temperature)
    engines = [
        tiny_engine(place, drafter, max_num_seqs=max_num_seqs)
        for drafter in ("trained", NoDrafter(tiny.BLOCK))
    ]
    got, plain = (serve(engine, requests) for engine in engines)
    assert tokens_of(got) == tokens_of(plain)
    assert columns_of(got) == set(range(tiny.BLOCK))
    assert engines[0].stats.num_blocks < 0.7 * engines[1].stats.num_blocks


def check_ngrams(place, drafter, *, overlap):
    """Drafts from the rows' own tokens, captured and kernel by kernel: the same steps and histories."""
    plan = {"draft_ngram": 2, "overlap": overlap}
    engines = [tiny_engine(place, drafter, is_captured=is_captured, **plan) for is_captured in (True, False)]
    requests = make_requests(temperature=0.0, max_tokens=60)
    got, eager = (serve(engine, requests) for engine in engines)
    plain = serve(tiny_engine(place, NoDrafter(tiny.BLOCK)), requests)
    assert tokens_of(got) == tokens_of(eager) == tokens_of(plain)
    assert [result.columns for result in got] == [result.columns for result in eager]
    assert engines[0].stats.num_blocks == engines[1].stats.num_blocks
    histories = [engine.rows.history[:MAX_ROWS, : NUM_PROMPT + 59] for engine in engines]
    assert torch.equal(*histories)
    texts = [[*prompt, *one.token_ids] for (prompt, _), one in zip(requests, got, strict=True)]
    assert sorted(histories[0].tolist()) == sorted(text[: NUM_PROMPT + 59] for text in texts)


def check_kind(place, kind, *, temperature):
    """A kind of drafter, captured and kernel by kernel: the same steps, and the tokens of plain decoding."""
    requests = make_requests(temperature=temperature)
    engines = [tiny_engine(place, kind, is_captured=is_captured) for is_captured in (True, False)]
    got, eager = (serve(engine, requests) for engine in engines)
    plain = serve(tiny_engine(place, NoDrafter(tiny.BLOCK)), requests)
    assert tokens_of(got) == tokens_of(eager) == tokens_of(plain)
    assert [result.columns for result in got] == [result.columns for result in eager]
    assert engines[0].stats.num_blocks == engines[1].stats.num_blocks


def check_trees(place, kind, *, temperature):
    """Trees of drafts, captured and kernel by kernel: the tokens of plain decoding."""
    requests = make_requests(temperature=temperature)
    plain = tokens_of(serve(tiny_engine(place, NoDrafter(tiny.BLOCK)), requests))
    for is_captured in (True, False):
        engine = tiny_engine(place, kind, is_captured=is_captured and place.has_graphs, tree=32)
        while engine.tree_graphs is not None and engine.tree_graphs.capture_next():
            pass  # while requests are served there may be no time for it
        assert tokens_of(serve(engine, requests)) == plain
        assert engine.stats.num_trees > 0


def check_mtp(name, place, *, overlap):
    """A model's own MTP head, captured and kernel by kernel: the same steps, and plain decoding's tokens."""
    shared = {"dtype": place.dtype, "device": place.device, "page_size": PAGE_SIZE, "max_prefill_tokens": 4}
    models, planned = families.mtp_pair(name, max_model_len=300, width=FAMILY_BLOCK, **shared)
    planned = replace(planned, num_pages=400, max_num_seqs=FAMILY_ROWS, overlap=overlap)
    plain = replace(models, drafter=NoDrafter(planned.block))
    engines = [
        pin(Engine(models, planned), is_captured=is_captured) for is_captured in (place.has_graphs, False)
    ]
    got, eager = (serve(engine, family_requests()) for engine in engines)
    expected = serve(pin(Engine(plain, planned), is_captured=False), family_requests())
    assert tokens_of(got) == tokens_of(eager) == tokens_of(expected)
    assert [result.columns for result in got] == [result.columns for result in eager]
    assert len(columns_of(got)) > 2


def check_columns(place, *, max_num_seqs):
    """Through any pattern of accepted drafts a position has the same token and log-probabilities."""
    requests = make_requests(temperature=1.0, logprobs=3)
    plain = serve(
        tiny_engine(place, NoDrafter(tiny.BLOCK), is_captured=False, max_num_seqs=max_num_seqs), requests
    )
    models = tiny.load(place.dtype, place.device)
    ways = set()
    for shift in range(3):
        drafter = script(models, requests, plain, block=tiny.BLOCK, shift=shift)
        got = serve(tiny_engine(place, drafter, is_captured=False, max_num_seqs=max_num_seqs), requests)
        assert [result.logprobs for result in got] == [result.logprobs for result in plain]
        ways |= {(n, place, column) for n, one in enumerate(got) for place, column in enumerate(one.columns)}
    assert {column for _, _, column in ways} == set(range(tiny.BLOCK))
    assert len(ways) > 2 * sum(len(one.token_ids) for one in plain), "most tokens came from several columns"


def check_family(name, place):
    """A scripted drafter against none: tokens and log-probabilities."""
    plain = family_answers(name, place)
    engine = family_engine(name, place, family_script(name, place), is_captured=False)
    got = serve(engine, family_requests(logprobs=0))
    for mine, theirs in zip(got, plain, strict=True):
        assert mine.logprobs == theirs.logprobs
        assert mine.token_ids == theirs.token_ids
    assert columns_of(got) == set(range(FAMILY_BLOCK))


@dataclass(frozen=True)
class Agreement:
    """The agreement of two greedy runs; margins are those of the first tokens that differ."""

    text: str
    margins: list


def compare_widths(place, width):
    """Plain decoding at `width` against width 1, four rows each, greedy."""
    requests = make_requests(max_tokens=100, temperature=0.0, logprobs=2)
    wide, narrow = (
        serve(
            tiny_engine(
                place, NoDrafter(block), is_captured=False, width=block, block=block, max_model_len=150
            ),
            requests,
        )
        for block in (width, 1)
    )
    lines, margins, num_equal = [], [], 0
    for index, (mine, theirs) in enumerate(zip(wide, narrow, strict=True)):
        pairs = list(zip(mine.token_ids, theirs.token_ids, strict=True))
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        num_equal += equal
        if equal < len(pairs):
            (_, best), (_, second) = theirs.logprobs[equal].top
            margins.append(best - second)
            lines.append(f"answer {index} parts at token {equal}, where the margin is {margins[-1]:.4f} nats")
    total = sum(len(result.token_ids) for result in narrow)
    head = f"width {width} and width 1 in {place.dtype}: {num_equal} of {total} tokens until answers part"
    return Agreement("; ".join([head, *lines]), margins)
