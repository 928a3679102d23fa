"""Times a server until it is ready, phase by phase: `python -m benchmarks.start`.

The pair that ships, or `--shape` with random weights. Every start is a process of its own. The first finds no
compiled kernel and no record of what was verified, the others find what it has left: `--warm` of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks import record
from benchmarks.shapes import SHAPES
from blockdraft.machine.machine import free_port
from blockdraft.settings.settings import cache_dir

PHASES = ("fetch", "load", "allocate", "capture", "warm", "verify")
KEPT = ("widths", "verified", "kernels")  # what starts leave in the cache folder beside downloads


def start(flags: list[str], folder: Path) -> dict[str, object]:
    """One server from its first instruction until it is ready; what it keeps goes into `folder`."""
    kept = {"TRITON_CACHE_DIR": str(folder / "triton"), "BLOCKDRAFT_CACHE": str(folder / "cache")}
    port = free_port()
    command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(port), *flags]
    begun_s, ahead = time.perf_counter(), 0
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **kept}, stdout=log, stderr=log)
        try:
            while (state := ready(port)).get("state") != "ready":
                ahead = max(ahead, compiled_ahead(state))
                if server.poll() is not None or state.get("state") == "failed":
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.02)
            seconds = time.perf_counter() - begun_s
        finally:
            server.terminate()
            server.wait()
    phases = {phase["name"]: phase["seconds"] or 0.0 for phase in state["phases"]}
    return {
        "seconds": seconds,
        "phases_s": phases,
        "compiled_ahead": ahead,
        "kernels": len(list((folder / "triton").rglob("*.cubin"))),
        "details": {phase["name"]: phase["detail"] for phase in state["phases"]},
    }


def ready(port: int) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # 503: not yet
        return json.load(error)
    except OSError:
        return {}


def compiled_ahead(state: dict[str, object]) -> int:
    """Return how many kernels the running phase says are being compiled."""
    details = [phase["detail"] or "" for phase in state.get("phases", [])]
    found = [detail.split()[3].rstrip(":") for detail in details if detail.startswith("compiled ")]
    return int(found[0]) if found else 0


def flags_for(shape: str | None, folder: Path) -> list[str]:
    if shape is None:
        return []
    for name, config in zip(("target", "draft"), SHAPES[shape], strict=True):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return ["--model", f"{folder}/target", "--draft", f"{folder}/draft", "--load-format", "dummy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="without it, the pair that ships")
    parser.add_argument("--warm", type=int, default=1, help="starts after the first (default: 1)")
    parser.add_argument("--json")
    args, flags = parser.parse_known_args()  # what we do not know is for the server
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cache").mkdir()
        for path in cache_dir().iterdir() if cache_dir().is_dir() else ():
            if path.name not in KEPT:
                (folder / "cache" / path.name).symlink_to(path)
        flags = [*flags_for(args.shape, folder), *flags]
        for number in range(1 + args.warm):
            found.append({"start": "warm" if number else "cold", **start(flags, folder)})
    result = {"what": "starts of a server", "settings": vars(args), **record.context(), "starts": found}
    record.save(args.json, result, scratch=name)
    rows = []
    for one in found:
        phases = [one["phases_s"][name] for name in PHASES]
        rows.append([one["start"], one["seconds"], *phases, one["compiled_ahead"], one["kernels"]])
    print(record.table([args.shape or "shipped pair", "s", *PHASES, "ahead", "kernels"], rows))
    print(found[-1]["details"]["verify"])


if __name__ == "__main__":
    main()
