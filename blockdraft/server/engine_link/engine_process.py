"""Starts the engine's processes: forked before the server has threads, spawned afterwards."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

log = logging.getLogger(__name__)

Work = Callable[[Connection], None]  # the engine's side of a connection


def start_child(
    work: Work, connection: Connection, closes: Items[Connection | socket.socket] | None = None
) -> BaseProcess:
    """Run `work` in its own process. A forked child closes `closes`, which it does not need.

    It forks only on Linux: Windows cannot, and macOS's libraries may crash. Elsewhere `work` is pickled, and
    so it is if `closes` is None: a process with threads must not fork, because a child's locks may be held
    by threads that it does not have.
    """
    is_forked = sys.platform == "linux" and closes is not None
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    args = (work, connection, closes if is_forked else ())
    process: BaseProcess = context.Process(target=_be_the_child, args=args)
    process.start()
    atexit.register(process.kill)  # else, if we fail, both processes wait for each other
    return process


def end_of(process: BaseProcess) -> int:
    """Wait for the end of a process, free what it holds here, and return its exit code."""
    process.join()
    atexit.unregister(process.kill)
    code = process.exitcode or 0
    process.close()
    return code


def _be_the_child(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> NoReturn:
    """Run `work` and exit. Ignore SIGINT and SIGTERM: the server handles them and ends this process."""
    code = 1
    try:
        for one in closes:
            one.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which our children would inherit
        work(connection)
        code = 0
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)
