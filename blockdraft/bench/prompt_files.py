"""Reads files with one prompt per row. Errors name the line.

A row has its conversation in one of these forms:
    {"messages": [{"role": "user", "content": "..."}, ...]}   several user messages: successive turns
    {"turns": ["...", ...]}
    {"prompt": "..."}, {"question": "..."} or {"text": "..."}
It may also have "id", "category" and "system". The model writes the assistant turns, so assistant messages in
a file are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from blockdraft.bench.records import Prompt
from blockdraft.errors import BenchError
from blockdraft.jsonl import Place, Row, kind_of, open_packed, parse, read_rows, row_of

TEXT_FIELDS = ("prompt", "question", "text")
SUFFIXES = (".jsonl", ".json", ".gz", ".xz", ".parquet")
TEXT = "{text}"  # marks the place of a row's text in a template

_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id", "unique_id")


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The rows of one file, and the first digits of the file's SHA-256."""

    path: Path
    rows: tuple[Row, ...]
    digest: str


def read(path: Path) -> PromptFile:
    """Return all rows of a .jsonl (or .jsonl.gz, .jsonl.xz), .json (a list) or .parquet file."""
    if path.suffix == ".parquet":
        rows = tuple(_parquet_rows(path))
    elif ".json" in path.suffixes:
        rows = tuple(_listed_rows(path))
    else:
        rows = tuple(read_rows(path, BenchError))
    if not rows:
        raise BenchError(f"{path} holds no prompts.")
    with path.open("rb") as file:
        return PromptFile(path, rows, hashlib.file_digest(file, "sha256").hexdigest()[:12])


def prompts_of(
    rows: Sequence[Row],
    *,
    name: str,
    category: str,
    fields: Sequence[str] = TEXT_FIELDS,
    template: str = TEXT,
) -> tuple[Prompt, ...]:
    """Make a prompt of each row. `name` and `category` replace missing fields of a row.

    `fields` are the names of fields with a row's text, which is inserted into `template`.
    """
    lines: dict[str, int] = {}
    prompts = []
    for row in rows:
        system, turns = _conversation(row, fields, template)
        given = row.fields.get("category")
        own = given if isinstance(given, str) and given else category
        prompt = Prompt(_id(row, name), own, turns, system)
        if prompt.id in lines:
            raise row.error(f"the id '{prompt.id}' is that of line {lines[prompt.id]}: ids must differ")
        lines[prompt.id] = row.place.number
        prompts.append(prompt)
    return tuple(prompts)


def num_assistant_messages(rows: Sequence[Row]) -> int:
    """Count the assistant messages of these rows; they are ignored because the model writes its own."""
    lists = (row.fields.get("messages") for row in rows)
    messages = (message for found in lists if isinstance(found, list) for message in found)
    return sum(isinstance(message, dict) and message.get("role") == "assistant" for message in messages)


def _id(row: Row, name: str) -> str:
    for field in _ID_FIELDS:
        value = row.fields.get(field)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int):
            return f"{name}-{value}"
    return f"{name}-{row.place.number}"


def _conversation(row: Row, fields: Sequence[str], template: str) -> tuple[str | None, tuple[str, ...]]:
    """Return (system, user turns). Only a single text is inserted into the template."""
    if "messages" in row.fields:
        return _from_messages(row)
    system = row.fields.get("system")
    if system is not None and not isinstance(system, str):
        raise row.error(f'"system" is {kind_of(system)}, where a text was expected')
    if "turns" in row.fields:
        return system, _turns(row, "turns")
    for field in fields:
        if isinstance(row.fields.get(field), list):
            return system, _turns(row, field)
        if field in row.fields:
            text = _text(row, field, row.fields[field])
            return system, (template.replace(TEXT, text),)
    wanted = ", ".join(f'"{field}"' for field in ("messages", "turns", *fields))
    raise row.error(f"no prompt: one of {wanted} was expected")


def _turns(row: Row, field: str) -> tuple[str, ...]:
    value = row.fields[field]
    if not isinstance(value, list) or not value:
        raise row.error(f'"{field}" is {kind_of(value)}, where a list of texts was expected')
    return tuple(_text(row, f"{field}[{i}]", turn) for i, turn in enumerate(value))


def _from_messages(row: Row) -> tuple[str | None, tuple[str, ...]]:
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise row.error(f'"messages" is {kind_of(messages)}, where a list of messages was expected')
    system: str | None = None
    turns = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, dict):
            raise row.error(f"{place} is {kind_of(message)}, where an object was expected")
        match message.get("role"):
            case "user":
                turns.append(_text(row, f"{place}.content", message.get("content")))
            case "system" | "developer" if i == 0:
                system = _text(row, f"{place}.content", message.get("content"))
            case "assistant":
                continue
            case role:
                raise row.error(f"{place} has the role {role!r}: user, assistant, or system at the start")
    if not turns:
        raise row.error("no user message: a prompt has at least one")
    return system, tuple(turns)


def _text(row: Row, place: str, value: object) -> str:
    """Return a text, or the joined text parts of a message."""
    if isinstance(value, list):
        value = "".join(_part(row, f"{place}[{i}]", part) for i, part in enumerate(value))
    if not isinstance(value, str):
        raise row.error(f'"{place}" is {kind_of(value)}, where a text was expected')
    if not value.strip():
        raise row.error(f'"{place}" is empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise row.error(f'"{place}" holds half of a surrogate pair, which no server can be sent')
    return value


def _part(row: Row, place: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise row.error(f'"{place}" is not a text part: only text can be sent')


def _listed_rows(path: Path) -> Iterator[Row]:
    with open_packed(path, BenchError) as file:
        values = parse(file.read(), Place(path, 1, BenchError, unit="row"))
    if not isinstance(values, list):
        raise BenchError(f"{path} holds {kind_of(values)}, where a list of prompts was expected.")
    return _numbered(path, values)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise BenchError(
            f"{path} is a Parquet file: 'pip install pyarrow' to read it, or give a JSONL file."
        ) from None
    with open_packed(path, BenchError) as file:
        try:
            return _numbered(path, parquet.read_table(file).to_pylist())
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise BenchError(f"{path} cannot be read as Parquet ({error}): copy it again.") from error


def _numbered(path: Path, values: Sequence[object]) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        yield row_of(value, Place(path, number, BenchError, unit="row"))
