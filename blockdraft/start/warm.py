"""Warms up: serves real requests in every shape, so that the first request is as fast as the tenth.

Some work is slow only the first time: compiling the CPU kernels, loading and choosing the GPU's kernels, and
touching memory. Real requests do all of it. A GPU has its own code for many sizes, and its libraries choose
by size. A CPU has not: after the small rounds, large ones are fast at once. On a GPU whose kernels an earlier
start has run, few rounds suffice: each kernel is a file of a few kilobytes to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import max_tokens, serve, trial_engine
from blockdraft.planner.plan import Plan

GREEDY = SamplingParams(temperature=0.0)
# Together they use every part of sampling that is skipped if no row of the batch requests it.
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=1
    ),
    SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5, logit_bias={0: 1.0}),
)
TREES = [replace(one, width=None, logprobs=None, max_tokens=2, ignore_eos=True, seed=0) for one in SAMPLINGS]

Request = tuple[int, SamplingParams]  # the number of prompt tokens, and the sampling
Rounds = Iterator[tuple[str, list[Request]]]  # a name, and the requests that are served together


def warm(engine: Engine, note: Callable[[str], None], choose: Callable[[Plan], Rounds]) -> None:
    """Serve the chosen rounds. The engine must be idle, and does not change."""
    room = max_tokens(engine)
    other = trial_engine(engine)
    for text, requests in choose(engine.plan):
        note(text)
        for number, (num_prompt, sampling) in enumerate(requests):
            num_prompt = max(1, min(num_prompt, room - 1))
            other.add(_prompt(num_prompt, number, engine.models.config.vocab_size), sampling)
        serve(other)


def rounds_for(device: torch.device) -> Callable[[Plan], Rounds]:
    """Return the rounds for a device: a GPU has its own code for many sizes, a CPU has not."""
    return few_rounds if device.type == "cpu" else every_round


def every_round(plan: Plan) -> Rounds:
    """Yield rounds for every size that has its own code, and for every part of sampling."""
    yield from small_rounds(plan)
    yield from largest_rounds(plan)


def small_rounds(plan: Plan) -> Rounds:
    """Yield all rounds but the largest, which the measurement of memory has run."""
    yield "one token of prefill", [(2, _asked(1))]
    if plan.max_num_seqs > 1:
        yield "two prompts of different lengths", [(3, _asked(1)), (8, _asked(1))]
    for width in _widths(plan):
        yield f"1 row of width {width}", [(1, _asked(width, max_tokens=2))]
    for sampling in SAMPLINGS:
        yield "1 row, sampled", [(2, _asked(plan.width, sampling))]


def largest_rounds(plan: Plan) -> Rounds:
    """Yield the rounds that take the most memory."""
    chunk = plan.max_prefill_tokens
    yield from tree_rounds(plan)
    yield f"a prefill chunk of {chunk} tokens", [(chunk + 1, _asked(1))]
    for width in _widths(plan):
        several = [_asked(width, sampling) for sampling in SAMPLINGS[: plan.max_num_seqs]]
        yield f"{len(several)} rows of width {width}, sampled", [(2, sampling) for sampling in several]
        if plan.max_num_seqs > len(several):
            yield f"{plan.max_num_seqs} rows of width {width}", [(1, _asked(width))] * plan.max_num_seqs


def few_rounds(plan: Plan) -> Rounds:
    """Yield rounds for every part of sampling, for devices where no size needs new code."""
    several = [_asked(plan.width, sampling) for sampling in SAMPLINGS]
    yield "one token of prefill", [(2, _asked(1, max_tokens=2))]
    yield "rows of different lengths, sampled", [(2 + 3 * i, one) for i, one in enumerate(several)]
    yield from tree_rounds(plan)


def tree_rounds(plan: Plan) -> Rounds:
    """Yield a round with the largest trees, if there are any."""
    for num_rows in plan.tree_rows[-1:]:
        yield f"{num_rows} rows with trees", [(2, sampling) for sampling in TREES[:num_rows]]


def _widths(plan: Plan) -> list[int]:
    return sorted({1, plan.width, plan.block})


def _asked(width: int, sampling: SamplingParams = GREEDY, *, max_tokens: int = 1) -> SamplingParams:
    return replace(sampling, width=width, max_tokens=max_tokens, ignore_eos=True, seed=0)


def _prompt(num_tokens: int, number: int, vocab_size: int) -> list[int]:
    """Return token ids that differ from request to request."""
    return [(7 * index + 13 * number + 1) % vocab_size for index in range(num_tokens)]
