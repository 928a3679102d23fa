"""Writes the plan, the verdict and the next command of a training run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.fit_report import FITS
from blockdraft.training.job import Job

NO_BETTER = "no better than"  # in every warning about a drafter without gain


def plan_lines(
    job: Job, *, num_training: int, num_held_out: int, answer_s: float | None, is_resumed: bool
) -> Iterator[str]:
    """Yield what the run does, how long it takes, and which files it leaves."""
    again = ", resumed" if is_resumed else ""
    source = str(job.start_from) if job.start_from else f"{job.shape.num_layers} new layers"
    asked = f"answers {num_training:,} prompts for training and {num_held_out:,} for evaluation"
    asked = asked if job.prompts else "has answered already"
    yield f"plan: train a drafter for '{job.model}' in {job.out}{again}"
    yield (
        f"  stages: the target {asked}; {source} are trained on the answers; the drafter is evaluated, "
        "exported and checked in the engine"
    )
    answers = "" if answer_s is None else f", up to {answer_s / 60:.3g} of them for answers"
    if job.minutes is None:
        yield f"  time: {job.steps:,} steps, after the answers; both stages show the time left"
    else:
        yield f"  time: about {job.minutes:g} minutes{answers}"
    yield (
        f"  results: {job.out / 'drafter'} for `serve --draft`; also answers, checkpoint.pt (every 5 "
        "minutes) and log.txt. Ctrl-C stops the run; the same command with --resume continues it"
    )


def left(share: float, seconds: float) -> str:
    """Return a stage's estimated remaining time after `seconds` of it; empty if it is too early to say."""
    if share <= 0 or seconds < 1:
        return ""
    left_s = seconds * (1 - min(share, 1.0)) / share
    return f", {left_s / 60:.0f} min left" if left_s >= 90 else f", {left_s:.0f} s left"


def verdict_lines(job: Job, fits: Mapping[str, DrafterFit], before: DrafterFit | None) -> Iterator[str]:
    """Yield the verdict and the next command; `before` is the fit of the drafter the run began with."""
    drafter, found = job.out / "drafter", fits["all"].committed
    target = "" if job.model == "default" else shlex.quote(job.model) + " "
    if before is not None and found <= before.committed:
        yield (
            f"warning: {NO_BETTER} the drafter it began with: {found:.3f} tokens per step, "
            f"{before.committed:.3f} before. Keep {job.start_from}, or try more --minutes, a lower --rate or "
            "more prompts"
        )
        return
    if found < FITS:
        yield (
            f"warning: {NO_BETTER} no drafter: {found:.3f} tokens per step, plain decoding has 1; `serve` "
            f"drops a drafter below {FITS}. Try more --minutes and more --prompts (docs/training.md)"
        )
        yield (
            f"next, to train it further: blockdraft train {target}--from {shlex.quote(str(drafter))} "
            "--out OTHER --prompts FILE --minutes N"
        )
        return
    gain = "" if before is None else f", {before.committed:.3f} before"
    yield f"{found:.3f} tokens per step on held-out prompts{gain}; plain decoding has 1"
    yield f"next: blockdraft serve {target}--draft {shlex.quote(str(drafter))}"
