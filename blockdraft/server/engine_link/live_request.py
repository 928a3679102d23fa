"""LiveRequest: a request that has not ended, with what another replica needs to continue its answer.

A token depends only on the request, its seed and the token's position. So a request whose engine is lost is
sent to another one as it is; the new answer begins with the tokens that the client has, which are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from blockdraft.engine.request import Delta, Metrics
from blockdraft.engine.streams import Stream

REQUEST_TOKENS = 256  # a request's work besides its prompt, in prompt tokens; arbitrary


@dataclass(slots=True)
class _Choice:
    """What the client has of one choice, and how much of it the engine at work has made."""

    num_tokens: int = 0
    num_chars: int = 0
    is_over: bool = False
    num_tokens_again: int = 0  # counted in a repeat only
    num_chars_again: int = 0


class LiveRequest:
    """A request and the state of its answer. One thread at a time calls `take` and `begin_repeat`."""

    def __init__(
        self, stream: Stream, message: bytes, *, num_choices: int, num_prompt: int, pages: Items[int] = ()
    ) -> None:
        self.stream = stream
        self.message = message  # the packed request, with its seed
        self.pages = pages  # hashes of the prompt's pages
        self.num_prompt = num_prompt
        self.num_repeats = 0
        self.has_begun = False  # the client has a part of the answer
        self.work = 0  # in prompt tokens, for its engine
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_unfinished = num_choices
        self._begin_s = self._repeat_s = time.monotonic()
        self._first_s: float | None = None  # from the request to the first token

    @property
    def id(self) -> str:
        return self.stream.request_id

    def work_with(self, num_cached: int) -> int:
        """Return the work for an engine that has the first `num_cached` tokens of the prompt."""
        return self.num_prompt - num_cached + REQUEST_TOKENS * len(self._choices)

    def begin_repeat(self) -> None:
        """Prepare for another engine, which computes the answer again from its beginning."""
        self.num_repeats += 1
        self._repeat_s = time.monotonic()
        for choice in self._choices:
            choice.num_tokens_again = choice.num_chars_again = 0

    def take(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the client does not have; None if it has all of it."""
        choice = self._choices[delta.index]
        if choice.is_over:
            return None
        if not self.has_begun:
            self.has_begun = True
            self._first_s = time.monotonic() - self._begin_s
        if self.num_repeats and not self._cut(delta, choice):
            return None
        choice.num_tokens += len(delta.token_ids)
        choice.num_chars += len(delta.text)
        if delta.finish_reason is not None:
            choice.is_over = True
            self._num_unfinished -= 1
            if self.num_repeats:  # the engine also counts choices that had ended before
                delta.ends_request = not self._num_unfinished
        return delta

    def _cut(self, delta: Delta, choice: _Choice) -> bool:
        """Remove what the client has from a delta of a repeat. Return whether anything is left."""
        tokens = max(choice.num_tokens - choice.num_tokens_again, 0)
        chars = max(choice.num_chars - choice.num_chars_again, 0)
        choice.num_tokens_again += len(delta.token_ids)
        choice.num_chars_again += len(delta.text)
        if choice.num_tokens:
            delta.prompt_logprobs = None  # they came with the first tokens
        delta.token_ids, delta.text = delta.token_ids[tokens:], delta.text[chars:]
        delta.logprobs = delta.logprobs[tokens:]
        if delta.metrics is not None:
            delta.metrics = self._since_the_request(delta.metrics)
        return bool(delta.token_ids or delta.text or delta.finish_reason is not None)

    def _since_the_request(self, metrics: Metrics) -> Metrics:
        """Return the metrics of a repeat with times that count from the request."""
        late_s = self._repeat_s - self._begin_s
        assert self._first_s is not None, "a delta was taken"
        first_s = min(self._first_s, late_s + metrics.first_token_s)
        queue_s = min(late_s + metrics.queue_s, first_s)
        return replace(metrics, queue_s=queue_s, first_token_s=first_s, seconds=late_s + metrics.seconds)
