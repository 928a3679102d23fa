"""How long a server's start takes on a GPU, phase by phase: `python -m benchmarks.gpu_start`.

Random weights of a published shape. Each start is a process of its own: the first finds Triton's cache of
compiled kernels empty, the second finds it filled. Then the check at the start is timed once more, with
everything compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record
from benchmarks.shapes import SHAPES, write_shape


def start(shape: str, max_rows: int, folder: str) -> dict[str, object]:
    """One start in this process."""
    import torch

    from blockdraft.check.selfcheck import verify_engine
    from blockdraft.phases import StartProgress
    from blockdraft.settings.settings import Settings
    from blockdraft.start.ready import start_engine

    target, draft = write_shape(shape, Path(folder))
    settings = Settings(
        model=str(target),
        draft=str(draft),
        load_format="dummy",
        device="cuda",
        max_rows=max_rows,
    )
    startup = StartProgress(lambda line: print(line, file=sys.stderr))
    engine = start_engine(settings, startup)
    again = verify_engine(engine, lambda text: None)  # everything is compiled now
    plan = engine.models.plan
    phases = {phase.name: phase.seconds for phase in startup.phases() if phase.state == "done"}
    reserved = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    return {
        "phases_s": phases,
        "verify_again_s": {check.name: check.seconds for check in again.checks},
        "num_graphs": 0 if engine.graphs is None else len(engine.graphs),
        "max_rows": plan.max_rows,
        "num_pages": plan.num_pages,
        "memory_reserved": reserved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--json")
    parser.add_argument("--one", metavar="FOLDER", help=argparse.SUPPRESS)  # a start in this process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args.shape, args.max_rows, args.one)))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for label in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.gpu_start", "--one", folder, "--shape", args.shape]
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, "--max-rows", str(args.max_rows)],
                env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            seconds = time.perf_counter() - begin
            found.append({"start": label, "seconds": seconds, **json.loads(done.stdout.splitlines()[-1])})
    result = {"what": "random weights; starts", "settings": vars(args), **record.context(), "starts": found}
    record.save(args.json, result)
    names = list(found[0]["phases_s"])
    rows = [
        [one["start"], one["seconds"], *(one["phases_s"].get(n, 0.0) for n in names), one["num_graphs"]]
        for one in found
    ]
    print(record.table([f"start, {args.max_rows} rows", "s", *names, "graphs"], rows))


if __name__ == "__main__":
    main()
