"""Measures at the start which width is fastest and how long a prefill step delays decoding.

`fit_pages` (start/memory.py) measures how many pages fit, before the engine is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import max_tokens, serve, trial_engine
from blockdraft.planner.plan import Plan
from blockdraft.start.block_width import known_acceptance, may_choose_width, plan_with_width

MIN_CHUNK = 16  # tokens; the time of shorter steps is only overhead
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, width=1, seed=0)


def measure(
    engine: Engine,
    accepted: tuple[float, ...] = (),
    *,
    uses_stored: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return the idle engine's plan with the fastest width, unless the user set a width.

    `accepted`: the acceptance on the built-in prompts, used if there is no fit; without both, return the
    plan unchanged. `uses_stored`: use the costs that an earlier start measured, if stored.
    """
    if not may_choose_width(engine):
        return engine.plan
    if known := known_acceptance(engine.models):
        return plan_with_width(engine, known, uses_stored=uses_stored, warn=warn)
    if accepted:
        return plan_with_width(engine, {"the built-in prompts": accepted}, stores=False)
    return engine.plan


def measure_chunk(engine: Engine, note: Callable[[str], None]) -> Plan:
    """Return the idle engine's plan with the chunk halved until its step takes at most `max_stall_ms`.

    Chunks are only halved, so that two starts on one machine usually divide prompts alike.
    """
    plan, allowed_ms = engine.plan, engine.plan.start.max_stall_ms
    if allowed_ms is None:
        return plan
    chunk = plan.max_prefill_tokens
    while (took_ms := _prefill_ms(engine, chunk)) > allowed_ms and chunk > MIN_CHUNK:
        chunk = max(chunk // 2, MIN_CHUNK)
    reason = f"a prefill step of {chunk} tokens takes {took_ms:.0f} ms, {allowed_ms} are allowed"
    note(reason)
    if chunk == plan.max_prefill_tokens:
        return plan
    return plan.changed({"max_prefill_tokens": reason}, max_prefill_tokens=chunk)


def _prefill_ms(engine: Engine, chunk: int) -> float:
    """Return the milliseconds of a step after one chunk of context, if that fits: the faster of two runs."""
    times = []
    num_prompt = max(2, min(max_tokens(engine) - 1, 2 * chunk + 1))
    for number in range(2):
        other = trial_engine(engine, plan=replace(engine.plan, max_prefill_tokens=chunk, overlap=False))
        other.add([(7 * i + number) % engine.models.config.vocab_size for i in range(num_prompt)], ONE)
        slowest = 0.0
        for _ in range(-(-(num_prompt - 1) // chunk)):
            begun = time.perf_counter()
            other.step()
            engine.wait()
            slowest = max(slowest, time.perf_counter() - begun)
        serve(other)
        times.append(slowest * 1e3)
    return min(times)
