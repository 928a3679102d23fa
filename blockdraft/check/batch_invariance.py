"""Checks that log-probabilities do not depend on the batch, with these weights on this device.

One text is computed in every way that the server uses: prefilled at once and in pieces, decoded token by
token and in blocks, as the only sequence and with others. The log-probabilities are compared with ==. The
text is too short for all tiles of experts, so the outputs of experts are compared, too. If all are equal,
answers do not depend on drafts or on other requests. If not, answers may vary where two tokens are nearly
tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView
from blockdraft.check.comparison import Numbers
from blockdraft.check.expert_tiles import FEW, mixtures, tile_runs
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import max_tokens, serve, trial_engine
from blockdraft.step.drafter import NoDrafter, Weightless

NUM_PROMPT = 150  # tokens; a GPU has different kernels for up to 16, 64, 128 and more tokens
NUM_ANSWER = 20  # more than a block
NUM_ROWS = 9  # sequences in a batch; so many blocks of 16 tokens are more than any tile holds
SHORT_CHUNK = 40  # tokens per prefill piece


class ComputedText(NamedTuple):
    """The tokens of an answer, and the log-probabilities of prompt and answer."""

    token_ids: list[int]
    prompt: list[float]  # without the first token; empty if not requested
    answer: list[float]


class BitsResult(NamedTuple):
    """The number of log-probabilities that were compared, and the first that differs."""

    num_values: int
    difference: str | None  # None: all are equal

    @property
    def is_same(self) -> bool:
        return self.difference is None

    @property
    def detail(self) -> str:
        if self.difference is None:
            return f"{self.num_values} log-probabilities are equal in blocks, larger batches and prefill"
        return f"{self.difference}: at near-ties, answers may vary with the batch"


def check_bits(engine: Engine, ids: list[int]) -> BitsResult:
    """Compare the log-probabilities of one text, and experts. The engine must be idle; it is restored."""
    count = 0
    for way, got, expected in _ways(engine, ids):
        for at, (one, other) in enumerate(zip(got, expected, strict=True), 1):
            count += 1
            if one != other:
                return BitsResult(count, f"{way}, log-probability {at} is {one!r}, not {other!r}")
    return BitsResult(count, _differing_experts(engine))


@torch.inference_mode()
def _differing_experts(engine: Engine) -> str | None:
    """Return the first size of tiles whose outputs differ from those of a few tokens at a time, or None."""
    for mixture in mixtures(engine):
        for where, outputs, few in tile_runs(engine, mixture, Numbers(engine)):
            if not torch.equal(outputs, few):
                return f"{where} have other outputs than {FEW} tokens at a time"
    return None


def _ways(engine: Engine, ids: list[int]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield (description, log-probabilities, expected log-probabilities) for each way to compute the text."""
    plan, room = engine.plan, max_tokens(engine)
    num_answer = max(1, min(NUM_ANSWER, room // 4))
    prompt = (ids * (NUM_PROMPT // len(ids) + 1))[: max(1, min(NUM_PROMPT, room // 2))]
    plain_engine = trial_engine(engine, NoDrafter(plan.block))
    (plain,) = _texts(plain_engine, [prompt], width=1, num_answer=num_answer)
    replay = _Replay([*prompt, *plain.token_ids], plan.block, engine.models.device)
    for width in sorted({min(4, plan.block), plan.block} - {1}):
        (text,) = _texts(trial_engine(engine, replay), [prompt], width=width, num_answer=num_answer)
        yield f"in a block of {width} tokens", text.answer, plain.answer
    for width in sorted({1, plan.block}):
        several = [prompt] * min(NUM_ROWS, plan.max_num_seqs)
        for text in _texts(trial_engine(engine, replay), several, width=width, num_answer=num_answer):
            yield f"among {len(several)} rows of width {width}", text.answer, plain.answer
    whole = [*prompt, *plain.token_ids]
    (text,) = _texts(plain_engine, [whole], width=1, num_answer=1, has_prompt=True)
    yield f"in a prompt of {len(whole)} tokens", text.prompt[-num_answer:], plain.answer
    short = replace(plan, max_prefill_tokens=min(plan.max_prefill_tokens, SHORT_CHUNK))
    in_pieces = trial_engine(engine, NoDrafter(plan.block), short)
    (cut,) = _texts(in_pieces, [whole], width=1, num_answer=1, has_prompt=True)
    yield f"in a prompt that comes in pieces of {SHORT_CHUNK} tokens", cut.prompt, text.prompt


def _texts(
    engine: Engine, prompts: list[list[int]], *, width: int, num_answer: int, has_prompt: bool = False
) -> list[ComputedText]:
    sampling = SamplingParams(
        temperature=0.0,
        width=width,
        max_tokens=num_answer,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if has_prompt else None,
    )
    found = {engine.add(prompt, sampling): ComputedText([], [], []) for prompt in prompts}
    for delta in serve(engine):
        text = found[delta.request_id]
        text.token_ids.extend(item.token_id for item in delta.logprobs)
        text.prompt.extend(item.logprob for item in delta.prompt_logprobs or () if item is not None)
        text.answer.extend(item.logprob for item in delta.logprobs)
    return list(found.values())


class _Replay(Weightless):
    """A drafter whose drafts are the known text, so that every block is accepted whole."""

    def __init__(self, token_ids: list[int], block: int, device: torch.device) -> None:
        self.block = block
        self._token_ids = torch.tensor(token_ids + [0] * block, device=device)

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        columns = torch.arange(width, device=rows.device)
        places = (rows.length[rows.active][:, None] + columns).clamp(max=len(self._token_ids) - 1)
        block = self._token_ids[places]
        block[:, 0] = rows.anchor[rows.active]
        return block
