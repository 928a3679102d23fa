"""A study of formats of keys and values on one model: texts and needles read by all arms, and verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockdraft.check.kv_centre import served_centres
from blockdraft.check.kv_drafts import committed_per_step, prompts_behind
from blockdraft.check.kv_needles import PER_TEXT, NeedleText, found, hide
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
from blockdraft.check.kv_texts import built_in
from blockdraft.check.kv_verdict import Needles, Verdict, instead_of, sentence, verdict_of
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.kernels.kv_codec import KvFormat
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.planner.plan import ELEMENT_BYTES, Plan

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FormatReport:
    """What one format does to a model. Bytes are a token's, of all layers."""

    name: str
    num_bytes: float
    ratio: float
    loss: Loss
    by_depth: tuple[Loss, ...]
    needles: Needles | None
    committed: float | None  # tokens per step, of drafts through such a cache; None: nobody drafts
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class KvReport:
    """What formats do to a model."""

    dtype: str
    device: str
    num_texts: int
    length: int
    begin: int  # tokens count from this depth on
    num_tokens: int
    exact_bytes: float
    perplexity: float  # with exact keys and values
    committed: float | None  # likewise
    num_answers: int  # in which it was counted
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
    """`texts` are all of one length; `num_needles` more have needles, `num_answers` questions follow them."""
    exact = exact_of(models)
    centres = served_centres(models, plan.max_model_len)
    arms = [exact, *(of_format(form, centres=centres if form.is_turned else None) for form in formats)]
    tallies = {arm.name: LossTally(begin) for arm in arms}
    for number, text in enumerate(texts, 1):
        count_text(models, text, arms, tallies)
        note(f"text {number} of {len(texts)} read by {len(arms)} arms")
    length, base = len(texts[0]), tallies[exact.name]
    needles = count_needles(models, arms, num_needles, length=length, note=note)
    prompts = _prompts(models, texts, begin=begin, count=num_answers, room=plan.max_model_len - 1)
    committed = count_committed(models, plan, [arm.name for arm in arms], prompts, note=note)
    classes = depths(begin, length)
    losses = {arm.name: loss_of(tallies[arm.name], base) for arm in arms}
    verdicts = {arm.name: verdict_of(losses[arm.name], needles.get(arm.name)) for arm in arms[1:]}
    sizes = {arm.name: bytes_of(arm, models) for arm in arms}
    instead = instead_of(verdicts, sizes)
    reports = []
    for arm in arms[1:]:
        loss, hidden, verdict = losses[arm.name], needles.get(arm.name), verdicts[arm.name]
        reports.append(
            FormatReport(
                name=arm.name,
                num_bytes=sizes[arm.name],
                ratio=sizes[exact.name] / sizes[arm.name],
                loss=loss,
                by_depth=tuple(loss_of(tallies[arm.name], base, *each) for each in classes),
                needles=hidden,
                committed=committed.get(arm.name),
                verdict=verdict,
                sentence=sentence(arm.name, loss, hidden, verdict, instead),
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


def exact_of(models: LoadedPair) -> Arm:
    return exact_arm(ELEMENT_BYTES[models.dtype])


def _prompts(
    models: LoadedPair, texts: Sequence[Sequence[int]], *, begin: int, count: int, room: int
) -> list[list[int]]:
    has_drafter = models.draft_config is not None
    return prompts_behind(models, texts, begin=begin, count=count, room=room) if has_drafter else []


def count_committed(
    models: LoadedPair, plan: Plan, names: Sequence[str], prompts: Sequence[Sequence[int]], *, note: Note
) -> dict[str, float | None]:
    """Tokens per step of each arm, the first of which is exact; none where nothing is asked."""
    results: dict[str, float | None] = {}
    for name in names if prompts else ():
        results[name] = committed_per_step(models, plan, EXACT if name == names[0] else name, prompts)
        note(f"{len(prompts)} answers with drafts, {name}")
    return results


def count_needles(
    models: LoadedPair, arms: Sequence[Arm], num_texts: int, *, length: int, note: Note
) -> dict[str, Needles]:
    """Of each arm, the first of which is exact; none where no texts are asked for."""
    if num_texts == 0:
        return {}
    results: dict[str, list[bool]] = {arm.name: [] for arm in arms}
    for number, text in enumerate(needle_texts(models, num_texts, length=length), 1):
        for arm in arms:
            results[arm.name] += found(text, likeliest(models, arm))
        note(f"needles {number} of {num_texts}")
    exact = results[arms[0].name]
    return {name: Needles.of(exact, each) for name, each in results.items()}


def needle_texts(models: LoadedPair, num_texts: int, *, length: int) -> list[NeedleText]:
    def encode(text: str) -> list[int]:
        return models.tokenizer.encode(text, add_special_tokens=False)

    fillers = itertools.islice(built_in(encode, length), num_texts)
    return [
        hide(filler, encode, length=length, count=PER_TEXT, seed=seed) for seed, filler in enumerate(fillers)
    ]
