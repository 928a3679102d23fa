"""Files of prompts: read row by row, each row made a prompt, and what is wrong named by its line.

A row says its conversation in one of these ways:
    {"messages": [{"role": "user", "content": "..."}, ...]}   several user messages: successive turns
    {"turns": ["...", ...]}
    {"prompt": "..."}, {"question": "..."} or {"text": "..."}
and may carry "id", "category" and "system". The model writes the assistant turns: those of a file are
left out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from blockdraft.bench.records import Prompt
from blockdraft.errors import BenchError

TEXT_FIELDS = ("prompt", "question", "text")
SUFFIXES = (".jsonl", ".json", ".gz", ".xz", ".parquet")
TEXT = "{text}"  # the place of a row's text in a wrapper

_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id", "unique_id")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, and where it stands: a line's number, or a place in a list."""

    path: Path
    number: int
    fields: dict[str, object]

    def error(self, fact: str) -> BenchError:
        return _line_error(self.path, self.number, fact)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The rows of one file, and the first digits of the file's SHA-256."""

    path: Path
    rows: tuple[Row, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How rows of a data set become prompts: which fields hold their text, and the words around it."""

    fields: tuple[str, ...] = TEXT_FIELDS
    template: str = TEXT


AS_IT_IS = Wrapper()


def read(path: Path) -> PromptFile:
    """All rows of a .jsonl (or .jsonl.gz, .jsonl.xz), .json (a list) or .parquet file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BenchError(f"{path} does not exist: give the path of a JSONL file of prompts.") from None
    except OSError as error:
        raise BenchError(f"{path} cannot be read ({error.strerror}).") from error
    digest = hashlib.sha256(data).hexdigest()[:12]
    if path.suffix == ".parquet":
        rows = tuple(_parquet_rows(path))
    else:
        rows = tuple(_text_rows(path, _unpacked(path, data)))
    if not rows:
        raise BenchError(f"{path} holds no prompts.")
    return PromptFile(path, rows, digest)


def prompts_of(rows: Sequence[Row], *, name: str, category: str, wrapper: Wrapper) -> tuple[Prompt, ...]:
    """A prompt per row; `name` and `category` stand in where a row does not say."""
    lines: dict[str, int] = {}
    prompts = []
    for row in rows:
        prompt = _prompt(row, name=name, category=category, wrapper=wrapper)
        if prompt.id in lines:
            raise row.error(f"the id '{prompt.id}' is that of line {lines[prompt.id]}: ids must differ")
        lines[prompt.id] = row.number
        prompts.append(prompt)
    return tuple(prompts)


def num_assistant_messages(rows: Sequence[Row]) -> int:
    """How many messages of these rows are left out, because the model writes its own."""
    return sum(_role(message) == "assistant" for row in rows for message in _list(row.fields.get("messages")))


def _prompt(row: Row, *, name: str, category: str, wrapper: Wrapper) -> Prompt:
    system, turns = _conversation(row, wrapper)
    given = row.fields.get("category")
    return Prompt(
        id=_id(row, name),
        category=given if isinstance(given, str) and given else category,
        turns=turns,
        system=system,
    )


def _id(row: Row, name: str) -> str:
    for field in _ID_FIELDS:
        value = row.fields.get(field)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int):
            return f"{name}-{value}"
    return f"{name}-{row.number}"


def _conversation(row: Row, wrapper: Wrapper) -> tuple[str | None, tuple[str, ...]]:
    """(system, user turns). Messages and turns are taken as they are; a bare text gets the wrapper."""
    if "messages" in row.fields:
        return _from_messages(row)
    system = row.fields.get("system")
    if system is not None and not isinstance(system, str):
        raise row.error(f'"system" is {_kind(system)}, where a text was expected')
    if "turns" in row.fields:
        return system, _turns(row, "turns")
    for field in wrapper.fields:
        if isinstance(row.fields.get(field), list):
            return system, _turns(row, field)
        if field in row.fields:
            text = _text(row, field, row.fields[field])
            return system, (wrapper.template.replace(TEXT, text),)
    wanted = ", ".join(f'"{field}"' for field in ("messages", "turns", *wrapper.fields))
    raise row.error(f"no prompt: one of {wanted} was expected")


def _turns(row: Row, field: str) -> tuple[str, ...]:
    value = row.fields[field]
    if not isinstance(value, list) or not value:
        raise row.error(f'"{field}" is {_kind(value)}, where a list of texts was expected')
    return tuple(_text(row, f"{field}[{i}]", turn) for i, turn in enumerate(value))


def _from_messages(row: Row) -> tuple[str | None, tuple[str, ...]]:
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise row.error(f'"messages" is {_kind(messages)}, where a list of messages was expected')
    system: str | None = None
    turns = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, dict):
            raise row.error(f"{place} is {_kind(message)}, where an object was expected")
        match _role(message):
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
    """A text, or the joined text parts of a message."""
    if isinstance(value, list):
        value = "".join(_part(row, f"{place}[{i}]", part) for i, part in enumerate(value))
    if not isinstance(value, str):
        raise row.error(f'"{place}" is {_kind(value)}, where a text was expected')
    if not value.strip():
        raise row.error(f'"{place}" is empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise row.error(f'"{place}" holds half of a surrogate pair, which no server can be sent')
    return value


def _part(row: Row, place: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise row.error(f'"{place}" is not a text part: only text can be sent')


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    match value:
        case None:
            return "missing or null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        match path.suffix:
            case ".gz":
                return gzip.decompress(data)
            case ".xz":
                return lzma.decompress(data)
            case _:
                return data
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise BenchError(f"{path} is not a whole {path.suffix} file ({error}): copy it again.") from error


def _text_rows(path: Path, data: bytes) -> Iterator[Row]:
    data = data.removeprefix(b"\xef\xbb\xbf")  # the mark some editors put first
    if ".json" in path.suffixes:
        yield from _listed_rows(path, data)
        return
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _row(path, number, _json(path, number, line))


def _listed_rows(path: Path, data: bytes) -> Iterator[Row]:
    values = _json(path, 1, data)
    if not isinstance(values, list):
        raise BenchError(f"{path} holds {_kind(values)}, where a list of prompts was expected.")
    for number, value in enumerate(values, start=1):
        yield _row(path, number, value)


def _json(path: Path, number: int, text: bytes) -> object:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise _line_error(path, number, f"not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        at = number + error.lineno - 1  # a list of prompts spans lines
        raise _line_error(path, at, f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise _line_error(path, number, "JSON that is nested too deeply") from None


def _row(path: Path, number: int, value: object) -> Row:
    if not isinstance(value, dict):
        raise _line_error(path, number, f"{_kind(value)}, where an object was expected")
    return Row(path, number, value)


def _line_error(path: Path, number: int, fact: str) -> BenchError:
    unit = "line" if ".json" not in path.suffixes and path.suffix != ".parquet" else "row"
    return BenchError(f"{path}, {unit} {number}: {fact}.")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise BenchError(
            f"{path} is a Parquet file, which pyarrow reads: 'pip install pyarrow', or give JSONL."
        ) from None
    try:
        values = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise BenchError(f"{path} cannot be read as Parquet ({error}).") from error
    for number, value in enumerate(values, start=1):
        yield _row(path, number, value)
