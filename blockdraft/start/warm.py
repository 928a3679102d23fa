"""Warm-up: real requests through every shape that will be served, so that the first is as fast as the tenth.

What is slow only once: compiling the CPU kernels, loading and choosing the device's own, the first touch of
memory. All of it happens on the way of a request, so requests are what warms it. A card has code of its own
for many sizes, and its libraries choose by size. A CPU has not: once the small rounds were served, the first
of the large ones took as long as the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.twin import max_tokens, serve, twin
from blockdraft.planner.plan import Plan

GREEDY = SamplingParams(temperature=0.0)
# Between them: every part of sampling that is left out when no row of the batch asks for it.
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=1
    ),
    SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5, logit_bias={0: 1.0}),
)

Request = tuple[int, SamplingParams]  # prompt tokens, and what is asked


def warm(engine: Engine, note: Callable[[str], None], *, every_size: bool | None = None) -> None:
    """Serve the warm-up requests; of every size on a card, or where that is asked for.

    The engine, which must be idle, stays as it was.
    """
    if every_size is None:
        every_size = engine.models.device.type != "cpu"
    room = max_tokens(engine)
    other = twin(engine)
    for text, requests in (rounds if every_size else few_rounds)(engine.models.plan):
        note(text)
        for number, (num_prompt, sampling) in enumerate(requests):
            num_prompt = max(1, min(num_prompt, room - 1))
            other.add(_prompt(num_prompt, number, engine.models.config.vocab_size), sampling)
        serve(other)


def rounds(plan: Plan) -> Iterator[tuple[str, list[Request]]]:
    """What is served together, with a name for it."""
    one = _changed(GREEDY, width=1, max_tokens=1)
    yield "one token of prefill", [(2, one)]
    yield f"a prefill chunk of {plan.chunk} tokens", [(plan.chunk + 1, one)]
    if plan.max_rows > 1:
        yield "two prompts of different lengths", [(3, one), (8, one)]
    for width in sorted({1, plan.width, plan.block}):
        yield f"1 row of width {width}", [(1, _changed(GREEDY, width=width, max_tokens=2))]
        several = [_changed(sampling, width=width, max_tokens=1) for sampling in SAMPLINGS[: plan.max_rows]]
        yield f"{len(several)} rows of width {width}, sampled", [(2, sampling) for sampling in several]
        if plan.max_rows > len(several):
            greedy = _changed(GREEDY, width=width, max_tokens=1)
            yield f"{plan.max_rows} rows of width {width}", [(1, greedy)] * plan.max_rows
    for sampling in SAMPLINGS:
        yield "1 row, sampled", [(2, _changed(sampling, width=plan.width, max_tokens=1))]


def few_rounds(plan: Plan) -> Iterator[tuple[str, list[Request]]]:
    """The same where no size has code of its own."""
    several = [_changed(sampling, width=plan.width, max_tokens=1) for sampling in SAMPLINGS]
    yield "one token of prefill", [(2, _changed(GREEDY, width=1, max_tokens=2))]
    yield "rows of different lengths, sampled", [(2 + 3 * i, one) for i, one in enumerate(several)]


def _changed(sampling: SamplingParams, *, width: int, max_tokens: int) -> SamplingParams:
    return replace(sampling, width=width, max_tokens=max_tokens, ignore_eos=True, seed=0)


def _prompt(num_tokens: int, number: int, vocab_size: int) -> list[int]:
    """Token ids that differ from request to request."""
    return [(7 * index + 13 * number + 1) % vocab_size for index in range(num_tokens)]
