"""Generates the target's answers to the training prompts; this stage can be interrupted and resumed.

A drafter learns to predict its target, so the target's own answers are better training data than better
answers from elsewhere: trained on the original answers of a corpus, JetSpec's drafter reached 3.36 instead of
7.82 on GSM8K.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from blockdraft.bench.records import Prompt
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.training.answers import Document, encode_conversation, read_shard, write_shard
from blockdraft.training.job import AnswerOptions
from blockdraft.training.offline_batch import OfflineAnswer, OfflineBatch, Question

SHARD = 8192  # documents per file
AHEAD = 2048  # prompts that are encoded in advance
MAX_TURNS = 64  # of one conversation; a key is conversation * MAX_TURNS + turn


@dataclass(slots=True)
class AnswerCount:
    """The numbers of answers and tokens so far, reported after every answer and every shard."""

    num_documents: int = 0
    num_answer_tokens: int = 0
    is_filed: bool = False  # all answers so far are in shards


def regenerate(
    bulk: OfflineBatch,
    tokenizer: Tokenizer,
    conversations: Sequence[Prompt],
    folder: Path,
    options: AnswerOptions,
    *,
    seconds: float | None = None,
    report: Callable[[AnswerCount], None] = lambda count: None,
) -> list[Document]:
    """Return the answers to all `conversations`; read stored answers from `folder`, and store new ones there.

    The answers are in the order of the conversations, so a resumed stage gives the result of an uninterrupted
    one. After `seconds` no new conversation begins, but running ones are finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = sorted(folder.glob("shard-*.npz"))
    done = [document for path in shards for document in read_shard(path)]
    known = {document.key for document in done}
    asker = _Asker(bulk, tokenizer, conversations, options, known, seconds)
    count = AnswerCount(len(done), sum(len(document.answer_ids) for document in done))
    fresh: list[Document] = []
    number = int(shards[-1].stem.removeprefix("shard-")) + 1 if shards else 0
    with closing(asker):
        for answer in bulk.answer(asker):
            document = asker.hear(answer)
            if document.key in known:
                continue
            fresh.append(document)
            count.num_documents += 1
            count.num_answer_tokens += len(document.answer_ids)
            report(replace(count))
            if len(fresh) == SHARD:
                write_shard(folder / f"shard-{number:04}.npz", fresh)
                done, fresh, number = done + fresh, [], number + 1
                report(replace(count, is_filed=True))
    if fresh:
        write_shard(folder / f"shard-{number:04}.npz", fresh)
    report(replace(count, is_filed=True))
    return sorted(done + fresh, key=lambda document: document.key)


class _Asker:
    """An iterator of questions; answers add the next turns to it."""

    def __init__(
        self,
        bulk: OfflineBatch,
        tokenizer: Tokenizer,
        conversations: Sequence[Prompt],
        options: AnswerOptions,
        known: set[int],
        seconds: float | None,
    ) -> None:
        self._tokenizer, self._conversations, self._options = tokenizer, conversations, options
        self._max_prompt = bulk.max_model_len - options.max_tokens
        self._ready: deque[Question] = deque()
        self._said: dict[int, list[str]] = {}  # answers so far, for conversations with turns to come
        self._end_s = None if seconds is None else time.monotonic() + seconds
        # A conversation without all of its answers is asked again from its first turn.
        self._new = iter(
            index
            for index, one in enumerate(conversations)
            if not known.issuperset(range(key := index * MAX_TURNS, key + min(len(one.turns), MAX_TURNS)))
        )
        self._encoder = ThreadPoolExecutor(2)  # while the device works
        self._ahead: deque[Future[Question | None]] = deque()

    def close(self) -> None:
        """Drop prepared questions that were not used."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        if self._ready:
            return self._ready.popleft()
        if self._end_s is not None and time.monotonic() >= self._end_s:
            raise StopIteration
        while len(self._ahead) < AHEAD and (index := next(self._new, None)) is not None:
            self._ahead.append(self._encoder.submit(self._question, index, []))
        while self._ahead:
            question = self._ahead.popleft().result()
            if question is not None:
                return question
        raise StopIteration

    def hear(self, answer: OfflineAnswer) -> Document:
        """Prepare the turn after `answer`, and return the answer as a document."""
        question = answer.question
        index, turn = divmod(question.key, MAX_TURNS)
        one = self._conversations[index]
        said = self._said.pop(index, [])
        if answer.is_whole and turn + 1 < min(len(one.turns), MAX_TURNS):
            said = [*said, self._tokenizer.decode(answer.token_ids)]
            following = self._question(index, said)
            if following is not None:
                self._said[index] = said
                self._ready.append(following)
        return Document(
            question.prompt_ids, answer.token_ids, one.category, question.temperature == 0, question.key
        )

    def _question(self, index: int, said: list[str]) -> Question | None:
        """Return the next turn of a conversation, or None if its prompt is too short or too long."""
        one, options = self._conversations[index], self._options
        prompt_ids = encode_conversation(self._tokenizer, one, said)
        if not 2 <= len(prompt_ids) <= self._max_prompt:
            return None
        chance = random.Random(options.seed * 1_000_003 + index)
        is_sampled = chance.random() < options.sampled
        return Question(
            key=index * MAX_TURNS + len(said),
            prompt_ids=tuple(prompt_ids),
            max_tokens=options.max_tokens,
            temperature=chance.uniform(*options.temperature) if is_sampled else 0.0,
            top_p=options.top_p if is_sampled else 1.0,
            seed=index,
            max_repeat=options.max_repeat,
        )
