"""Thinking models: what they think, kept apart from what they say.

A thinking model writes its thoughts between `<think>` and `</think>`, before the answer. Some chat templates
write the first tag themselves, so that an answer begins inside its thoughts. Here the text is divided as it
streams; the result depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdraft.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_TAIL_TOKENS = 8  # enough for the tag and the white space a template may write behind it


@dataclass(frozen=True, slots=True)
class Tags:
    """The two tokens around the thoughts of this model."""

    open_id: int
    close_id: int


def find_tags(tokenizer: Tokenizer) -> Tags | None:
    """None: the model has no such tokens, and its answers are not looked at.

    Special tokens do not show in the text, so tags that are special cannot be found in it.
    """
    ids = [tokenizer.encode(tag, add_special_tokens=False) for tag in (OPEN, CLOSE)]
    if any(len(one) != 1 for one in ids) or ids[0] == ids[1]:
        return None
    (open_id,), (close_id,) = ids
    for token_id, tag in ((open_id, OPEN), (close_id, CLOSE)):
        if tokenizer.decode([token_id], skip_special_tokens=True).strip() != tag:
            return None
    return Tags(open_id, close_id)


def begins_inside(tokenizer: Tokenizer, prompt_ids: Items[int]) -> bool:
    """Whether the prompt ends with the opening tag."""
    tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(OPEN)


def continues_inside(message: Mapping[str, object]) -> bool:
    """Whether a message that the model is to go on with stops inside its thoughts."""
    text = message.get("content")
    return isinstance(text, str) and text.rfind(OPEN) > text.rfind(CLOSE)


class Split(NamedTuple):
    """One piece of text, divided."""

    reasoning: str
    content: str


class Splitter:
    """Divides one answer. Line ends next to a tag belong to neither part.

    before: blank so far, the opening tag may come   inside: thoughts
    after: behind the closing tag, line ends are dropped   content: all the rest
    """

    def __init__(self, *, is_inside: bool) -> None:
        self._state: Literal["before", "inside", "after", "content"] = "inside" if is_inside else "before"
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str, is_last: bool) -> Split:
        """Text that may be part of a tag, or a line end in front of one, waits; the last push lets it go."""
        self._held += text
        reasoning = ""
        if self._state == "before":
            self._look_for_open(is_last)
        if self._state == "inside":
            reasoning = self._take_thoughts(is_last)
        if self._state == "after":
            self._held = self._held.lstrip("\r\n")
            if self._held:
                self._state = "content"
        content = ""
        if self._state == "content":
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def _look_for_open(self, is_last: bool) -> None:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start.removeprefix(OPEN)
            self._state = "inside"
        elif is_last or not OPEN.startswith(start):
            self._state = "content"

    def _take_thoughts(self, is_last: bool) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip("\r\n")
        thoughts, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state = "after"
            self._held = rest
            return thoughts.rstrip("\r\n")
        cut = len(thoughts) if is_last else len(thoughts) - _num_partial(thoughts)
        if not is_last:
            cut = len(thoughts[:cut].rstrip("\r\n"))
        taken, self._held = thoughts[:cut], thoughts[cut:]
        self._has_reasoning = self._has_reasoning or bool(taken)
        return taken


def _num_partial(text: str) -> int:
    """How many characters at the end may begin the closing tag."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)


class ThoughtCounter:
    """Counts the tokens of the thoughts; the tags themselves do not count."""

    def __init__(self, tags: Tags, tokenizer: Tokenizer, *, is_inside: bool) -> None:
        self.num_tokens = 0
        self._tags = tags
        self._tokenizer = tokenizer
        self._state: Literal["before", "inside", "over"] = "inside" if is_inside else "before"

    def push(self, token_ids: Items[int]) -> None:
        for token_id in token_ids:
            if self._state == "over":
                return
            if self._state == "before":
                self._look_at(token_id)
            elif token_id == self._tags.close_id:
                self._state = "over"
            else:
                self.num_tokens += 1

    def _look_at(self, token_id: int) -> None:
        if token_id == self._tags.open_id:
            self._state = "inside"
        elif self._tokenizer.decode([token_id]).strip():
            self._state = "over"
