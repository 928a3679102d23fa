"""Separates the thoughts of thinking models from their answers, as the text streams.

A thinking model writes its thoughts between two tags, before the answer. Some chat templates write the first
tag themselves, so that an answer begins inside its thoughts. The result does not depend on how the text is
cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.reading import TagFinder

_TAIL_TOKENS = 8  # enough for the tag and the white space that a template may write after it
# The tags of each family. The first token identifies a tag; the rest of the tag is plain text.
_FAMILIES = (
    ("<think>", "", "</think>"),
    ("<|channel>", "thought", "<channel|>"),  # Gemma 4
    ("[THINK]", "", "[/THINK]"),  # Mistral
    ("<seed:think>", "", "</seed:think>"),  # Seed-OSS
)


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around a model's thoughts, as text and as tokens."""

    open: str
    close: str
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    special: tuple[str, ...] = ()  # the tags that are special tokens, which decoding may skip


def find_tags(tokenizer: Tokenizer) -> Tags | None:
    """Return the tags of a model; None if it has no such tokens."""
    for token, name, close in _FAMILIES:
        open_id, close_id = (_single(tokenizer, tag) for tag in (token, close))
        if open_id is None or close_id is None or open_id == close_id:
            continue
        special = tuple(tag for tag, i in ((token, open_id), (close, close_id)) if i in tokenizer.special_ids)
        return Tags(token + name, close, (open_id,), (close_id,), special)
    return None


def _single(tokenizer: Tokenizer, tag: str) -> int | None:
    """Return the id of a tag that is a single token and decodes to its text, else None."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    is_shown = len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=False).strip() == tag
    return ids[0] if is_shown else None


def begins_inside(tags: Tags, tokenizer: Tokenizer, prompt_ids: Items[int]) -> bool:
    return _tail(tokenizer, prompt_ids).endswith(tags.open)


def begins_behind(tags: Tags, tokenizer: Tokenizer, prompt_ids: Items[int]) -> bool:
    return _tail(tokenizer, prompt_ids).endswith(tags.close)


def _tail(tokenizer: Tokenizer, prompt_ids: Items[int]) -> str:
    return tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()


def continues_inside(tags: Tags, message: Mapping[str, object]) -> bool:
    """Return whether a message that the model continues stops inside its thoughts."""
    text = message.get("content")
    return isinstance(text, str) and text.rfind(tags.open) > text.rfind(tags.close)


class Split(NamedTuple):
    """The parts of one piece of text."""

    reasoning: str
    content: str


class Splitter:
    """Splits one answer into thoughts and content. Line ends next to a tag belong to neither.

    States: before (only white space so far), inside (thoughts), after (the closing tag came; line ends are
    dropped), content (the rest).
    """

    def __init__(self, tags: Tags, *, is_inside: bool) -> None:
        self._open, self._closing = tags.open, TagFinder((tags.close,))
        self._state: Literal["before", "inside", "after", "content"] = "inside" if is_inside else "before"
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str, is_last: bool) -> Split:
        """Split a piece. Hold back what may be a tag, and line ends before a tag, until that is decided."""
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
        if start.startswith(self._open):
            self._held = start.removeprefix(self._open)
            self._state = "inside"
        elif is_last or not self._open.startswith(start):
            self._state = "content"

    def _take_thoughts(self, is_last: bool) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip("\r\n")
        end, tag = self._closing.find(self._held, 0, is_last)
        taken = self._held[:end] if is_last and tag is None else self._held[:end].rstrip("\r\n")
        self._held = self._held[len(taken) if tag is None else end + len(tag) :]
        self._state = "inside" if tag is None else "after"
        self._has_reasoning = self._has_reasoning or bool(taken)
        return taken


class ThoughtCounter:
    """Counts the tokens of the thoughts; the tags themselves do not count."""

    def __init__(self, tags: Tags, tokenizer: Tokenizer, *, is_inside: bool) -> None:
        self.num_tokens = 0
        self._tags = tags
        self._tokenizer = tokenizer
        self._num_opened = 0  # tokens of the opening tag so far
        self._state: Literal["before", "inside", "over"] = "inside" if is_inside else "before"

    def push(self, token_ids: Items[int]) -> None:
        for token_id in token_ids:
            if self._state == "over":
                return
            if self._state == "before":
                self._look_at(token_id)
            elif token_id == self._tags.close_ids[0]:
                self._state = "over"
            else:
                self.num_tokens += 1

    def _look_at(self, token_id: int) -> None:
        if token_id == self._tags.open_ids[self._num_opened]:
            self._num_opened += 1
            self._state = "inside" if self._num_opened == len(self._tags.open_ids) else "before"
        elif self._num_opened or self._tokenizer.decode([token_id]).strip():
            self._state = "over"
