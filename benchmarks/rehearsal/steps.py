"""The steps of a rehearsal. Each runs real commands, and returns what it found or raises with one line."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.rehearsal import client, memory, serving
from benchmarks.rehearsal.children import Children, Done, fresh_environment
from benchmarks.rehearsal.compare import Last, Measured
from benchmarks.rehearsal.sheet import Failure, Found, Step
from blockdraft.bench.workloads import load
from blockdraft.check.kv_texts import BUILT_IN
from blockdraft.settings.shipped import shipped_drafter

MODEL = "default"
STREAMS = (1, 16)
RECEIPTS = "receipts.jsonl"
PREFIXES = "prefixes"
LONG_TEXT = 4000  # characters: some hundred tokens are read compressed
OUR_WARNING = re.compile(r"\bwarning:", re.IGNORECASE)  # not a UserWarning of a compiler
NO_BETTER = "no better than"  # what `train` warns of after so short a training
TRAINED_CLASSES = ("qa", "reasoning")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all steps: enough to run every path, on a CPU within minutes."""

    bench: tuple[str, ...]
    fit: tuple[str, ...]
    train: tuple[str, ...]
    kv_dtypes: tuple[str, ...]  # that are served
    prove: tuple[str, ...] = ("--quick",)
    timeout_s: float = 300.0  # of each command but bench, fit and train
    long_timeout_s: float = 600.0


# Of two minutes `train` keeps one for evaluation and export, which take less: the step takes little over one.
A_MINUTE = ("--minutes", "2")


def sizes_of(device: str, *, is_quick: bool) -> Sizes:
    if memory.kind_of(device) == "cpu":
        small = shlex.split("--layers 2 --rows-per-step 1 --anchors 8 --length 128 --max-answer 24")
        return Sizes(
            bench=("--workload", "qa", "--num-prompts", "4", "--max-tokens", "6"),
            fit=("--quick", "--limit", "1", "--max-tokens", "8", "--width", "4"),
            train=(*(("--steps", "3") if is_quick else A_MINUTE), "--max-prompts", "8", *small),
            kv_dtypes=("tq4",),
            prove=("--num-prompts", "3", "--max-tokens", "16"),
        )
    small = ["--rows-per-step", "4", "--max-answer", "128"]
    return Sizes(
        bench=("--workload", "code", "--num-prompts", "8", "--max-tokens", "256"),
        fit=("--quick", "--limit", "1", "--max-tokens", "64"),
        train=(*(("--steps", "100") if is_quick else A_MINUTE), *small),
        kv_dtypes=("int8", "tq4v3", "tq4"),
    )


@dataclass(slots=True)
class Stage:
    """The place of a rehearsal, and results of steps for later ones."""

    children: Children
    folder: Path
    device: str  # "cpu", "cuda", "cuda:1"
    sizes: Sizes
    last: Last | None = None  # what this rehearsal is compared with
    plan: dict[str, Any] = field(default_factory=dict)
    free_before: int | None = None  # bytes of the card before anything was started
    answer: str | None = None  # greedy, of `generate`
    started: dict[str, serving.Server] = field(default_factory=dict)  # that got to ready
    server: serving.Server | None = None  # that still runs
    measured: Measured = field(default_factory=Measured)
    compared: list[str] = field(default_factory=list)  # lines of before and now
    before: dict[str, str] = field(init=False)  # environments: what runs before the servers
    served: dict[str, str] = field(init=False)  # the servers', and what runs after the first of them
    large: dict[str, str] = field(init=False)  # of random weights of large shapes

    def __post_init__(self) -> None:
        # A cold start must not find what the doctor has compiled.
        self.before = fresh_environment(self.folder / "before")
        self.served = fresh_environment(self.folder / "served")
        self.large = fresh_environment(self.folder / "large")

    @property
    def on_device(self) -> tuple[str, str]:
        return "--device", self.device

    @property
    def running(self) -> serving.Server:
        assert self.server is not None
        return self.server

    def path(self, name: str) -> Path:
        return self.folder / name


def steps_of(stage: Stage) -> Sequence[Step]:
    """Return all steps, in order."""

    def step(name: str, run: object, *needs: str) -> Step:
        return Step(name, lambda: run(stage), needs)  # type: ignore[operator]

    return (
        step("doctor", examine),
        step("plan", plan),
        step("serve, cold", serve_cold),
        step("generate", generate),
        step("trees", generate_with_trees, "generate"),
        step("serve, warm", serve_warm),
        step("clean starts", check_starts, "serve, warm"),
        step("plan against server", compare_memory, "plan", "serve, warm"),
        step("openai client", ask, "serve, warm"),
        step("prove", prove, "serve, warm"),
        step("bench", bench, "serve, warm"),
        step("end of server", end_server, "serve, warm"),
        step("replay", replay, "end of server"),
        *(
            step(f"compressed keys, {kv_dtype}", functools.partial(serve_compressed, kv_dtype))
            for kv_dtype in stage.sizes.kv_dtypes
        ),
        step("fit", fit),
        step("train", train),
        step("trained drafter", use_trained, "train"),
    )


# ---- before a server


def examine(stage: Stage) -> Found:
    done = stage.children.blockdraft(
        "doctor", "--json", *stage.on_device, env=stage.before, timeout_s=stage.sizes.timeout_s, codes=(0, 1)
    )
    found = json.loads(done.out)
    problems = [one for one in found["findings"] if one["level"] == "problem"]
    ours = [f"{one['name']}: {one['says']}" for one in problems if one["area"] == "kernels"]
    if ours:
        raise Failure("; ".join(ours))
    num_warnings = sum(one["level"] == "warning" for one in found["findings"])
    says = f"{found['verdict']}: kernels agree, {num_warnings} warnings"
    if problems:
        says += f", the machine has problems: {', '.join(one['name'] for one in problems)}"
    return Found(says, {"verdict": found["verdict"], "problems": problems})


def plan(stage: Stage) -> Found:
    stage.free_before = memory.free_bytes(stage.device)
    found = stage.plan = _planned(stage)
    total = found["memory"]["total_bytes"]
    return Found(f"{found['verdict']}: {total / 1e9:.2f} GB, {found['reason']}", {"memory": found["memory"]})


def _planned(stage: Stage, *flags: str) -> dict[str, Any]:
    done = stage.children.blockdraft(
        "plan", MODEL, "--json", *flags, *stage.on_device, env=stage.before, timeout_s=stage.sizes.timeout_s
    )
    found: dict[str, Any] = json.loads(done.out)
    if not found["draft"]:
        raise Failure("the plan has no drafter: the shipped one is not in blockdraft/drafters")
    return found


def generate(stage: Stage) -> Found:
    found = _generated(stage, env=stage.served)  # with what the cold start has compiled
    stage.answer = str(found["text"])
    return Found(f"{found['text']!r}, {_per_step(found)}", found)


def generate_with_trees(stage: Stage) -> Found:
    found = _generated(stage, "--tree", "32", "--width", "16", env=stage.served)
    if found["text"] != stage.answer:
        raise Failure(f"with trees the answer is {found['text']!r}, with chains {stage.answer!r}")
    return Found(f"the same answer, {_per_step(found)}", found)


def _generated(stage: Stage, *flags: str, env: dict[str, str]) -> dict[str, object]:
    """Return the greedy answer; the client asks the server the same."""
    words = (client.QUESTION, "--json", "--temperature", "0", "--max-tokens", str(client.MAX_TOKENS), *flags)
    done = stage.children.blockdraft(
        "generate", *words, *stage.on_device, env=env, timeout_s=stage.sizes.timeout_s
    )
    _refuse_warnings(done)
    found = json.loads(done.out)
    if not found["text"].strip():
        raise Failure("the answer is empty")
    if not found["draft"]:
        raise Failure("it ran without a drafter")
    return dict(found)


def _per_step(found: dict[str, object]) -> str:
    return f"{found['metrics']['tokens_per_step']:.2f} tokens per step"  # type: ignore[index]


def _refuse_warnings(done: Done, but: str | None = None) -> None:
    for line in done.err.splitlines():
        if OUR_WARNING.search(line) and (but is None or but not in line):
            raise Failure(f"it printed a warning: {line.strip()}")


# ---- servers


def serve_cold(stage: Stage) -> Found:
    """The caches of compiled and measured things are empty; it leaves the prefix of a prompt."""
    server = _start(stage, "cold", "--prefix-disk", str(stage.path(PREFIXES)))
    serving.ask(server.url, client.QUESTION, client.MAX_TOKENS)
    end(stage, server)
    return ready(stage, f"{MODEL}, cold", server)


def serve_warm(stage: Stage) -> Found:
    """With what the cold start has left; left running for the steps that need one."""
    flags = ("--prefix-disk", str(stage.path(PREFIXES)), "--receipts", str(stage.path(RECEIPTS)))
    stage.server = _start(stage, "warm", *flags, "--recheck", "0.2")
    text, num_cached = serving.ask(stage.server.url, client.QUESTION, client.MAX_TOKENS)
    if not num_cached:
        raise Failure("nothing of a prompt that was asked before the restart is found on disk")
    if text != (stage.answer or text):
        raise Failure(f"after a restart the answer is {text!r}, that of `generate` is {stage.answer!r}")
    found = ready(stage, f"{MODEL}, warm", stage.server)
    return replace(found, says=f"{found.says}, {num_cached} tokens of a prompt from disk")


def _start(stage: Stage, name: str, *flags: str) -> serving.Server:
    server = serving.start(
        stage.children,
        MODEL,
        *flags,
        *stage.on_device,
        env=stage.served,
        log=stage.path(f"serve-{name}.log"),
        timeout_s=stage.sizes.timeout_s,
    )
    stage.started[name] = server
    return server


def ready(stage: Stage, name: str, server: serving.Server) -> Found:
    """Return what a start took; it is also kept for comparison."""
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in server.phases.items())
    engine, seconds = server.engine, server.startup["seconds"]
    assert isinstance(seconds, float)
    stage.measured.starts_s[name] = seconds
    stage.measured.graphs[name] = server.num_graphs
    graphs = f"{server.num_graphs} graphs, " if server.num_graphs else ""
    says = f"ready in {seconds:.1f} s ({phases}), {graphs}width {engine['width']}, {engine['dtype']}"
    return Found(says, {"startup": server.startup, "engine": engine})


def check_starts(stage: Stage) -> Found:
    """Apart from the starts themselves: a server that warns can still be asked."""
    said = [
        f"{name}: {text}" for name, server in stage.started.items() for text in serving.complaints(server)
    ]
    if said:
        raise Failure("; ".join(said))
    return Found(f"{len(stage.started)} starts, the drafter kept, no warnings")


def compare_memory(stage: Stage) -> Found:
    server = stage.running
    return memory.compare(stage.plan, server.engine, pid=server.process.pid, free_before=stage.free_before)


def ask(stage: Stage) -> Found:
    text = client.check(client.connect(stage.running.url), stage.answer)
    as_generated = "" if stage.answer is None else " as `generate` answered;"
    says = f"{text!r}{as_generated} streamed, seeded, stopped, with log-probabilities, of a form, by a tool"
    return Found(says, {"text": text})


def prove(stage: Stage) -> Found:
    """Ask the running server in every way; the exit code tells if answers differ."""
    path = stage.path("prove.json")
    words = (stage.running.url, *stage.sizes.prove, "--json", str(path))
    stage.children.blockdraft("prove", *words, env=stage.served, timeout_s=stage.sizes.long_timeout_s)
    found = json.loads(path.read_text())
    return Found(found["verdict"], {"ways": found["ways"]})


def replay(stage: Stage) -> Found:
    """Repeat all that the server has answered: by another engine, at another width and in another batch."""
    words = (str(stage.path(RECEIPTS)), "--draft", "none", "--max-num-seqs", "5", *stage.on_device)
    done = stage.children.blockdraft("replay", *words, env=stage.served, timeout_s=stage.sizes.long_timeout_s)
    _refuse_warnings(done)
    return Found(done.out.splitlines()[-1], {})


def bench(stage: Stage) -> Found:
    return load_with(stage, "bench", STREAMS, stage.sizes.bench)


def load_with(stage: Stage, name: str, streams: Sequence[int], workload: Sequence[str]) -> Found:
    """`bench` of the running server, both arms, at these numbers of streams."""
    path = stage.path(name)
    words = ("--concurrency", ",".join(map(str, streams)), "--offline", "--out", str(path))
    stage.children.blockdraft(
        "bench",
        stage.running.url,
        *workload,
        *words,
        env=stage.served,
        timeout_s=stage.sizes.long_timeout_s,
    )
    report = json.loads(path.with_suffix(".json").read_text())
    return _benched(report, streams)


def _benched(report: dict[str, list[dict[str, object]]], streams: Sequence[int] = STREAMS) -> Found:
    cells, pairs = report["cells"], report["pairs"]
    for cell in cells:
        lost = {name: cell[name] for name in ("num_failed", "num_not_sent", "num_not_ended") if cell[name]}
        if lost:
            raise Failure(f"{cell['key']}, {cell['arm']}: {lost}, {cell['errors']}")
    measured = {(cell["key"]["concurrency"], cell["arm"]) for cell in cells}  # type: ignore[index]
    missing = [(n, arm) for n in streams for arm in ("speculative", "plain") if (n, arm) not in measured]
    if missing:
        raise Failure(f"nothing was measured for {missing}")
    num_requests = sum(cell["num_requests"] for cell in cells)  # type: ignore[misc]
    speeds = ", ".join(_speed_up(pair) for pair in pairs)
    return Found(f"{num_requests} requests, none failed; {speeds}", {"cells": cells, "pairs": pairs})


def _speed_up(pair: dict[str, object]) -> str:
    value = pair["speedup"]["tokens_per_s"]["value"]  # type: ignore[index]
    slower = " (slower than plain)" if value is not None and round(value, 2) < 1 else ""
    key = pair["key"]
    speed = "unknown" if value is None else f"{value:.2f}x"
    return f"{key['workload']} at {key['concurrency']}: {speed}{slower}"  # type: ignore[index]


def end_server(stage: Stage) -> Found:
    server, url = stage.running, stage.running.url
    if serving.get_json(f"{url}/health")["status"] != "ok":
        raise Failure("/health is not well after the benchmark")
    num_checked, num_different = serving.wait_for_rechecks(url)
    if num_different:
        raise Failure(f"{num_different} of {num_checked} answers differed from plain decoding")
    end(stage, server)
    return Found(f"healthy to the end, exit code 0; {num_checked} answers were computed again, all equal")


def serve_compressed(kv_dtype: str, stage: Stage) -> Found:
    """A server that compresses: its memory against its plan, and its answer behind a long prompt.

    On a CPU the process is not compared again: exact windows are not there until they are written, and the
    kernels that this start compiles are, which no plan counts.
    """
    flags = ("--kv-dtype", kv_dtype)
    planned, free_before = _planned(stage, *flags), memory.free_bytes(stage.device)
    server = _start(stage, kv_dtype, *flags)
    if said := serving.complaints(server):
        raise Failure("; ".join(said))
    taken = memory.compare(planned, server.engine, pid=None, free_before=free_before)
    text = client.check_drafts(client.connect(server.url), BUILT_IN.read_text(encoding="utf-8")[:LONG_TEXT])
    end(stage, server)
    started = ready(stage, f"{MODEL}, {kv_dtype}", server)
    kept = f"{server.engine['kv_dtype']}, {server.engine['kv_compression']:.1f}x fewer bytes per token"
    says = f"{kept}; {taken.says}; with drafts and without {text!r}"
    return Found(says, {"text": text, "memory": taken.values, **started.values})


def end(stage: Stage, server: serving.Server) -> None:
    code = serving.end(stage.children, server)
    if code != 0:
        raise Failure(f"the server ended with {code} after SIGTERM")


# ---- drafters


def fit(stage: Stage) -> Found:
    if shipped_drafter(MODEL) is None:
        raise Failure("no drafter ships for the default model: blockdraft/drafters is empty")
    done = stage.children.blockdraft(
        "fit",
        MODEL,
        "--json",
        "--quiet",
        *stage.sizes.fit,
        *stage.on_device,
        env=stage.served,
        timeout_s=stage.sizes.long_timeout_s,
    )
    found = json.loads(done.out)
    _refuse_warnings(done)
    overall = found["overall"]
    says = (
        f"{found['verdict']}: {overall['committed_per_step']:.2f} tokens per step of {found['width']} on "
        f"{overall['prompts']} prompts ({found['question']['prompts']})"
    )
    return Found(says, found)


def train(stage: Stage) -> Found:
    prompts, out = stage.path("prompts.jsonl"), stage.path("run")
    rows = [
        {"category": name, "messages": [{"role": "user", "content": one.turns[0]}]}
        for name in TRAINED_CLASSES
        for one in load(name).prompts
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = stage.children.blockdraft(
        "train",
        MODEL,
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        *stage.sizes.train,
        *stage.on_device,
        env=stage.served,
        timeout_s=stage.sizes.long_timeout_s,
    )
    _refuse_warnings(done, but=NO_BETTER)
    missing = [
        name for name in ("config.json", "model.safetensors") if not (out / "drafter" / name).is_file()
    ]
    if missing:
        raise Failure(f"the drafter has no {missing[0]}")
    said = (out / "log.txt").read_text().splitlines()
    return Found(f"exported; {said[-1].strip()}", {"log": said})


def use_trained(stage: Stage) -> Found:
    """Serve the drafter just trained: it knows nothing yet, and must not change a token."""
    found = _generated(stage, "--draft", str(stage.path("run") / "drafter"), env=stage.served)
    if stage.answer is not None and found["text"] != stage.answer:
        raise Failure(f"with it the answer is {found['text']!r}, with the shipped one {stage.answer!r}")
    return Found(f"it loads, and the answer is the same: {_per_step(found)}", found)
