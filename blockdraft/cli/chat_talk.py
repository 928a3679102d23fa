"""Runs a conversation of questions and commands until the input ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from blockdraft.cli.chat_answers import OVERFLOW, Answerer, AnswerFigures, Message
from blockdraft.cli.chat_screen import Screen, line_reader, read_question
from blockdraft.errors import BlockdraftError, RequestError
from blockdraft.settings.settings import suggestion

WAY_ON = " /save FILE keeps the conversation, /reset starts over"
EXIT_FAILED = 2  # one of the piped questions failed
HELP = """\
/system TEXT   set the system message; without TEXT, show it
/reset         forget the conversation, as /clear does; the system message stays
/save FILE     write the conversation to a new file, as JSON if FILE ends in .json, else as text
/stats         show tokens per second, tokens per step and accepted drafts
/drafts        switch the colouring of accepted drafts on or off
/help          show this list, as /? does
/exit          end, as /quit and /bye do, or Ctrl-D
End a line with a backslash to continue on the next line. Put several lines between two lines of three
quotes (\""") to ask them as one question. A question that begins with a slash needs a space in front of it.
Ctrl-C stops an answer; the part that was shown stays in the conversation."""

OTHER_NAMES = {"/clear": "/reset", "/?": "/help", "/quit": "/exit", "/bye": "/exit"}  # as in other programs


class Talk:
    """A conversation: its messages so far, and the model that answers."""

    def __init__(
        self, answerer: Answerer, *, system: str | None = None, max_tokens: int | None = None
    ) -> None:
        self._answerer, self._system, self._max_tokens = answerer, system, max_tokens
        self._messages: list[Message] = []
        self._figures: list[AnswerFigures] = []
        self._has_marks = self._is_over = self._has_failed = False
        self._screen = Screen()
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/stats": self._show_stats,
            "/drafts": self._toggle_drafts,
            "/help": lambda _: self._screen.note(HELP),
            "/exit": lambda _: setattr(self, "_is_over", True),
        }
        self._commands |= {theirs: self._commands[ours] for theirs, ours in OTHER_NAMES.items()}

    def run(self) -> int:
        """Run until the input ends; return the exit code."""
        is_typed = sys.stdin.isatty()
        read_line = line_reader()
        if is_typed:
            self._screen.note(f"{self._answerer.name}: /help lists commands, Ctrl-D ends")
        while not self._is_over:
            try:
                self.hear(read_question(read_line))
            except EOFError:
                break
            except KeyboardInterrupt:  # Ctrl-C at the prompt drops the line
                if not is_typed:
                    raise
                self._screen.note("\n(Ctrl-D or /exit ends)")
        if is_typed and not self._is_over:
            print()  # put the shell's prompt on a new line
        return EXIT_FAILED if self._has_failed and not is_typed else 0

    def hear(self, text: str) -> None:
        """Handle one input: a question or a command."""
        name, _, rest = text.partition(" ")
        if name in self._commands:
            self._commands[name](rest.strip())
        elif text.startswith("/") and "\n" not in text:
            hint = suggestion(name, list(self._commands)) or "."
            self._screen.note(f"unknown command {name}{hint} /help lists the commands.")
        elif text.strip():
            self._ask(text.strip())

    # ---- questions

    def _ask(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            self._stream(said)
        except KeyboardInterrupt:
            self._screen.end()
            self._screen.note("(stopped)")
        except BlockdraftError as error:
            self._screen.end()
            self._has_failed = True
            text = " ".join(str(error).split())
            is_overflow = isinstance(error, RequestError) and error.code == OVERFLOW
            self._screen.note(f"error: {text}{f'{WAY_ON}.' if is_overflow else ''}")
        self._screen.end()
        if said:
            self._messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self._messages.pop()  # drop a question without an answer: do not send it with the next one

    def _stream(self, said: list[str]) -> None:
        """Write an answer as it arrives, and append its text to `said`."""
        answer = self._answerer.answer(self._with_system(), with_drafts=self._has_marks)
        with closing(answer):  # type: ignore[type-var]
            for piece in answer:
                if piece.text:
                    said.append(piece.text)
                if self._has_marks and piece.tokens:
                    self._screen.mark(piece.tokens, piece.num_drafts)
                elif not self._has_marks:
                    self._screen.think(piece.thought)
                    self._screen.write(piece.text)
                if piece.figures is not None:
                    self._note_end(piece.figures)

    def _with_system(self) -> list[Message]:
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _note_end(self, figures: AnswerFigures) -> None:
        self._figures.append(figures)
        if figures.finish_reason != "length":
            return
        self._screen.end()
        if self._max_tokens is not None and figures.num_tokens >= self._max_tokens:
            self._screen.note(f"(cut after {figures.num_tokens} tokens: raise --max-tokens for more)")
        else:
            self._screen.note(f"(cut: the context is full.{WAY_ON})")

    # ---- commands

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        shown = "none; the model's template may add one" if self._system is None else self._system
        self._screen.note(f"system message: {shown}")

    def _reset(self, _: str) -> None:
        self._messages.clear()
        self._figures.clear()
        self._screen.note("the conversation was forgotten")

    def _save(self, name: str) -> None:
        if not name:
            self._screen.note("/save needs a file name")
            return
        messages = self._with_system()
        if name.endswith(".json"):
            said = {"model": self._answerer.name, "messages": messages}
            text = json.dumps(said, indent=1, ensure_ascii=False)
        else:
            text = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:  # "x" never overwrites a file
                file.write(text + "\n")
        except OSError as error:
            self._screen.note(f"error: {path} cannot be written: {error.strerror}.")
            return
        self._screen.note(f"wrote {len(messages)} messages to {path}")

    def _show_stats(self, _: str) -> None:
        if not self._figures:
            self._screen.note("no answer is complete yet")
            return
        self._screen.note(f"last answer: {shown_figures(self._figures[-1:])}")
        if len(self._figures) > 1:
            self._screen.note(f"{len(self._figures)} answers: {shown_figures(self._figures)}")

    def _toggle_drafts(self, _: str) -> None:
        if not self._answerer.has_drafts:
            self._screen.note(f"{self._answerer.name} has no drafter, or does not report its drafts")
        elif not self._screen.has_colours:
            self._screen.note("drafts need colours, which are off here (NO_COLOR, or no terminal)")
        else:
            self._has_marks = not self._has_marks
            shown = "on: accepted drafts are green, tokens of the target are not"
            self._screen.note(f"drafts {shown if self._has_marks else 'off'}")


def shown_figures(figures: list[AnswerFigures]) -> str:
    num_tokens, seconds = sum(one.num_tokens for one in figures), sum(one.seconds for one in figures)
    text = f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds if seconds else 0.0:.1f} tok/s"
    counted = [one for one in figures if one.steps]
    if not counted:
        return f"{text}; steps and drafts were not counted"
    per_step = sum(one.num_tokens for one in counted) / sum(one.steps or 0 for one in counted)
    drafted, accepted = sum(one.drafted for one in counted), sum(one.accepted for one in counted)
    drafts = f"{accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})" if drafted else "no drafts"
    return f"{text}, {per_step:.2f} tokens per step, {drafts}"
