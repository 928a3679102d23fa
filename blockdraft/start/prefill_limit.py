"""How long a prefill step may hold up decoding: the chunk, cut until it takes no longer than allowed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import max_tokens, serve, trial_engine
from blockdraft.planner.plan import Plan

MIN_CHUNK = 16  # tokens; shorter steps are all overhead
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, width=1, seed=0)


def plan_with_short_chunk(engine: Engine, max_stall_ms: int, note: Callable[[str], None]) -> Plan:
    """The idle engine's plan with the chunk halved until a step of it takes at most `max_stall_ms`.

    It is halved, not cut to measure: two starts on one machine then cut prompts alike.
    """
    plan = engine.plan
    chunk = plan.max_prefill_tokens
    while (took_ms := _prefill_ms(engine, chunk)) > max_stall_ms and chunk > MIN_CHUNK:
        chunk = max(chunk // 2, MIN_CHUNK)
    reason = f"a prefill step of {chunk} tokens takes {took_ms:.0f} ms, {max_stall_ms} are allowed"
    note(reason)
    return (
        plan
        if chunk == plan.max_prefill_tokens
        else plan.changed({"max_prefill_tokens": reason}, max_prefill_tokens=chunk)
    )


def _prefill_ms(engine: Engine, chunk: int) -> float:
    """Behind one chunk of context where that fits; the faster of two runs."""
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
