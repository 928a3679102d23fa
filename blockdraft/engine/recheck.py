"""Recheck: computes a sample of finished answers again by plain decoding, while the engine is idle.

It uses the engine's own weights, rows and pages (trial_engine.py), without drafts and without the prefix
cache. A new request waits for at most one of its steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.receipt import REPEATED, Receipt, digest_of_tokens, repeatable
from blockdraft.engine.sequence import Sequence
from blockdraft.engine.trial_engine import trial_engine

MAX_WAITING = 64  # answers; while as many wait, no more are sampled; arbitrary
log = logging.getLogger(__name__)


class Recheck:
    """Samples a share of the answers of `engine`. Only the engine's thread may use it."""

    def __init__(self, engine: Engine, share: float) -> None:
        self._engine = engine
        self._share = share
        self._due = 0.0  # answers that should have been sampled so far, less the sampled ones
        self._waiting: deque[Receipt] = deque()
        self._trial: Engine | None = None  # while it computes the first waiting answer
        self._token_ids: list[int] = []
        if share > 0:
            engine.on_end = self.offer

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offer(self, sequence: Sequence) -> None:
        """Take a finished answer if it is its turn."""
        self._due += self._share
        if self._due >= 1.0:
            self._due -= 1.0
            if sequence.finish_reason in REPEATED and len(self._waiting) < MAX_WAITING:
                self._waiting.append(_receipt(sequence, self._engine))

    def step(self) -> bool:
        """Run one step of the first waiting answer, if the engine is idle. Return False if there is none."""
        if self._engine.has_work or not self._waiting:
            return False
        receipt = self._waiting[0]
        try:
            trial = self._trial or self._begin(receipt)
            for delta in trial.step():
                self._token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    self._judge(receipt, delta.finish_reason)
        except BaseException:  # the trial engine has recovered: it holds no rows and pages
            self._trial = None
            self._waiting.popleft()
            raise
        return True

    def pause(self) -> None:
        """Return rows and pages to the engine, which gets work now. The answer begins again later."""
        if self._trial is not None:
            trial, self._trial = self._trial, None
            for request_id in trial.live_ids:
                trial.abort(request_id)
            while trial.has_work:  # its last step may be in flight
                trial.step()

    def _begin(self, receipt: Receipt) -> Engine:
        trial, self._token_ids = trial_engine(self._engine), []
        trial.add(receipt.prompt_ids, replace(receipt.sampling, width=1))
        self._trial = trial
        return trial

    def _judge(self, receipt: Receipt, finish_reason: str) -> None:
        is_equal = receipt.is_repeated_by(self._token_ids, finish_reason)
        self._engine.stats.count_recheck(is_equal=is_equal)
        if not is_equal:
            log.error("an answer differs from plain decoding; its receipt: %s", receipt.as_line().rstrip())
        self.pause()
        self._waiting.popleft()


def _receipt(sequence: Sequence, engine: Engine) -> Receipt:
    request, token_ids = sequence.request, tuple(sequence.token_ids[sequence.num_prompt :])
    most_tokens = engine.plan.max_model_len - sequence.num_prompt
    assert sequence.finish_reason is not None
    return Receipt(
        id=request.id,
        index=sequence.index,
        prompt_ids=request.prompt_ids,
        sampling=repeatable(request.sampling, seed=sequence.sampling.seed, most_tokens=most_tokens),
        num_tokens=len(token_ids),
        finish_reason=sequence.finish_reason,
        digest=digest_of_tokens(token_ids),
        fingerprint=engine.fingerprint,
        model=engine.models.config.name,
        created=int(time.time()),
    )
