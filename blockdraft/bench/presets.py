"""The shapes of published tables: what was asked, at which concurrencies, and how the figures are laid out.

A preset reproduces the shape, never the numbers: machine, model and engine are yours.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from blockdraft.errors import BenchError


@dataclass(frozen=True, slots=True)
class Preset:
    """What a published table was measured with.

    `num_prompts` are requests per place of the table: workloads with fewer prompts repeat them.
    """

    published: str  # where the original stands, and what it does not say
    workloads: tuple[str, ...]
    concurrencies: tuple[int, ...]
    max_tokens: int
    temperature: float
    num_prompts: int
    figures: tuple[
        str, ...
    ]  # of `layout.FIGURES`, a table each: a row per workload, a column per concurrency
    max_turns: int | None = None  # 1: only the first turn of a conversation is asked
    num_warmups: int = 1
    thinking: bool | None = None  # None: the model's default


PRESETS: dict[str, Preset] = {
    "z-lab": Preset(
        published=(
            "card of z-lab/gemma-4-31B-it-DFlash: vLLM on one B300, thinking on, greedy, at most 4096 "
            "tokens; 128 prompts a task from the README of z-lab/dflash, whose benchmark asks first "
            "turns only and warms up with as many requests as the concurrency. (Table 1 of the paper "
            "has 2048 tokens and no thinking.)"
        ),
        workloads=("math500", "gsm8k", "humaneval", "mbpp", "mt_bench"),
        concurrencies=(1, 8, 32),
        max_tokens=4096,
        temperature=0.0,
        num_prompts=128,
        figures=("card", "committed_per_step"),
        max_turns=1,
        num_warmups=32,
        thinking=True,
    ),
    "spark": Preset(
        published=(
            "README and BENCHMARKS.md of AEON-7/vllm-dflash: 16 requests of at most 512 tokens at each "
            "concurrency after 3 warm-ups, temperature 0. There every request of a class is the same "
            "text, and prefix caching is on; here the texts differ, so that the time to first token is "
            "no cache hit."
        ),
        workloads=("code", "reasoning", "dialogue", "prose"),
        concurrencies=(1, 4, 8, 16),
        max_tokens=512,
        temperature=0.0,
        num_prompts=16,
        figures=("tokens_per_s", "request_tokens_per_s", "ttft", "tpot"),
        max_turns=1,
        num_warmups=3,
    ),
    "mt-bench": Preset(
        published=(
            "meanaverage/gemma4-dflash-spark-vllm: 'vllm bench serve' on philschmid/mt-bench, which "
            "asks first turns only; 80 prompts, concurrency 1, at most 2048 tokens, temperature 0."
        ),
        workloads=("mt_bench",),
        concurrencies=(1,),
        max_tokens=2048,
        temperature=0.0,
        num_prompts=80,
        figures=("card",),
        max_turns=1,
    ),
}


DEFAULT = Preset(
    published="",
    workloads=("code", "reasoning", "dialogue", "prose"),
    concurrencies=(1,),
    max_tokens=256,
    temperature=0.0,
    num_prompts=8,
    figures=(),
    num_warmups=2,
)


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(PRESETS)}."
        raise BenchError(f"unknown table '{name}': {hint}")
    return PRESETS[name]
