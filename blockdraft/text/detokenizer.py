"""From committed token ids to text that can be streamed: whole characters, cut at stop strings.

Three layers, each unaware of the next: `Detokenizer` turns ids into text that later ids cannot
change, `StopStrings` looks for the end in that text, `TextStream` is the two together, one per
sequence. The result depends on the ids alone, never on how decoding grouped them into blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockdraft.errors import RequestError
from blockdraft.text.tokenizer import REPLACEMENT, Tokenizer

# An unfinished UTF-8 sequence is at most 3 bytes, and shows as at most that many U+FFFD.
_MAX_OPEN_CHARS = 3
# Tokens kept as context. 3 open characters are at most 3 broken sequences of 3 one-byte tokens;
# past these one token is enough: some decoders drop a space, but only from the first token.
_KEEP_OPEN = 12
_KEEP = 4
_MAX_WINDOW = 20  # trimmed back past this; larger saves trims, costs decoding


class Detokenizer:
    """Incremental decoding: the text that decode(prompt + output) adds to decode(prompt).

    A character that began in the prompt and ends in the output belongs to the output. Behind whole
    characters a plain token is looked up; any other decodes a window of the last few tokens, so the
    cost per token does not grow with the output.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._plain_texts = tokenizer.plain_texts
        self._skip_special_tokens = skip_special_tokens
        self._window = self._tail_of(prompt_ids)
        text = tokenizer.decode(self._window, skip_special_tokens=False)
        # text of the window: [0, num_sent) sent or the prompt's   [num_sent, end) may still change
        self._num_sent = len(text) - _num_open(text)
        self._owed = text[self._num_sent :]  # the prompt's, if the output leaves it as it is
        # All of the window is sent. Not of an empty one: the first token's text may be another than later.
        self._is_settled = bool(self._window) and not self._owed
        self._last_plain: int | None = None  # the token that takes the window's place, if any

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that has become certain. At most 3 trailing U+FFFD wait for the next token."""
        new = ""
        for token_id in token_ids:
            text = self._plain_texts[token_id] if self._is_settled else None
            if text is None:
                text = self._decode_window(token_id)
            else:
                self._last_plain = token_id
            new += text
        return new

    def flush(self) -> str:
        """The text still held back, U+FFFD for a character that never got its last byte."""
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
        # The last byte of a character turns up to 3 U+FFFD into one: `until` can step back.
        self._num_sent = max(self._num_sent, until)
        if self._owed and new:
            num_same = _num_same(new, self._owed)
            new = new[num_same:]
            self._owed = "" if new else self._owed[num_same:]
        return new

    def _trim(self, num_held: int) -> None:
        # May cut a finished character in two: its rest is context, and counts as sent.
        self._window = self._window[-(_KEEP_OPEN if num_held else _KEEP) :]
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_sent = len(text) - num_held

    def _tail_of(self, prompt_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(tail) == _KEEP_OPEN:
                break
            if self._shows(token_id):
                tail.append(token_id)
        return tail[::-1]

    def _shows(self, token_id: int) -> bool:
        return self._tokenizer.shows(token_id, self._skip_special_tokens)


def _num_same(one: str, other: str) -> int:
    """How many characters the two have in common at the beginning."""
    limit = min(len(one), len(other))
    return next((at for at in range(limit) if one[at] != other[at]), limit)


def _num_open(text: str) -> int:
    """How many characters at the end may be a character's first bytes."""
    tail = text[-_MAX_OPEN_CHARS:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopStrings:
    """Finds the first stop string in a stream of text and cuts there.

    First is the one that is complete first; of two that end at the same character the longer wins,
    so more is cut. This, unlike "starts first", does not depend on how the text was split.
    Characters are compared as code points: nothing is normalised. Text that may be the beginning
    of a stop string is held back, and no more than that; with `include` nothing has to be.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty: leave it out, or give it some text.")
        self._include = include
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self.stop_reason: str | None = None

    def push(self, text: str, can_stop: bool = True) -> str:
        """The text to show now; `stop_reason` is set where a stop string ended it.

        With `can_stop` false a stop string that ends in `text` is let through as plain text; one that only
        begins there is held back, and stops the stream if it ends in a later push.
        """
        assert self.stop_reason is None, "text after a stop string"
        if not self._matchers:
            return text
        waiting = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # No short cut here: every matcher has to see every character.
            complete = [m.stop for m in self._matchers if m.advance(character)]
            if complete and can_stop:
                return self._stop(waiting[:end], complete[0])
        return self._hold(waiting)

    def flush(self) -> str:
        """Return the held text at the end, as no stop string can complete."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> str:
        self.stop_reason = stop
        self._held = ""
        return text if self._include else text[: -len(stop)]

    def _hold(self, waiting: str) -> str:
        num_held = 0 if self._include else max(m.num_matched for m in self._matchers)
        cut = len(waiting) - num_held
        self._held = waiting[cut:]
        return waiting[:cut]


class _Matcher:
    """Knuth-Morris-Pratt for one stop string, a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # longest end of the text that begins `stop`; never all of it
        # shorter[n]: the longest proper beginning of stop[:n] that also ends it
        self._shorter = [0, 0]
        for character in stop[1:]:
            self._shorter.append(self._extend(self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """True when `stop` is complete with this character."""
        num_matched = self._extend(self.num_matched, character)
        is_complete = num_matched == len(self.stop)
        self.num_matched = self._shorter[num_matched] if is_complete else num_matched
        return is_complete

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._shorter[num_matched]
        return num_matched + (self.stop[num_matched] == character)


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
        self._stops = StopStrings(stops, include=include_stop_str_in_output)
        self._has_stops = bool(stops)
        self._can_stop = True
        self._ready = ""
        self.stop_reason: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int], num_protected: int = 0) -> int:
        """Read tokens up to the one with which a stop string is complete; returns how many were read.

        That one is the last of the sequence, and `stop_reason` is set. The first `num_protected` tokens are
        those that min_tokens protects. As in vLLM, what counts is where a stop string ends: one that begins
        under protection and ends after it does stop, and its beginning is cut too.
        """
        if not self._has_stops:
            self._ready += self._detokenizer.push(token_ids)
            return len(token_ids)
        for number, token_id in enumerate(token_ids):
            self._can_stop = number >= num_protected
            if self._emit(self._detokenizer.push((token_id,))):
                return number + 1
        return len(token_ids)

    def take(self) -> str:
        """The text that became ready since the last take."""
        new, self._ready = self._ready, ""
        return new

    def finish(self) -> None:
        """Lets go of all text held back. No push after this; a second finish does nothing."""
        if self.stop_reason is None and not self._emit(self._detokenizer.flush()):
            self._ready += self._stops.flush()

    def _emit(self, text: str) -> bool:
        self._ready += self._stops.push(text, can_stop=self._can_stop)
        self.stop_reason = self._stops.stop_reason
        return self.stop_reason is not None
