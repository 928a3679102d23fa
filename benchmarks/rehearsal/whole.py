"""Steps of a whole rehearsal beyond the quick one: many streams, large shapes, steps, equality, last result.

On a CPU most of it makes no sense: `left_out` says what is not done there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence

from benchmarks.rehearsal import compare, memory, serving, steps
from benchmarks.rehearsal.sheet import Failure, Found, Step
from benchmarks.rehearsal.steps import MODEL, Stage
from benchmarks.shapes import write_shape

MANY_STREAMS = (64, 256)
MANY = ("--workload", "code", "--num-prompts", "8", "--max-tokens", "64")
LARGE = "qwen3-8b"
TABLE = ("--rows", "1", "4", "8", "32", "--width", "1", "16", "--context", "1024")
DEEP = ("--rows", "1", "--width", "1", "16", "--context", "32768")
MIXTURE = "qwen3.5-35b-a3b"
MIXED = ("--rows", "1", "8", "32", "--width", "1", "16", "--context", "1024")
FEW = ("--prompts", "2", "--tokens", "24")  # answers on a CPU
SHORT = ("--streams", "1", "--early", "2", "--seconds", "6", "--max-tokens", "24")  # a load on a CPU


def steps_of(stage: Stage) -> Sequence[Step]:
    """Return all steps in order: those of the quick rehearsal, then the others."""

    def step(name: str, run: Callable[[Stage], Found], *needs: str) -> Step:
        return Step(name, lambda: run(stage), needs)

    has_card = memory.kind_of(stage.device) != "cpu"
    found = [*steps.steps_of(stage), step("first seconds", load_at_once, "serve, warm")]
    if has_card:
        place = [one.name for one in found].index("bench") + 1
        found.insert(place, step("many streams", load_many, "serve, warm"))
        cold = f"{LARGE}, cold"
        found += [
            step(cold, functools.partial(start_large, "cold")),
            step(f"{LARGE}, warm", functools.partial(start_large, "warm"), cold),
            step("steps", functools.partial(time_steps, LARGE, TABLE)),
            step("steps, deep", functools.partial(time_steps, LARGE, DEEP)),
            step(f"steps, {MIXTURE}", functools.partial(time_steps, MIXTURE, MIXED)),
        ]
    for pair in (MODEL, LARGE, MIXTURE) if has_card else (MODEL,):
        found.append(step(f"equality, {pair}", functools.partial(count_equal, pair)))
    return (*found, step("the last result", compare_with_last))


def left_out(device: str) -> list[str]:
    """Yield what is left out on this device, and why."""
    if memory.kind_of(device) != "cpu":
        return []
    streams = " and ".join(map(str, MANY_STREAMS))
    shapes = f"starts and answers of {LARGE}, answers of {MIXTURE}, the times of steps of both"
    return [
        f"{streams} streams: a CPU runs 16 rows at once, the others would only wait",
        f"{shapes}: they need a card",
        f"all but {FEW[1]} prompts of {FEW[3]} tokens in the table of equality",
    ]


def load_at_once(stage: Stage) -> Found:
    """Load a server from the moment it is ready. A slow beginning is reported and fails nothing."""
    file, is_cpu = stage.path("first-seconds.json"), memory.kind_of(stage.device) == "cpu"
    flags = (*(SHORT if is_cpu else ()), "--json", str(file), *stage.on_device)
    stage.children.benchmark("first_seconds", *flags, env=stage.served, timeout_s=stage.sizes.timeout_s)
    loads = json.loads(file.read_text())["loads"]
    says = "; ".join(
        f"{one['streams']} streams: {one['early_tokens_per_s']:,.0f} tok/s at first, then "
        f"{one['later_tokens_per_s']:,.0f}, TTFT {one['early_ttft_ms'][0]:.0f} and "
        f"{one['later_ttft_ms'][0]:.0f} ms"
        for one in loads
    )
    return Found(says, {"loads": loads})


def load_many(stage: Stage) -> Found:
    return steps.load_with(stage, "many-streams", MANY_STREAMS, MANY)


def start_large(name: str, stage: Stage) -> Found:
    """A server of the large shape with random weights; the first finds no compiled kernels."""
    target, draft = write_shape(LARGE, stage.path(LARGE))
    server = serving.start(
        stage.children,
        str(target),
        "--draft",
        str(draft),
        "--load-format",
        "dummy",
        *stage.on_device,
        env=stage.large,
        log=stage.path(f"serve-{LARGE}-{name}.log"),
        timeout_s=stage.sizes.timeout_s,
    )
    steps.end(stage, server)
    if not server.engine["draft"]:
        raise Failure("the drafter was dropped")
    return steps.ready(stage, f"{LARGE}, {name}", server)


def time_steps(shape: str, words: Sequence[str], stage: Stage) -> Found:
    """Time steps of a shape by graph replay; those of one row are kept to be compared."""
    file = stage.path(f"steps-{shape}.json")
    flags = ("--shape", shape, *stage.on_device, *words, "--json", str(file))
    stage.children.benchmark("gpu_step", *flags, env=stage.large, timeout_s=stage.sizes.timeout_s)
    table = json.loads(file.read_text())["steps"]
    for one in table:
        if one["rows"] == 1:
            name = f"{shape}, width {one['width']}, {one['context']:,} tokens of context"
            stage.measured.steps_ms[name] = one["ms"]
    by_rows: dict[int, list[str]] = {}
    for one in table:
        by_rows.setdefault(one["rows"], []).append(f"{one['ms']:.2f} at {one['width']}")
    says = "; ".join(f"{rows} x {', '.join(times)}" for rows, times in by_rows.items())
    kept = [{name: value for name, value in one.items() if name != "kernels"} for one in table]
    return Found(f"rows x ms at width, behind {table[0]['context']:,} tokens: {says}", {"steps": kept})


def count_equal(pair: str, stage: Stage) -> Found:
    """Raises Failure where an answer differs, or where a way of serving did not happen."""
    file = stage.path(f"equality-{pair}.json")
    flags = ("--pair", pair, *stage.on_device, "--out", str(file))
    few = FEW if memory.kind_of(stage.device) == "cpu" else ()
    stage.children.benchmark(
        "equality",
        *flags,
        *few,
        env=stage.served if pair == MODEL else stage.large,
        timeout_s=stage.sizes.long_timeout_s,
        codes=(0, 1),
    )
    found = json.loads(file.read_text())
    trouble = []
    for line in found["lines"]:
        for kind in ("greedy", "sampled"):
            num_equal, total = line[kind]["equal"], line[kind]["of"]
            stage.measured.equal[f"{pair}, {line['way']}, {kind}"] = [num_equal, total]
            if num_equal < total:
                trouble.append(f"{line['way']}, {kind}: {num_equal} of {total}")
        if line["untested"] is not None:
            trouble.append(f"{line['way']}: {line['untested']}")
    if trouble:
        raise Failure(f"{found['verdict']}: {'; '.join(trouble)}", found)
    return Found(f"{found['verdict']} in {len(found['lines'])} ways{_left_out(found)}", found)


def _left_out(found: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"; left out {why}" for why in found["left_out"])


def compare_with_last(stage: Stage) -> Found:
    before = stage.last
    found = [] if before is None else list(compare.changes(before.measured, stage.measured))
    stage.compared = compare.lines(found)
    return compare.verdict(before, found, len(stage.measured))
