"""Finds another engine in its own Python environment, before anything is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import SettingsError
from blockdraft.launch.engine_versions import NEWEST, TITLES
from blockdraft.launch.launch_request import SPARK
from blockdraft.machine.machine import read_machine
from blockdraft.settings.settings import child_environment

ASK_S = 60.0  # limit for a Python to report its packages; a cold disk takes seconds
_PYTHONS = ("python", "python3")
# The package must exist; its version comes from its distribution, which may have another name.
_QUESTION = """
import importlib.metadata, importlib.util, sys
name = sys.argv[1]
if importlib.util.find_spec(name) is None:
    sys.exit(3)
for distribution in (name, name + "-cpu"):
    try:
        print(importlib.metadata.version(distribution))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An engine that can be started. `version` is None if unknown."""

    engine: str
    python: Path
    version: str | None

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return the command line with the program's path in this environment."""
        program, *rest = argv
        beside = self.python if program in _PYTHONS else self.python.parent / program
        found = str(beside) if beside.is_file() else shutil.which(program)
        if found is None:
            raise SettingsError(
                f"{TITLES[self.engine]} is there for {self.python}, but its program '{program}' is not: "
                "install it again."
            )
        return [found, *rest]


def find_engine(engine: str, python: str | None = None) -> Installed:
    """Find the engine in `python`'s environment, or on PATH, then ours. Raise SettingsError if missing."""
    if python is not None:
        path = shutil.which(str(Path(python).expanduser()))
        if path is None:
            raise SettingsError(
                f"--engine-python '{python}' is no program: give the Python of an environment."
            )
        if (found := _ask(engine, Path(path))) is None:
            advice = _advice(engine, python=python)
            raise SettingsError(f"{TITLES[engine]} is not installed for {python}: {advice}")
        return found
    program = shutil.which(engine)
    candidates = [] if program is None else [_shebang(Path(program))]
    for candidate in (*candidates, Path(sys.executable)):
        if candidate is not None and (found := _ask(engine, candidate)) is not None:
            return found
    raise SettingsError(f"{TITLES[engine]} is not installed: {_advice(engine, python=None)}")


def _ask(engine: str, python: Path) -> Installed | None:
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION, engine],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=ASK_S,
            env=child_environment({}),
            cwd="/",  # Python would import a folder of that name in our directory
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Installed(engine, python, done.stdout.strip() or None) if done.returncode == 0 else None


def _shebang(program: Path) -> Path | None:
    """Return the Python that runs a script; None if it is not a Python script."""
    try:
        with program.open("rb") as file:
            line = file.readline(512)
    except OSError:
        return None
    word = line.removeprefix(b"#!").strip().split(b" ")[0].decode(errors="replace")
    python = Path(word)
    return python if line.startswith(b"#!") and "python" in python.name and python.is_file() else None


def _advice(engine: str, *, python: str | None) -> str:
    pip = "python -m venv ~/engine && ~/engine/bin/pip" if python is None else f"{python} -m pip"
    where = " and add --engine-python ~/engine/bin/python" if python is None else ""
    package = f"{engine}=={NEWEST[engine]}"
    if engine == "vllm" and any(gpu.capability == SPARK for gpu in read_machine().gpus):
        return (
            "published builds lack fp8 and NVFP4 kernels for this card (GB10). Print commands that build it "
            "with container/Containerfile --target spark (--dry-run docker), or for other weights run "
            f"'{pip} install {package}'{where}."
        )
    return f"run '{pip} install {package}'{where}, or print a container's command with --dry-run docker."
