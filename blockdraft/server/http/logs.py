"""Log lines, as text or as one JSON object each. They never hold a key, a prompt or an answer.

Lines of answered requests wait for the end of the event loop's turn and are written together.

API keys are replaced wherever they appear. An error in a request is logged only by its type and
place, because its message may quote what the client sent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TextIO

HIDDEN = "***"
_REQUEST_ERRORS = "uvicorn.error"  # logs the errors that requests raise


def set_up(*, is_json: bool, level: int, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr by default). Give uvicorn log_config=None."""
    handler = LineHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter((JsonLines if is_json else TextLines)(secrets))
    logging.basicConfig(handlers=[handler], level=level, force=True)


_BLANK = vars(logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO"}))


class AccessRecord(logging.LogRecord):
    """The record of one answered request. Logging's own way to make one takes three times as long."""

    def __init__(self, name: str, text: str, request_id: str) -> None:
        vars(self).update(_BLANK, name=name, msg=text, request_id=request_id, created=time.time())


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines in order: those of answered requests once per turn of the event loop, others at once.

    `logging.shutdown`, which Python calls at its end, writes the lines that wait.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._held: deque[logging.LogRecord] = deque()

    def handle(self, record: logging.LogRecord) -> bool:
        if type(record) is not AccessRecord:
            return super().handle(record)
        self.acquire()  # another thread must not write what is held between these two lines
        try:
            is_first = not self._held
            self._held.append(record)
        finally:
            self.release()
        if is_first:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # no event loop runs
                self.flush()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        self._held.append(record)
        self.flush()

    def flush(self) -> None:
        """Write all lines that wait."""
        self.acquire()
        try:
            held = [self._held.popleft() for _ in range(len(self._held))]
            try:
                self.stream.write("".join(map(self._line, held)))
                super().flush()
            except Exception:
                if not held:
                    raise
                self.handleError(held[-1])  # as logging does: the server goes on
        finally:
            self.release()

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return f"{self.format(record)}\n"
        except Exception:  # noqa: BLE001  # of a logging call with wrong arguments; the other lines are written
            self.handleError(record)
            return ""


class _Lines(logging.Formatter):
    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


class JsonLines(_Lines):
    """Lines of JSON: time, level, logger, message, and request_id and error if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._hide(record.getMessage()),
        }
        request_id = record.__dict__.get("request_id")
        if request_id is not None:
            line["request_id"] = str(request_id)
        error = _error(record)
        if error:
            line["error"] = self._hide(error)
        return json.dumps(line, ensure_ascii=False)


class TextLines(_Lines):
    """Lines for people. Control characters are escaped, so that a client cannot forge lines."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().strip()
        if not message.isprintable():
            message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        request_id = record.__dict__.get("request_id")
        name = "" if request_id is None else f" [{request_id}]"
        line = f"{_time(record)} {record.levelname.lower()}{name} {message}"
        return self._hide("\n".join(filter(None, (line, _error(record)))))


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.created % 1 * 1000):03d}Z"


@functools.lru_cache(4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _error(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    error = record.exc_info[1]
    if record.name == _REQUEST_ERRORS:
        return "\n".join(_types_and_places(error))
    return "".join(traceback.format_exception(error)).rstrip()


def _types_and_places(error: BaseException | None) -> Iterator[str]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
        error = error.__cause__ or error.__context__
