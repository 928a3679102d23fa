"""Studies key/value formats on one model: the loss, the needles that are found, and a verdict.

References read texts and needles (kv_quality.py). Questions are answered with drafts, through the engine's
own cache: the drafter was trained with exact keys and values, and may predict fewer of the tokens that the
model chooses with compressed ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blockdraft.check.kv_quality import (
    Arm,
    Loss,
    LossTally,
    bytes_of,
    count_text,
    depths,
    exact_arm,
    likeliest,
    loss_of,
    of_format,
)
from blockdraft.check.kv_served import check_served_on_card, served_centres
from blockdraft.check.kv_texts import PER_TEXT, built_in, found, hide
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import serve
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.kv_codec import KvFormat
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.planner.kv_choice import KvRequest, kv_choice
from blockdraft.planner.plan import ELEMENT_BYTES, Plan

# ---- verdicts


# Limits for "use" and "care", over the counted tokens. A loss that users notice lies between the two, by
# our own judgement of SmolLM2-135M's int8 (99.9 %, 0.0 %) and its tq4 (98 %, 0.3 %).
USE_SAME, CARE_SAME = 96.0, 92.0  # least percent of tokens whose likeliest next token is the same
USE_PERPLEXITY, CARE_PERPLEXITY = 1.0, 3.0  # largest increase in percent
USE_NEEDLES, CARE_NEEDLES = 0.9, 0.75  # least share of the needles that exact keys find
NUM_SURE = 2.0  # a perplexity exceeds a limit if it is so many standard errors above
MIN_NEEDLES = 8  # needles that exact keys must find; with fewer, needles are ignored

Verdict = Literal["use", "care", "harms", "unknown"]


@dataclass(frozen=True, slots=True)
class Needles:
    """The numbers of needles: hidden, found with exact keys and values, found with compressed ones."""

    num_hidden: int
    num_exact: int
    num_found: int  # with compressed ones
    num_both: int  # with exact and with compressed ones

    @classmethod
    def of(cls, exact: Sequence[bool], found: Sequence[bool]) -> Needles:
        both = sum(one and other for one, other in zip(exact, found, strict=True))
        return cls(len(exact), sum(exact), sum(found), both)

    @property
    def share(self) -> float | None:
        """Return the needles found relative to those that exact keys find, or None if these are too few."""
        return None if self.num_exact < MIN_NEEDLES else self.num_found / self.num_exact


def verdict_of(loss: Loss, needles: Needles | None) -> Verdict:
    """Return the worst verdict of all measures. A change of perplexity must exceed its error to count."""
    share = None if needles is None else needles.share
    sure = NUM_SURE * loss.error_percent

    def is_within(same: float, perplexity: float, found: float) -> bool:
        is_found = share is None or share >= found
        return loss.same_percent >= same and loss.perplexity_percent - sure <= perplexity and is_found

    if not is_within(CARE_SAME, CARE_PERPLEXITY, CARE_NEEDLES):
        return "harms"
    if sure > CARE_PERPLEXITY:
        return "unknown"
    return "use" if is_within(USE_SAME, USE_PERPLEXITY, USE_NEEDLES) else "care"


def sentence(name: str, loss: Loss, needles: Needles | None, verdict: Verdict, instead: str | None) -> str:
    """Return a sentence with results and advice. `instead` is the smallest usable format, or None."""
    found = [
        f"{loss.same_percent:.1f} % same likeliest token",
        f"{loss.perplexity_percent:+.1f} % perplexity (±{loss.error_percent:.1f})",
    ]
    if needles is not None and needles.num_exact:
        found.append(f"{needles.num_found} needles found where exact ones find {needles.num_exact}")
    advice = {
        "use": "use it",
        "care": "a loss that may show: use it where memory is short, and look at your own answers",
        "harms": f"harms this model: {'keep exact ones' if instead is None else f'use {instead}'}",
        "unknown": "too few tokens to say: use more of them (--tokens)",
    }[verdict]
    return f"{name}: {', '.join(found)}: {advice}."


def instead_of(verdicts: dict[str, Verdict], num_bytes: dict[str, float]) -> str | None:
    """Return the smallest format with the verdict "use", or None."""
    usable = [name for name, verdict in verdicts.items() if verdict == "use"]
    return min(usable, key=lambda name: num_bytes[name], default=None)


# ---- tokens per step


PASSAGE = 384  # most tokens of a passage: enough for answers to read compressed keys
ANSWER = 64  # tokens at most
QUESTIONS = (  # after a passage, so that answers read mostly compressed keys
    "What is this text about? Answer in one paragraph.",
    "Write a Python function that counts how often each word of such a text occurs.",
    "List five things that this text mentions, one in each line.",
    "A page has 40 lines of 12 words each. How many pages do 6,000 words take? Think step by step.",
)


def prompts_behind(
    models: LoadedPair, texts: Sequence[Sequence[int]], *, begin: int, count: int, room: int
) -> list[list[int]]:
    """Return up to `count` prompts that fit `room`: the beginning of a text, then a question."""
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
    """Return the tokens per step of greedy answers at the plan's width, or None if this is unsupported."""
    try:
        kept = _plan(models, plan, format, prompts)
        check_served_on_card(models, kept)
    except (ModelError, SettingsError):
        return None
    engine = Engine(models, kept)
    if any(group.pages.format.is_rotated for group in engine.cache.compressed):
        engine.cache.centre_keys(served_centres(models, plan.max_model_len))
    for ids in prompts:
        most = min(ANSWER, plan.max_model_len - len(ids))
        engine.add(ids, SamplingParams(temperature=0.0, max_tokens=most, width=plan.width))
    found = [delta.metrics for delta in serve(engine) if delta.metrics is not None]
    return sum(one.num_tokens for one in found) / sum(one.steps for one in found)


def _plan(models: LoadedPair, plan: Plan, format: str, prompts: Sequence[Sequence[int]]) -> Plan:
    """Return `plan` with a cache of the given format that holds the prompts."""
    rows = min(len(prompts), plan.max_num_seqs)
    asked = KvRequest("auto" if format == EXACT else format, "auto", plan.kv_window, plan.page_size)
    kv = kv_choice(asked, plan.dtype, models.config, models.draft_config, plan.block)
    longest = max(map(len, prompts)) + ANSWER + plan.scratch
    in_flight = plan.max_prefill_tokens * (2 if plan.overlap else 1)
    return replace(
        plan,
        max_num_seqs=rows,
        num_pages=rows * (plan.pages_of(longest) + 1),
        kv_dtype=kv.target,
        num_exact_pages=kv.num_exact_pages(rows, plan.block, in_flight),
    )


# ---- the study


Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FormatReport:
    """The results of one format. Bytes are per token, in all layers."""

    name: str
    num_bytes: float
    ratio: float
    loss: Loss
    by_depth: tuple[Loss, ...]
    needles: Needles | None
    committed: float | None  # tokens per step with this cache; None: not measured
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class KvReport:
    """The results of a study."""

    dtype: str
    device: str
    num_texts: int
    length: int
    begin: int  # the first counted depth
    num_tokens: int
    exact_bytes: float
    perplexity: float  # with exact keys and values
    committed: float | None  # tokens per step with exact keys and values; None: not measured
    num_answers: int  # answers in which `committed` was measured
    depths: tuple[tuple[int, int], ...]
    formats: tuple[FormatReport, ...]


def study(  # noqa: PLR0913
    models: LoadedPair,
    plan: Plan,
    formats: Sequence[KvFormat],
    texts: Sequence[Sequence[int]],
    *,
    begin: int,
    num_needles: int,
    num_answers: int,
    note: Note,
) -> KvReport:
    """Study formats on `texts` of equal length, on `num_needles` texts with needles, and on answers."""
    exact = exact_arm(ELEMENT_BYTES[models.dtype])
    centres = served_centres(models, plan.max_model_len)
    arms = [exact, *(of_format(form, centres=centres if form.is_rotated else None) for form in formats)]
    tallies = {arm.name: LossTally(begin) for arm in arms}
    for number, text in enumerate(texts, 1):
        count_text(models, text, arms, tallies)
        note(f"text {number} of {len(texts)} read by {len(arms)} arms")
    length, base = len(texts[0]), tallies[exact.name]
    needles = count_needles(models, arms, num_needles, length=length, note=note)
    num_answers = 0 if models.draft_config is None else num_answers
    room = plan.max_model_len - 1
    prompts = prompts_behind(models, texts, begin=begin, count=num_answers, room=room)
    committed = count_committed(models, plan, [arm.name for arm in arms], prompts, note=note)
    classes = depths(begin, length)
    losses = {arm.name: loss_of(tallies[arm.name], base) for arm in arms}
    verdicts = {arm.name: verdict_of(losses[arm.name], needles.get(arm.name)) for arm in arms[1:]}
    sizes = {arm.name: bytes_of(arm, models) for arm in arms}
    instead = instead_of(verdicts, sizes)
    reports = []
    for name in verdicts:
        loss, hidden, verdict = losses[name], needles.get(name), verdicts[name]
        reports.append(
            FormatReport(
                name=name,
                num_bytes=sizes[name],
                ratio=sizes[exact.name] / sizes[name],
                loss=loss,
                by_depth=tuple(loss_of(tallies[name], base, *each) for each in classes),
                needles=hidden,
                committed=committed.get(name),
                verdict=verdict,
                sentence=sentence(name, loss, hidden, verdict, instead),
            )
        )
    return KvReport(
        dtype=models.dtype,
        device=str(models.device),
        num_texts=len(texts),
        length=length,
        begin=begin,
        num_tokens=losses[exact.name].num_tokens,
        exact_bytes=sizes[exact.name],
        perplexity=losses[exact.name].perplexity,
        committed=committed.get(exact.name),
        num_answers=len(prompts),
        depths=tuple(classes),
        formats=tuple(reports),
    )


def count_committed(
    models: LoadedPair, plan: Plan, names: Sequence[str], prompts: Sequence[Sequence[int]], *, note: Note
) -> dict[str, float | None]:
    """Return the tokens per step of each arm; the first arm is exact. Return {} without prompts."""
    results: dict[str, float | None] = {}
    for name in names if prompts else ():
        results[name] = committed_per_step(models, plan, EXACT if name == names[0] else name, prompts)
        note(f"{len(prompts)} answers with drafts, {name}")
    return results


def count_needles(
    models: LoadedPair, arms: Sequence[Arm], num_texts: int, *, length: int, note: Note
) -> dict[str, Needles]:
    """Return the needles found by each arm; the first arm is exact. Return {} without texts."""
    if num_texts == 0:
        return {}

    def encode(text: str) -> list[int]:
        return models.tokenizer.encode(text, add_special_tokens=False)

    results: dict[str, list[bool]] = {arm.name: [] for arm in arms}
    for number, filler in enumerate(itertools.islice(built_in(encode, length), num_texts), 1):
        text = hide(filler, encode, length=length, count=PER_TEXT, seed=number - 1)
        for arm in arms:
            results[arm.name] += found(text, likeliest(models, arm))
        note(f"needles {number} of {num_texts}")
    exact = results[arms[0].name]
    return {name: Needles.of(exact, each) for name, each in results.items()}
