"""Times ten kinds of work of an engine, to compare machines: eight decode steps and two prompts."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import max_tokens, trial_engine

DECODES = tuple((rows, width) for rows in (1, 8) for width in (1, 4, 8, 16))
PREFILLS = (512, 2048)  # tokens
NUM_PROMPT = 64  # tokens before a decode step
NUM_WARM, NUM_TIMED = 4, 12  # steps of each kind


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a decode step (median) or of a prompt. `tokens` is of each row."""

    kind: str  # "decode" or "prefill"
    rows: int
    tokens: int
    ms: float


def step_times(engine: Engine) -> list[StepTime]:
    """Time what the idle engine can run: its rows, its block and its context limit it."""
    plan = engine.plan
    decodes = [(rows, width) for rows, width in DECODES if rows <= plan.max_num_seqs and width <= plan.block]
    prefills = [count for count in PREFILLS if count <= max_tokens(engine) - 2]
    return [
        *(StepTime("decode", rows, width, _decode_ms(engine, rows, width)) for rows, width in decodes),
        *(StepTime("prefill", 1, count, _prefill_ms(engine, count)) for count in prefills),
    ]


def _decode_ms(engine: Engine, rows: int, width: int) -> float:
    num_steps = NUM_WARM + NUM_TIMED
    trial = trial_engine(engine, plan=replace(engine.plan, overlap=False))
    params = SamplingParams(
        temperature=0.0, max_tokens=width * (num_steps + 1), ignore_eos=True, width=width, seed=0
    )
    for row in range(rows):
        trial.add(_prompt(engine, NUM_PROMPT, row), params)
    _prefill(trial)
    times = [_timed(trial) for _ in range(num_steps)]
    for request_id in trial.live_ids:
        trial.abort(request_id)
    return statistics.median(times[NUM_WARM:])


def _prefill_ms(engine: Engine, count: int) -> float:
    """Return the time of a prompt of `count` tokens, in all its steps: the best of three."""
    times = []
    for number in range(3):
        trial = trial_engine(engine, plan=replace(engine.plan, overlap=False))
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, width=1, seed=0)
        trial.add(_prompt(engine, count + 1, number), one)
        times.append(_prefill(trial))
        while trial.has_work:
            trial.step()
    return min(times)


def _prefill(trial: Engine) -> float:
    """Run steps until every prompt has been read, and return their time."""
    spent_ms = 0.0
    while any(not sequence.is_decoding for sequence in trial.scheduler.live):
        spent_ms += _timed(trial)
    return spent_ms


def _timed(trial: Engine) -> float:
    begun_s = time.perf_counter()
    trial.step()
    trial.wait()
    return 1e3 * (time.perf_counter() - begun_s)


def _prompt(engine: Engine, count: int, number: int) -> list[int]:
    return [(7 * place + 11 * number) % engine.models.config.vocab_size for place in range(count)]
