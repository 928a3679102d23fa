"""A training run of the default drafter, from a pool of prompts to the table, with nobody watching.

    python -m benchmarks.drafter_run --pool FILE.jsonl.xz --data EVAL --out DIR --minutes 20 [--seconds 140]
        [--from DRAFTER] [--seed N] [--num-long N] [--recipe "--kind dflash2 --train added"]

1. `data`: prompts to train on (benchmarks/drafter_data.py).
2. `answers`: of the target to the evaluation sets EVAL and to those prompts (benchmarks/drafter_evaluate.py),
   the short ones for `--seconds`. Meanwhile two steps on made-up answers compile what training needs.
3. `train`: `blockdraft train` for `--minutes` in all, with RECIPE and what `--recipe` adds to it.
4. `evaluate`: the drafter that it began with and the new one, on the same answers.

Every stage logs to DIR/STAGE.log; DIR/stages.txt says when each began and how it ended. One that went well is
not run again, and training that was cut short is resumed: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from blockdraft.jsonl import read_rows
from blockdraft.settings.shipped import shipped_drafter
from blockdraft.training.answers import Document, write_shard

RECIPE = (
    "--rows 256 --length 8192 --rows-per-step 4 --anchors 768 --distill 0.5 --deep-weight 3 --phases 3 "
    "--short-blocks 0.5 --rate 1.5e-3"
)
EVERY = 25  # of the prompts held out of the pool, to look at while it trains: the table has all of them
WAIT_S = 90  # for what is compiled meanwhile, once the answers are there


class Stages:
    """Runs commands one after the other, and remembers which ended well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "stages.txt"
        self._begin_s = time.monotonic()

    def is_done(self, name: str) -> bool:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return any(line.endswith(f" {name} ended 0") for line in lines)

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self._begin_s:6.0f} s  {text}"
        print(line, flush=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        self.note(f"{name} begins: {shlex.join(words)}")
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def run(self, name: str, words: list[str]) -> None:
        """Nothing where it is done; ends us where it fails."""
        if not self.is_done(name):
            self.end(name, self.start(name, words))

    def end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self.note(f"{name} ended {code}")
        if code:
            raise SystemExit(f"{name} failed: see {self.folder / name}.log")


def made_up(folder: Path) -> Path:
    """Answers of random tokens: enough for one row of training."""
    chance = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(100, 1000) for _ in range(count))

    folder.mkdir(exist_ok=True)
    documents = [Document(ids(60), ids(300), "made up", is_greedy=True, key=64 * n) for n in range(110)]
    write_shard(folder / "shard-0000.npz", documents)
    return folder


def held_out(data: Path, out: Path) -> Path:
    """Return some of the prompts held out of the pool."""
    rows = list(read_rows(data / "pool_val.jsonl.gz", SystemExit, hint=""))
    path = out / "held-out.jsonl"
    path.write_text("".join(json.dumps(row.fields) + "\n" for row in rows[::EVERY]), encoding="utf-8")
    return path


def run(args: argparse.Namespace) -> None:
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    stages, where = Stages(out), ["--model", args.model, "--device", args.device]
    short, long, answered = out / "short.jsonl", out / "long.jsonl", out / "answered"
    pool = ["--pool", str(args.pool), "--num-long", str(args.num_long), "--seed", str(args.seed)]
    stages.run("data", ["benchmarks.drafter_data", *pool, "--short", str(short), "--long", str(long)])
    recipe = [*shlex.split(args.recipe), "--held-out", str(held_out(args.data, out)), "--answer-minutes", "0"]
    train = ["blockdraft", "train", args.model, "--from", str(args.start), "--device", args.device]
    answers = ["benchmarks.drafter_evaluate", "answers", "--data", str(args.data), "--out", str(answered)]
    answers += ["--short", str(short), "--long", str(long), "--seconds", str(args.seconds)]
    if not stages.is_done("answers"):
        asking = stages.start("answers", [*answers, *shlex.split(args.answering), *where])
        compiling = stages.start("compile", _compile(train, recipe, out))
        stages.end("answers", asking)
        _wait(stages, compiling)
    drafter = out / "run" / "drafter"
    folders = [word for name in ("train-short", "train-long") for word in ("--answers", str(answered / name))]
    is_begun = ["--resume"] if (out / "run" / "checkpoint.pt").exists() else []
    limit = ["--minutes", str(args.minutes), *folders, "--out", str(out / "run")]
    stages.run("train", [*train, *recipe, *limit, *is_begun])
    evaluate = ["benchmarks.drafter_evaluate", "run", f"before={args.start}", f"after={drafter}"]
    evaluate += ["--json", str(out / "evaluation.json"), "--out", str(answered)]
    stages.run("evaluate", [*evaluate, *shlex.split(args.evaluating), *where])


def _compile(train: list[str], recipe: list[str], out: Path) -> list[str]:
    folder = out / "two-steps"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    answers = made_up(out / "made-up")
    return [*train, *recipe, "--steps", "2", "--answers", str(answers), "--out", str(folder)]


def _wait(stages: Stages, process: subprocess.Popen[bytes]) -> None:
    """For what only saves time, and takes memory while it runs."""
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    stages.note(f"compile ended {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the folder of evaluation sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of `blockdraft train`, in all")
    parser.add_argument("--seconds", type=float, default=140, help="for short answers")
    parser.add_argument("--num-long", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="which prompts, and in which words")
    parser.add_argument("--from", dest="start", default=shipped_drafter("default"), metavar="DRAFTER")
    parser.add_argument("--recipe", default="", help="flags of `blockdraft train` behind RECIPE")
    parser.add_argument("--answering", default="--cache-bytes 80e9", help="flags of the answers")
    parser.add_argument("--evaluating", default="--cache-bytes 2e9", help="flags of the evaluation")
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    args.recipe = f"{RECIPE} {args.recipe}"
    run(args)


if __name__ == "__main__":
    main()
