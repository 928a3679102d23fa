"""What a step commits where keys and values are compressed: prompts answered through the engine's cache.

Drafts are checked against what the model says through that cache, so answers are its own. But the drafter was
trained beside exact keys and values, and may guess less of what compressed ones make of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from blockdraft.check.kv_card import check_served_on_card
from blockdraft.check.kv_centre import served_centres
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.planner.kv_choice import kv_choice
from blockdraft.planner.plan import Plan
from blockdraft.settings.settings import Settings

PASSAGE = 384  # tokens of a text, at most: enough that answers read compressed ones
ANSWER = 64  # tokens at most
QUESTIONS = (  # of a passage, so that most of what answers read is compressed
    "What is this text about? Answer in one paragraph.",
    "Write a Python function that counts how often each word of such a text occurs.",
    "List five things that this text mentions, one in each line.",
    "A page has 40 lines of 12 words each. How many pages do 6,000 words take? Think step by step.",
)


def prompts_behind(
    models: LoadedPair, texts: Sequence[Sequence[int]], *, begin: int, count: int, room: int
) -> list[list[int]]:
    """`count` questions, each behind the beginning of a text."""
    found, passage = [], min(begin, PASSAGE)
    asked = itertools.cycle(itertools.product(texts, QUESTIONS))
    for text, question in itertools.islice(asked, count):
        content = f"{models.tokenizer.decode(text[:passage])}\n\n{question}\n"
        if models.tokenizer.has_chat_template:
            messages = [{"role": "user", "content": content}]
            found.append(models.tokenizer.encode_chat(messages, add_generation_prompt=True))
        else:
            found.append(models.tokenizer.encode(content))
    return [ids for ids in found if len(ids) <= room]


def committed_per_step(
    models: LoadedPair, plan: Plan, format: str, prompts: Sequence[Sequence[int]]
) -> float | None:
    """Tokens by steps, of greedy answers at the plan's width; None: the engine has no such cache for it."""
    try:
        kept = _plan(models, plan, format, prompts)
        check_served_on_card(models, kept)
    except (ModelError, SettingsError):
        return None
    engine = Engine(models, kept)
    if any(cold.pages.format.is_turned for cold in engine.cache.cold):
        engine.cache.centre_keys(served_centres(models, plan.max_model_len))
    num_tokens = num_steps = 0
    for tokens, steps in _answers(engine, prompts):
        num_tokens, num_steps = num_tokens + tokens, num_steps + steps
    return num_tokens / num_steps


def _plan(models: LoadedPair, plan: Plan, format: str, prompts: Sequence[Sequence[int]]) -> Plan:
    """`plan` with another cache, for these prompts alone."""
    rows = min(len(prompts), plan.max_num_seqs)
    settings = Settings(kv_dtype="auto" if format == EXACT else format, page_size=plan.page_size)
    kv = kv_choice(settings, plan.dtype, models.config, models.draft_config, plan.block)
    longest = max(map(len, prompts)) + ANSWER + plan.scratch
    in_flight = plan.max_prefill_tokens * (2 if plan.overlap else 1)
    return replace(
        plan,
        max_num_seqs=rows,
        num_pages=rows * (plan.pages_of(longest) + 1),
        kv_dtype=kv.target,
        kv_window=settings.kv_window,
        num_exact_pages=kv.num_exact_pages(settings, rows, plan.block, in_flight),
    )


def _answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Tokens and steps of every answer."""
    plan = engine.plan
    for ids in prompts:
        most = min(ANSWER, plan.max_model_len - len(ids))
        engine.add(ids, SamplingParams(temperature=0.0, max_tokens=most, width=plan.width))
    while engine.has_work:
        for delta in engine.step():
            if delta.metrics is not None:
                yield delta.metrics.num_tokens, delta.metrics.steps
