"""Trials: compiles a client's grammar in another process first, with limits on time and memory.

llguidance's own limits do not bound a grammar's cost: a schema of 600 bytes can take minutes, and a thread
cannot be ended. Our own passes over a client's text must not hold this process's interpreter lock either.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock, Timer

from blockdraft.errors import RequestError
from blockdraft.grammar.compiling import TokenSource
from blockdraft.grammar.trial_worker import MAX_WALL_S, TOO_MUCH
from blockdraft.settings.settings import child_environment

GRACE_S = 5.0  # beyond the worker's own limit
WORKER = (sys.executable, "-m", "blockdraft.grammar.trial_worker")


@dataclass(frozen=True, slots=True)
class TriedGrammar:
    """A grammar that can be compiled in this process."""

    text: str  # as llguidance reads it
    may_roll_back: bool  # its matcher can take back tokens
    num_bytes: int  # approximate memory of the compiled grammar


class Trials:
    """Sends grammars to the worker process. Any thread may call it; one grammar is tried at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[str] | None = None

    def of(self, output: Mapping[str, object], tokens: TokenSource, key: str) -> TriedGrammar:
        """Try a grammar. Raise RequestError if it fails or costs too much. `key` identifies the tokens."""
        with self._lock:
            asked: dict[str, object] = {"output": output, "key": key}
            answer = self._ask(asked)
            if "is_unknown" in answer:
                told = {"json": tokens.json, "size": tokens.size, "end_ids": tokens.end_ids}
                answer = self._ask({**asked, "tokens": {**told, "names": tokens.names}})
        if "error" in answer:
            raise RequestError(str(answer["error"]), "structured_outputs")
        text, may_roll_back, num_bytes = (answer[name] for name in ("text", "may_roll_back", "num_bytes"))
        assert isinstance(text, str)
        assert isinstance(num_bytes, int)
        return TriedGrammar(text, bool(may_roll_back), num_bytes)

    def _ask(self, asked: dict[str, object]) -> dict[str, object]:
        process, number = self._started(), next(self._numbers)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**asked, "number": number}, default=dict) + "\n")
        process.stdin.flush()
        too_late = Timer(MAX_WALL_S + GRACE_S, process.kill)
        too_late.start()
        try:
            for line in process.stdout:
                answer: dict[str, object] = json.loads(line)
                if answer["number"] == number:  # else it answers an earlier request that was interrupted
                    return answer
        finally:
            too_late.cancel()
        process.wait()  # the worker is ending: it must not get the next request
        return {"error": TOO_MUCH}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment({}),
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C must not reach the worker
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@functools.cache
def _trials_of(process_id: int) -> Trials:  # a forked process must not share the pipes
    return Trials()


def trials() -> Trials:
    """Return this process's Trials, which all models share. The worker starts with the first trial."""
    return _trials_of(os.getpid())


def key_of(tokens: TokenSource) -> str:
    """Return a hash of the tokens."""
    told = json.dumps([tokens.size, tokens.end_ids, sorted(tokens.names.items())])
    return hashlib.blake2b((told + tokens.json).encode(), digest_size=16).hexdigest()
