"""The messages of a training run: plan, time left, verdict and next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.fit_report import FITS
from blockdraft.training.job import Job

NO_BETTER = "no better than"  # part of every warning about a drafter without gain


def plan_lines(
    job: Job, *, num_training: int, num_held_out: int, answer_s: float | None, is_resumed: bool
) -> Iterator[str]:
    """Yield the lines that announce the stages, the time and the files of a run."""
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
    """Return a text with the time left, given the share done after `seconds`; empty if it is too early."""
    if share <= 0 or seconds < 1:
        return ""
    left_s = seconds * (1 - min(share, 1.0)) / share
    return f", {left_s / 60:.0f} min left" if left_s >= 90 else f", {left_s:.0f} s left"


def verdict_lines(job: Job, fits: Mapping[str, DrafterFit], before: DrafterFit | None) -> Iterator[str]:
    """Yield the verdict and the next command. `before` is the fit of the drafter given by --from."""
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
