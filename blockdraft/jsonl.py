"""Reads files of JSON lines, plain or compressed (.gz, .xz). Errors name the file and the line.

`as_object` reads untrusted output of other programs.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path

_OPENERS: Mapping[str, Callable[..., BufferedIOBase]] = {".xz": lzma.LZMAFile, ".gz": gzip.GzipFile}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a file
MakeError = Callable[[str], Exception]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row in its file. `make_error` makes the exception for a wrong row."""

    path: Path
    number: int
    make_error: MakeError
    unit: str = "line"
    hint: str = ""  # the end of every error message

    def error(self, fact: str) -> Exception:
        return self.make_error(f"{self.path}, {self.unit} {self.number}: {fact}.{self.hint}")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object of a file."""

    fields: dict[str, object]
    place: Place

    def error(self, fact: str) -> Exception:
        return self.place.error(fact)


def read_rows(path: Path, make_error: MakeError, *, hint: str = "") -> Iterator[Row]:
    """Yield the objects of a .jsonl, .jsonl.gz or .jsonl.xz file one by one; skip blank lines."""
    with open_packed(path, make_error) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = Place(path, number, make_error, hint=hint)
                yield row_of(parse(line.rstrip(), place), place)


@contextmanager
def open_packed(path: Path, make_error: MakeError) -> Iterator[BufferedIOBase]:
    """Open a file for reading and decompress .gz and .xz. Errors during reading say what to do."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise make_error(f"{path} does not exist: give the path of a JSONL file.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise make_error(f"{path} is not a whole {path.suffix} file ({error}): copy it again.") from error
    except OSError as error:
        raise make_error(f"{path} cannot be read ({error.strerror}).") from error


def parse(text: bytes, place: Place) -> object:
    """Parse a JSON text; an error names the line of the mistake."""
    try:
        return json.loads(text.removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        raise place.error(f"not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        at = replace(place, number=place.number + error.lineno - 1)
        raise at.error(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise place.error("JSON that is nested too deeply") from None


def row_of(value: object, place: Place) -> Row:
    if not isinstance(value, dict):
        raise place.error(f"{kind_of(value)}, where an object was expected")
    return Row(value, place)


def as_object(text: str | bytes) -> dict[str, object]:
    """Parse a JSON object; return an empty one for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def kind_of(value: object) -> str:
    """Return the kind of a JSON value in words, for error messages."""
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
