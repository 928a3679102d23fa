"""python -m benchmarks.rehearsal: see the package's first lines."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rehearsal
from benchmarks.record import context, save
from benchmarks.rehearsal import whole
from benchmarks.rehearsal.children import Children
from benchmarks.rehearsal.compare import last_result
from benchmarks.rehearsal.sheet import Outcome, Step, as_json, exit_code, lines, run_steps
from benchmarks.rehearsal.steps import Stage, sizes_of, steps_of
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.machine.machine import read_machine
from blockdraft.settings.settings import cache_dir

EXIT_ERROR = 2
EXIT_INTERRUPT = 130


def main(words: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(words)
    trouble = check_model()
    if trouble is not None:
        print(f"rehearsal: error: {trouble}", file=sys.stderr)
        return EXIT_ERROR
    device = _device(args.device)
    result = {"what": "rehearsal", "settings": vars(args), "device": _described(device), **context()}
    outcomes: list[Outcome] = []
    # Whatever ends us ends what we have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="rehearsal-") as folder,
        contextlib.closing(Children()) as children,
    ):
        last = None if args.quick else last_result(result)
        stage = Stage(children, Path(folder), device, sizes_of(device, is_quick=args.quick), last)
        steps = steps_of(stage) if args.quick else whole.steps_of(stage)
        was_interrupted = _rehearse(stage, steps, outcomes)
    print(f"\nrehearsal on {result['device']}, commit {result['commit']}")
    for line in lines(outcomes):
        print(line)
    left_out = [] if args.quick else whole.left_out(device)
    for line in (*stage.compared, *(f"left out: {text}" for text in left_out)):
        print(line)
    found = as_json(outcomes) | {"measured": stage.measured.as_json(), "left_out": left_out}
    if was_interrupted:
        print("it was interrupted: the steps after these did not run")
        found["went_well"] = False
    save(args.out, result | found, scratch=folder)
    return EXIT_INTERRUPT if was_interrupted else exit_code(outcomes)


def _rehearse(stage: Stage, steps: Sequence[Step], outcomes: list[Outcome]) -> bool:
    """Adds each outcome as it comes, and says it. True: somebody interrupted us."""
    try:
        for outcome in run_steps(steps, take_commands=stage.children.take_commands):
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.state}, {outcome.seconds:.1f} s: {outcome.says}", flush=True)
    except KeyboardInterrupt:
        return True
    return False


def check_model() -> str | None:
    """Refuse to start without the default model: a rehearsal downloads nothing."""
    if (cache_dir() / SMOLLM2.gguf).is_file():
        return None
    return f"the default model is not in {cache_dir()}: run 'python -m blockdraft fetch' first."


def _device(asked: str) -> str:
    import torch

    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def _described(device: str) -> str:
    gpus = read_machine().gpus
    return f"{device} ({gpus[0].name})" if device.startswith("cuda") and gpus else device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rehearsal",
        description=rehearsal.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quick_help = "every command once, and no more: no many streams, large shapes, equality or comparison"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--out", metavar="FILE", help="write everything that was found as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
