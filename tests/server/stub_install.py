"""An environment in which the stand-in for vLLM is installed: its Python, its program, its metadata."""

import os
import sys
from pathlib import Path

STUB = Path(__file__).with_name("stub_engine.py")


def install_stub(folder, *, engine="vllm", version="0.32.0"):
    """The path of its Python."""
    programs, site = folder / "bin", folder / "site"
    programs.mkdir(parents=True)
    (site / engine).mkdir(parents=True)
    (site / engine / "__init__.py").write_text("raise ImportError('the engine must not be imported')\n")
    metadata = site / f"{engine}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    write_program(programs / "python", f'PYTHONPATH="{site}" exec "{sys.executable}" "$@"')
    write_program(programs / engine, f'exec "{sys.executable}" "{STUB}" "$@"')
    return programs / "python"


def write_program(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def is_alive(pid):
    """A zombie is not: nobody has buried it yet, but it runs no more."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
