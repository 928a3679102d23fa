"""What busy cores cost: decoding with one thread and with two, alone and beside other work.

    python -m benchmarks.busy_cores [--cores 0,1] [--rounds 5] [--busy 0 1 2] [--against DIR] [--out FILE]

Everything runs on two cores, the other work too: processes that compute for ever. Arms take turns within a
round, so that whatever else the machine does meets all of them; the median of rounds counts, the best is
shown beside it. `bound` is how `blockdraft serve` starts (OpenMP binds its threads), `free` is `LLM` in a
program. `--against` measures another checkout in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NUM_TOKENS = 48
BUSY = "while True: pass"
BINDS = {"bound": {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}, "free": {}}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run."""

    tree: Path
    threads: int
    binding: str

    @property
    def name(self) -> str:
        return f"{self.tree.name} {self.threads} thread{'s' * (self.threads > 1)} {self.binding}"


class Worker:
    """A process that holds an engine and decodes when it is told to."""

    def __init__(self, arm: Arm, cores: Sequence[int], draft: str) -> None:
        variables = {**os.environ, **BINDS[arm.binding], "OMP_NUM_THREADS": str(arm.threads)}
        variables["PYTHONPATH"] = str(arm.tree)
        self._process = subprocess.Popen(
            on(cores, sys.executable, "-P", __file__, "--worker", draft),
            env=variables, cwd=arm.tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tokens_per_s(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def on(cores: Sequence[int], *command: str) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


@contextmanager
def busy(count: int, cores: Sequence[int]) -> Iterator[None]:
    """So many processes that compute for ever, on the same cores."""
    processes = [subprocess.Popen(on(cores, sys.executable, "-c", BUSY)) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def work(draft: str) -> None:
    from benchmarks.cpu_ours import decode, engine_of

    engine = engine_of("int8", draft)
    for _ in sys.stdin:
        print(decode(engine, 1, NUM_TOKENS)[0], flush=True)


def measured(
    arms: Sequence[Arm], cores: Sequence[int], args: argparse.Namespace
) -> dict[tuple[Arm, int], list[float]]:
    """Tokens per second of each round, by arm and number of busy processes."""
    workers = {arm: Worker(arm, cores, args.draft) for arm in arms}
    found: dict[tuple[Arm, int], list[float]] = {(arm, count): [] for arm in arms for count in args.busy}
    try:
        for worker in workers.values():
            worker.tokens_per_s()  # records the steps
        for number in range(args.rounds):
            for count in args.busy:
                with busy(count, cores):
                    for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                        found[arm, count].append(workers[arm].tokens_per_s())
    finally:
        for worker in workers.values():
            worker.end()
    return found


def told(found: dict[tuple[Arm, int], list[float]], alone: float) -> Iterator[str]:
    for (arm, count), rates in found.items():
        middle = statistics.median(rates)
        text = f"{middle:7.1f} tok/s (best {max(rates):6.1f}), {middle / alone:5.2f} of one thread alone"
        yield f"{arm.name:28} beside {count}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bindings", nargs="+", choices=list(BINDS), default=list(BINDS))
    parser.add_argument("--draft", default="none")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", metavar="DRAFT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    cores = [int(one) for one in args.cores.split(",")]
    trees = [Path(__file__).resolve().parents[1], *([args.against.resolve()] if args.against else [])]
    arms = [Arm(tree, threads, how) for tree in trees for threads in (1, 2) for how in args.bindings]
    found = measured(arms, cores, args)
    alone = max(statistics.median(found[arm, args.busy[0]]) for arm in arms if arm.threads == 1)
    print("\n".join(told(found, alone)))
    if args.out:
        rows = [
            {"arm": arm.name, "busy": count, "tokens_per_s": rates} for (arm, count), rates in found.items()
        ]
        args.out.write_text(json.dumps({"cores": cores, "one_thread_alone": alone, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
