"""Reads tool calls from an answer that comes in pieces.

The rules, for every format:
- The result depends only on the whole text, never on how it was cut into pieces.
- A call begins when its name is complete, is one of the tools, and its arguments have opened. Until then
  all of it is held back. Text that turns out not to be a call is passed on unchanged as content.
- After that, its arguments are passed on as they come. If they turn out to be invalid, the rest of the call
  follows in the arguments as it was written: the client sees JSON that does not parse, and nothing is lost.
- White space around calls is dropped. If an answer may hold only one call, later calls are left out.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Literal, TypeVar

from blockdraft.tool_calls.json_scanner import JsonScanner
from blockdraft.tool_calls.pieces import FunctionTool, Span, ToolCallPiece

T = TypeVar("T")
Steps = Generator[None, None, T]  # runs until it needs more text
MAX_HEAD = 1 << 16  # characters that may wait for a call to begin; arbitrary
SPACE = " \t\r\n"


class TagFinder:
    """Finds the first of several tags; if two begin at the same place, the longer one."""

    def __init__(self, tags: Iterable[str]) -> None:
        longest_first = sorted(set(tags), key=len, reverse=True)
        self.tags = frozenset(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {tag[:size] for tag in longest_first for size in range(1, len(tag))}
        self._longest = max(map(len, longest_first), default=0)

    def find(self, text: str, start: int, is_over: bool) -> tuple[int, str | None]:
        """Return the end of the text that cannot be part of a tag, and the tag that follows, or None."""
        match = self._pattern.search(text, start)
        waiting = len(text) if is_over else self._first_beginning(text, start)
        if match is None or (waiting < len(text) and waiting <= match.start()):
            return waiting, None
        return match.start(), match.group()

    def _first_beginning(self, text: str, start: int) -> int:
        """Return where an unfinished tag may begin at the end of the text; the text's length if none does."""
        places = range(max(start, len(text) - self._longest + 1), len(text))
        return next((at for at in places if text[at:] in self._beginnings), len(text))


class TagFilter:
    """Removes tags from a text that comes in pieces."""

    def __init__(self, finder: TagFinder) -> None:
        self._finder = finder
        self._held = ""

    def push(self, text: str, is_last: bool) -> str:
        text, at = self._held + text, 0
        kept = []
        while True:
            end, tag = self._finder.find(text, at, is_last)
            kept.append(text[at:end])
            if tag is None:
                self._held = text[end:]
                return "".join(kept)
            at = end + len(tag)


class NotACall(Exception):
    """Raised when text only looked like a call."""


class AnswerReader(ABC):
    """Reads one answer. `hidden` are tags that the client must never see."""

    OPENING: tuple[str, ...]  # tags with which a call may begin
    CLOSING: tuple[str, ...] = ()  # tags with which it ends; stray ones after a call are dropped

    def __init__(
        self, tools: Mapping[str, FunctionTool], *, hidden: Collection[str] = (), max_calls: int | None = None
    ) -> None:
        self._tools = tools
        self._hidden = frozenset(hidden)
        self._max_calls = max_calls
        self._finder = TagFinder((*self.OPENING, *self.CLOSING, *hidden))
        self._closing = TagFinder((*self.CLOSING, *hidden))
        self._buffer, self._at = "", 0
        self._mark: int | None = None  # where to go back to if this is no call
        self._is_over = False
        self._space = ""  # white space that is held back, as a call may follow
        self._is_behind_call = False
        self._spans: list[Span] = []  # what the current push has found, in the answer's order
        self.num_calls = 0
        self._work = self._read()

    def push(self, text: str, is_last: bool) -> tuple[Span, ...]:
        """Return the spans that are certain after this piece, in order. The last piece releases all text."""
        start = self._at if self._mark is None else self._mark
        self._buffer, self._at = self._buffer[start:] + text, self._at - start
        if self._mark is not None:
            self._mark = 0
        self._is_over = is_last
        next(self._work, None)
        spans, self._spans = tuple(self._spans), []
        return spans

    def _read(self) -> Steps[None]:
        while (tag := (yield from self._read_text())) is not None:
            if tag in self.OPENING:
                yield from self._try_call(tag)
            elif tag not in self._hidden and not self._is_behind_call:
                self._say(tag)
        if not self._is_behind_call:
            self._add("text", self._space)

    def _try_call(self, tag: str) -> Steps[None]:
        self._mark = self._at
        try:
            yield from self._read_call(tag)
        except NotACall:
            assert self._mark is not None, "a call that has begun is never taken back"
            self._at = self._mark
            self._say("" if tag in self._hidden else tag)
        self._mark = None

    @abstractmethod
    def _read_call(self, opening: str) -> Steps[None]:
        """Read one call after its opening tag. Raises NotACall only before the call has begun."""

    # ---- reading

    def _read_text(self) -> Steps[str | None]:
        """Pass on text up to the next tag, and return the tag; None at the end of the answer."""
        while True:
            end, tag = self._finder.find(self._buffer, self._at, self._is_over)
            self._say(self._buffer[self._at : end])
            self._at = end + len(tag or "")
            if tag is not None or self._is_over:
                return tag
            yield

    def _peek(self) -> Steps[str]:
        """Return the next character, or "" at the end of the answer."""
        if self._mark is not None and self._at - self._mark > MAX_HEAD:
            raise NotACall
        while self._at >= len(self._buffer) and not self._is_over:
            yield
        return self._buffer[self._at : self._at + 1]

    def _skip_space(self) -> Steps[str]:
        """Skip white space, and return the next character without taking it."""
        while (character := (yield from self._peek())) and character in SPACE:
            self._at += 1
        return character

    def _take(self, expected: str) -> Steps[bool]:
        """Take `expected` if it comes next, and return whether it did."""
        while True:
            ahead = self._buffer[self._at : self._at + len(expected)]
            if ahead == expected:
                self._at += len(expected)
                return True
            if self._is_over or not expected.startswith(ahead):
                return False
            yield

    def _expect(self, expected: str) -> Steps[None]:
        if not (yield from self._take(expected)):
            raise NotACall

    def _take_up_to(self, ends: str) -> Steps[str]:
        """Take and return the text up to the next of the characters in `ends`."""
        found = []
        while (character := (yield from self._peek())) and character not in ends:
            found.append(character)
            self._at += 1
        return "".join(found)

    def _read_json(self, scanner: JsonScanner, *, is_argument: bool) -> Steps[str]:
        """Read a JSON value; return it, or pass it on if `is_argument`. Raises ValueError if invalid."""
        found: list[str] = []
        while True:
            is_done = False
            character = yield from self._peek()
            start = self._at
            try:
                while self._at < len(self._buffer) and not is_done:
                    is_done = scanner.push(self._buffer[self._at])
                    self._at += 1
            finally:
                (self._argue if is_argument else found.append)(self._buffer[start : self._at])
            if is_done or not character:
                return "".join(found)

    def _read_broken(self) -> Steps[None]:
        """Pass on the rest of a call whose arguments are invalid."""
        while True:
            end, tag = self._closing.find(self._buffer, self._at, self._is_over)
            self._argue(self._buffer[self._at : end])
            self._at = end + len(tag or "")
            if tag in self.CLOSING or (tag is None and self._is_over):
                return
            if tag is None:
                yield

    # ---- what was read

    def _say(self, text: str) -> None:
        """Add content. White space at its end is held back, as a call may follow."""
        if self._is_behind_call:
            text = text.lstrip(SPACE)
            self._is_behind_call = not text
        text = self._space + text
        said = text.rstrip(SPACE)
        self._space = text[len(said) :]
        self._add("text", said)

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> None:
        if text:
            self._spans.append(Span(kind, text))

    def _begin(self, name: str) -> None:
        self._mark = None
        self._space = ""
        self._is_behind_call = True
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self._is_wanted:
            piece = ToolCallPiece(index, f"call_{secrets.token_hex(12)}", name, "")
            self._spans.append(Span("call", call=piece))

    def _argue(self, text: str) -> None:
        """Add characters to the call's arguments."""
        if not text or not self._is_wanted:
            return
        index, last = self.num_calls - 1, self._spans[-1].call if self._spans else None
        if last is not None and last.index == index:
            piece = ToolCallPiece(index, last.id, last.name, last.arguments + text)
            self._spans[-1] = Span("call", call=piece)
        else:
            self._spans.append(Span("call", call=ToolCallPiece(index, None, None, text)))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls
