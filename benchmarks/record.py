"""The origin of a number: machine, versions, commit, date; and what else was running."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path


def context() -> dict[str, object]:
    import torch

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("Model name")), "CPU")


def save(path: str | None, result: dict[str, object], *, scratch: str | None = None) -> None:
    """Write a result for readers elsewhere: it names neither this checkout's folder nor `scratch`."""
    if path:
        text = json.dumps(result, indent=1).replace(json.dumps(path), json.dumps(Path(path).name))
        for folder in (str(Path(__file__).parents[1]), *([scratch] if scratch else [])):
            text = text.replace(f"{folder}/", "").replace(folder, ".")
        Path(path).write_text(text + "\n")


def table(header: list[str], rows: list[list[object]]) -> str:
    """Aligned columns, the first left, the others right."""
    text = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        )

    return "\n".join(map(line, text))
