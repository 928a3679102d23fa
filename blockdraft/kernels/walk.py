"""A walk through the drafts of a block, each chosen from a few candidates and knowing the one before it.

A drafter's head is asked once, for all drafts. What a token says of the next one is a product of two short
vectors, and only candidates that the head thinks likely can win: so a draft costs a few hundred products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import NEVER, Needs, Noise, SamplingBatch, native_noise, reference_choose


@dataclass(frozen=True, slots=True)
class Candidates:
    """K tokens for each of D drafts of R rows, none twice for one draft."""

    scores: Tensor  # [R, D, K] logits
    token_ids: Tensor  # [R, D, K] int64


@dataclass(frozen=True, slots=True)
class Transition:
    """What the token before a draft adds to the score of a candidate: a product of two rows."""

    before: Tensor  # [V, rank], by token
    after: Tensor  # [places, rank]
    places: Tensor  # [R, D, K] int64: the candidates' rows of `after`


# Candidates, the tokens before and where they begin, how rows are sampled, what a token adds for the next.
Walk = Callable[[Candidates, Tensor, Tensor, SamplingBatch, Transition | None], Tensor]


def pick_walk(at: Available) -> Walk:
    if at.has_llvm():
        return _repeated_walk()
    if not at.has_triton("sampling"):
        return reference_walk
    from blockdraft.kernels.triton.walk import walk

    return named("sampling", walk)


def _repeated_walk() -> Walk:
    """On a CPU: what the rows need is asked anew at each replay of a captured step."""
    from blockdraft.kernels.llvm.tape import repeat

    noise = native_noise()

    def walk(
        found: Candidates,
        path: Tensor,
        starts: Tensor,
        batch: SamplingBatch,
        transition: Transition | None = None,
    ) -> Tensor:
        drafts = torch.empty(found.scores.shape[:2], dtype=torch.int64)

        def run() -> None:
            if batch.needs == Needs():
                drafts.copy_(_greedy_walk(found, path, transition))
            else:
                drafts.copy_(reference_walk(found, path, starts, batch, transition, noise))

        repeat(run)
        return drafts

    return walk


def reference_walk(
    found: Candidates,
    path: Tensor,
    starts: Tensor,
    batch: SamplingBatch,
    transition: Transition | None = None,
    noise: Noise = gumbel,
) -> Tensor:
    """Drafts [R, D] behind the tokens `path` [R, J], at least one, at positions starts[r], starts[r] + 1, …

    Each is what `choose` makes of its candidates alone, once the token before it has added to their scores.
    """
    vocab_size, num_before = batch.prompt_seen.shape[1], path.shape[1]
    for draft in range(found.scores.shape[1]):
        scores, token_ids = _scores(found, transition, draft, path[:, -1]), found.token_ids[:, draft]
        full = scores.new_full((len(scores), 1, vocab_size), NEVER)
        full.scatter_(2, token_ids[:, None], scores[:, None])
        if batch.has_penalty:  # counts what is on the path: as the last of as many columns
            chosen = reference_choose(full.expand(-1, path.shape[1], -1), starts, path, batch, noise)[:, -1:]
        else:
            chosen = reference_choose(full, starts + path.shape[1] - 1, path, batch, noise)
        path = torch.cat((path, chosen), dim=1)
    return path[:, num_before:]


def _greedy_walk(found: Candidates, path: Tensor, transition: Transition | None) -> Tensor:
    """The same where no row asks for anything: the best of each draft, of equal ones the lowest id."""
    token, chosen = path[:, -1], []
    for draft in range(found.scores.shape[1]):
        scores = _scores(found, transition, draft, token)
        is_best = scores == scores.amax(dim=1, keepdim=True)
        token = torch.where(is_best, found.token_ids[:, draft], torch.iinfo(torch.int64).max).amin(dim=1)
        chosen.append(token)
    return torch.stack(chosen, dim=1)


def _scores(found: Candidates, transition: Transition | None, draft: int, token: Tensor) -> Tensor:
    """[R, K] of a draft's candidates behind the tokens [R], in float32 or wider."""
    scores = found.scores[:, draft]
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if transition is None:
        return scores
    rows = transition.after[transition.places[:, draft]].to(scores.dtype)
    return scores + (rows @ transition.before[token].to(scores.dtype)[..., None])[..., 0]
