"""Keeps the answers of a cell in the report without their texts, so that two runs can be paired later."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from blockdraft.bench.figures import AnswerColumns, Cell
from blockdraft.bench.records import Answer, Ask, Group, Prompt
from blockdraft.errors import BenchError

_DIGITS = 6  # of seconds: microseconds
_FAILED = "failed"


def columns_of(answers: Sequence[Answer]) -> AnswerColumns:
    """Return the answers of one cell, figure by figure."""
    return {
        "prompt": [answer.ask.prompt.id for answer in answers],
        "number": [answer.ask.number for answer in answers],
        "turn": [answer.turn for answer in answers],
        "tokens": [answer.completion_tokens if answer.is_ok else None for answer in answers],
        "ttft_s": [None if answer.ttft_s is None else round(answer.ttft_s, _DIGITS) for answer in answers],
        "latency_s": [round(answer.latency_s, _DIGITS) for answer in answers],
        "text_hash": [_text_hash(answer) if answer.is_ok else None for answer in answers],
    }


def group_of(cell: Cell) -> Group | None:
    """Return the answers of a cell that was read from a file; None: an older report, which kept none.

    The hash of a text stands for the text: equal texts stay equal, and more than that nobody can tell.
    """
    kept = cell.get("answers")
    if kept is None:
        return None
    try:
        rows = list(zip(*(kept[name] for name in _COLUMNS), strict=True))  # type: ignore[literal-required]
    except ValueError:
        raise BenchError("a report is damaged: the columns of 'answers' differ in length.") from None
    answers = []
    for prompt, number, turn, tokens, ttft_s, latency_s, text_hash in rows:
        answers.append(
            Answer(
                ask=Ask(Prompt(prompt, "", ("",)), cell["arm"], max_tokens=0, number=number),
                turn=turn,
                planned_s=0.0,
                sent_s=0.0,
                first_s=ttft_s,
                end_s=latency_s,
                completion_tokens=tokens,
                text=text_hash or "",
                error=_FAILED if text_hash is None else None,
            )
        )
    return Group(cell["key"], cell["arm"], answers, cell["busy_s"])


_COLUMNS = tuple(AnswerColumns.__annotations__)


def _text_hash(answer: Answer) -> str:
    return hashlib.sha256(f"{answer.thinking}\0{answer.text}".encode("utf-8", "surrogatepass")).hexdigest()[
        :16
    ]
