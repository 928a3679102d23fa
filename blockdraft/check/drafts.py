"""Checks that a drafter changes only the speed, and counts its committed tokens on built-in prompts.

The target's cache is compared before and after each call of the drafter. If our own batch-invariant kernels
compute all products, answers and probabilities must equal those without the drafter. Other libraries do not
promise equal bits; with them, equal answers are only counted. With or without a drafter, a captured step must
give the same tokens as the step without capture.
"""

from __future__ import annotations

import itertools
import operator
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import Metrics, SamplingParams, TokenLogprobs
from blockdraft.engine.trial_engine import max_tokens, serve, trial_engine
from blockdraft.engine.width_controller import widths_for
from blockdraft.errors import ModelError
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.linear import MAX_FEW
from blockdraft.step.drafter import Drafter, NoDrafter, Weightless

ANSWER_TOKENS = 24  # per prompt, with the drafter
PLAIN_TOKENS = 6  # per prompt, for the comparison with answers without the drafter
PLAIN_SECONDS = 0.5  # after this time the comparison begins no further prompt
CAPTURED_TOKENS = 4  # for one prompt, at each checked width
NARROW = 4  # a width
WATCHED_TOKENS = 2  # while the target's cache is compared around every call of the drafter


class Drafted(NamedTuple):
    """The results of a drafter on the built-in prompts."""

    accepted: tuple[float, ...]  # [i]: share of the steps that accepted draft i + 1
    width: int
    num_prompts: int
    num_equal: int  # answers that equal the answer without the drafter
    num_compared: int

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted)


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """The answer to one prompt, with log-probabilities and metrics."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    metrics: Metrics


def check_drafter(engine: Engine, prompts: list[list[int]]) -> Drafted:
    """Answer prompts greedily, with and without the drafter; return the counts.

    Raise ModelError if the drafter changes more than the speed.
    """
    models, width = engine.models, checked_widths(engine)[-1]
    width = width if width > 1 else engine.plan.block
    prompts = [ids[-max(1, max_tokens(engine) // 2) :] for ids in prompts]
    _watch(engine, prompts[0], width)
    drafted = [answer(trial_engine(engine), ids, width, ANSWER_TOKENS) for ids in prompts]  # as served
    begun_s, equal = time.monotonic(), []
    for number, ids in enumerate(prompts):
        if time.monotonic() - begun_s > PLAIN_SECONDS:
            break
        with_it = answer(trial_engine(engine), ids, width, PLAIN_TOKENS, num_logprobs=0)
        plain = answer(
            trial_engine(engine, NoDrafter(engine.plan.block)), ids, width, PLAIN_TOKENS, num_logprobs=0
        )
        equal.append(_is_equal(models, number, with_it, plain, width))
    return Drafted(_accepted(drafted), width, len(prompts), sum(equal), len(equal))


def answer(
    engine: Engine, prompt: list[int], width: int, num_tokens: int, num_logprobs: int | None = None
) -> CheckedAnswer:
    num_tokens = max(1, min(num_tokens, max_tokens(engine) - len(prompt)))
    sampling = SamplingParams(
        temperature=0.0,
        width=width,
        max_tokens=num_tokens,
        min_tokens=min(8, num_tokens),
        logprobs=num_logprobs,
    )
    engine.add(prompt, sampling)
    deltas = serve(engine)
    metrics = deltas[-1].metrics
    assert metrics is not None
    return CheckedAnswer(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        metrics=metrics,
    )


def keeps_bits(models: LoadedPair, width: int) -> bool:
    """Return whether batch-invariant kernels compute all products of one sequence's block."""
    dtype: torch.dtype = getattr(torch, models.dtype)
    if models.device.type == "cpu":
        return why_no_llvm(dtype, models.device) is None
    is_ours = not models.target.kernels.off and models.why_not_captured() is None
    return is_ours and (width <= MAX_FEW or not models.target.kernels.available.is_fast)


def draft_name(models: LoadedPair) -> str:
    return models.draft_name or type(models.drafter).__name__


def _accepted(answers: list[CheckedAnswer]) -> tuple[float, ...]:
    """Return, for each position, the probability that its draft and all drafts before it are right.

    This is the product, over the positions, of the share of right drafts among those reached. So a last block
    that the end of the answer cuts does not lower the result.
    """
    accepted = itertools.zip_longest(*(answer.metrics.accepted for answer in answers), fillvalue=0)
    reached = itertools.zip_longest(*(answer.metrics.reached for answer in answers), fillvalue=0)
    where_reached = (sum(kept) / max(1, sum(tried)) for kept, tried in zip(accepted, reached, strict=True))
    return tuple(itertools.accumulate(where_reached, operator.mul))


def _is_equal(
    models: LoadedPair, number: int, drafted: CheckedAnswer, plain: CheckedAnswer, width: int
) -> bool:
    """Return whether the drafted answer begins with the plain one.

    Raise ModelError if the answers or their log-probabilities differ although equal bits are promised.
    """
    pairs = list(zip(drafted.logprobs, plain.logprobs, strict=False))
    at = next((at for at, (one, other) in enumerate(pairs) if one.token_id != other.token_id), None)
    if at is None and all(one.logprob == other.logprob for one, other in pairs):
        return True
    if not keeps_bits(models, width):
        return at is None
    if at is None:
        off = max(abs(one.logprob - other.logprob) for one, other in pairs)
        changed = f"the target's probabilities: by up to {off:.1e} nats in built-in prompt {number + 1}"
    else:
        one, other = pairs[at]
        changed = (
            f"the answer: token {at + 1} of built-in prompt {number + 1} is {one.token_id} with it and "
            f"{other.token_id} without it"
        )
    raise ModelError(
        f"draft '{draft_name(models)}' changes {changed}, at the same width of {width}. A drafter may change "
        "the speed only, so nothing is served: use --draft none, and please report this line."
    )


def checked_widths(engine: Engine) -> list[int]:
    """Return the widths to check: 1, a narrow one, and the widest that may be served.

    They follow from the settings. The width that is measured as best differs between starts, and would make
    each start check again.
    """
    widths = widths_for(engine.plan.block)
    if engine.graphs is not None:
        widths = sorted({size.width for size in engine.graphs.places})
    return sorted({1, *(width for width in widths if width == NARROW), widths[-1]})


def check_captured(engine: Engine, prompt: list[int]) -> int:
    """Return the number of compared tokens of captured steps. Raise ModelError if eager steps differ."""
    prompt, count = prompt[-max(1, max_tokens(engine) // 2) :], 0
    for width in checked_widths(engine):
        served = answer(trial_engine(engine), prompt, width, CAPTURED_TOKENS).token_ids
        # Steps that list probabilities are not captured.
        eager = answer(trial_engine(engine), prompt, width, CAPTURED_TOKENS, num_logprobs=0).token_ids
        if served != eager:
            raise ModelError(
                f"the captured step of width {width} gives other tokens than its kernels one by one: "
                f"{list(served)}, not {list(eager)} (on {engine.models.device}). Nothing is served: use "
                "--no-graphs, and please report this line."
            )
        count += len(served)
    return count


# ---- the target's cache


def _watch(engine: Engine, prompt: list[int], width: int) -> None:
    watched = _Watched(engine)
    answer(trial_engine(engine, watched), prompt, width, WATCHED_TOKENS)
    if watched.touched is not None:
        raise ModelError(
            f"draft '{draft_name(engine.models)}' writes into layer {watched.touched} of the target's cache. "
            "A drafter may change the speed only, so nothing is served: use --draft none, and please report "
            "this line."
        )


class _Watched(Weightless):
    """Wraps the drafter, and notes if a call changes the active sequence's target cache."""

    def __init__(self, engine: Engine) -> None:
        self.touched: int | None = None  # the first layer that was changed
        self._engine = engine
        self._drafter: Drafter = engine.models.drafter
        self.block = self._drafter.block

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        before = self._remembered(0)
        drafted = self._drafter.draft(rows, cache, view, width)
        self._compare(before, self._remembered(0))
        return drafted

    def absorb(self, features: Tensor, view: View) -> None:
        num_new = len(features) // len(self._engine.rows.active)
        before = self._remembered(num_new)
        self._drafter.absorb(features, view)
        self._compare(before, self._remembered(num_new))

    def follow(self, hidden: Tensor, next_ids: Tensor, num_kept: Tensor, view: CacheView, rows: Rows) -> None:
        num_new = len(hidden) // len(rows.active)
        before = self._remembered(num_new)
        self._drafter.follow(hidden, next_ids, num_kept, view, rows)
        self._compare(before, self._remembered(num_new))

    def _remembered(self, num_new: int) -> list[Tensor]:
        """Return the active sequence's cache in all target layers, up to `num_new` tokens past its length."""
        rows, page_size = self._engine.rows, self._engine.plan.page_size
        row = rows.active[:1]
        position = torch.arange(int(rows.length[row]) + num_new, device=row.device)
        page, inside = position // page_size, position % page_size
        slots = rows.page_table[row, page] * page_size + inside
        found = []
        for storage in self._engine.cache.storage[: self._engine.models.config.num_layers]:
            if isinstance(storage, PagedKV):
                found.append(torch.cat((storage.keys[:, slots], storage.values[:, slots])))
            elif isinstance(storage, CompressedLayer):
                assert rows.exact_table is not None
                exact = (rows.exact_table[row, page] * page_size + inside)[-num_new - 1 :]
                pages = storage.pages
                found.append(torch.cat((pages.exact_keys[0][:, exact], pages.exact_values[0][:, exact])))
            else:
                assert isinstance(storage, RecurrentState)
                found.append(torch.cat((storage.state[row].flatten(), storage.tail[row].flatten())))
        return found

    def _compare(self, before: list[Tensor], after: list[Tensor]) -> None:
        for layer, (one, other) in enumerate(zip(before, after, strict=True)):
            if self.touched is None and not torch.equal(one.nan_to_num(), other.nan_to_num()):
                self.touched = layer
