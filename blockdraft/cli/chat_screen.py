"""Reads questions from a terminal or a pipe, and writes answers."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from blockdraft.cli.flags import not_text, show_anything

QUOTES = '"""'
PROMPT, CONTINUED = ">>> ", "... "
GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
ReadLine = Callable[[str], str]  # takes the prompt to show; raises EOFError at the end
# Control characters in answers could change the terminal; tabs and line ends are harmless.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class Screen:
    """Writes answers to stdout and notes to stderr."""

    def __init__(self) -> None:
        show_anything()
        console = Console()  # respects NO_COLOR, TERM and the abilities of Windows
        self.is_terminal = sys.stdout.isatty()
        self.has_styles = self.is_terminal and console.color_system is not None and not console.legacy_windows
        self.has_colours = self.has_styles and not console.no_color
        self._was_thought = self._is_open = False

    def write(self, text: str) -> None:
        if text:
            self._put("\n\n" + text.lstrip("\n") if self._was_thought else text)
            self._was_thought = False

    def think(self, text: str) -> None:
        """Write a thought, but only to a terminal: a pipe gets only the answer."""
        if text and self.is_terminal:
            self._put(text, DIM if self.has_styles else "")
            self._was_thought = True

    def mark(self, tokens: Sequence[str], num_drafts: int) -> None:
        """Write the tokens of one step, with accepted drafts in colour."""
        self._put("".join(tokens[:num_drafts]), GREEN if self.has_colours else "")
        self._put("".join(tokens[num_drafts:]))

    def end(self) -> None:
        """End the line of an answer."""
        if self._is_open:
            print(flush=True)
        self._is_open = self._was_thought = False

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _put(self, text: str, style: str = "") -> None:
        if self.is_terminal:
            text = text.translate(_CONTROLS)
        if text:
            print(f"{style}{text}{PLAIN}" if style else text, end="", flush=True)
            self._is_open = True


def line_reader() -> ReadLine:
    """Return a function that reads lines from the terminal (with readline if available) or from a pipe."""
    if not sys.stdin.isatty():
        return _piped_line
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # now `input` uses it; its history is not saved
    return _typed_line


def _typed_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout gets only the answers
    return input()


def _piped_line(prompt: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise not_text(error) from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def read_question(read_line: ReadLine) -> str:
    """Read a question: one line, lines continued by backslashes, or a block between triple quotes."""
    line = read_line(PROMPT)
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read_line)
    lines = [line]
    with contextlib.suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(read_line(CONTINUED))
    return "\n".join(lines)


def _quoted(first: str, read_line: ReadLine) -> str:
    """Read a block up to closing quotes, or to the end of the input."""
    lines = [first]
    with contextlib.suppress(EOFError):
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read_line(CONTINUED))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")
