"""The processes of a rehearsal: each in a session of its own, so that it ends with all that it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.rehearsal.sheet import Failure
from blockdraft.settings.settings import cache_dir

ROOT = Path(__file__).parents[2]  # the package need not be installed: `-m blockdraft` finds it from here
COMMAND = (sys.executable, "-m", "blockdraft")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


class Children:
    """Starts commands and, when closed, ends those that still run, with their own children."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._commands: list[str] = []

    def take_commands(self) -> list[str]:
        """Return the commands started since the last call."""
        taken, self._commands = self._commands, []
        return taken

    def blockdraft(
        self,
        *words: str,
        env: Mapping[str, str],
        timeout_s: float,
        codes: Collection[int] = (0,),
    ) -> Done:
        """`blockdraft WORDS`, to its end. Raises Failure for another exit code, or after too long."""
        process = self.start(*words, env=env, out=subprocess.PIPE, err=subprocess.PIPE)
        return self._ended(process, f"blockdraft {words[0]}", timeout_s, codes)

    def benchmark(
        self,
        name: str,
        *words: str,
        env: Mapping[str, str],
        timeout_s: float,
        codes: Collection[int] = (0,),
    ) -> Done:
        """`python -m benchmarks.NAME WORDS`, in the same way."""
        module = f"benchmarks.{name}"
        self._commands.append(shlex.join(["python", "-m", module, *words]))
        command = (sys.executable, "-m", module, *words)
        process = self._start(command, env=env, out=subprocess.PIPE, err=subprocess.PIPE)
        return self._ended(process, module, timeout_s, codes)

    def _ended(
        self, process: subprocess.Popen[str], name: str, timeout_s: float, codes: Collection[int]
    ) -> Done:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"`{name}` did not end within {timeout_s:.0f} s") from None
        finally:
            self.kill(process)
        if process.returncode not in codes:
            raise Failure(f"`{name}` ended with {process.returncode}: {last_line(err)}")
        return Done(process.returncode, out, err)

    def start(
        self, *words: str, env: Mapping[str, str], out: int | IO[str], err: int | IO[str]
    ) -> subprocess.Popen[str]:
        """`blockdraft WORDS`, left running."""
        self._commands.append(shlex.join(["blockdraft", *words]))
        return self._start((*COMMAND, *words), env=env, out=out, err=err)

    def _start(
        self, command: Sequence[str], *, env: Mapping[str, str], out: int | IO[str], err: int | IO[str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End it, and whatever it has started, at once."""
        if process in self._running:
            self._running.remove(process)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        for process in list(self._running):
            self.kill(process)


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found[-1] if found else "it said nothing"


def fresh_environment(folder: Path) -> dict[str, str]:
    """Our environment without settings and keys; what is compiled or measured is kept in `folder`.

    Downloads are linked into it: a start is cold, not without its model.
    """
    own = folder / "blockdraft"
    own.mkdir(parents=True)
    for path in cache_dir().iterdir():
        if path.is_file() and path.suffix != ".lock":
            (own / path.name).symlink_to(path.resolve())
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKDRAFT_")}
    return kept | {
        "BLOCKDRAFT_CACHE": str(own),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
