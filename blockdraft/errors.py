"""The exceptions for errors that a user can cause. Other exceptions are bugs of ours.

    BlockdraftError        the command line prints its one line and exits with code 2
    ├── SettingsError      a flag, a setting or an argument that cannot be used
    ├── ModelError         a checkpoint that is missing, damaged, unknown, or does not match its drafter
    ├── FetchError         a download that did not arrive whole, or a disk that is full
    ├── RequestError       a request that can never be served: empty, too long, impossible sampling values
    ├── CapacityError      a request or a model that does not fit right now: full queue, too little memory
    ├── LaunchError        another engine that does not start, or ends unexpectedly
    └── BenchError         a benchmark that cannot be run as requested

A message has three parts: what happened, the value, what to do.
"""

import sys
import warnings


class BlockdraftError(Exception):
    """Base class of all errors that a user can cause."""


class SettingsError(BlockdraftError):
    """A flag, a setting or an argument that cannot be used."""


class ModelError(BlockdraftError):
    """A checkpoint that is missing, damaged, unknown, or does not match its drafter."""


class FetchError(BlockdraftError):
    """A download that did not arrive whole, or a disk that is full."""


class RequestError(BlockdraftError):
    """A request that can never be served. `field` is the wrong field, `code` is OpenAI's error code."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class CapacityError(BlockdraftError):
    """A request or a model that does not fit right now; `retry_after_s`: when a request may fit."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LaunchError(BlockdraftError):
    """Another engine that does not start, or ends unexpectedly."""


class BenchError(BlockdraftError):
    """A benchmark that cannot be run as requested."""


def warn_caller(text: str) -> None:
    """Issue a Python warning at the nearest caller outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "blockdraft":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
