"""ReceiptBook: writes a line per choice to a file, from which `blockdraft replay` repeats the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import TextIO

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.receipt import REPEATED, Receipt, digest_of_tokens, repeatable
from blockdraft.engine.request import FinishReason, SamplingParams
from blockdraft.server.api.choices import AnswerChoice
from blockdraft.server.api.schemas import AnswerObject
from blockdraft.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

OnEnd = Callable[[AnswerChoice, FinishReason], None]


class ReceiptBook:
    """Appends receipts to `file`. With `keeps_texts` they have the texts and the answer's token ids, too."""

    def __init__(self, file: TextIO, *, keeps_texts: bool = False) -> None:
        self._file = file
        self._keeps_texts = keeps_texts
        self._is_failing = False

    def writer(
        self,
        head: AnswerObject,
        prompts: Items[Items[int]],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        info: EngineInfo,
    ) -> OnEnd:
        """Return a function that writes the receipt of a choice that has ended."""
        decode = partial(tokenizer.decode, skip_special_tokens=False)

        def write(choice: AnswerChoice, reason: FinishReason) -> None:
            if reason not in REPEATED:
                return
            prompt_ids, token_ids = prompts[choice.prompt], choice.token_ids
            assert choice.seed is not None, "the choice has ended"
            most_tokens = info.max_model_len - len(prompt_ids)
            receipt = Receipt(
                id=head["id"],
                index=choice.index,
                model=head["model"],
                created=head["created"],
                prompt_ids=tuple(prompt_ids),
                sampling=repeatable(sampling, seed=choice.seed, most_tokens=most_tokens),
                num_tokens=len(token_ids),
                finish_reason=reason,
                digest=digest_of_tokens(token_ids),
                fingerprint=info.fingerprint,
                prompt=decode(prompt_ids) if self._keeps_texts else None,
                text=decode(token_ids) if self._keeps_texts else None,
                token_ids=tuple(token_ids) if self._keeps_texts else None,
            )
            self._append(receipt.as_line())

        return write

    def _append(self, line: str) -> None:
        """Append a line. If the disk is full, log it once: the answer is well."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            if not self._is_failing:
                log.error("receipts cannot be written (%s): they will be missing", error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False
