"""Turns committed token ids into text that can be streamed: whole characters, cut at stop strings.

`Detokenizer` turns ids into text that later ids cannot change. `StopStrings` cuts text at stop strings. Each
sequence has a `TextStream`, which uses both. The text depends only on the ids, not on how blocks group them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

from blockdraft.errors import RequestError
from blockdraft.text.tokenizer import REPLACEMENT, Tokenizer

# An unfinished UTF-8 sequence is at most 3 bytes, and shows as at most that many U+FFFD.
_MAX_OPEN_CHARS = 3
# Tokens kept as context. 3 open characters are at most 3 broken sequences of 3 one-byte tokens.
# One more token is enough: some decoders drop a space, but only from the first token.
_KEEP_OPEN = 12
_KEEP = 4
_MAX_WINDOW = 20  # longer windows are trimmed; a larger limit saves trims, but costs decoding


class Detokenizer:
    """Decodes an output token by token to the text that it adds to the prompt's.

    A character that begins in the prompt and ends in the output belongs to the output. The text of a plain
    token after a whole character is looked up. For other tokens, a window of the last few tokens is decoded,
    so the cost per token does not grow with the output.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._plain_text, self._plain_texts = tokenizer.plain_text, tokenizer.plain_texts
        self._skip_special_tokens = skip_special_tokens
        self._window = self._tail_of(prompt_ids)
        text = tokenizer.decode(self._window, skip_special_tokens=False)
        # The window's text: [0, num_sent) is sent, or the prompt's; [num_sent, end) may change.
        self._num_sent = len(text) - _num_open(text)
        self._owed = text[self._num_sent :]  # U+FFFD at the prompt's end, which are not sent again
        # Is all of the window sent? An empty window does not count: a first token's text may differ.
        self._is_settled = bool(self._window) and not self._owed
        self._last_plain: int | None = None  # the token that replaces the window, if any

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text that cannot change any more; up to 3 final U+FFFD wait for the next token."""
        if self._is_settled and token_ids:
            try:
                new = "".join(itemgetter(*token_ids)(self._plain_texts))
            except (TypeError, IndexError):
                pass  # one is no plain token, or was not looked up before
            else:
                self._last_plain = token_ids[-1]
                return new
        new = ""
        for token_id in token_ids:
            text = self._plain_text(token_id) if self._is_settled else None
            if text is None:
                text = self._decode_window(token_id)
            else:
                self._last_plain = token_id
            new += text
        return new

    def flush(self) -> str:
        """Return the text held back until now, with U+FFFD for an incomplete character."""
        if self._is_settled:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return self._send(text, until=len(text))

    def _decode_window(self, token_id: int) -> str:
        if self._last_plain is not None:
            self._window, self._last_plain = [self._last_plain], None
            self._num_sent = len(self._tokenizer.decode(self._window, skip_special_tokens=False))
        if self._shows(token_id):
            self._window.append(token_id)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        until = len(text) - _num_open(text)
        new = self._send(text, until=until)
        self._is_settled = bool(self._window) and self._num_sent == until == len(text)
        if len(self._window) > _MAX_WINDOW:
            self._trim(num_held=len(text) - self._num_sent)
        return new

    def _send(self, text: str, until: int) -> str:
        new = text[self._num_sent : until]
        # A character's last byte turns up to 3 U+FFFD into one character, so `until` may decrease.
        self._num_sent = max(self._num_sent, until)
        if self._owed and new:
            begin = new[: len(self._owed)]
            num_same = len(begin) - len(begin.lstrip(REPLACEMENT))
            new = new[num_same:]
            self._owed = "" if new else self._owed[num_same:]
        return new

    def _trim(self, num_held: int) -> None:
        # This may cut a finished character: its remaining bytes are context and count as sent.
        self._window = self._window[-(_KEEP_OPEN if num_held else _KEEP) :]
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_sent = len(text) - num_held

    def _tail_of(self, prompt_ids: Sequence[int]) -> list[int]:
        shown = filter(self._shows, reversed(prompt_ids))
        return [*islice(shown, _KEEP_OPEN)][::-1]

    def _shows(self, token_id: int) -> bool:
        return self._tokenizer.shows(token_id, self._skip_special_tokens)


def _num_open(text: str) -> int:
    """Count the U+FFFD at the end that may be the first bytes of one character."""
    tail = text[-_MAX_OPEN_CHARS:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopStrings:
    """Finds the first stop string in a stream of text and cuts the text there.

    The first stop string is the one that ends first: the one that starts first would depend on how the text
    is split. If two end at the same character, the longer one counts, so more text is cut. Characters are
    compared as code points, without normalisation. Text is held back only if it may begin a stop string, and
    never with `include`.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty: leave it out, or give it some text.")
        self._include = include
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._begun = ""  # the longest suffix of the text that begins a stop string
        self.stop_reason: str | None = None

    def push(self, text: str, can_stop: bool = True) -> str:
        """Return the text to show now; set `stop_reason` if a stop string ended it.

        If `can_stop` is False, a stop string that ends in `text` counts as plain text. One that only begins
        there is held back, and stops the stream if a later push completes it.
        """
        assert self.stop_reason is None, "text after a stop string"
        if not self._stops:
            return text
        num_shown, waiting = len(self._begun) if self._include else 0, self._begun + text
        found = []
        for stop in self._stops if can_stop else ():
            begin = waiting.find(stop, max(0, len(self._begun) + 1 - len(stop)))  # ends in `text`
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if found:
            end, begin, self.stop_reason = min(found)
            self._begun = ""
            return waiting[num_shown : end if self._include else begin]
        self._begun = self._beginning(waiting)
        return text if self._include else waiting[: len(waiting) - len(self._begun)]

    def flush(self) -> str:
        """Return the text held back, at the end, when no stop string can be completed."""
        held, self._begun = "" if self._include else self._begun, ""
        return held

    def _beginning(self, text: str) -> str:
        ends = (text[at:] for at in range(max(0, len(text) - len(self._stops[0]) + 1), len(text)))
        is_begun = (end for end in ends if any(s.startswith(end) and s != end for s in self._stops))
        return next(is_begun, "")


class TextStream:
    """The text of one sequence, which may end inside a block."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        # Reads tokens of a stream without stop strings, and returns the text that becomes ready.
        self.push_plain = self._detokenizer.push
        self._stops = StopStrings(stops, include=include_stop_str_in_output)
        self.has_stops = bool(stops)
        self._can_stop = True
        self._ready = ""
        self.stop_reason: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int], num_protected: int = 0) -> int:
        """Read tokens up to the one that completes a stop string; return the number of tokens read.

        That token is the last of the sequence. In the first `num_protected` tokens (`min_tokens`), no stop
        string can end. As in vLLM, one that begins there and ends later does stop, and all of it is cut.
        """
        if not self.has_stops:
            self._ready += self._detokenizer.push(token_ids)
            return len(token_ids)
        for number, token_id in enumerate(token_ids):
            self._can_stop = number >= num_protected
            if self._emit(self._detokenizer.push((token_id,))):
                return number + 1
        return len(token_ids)

    def take(self) -> str:
        """Return the text that became ready since the last call."""
        new, self._ready = self._ready, ""
        return new

    def finish(self) -> None:
        """Make the text held back ready for `take`. No push may follow; a second call does nothing."""
        if self.stop_reason is None and not self._emit(self._detokenizer.flush()):
            self._ready += self._stops.flush()

    def _emit(self, text: str) -> bool:
        self._ready += self._stops.push(text, can_stop=self._can_stop)
        self.stop_reason = self._stops.stop_reason
        return self.stop_reason is not None
