"""Our engine as `benchmarks.cpu` measures it: decoding, prefill, answers, starts and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.start import ready
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.machine.machine import free_port
from blockdraft.settings.settings import Settings
from blockdraft.start.start_engine import plain_engine

CONTEXT = 512
CORES = range(os.cpu_count() or 1)
QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first step that commits tokens counts as the prompt's; the figures are of the steps after it."""

    tokens: list[int]
    seconds: float
    num_timed: int  # tokens
    steps: int

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(1, self.num_timed)


def engine_of(quantization: str, draft: str) -> Engine:
    settings = Settings(
        draft=draft,
        device="cpu",
        quantization=quantization,
        draft_quantization=quantization,
        prefix_cache=False,
        max_model_len=2048,
    )
    return plain_engine(settings, lambda _: None)


def prompt(vocab_size: int, length: int = CONTEXT) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(100, vocab_size - 100, (length,), generator=generator).tolist()


def prompts(vocab_size: int, num_rows: int) -> list[list[int]]:
    """Return prompts that differ in the last token."""
    ids = prompt(vocab_size)
    return [[*ids[:-1], 1000 + row] for row in range(num_rows)]


def decode(engine: Engine, num_rows: int, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Decode tok/s over all rows, first tokens excluded, and the tokens of each row."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    names = [engine.add(ids, params) for ids in prompts(engine.models.config.vocab_size, num_rows)]
    answers: dict[str, list[int]] = {name: [] for name in names}
    start = None
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
        if start is None and all(answers.values()):
            done = sum(len(tokens) for tokens in answers.values())
            start = time.perf_counter()
    assert start is not None
    total = sum(len(tokens) for tokens in answers.values()) - done
    return total / (time.perf_counter() - start), list(answers.values())


def prefill_s(engine: Engine, length: int) -> float:
    """Seconds from a request to its first token."""
    ids = prompt(engine.models.config.vocab_size, length)
    start = time.perf_counter()
    engine.add(ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def answer(engine: Engine, ids: list[int], max_tokens: int) -> Answer:
    """One greedy answer until the model ends it."""
    engine.add(ids, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    tokens: list[int] = []
    num_first, steps, start = 0, 0, time.perf_counter()
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
        if num_first:
            steps += 1
        elif tokens:
            num_first, start = len(tokens), time.perf_counter()
    return Answer(tokens, time.perf_counter() - start, len(tokens) - num_first, steps)


@contextmanager
def all_cores() -> Iterator[None]:
    """For starting processes: OpenMP has bound this thread to one core, and children would inherit that."""
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def flags(quantization: str) -> list[str]:
    return ["--device", "cpu", "--quantization", quantization, "--draft-quantization", quantization]


def first_token_s(quantization: str) -> float:
    """Seconds from starting `blockdraft generate` to the first character of its answer."""
    command = [sys.executable, "-m", "blockdraft", "generate", QUESTION]
    return first_character_s([*command, "--temperature", "0", "--max-tokens", "8", *flags(quantization)])


def first_character_s(command: list[str]) -> float:
    start = time.perf_counter()
    with all_cores():
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with started as process:
        assert process.stdout is not None
        found = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()  # it must not find the pipe closed
    assert found, f"nothing came from {command}"
    assert process.returncode == 0, f"{command} has failed"
    return seconds


def ready_s(quantization: str) -> float:
    """Seconds from starting `blockdraft serve` until /ready answers 200."""
    port = free_port()
    command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(port), *flags(quantization)]
    start = time.perf_counter()
    with all_cores():
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while ready(port).get("state") != "ready":
            assert server.poll() is None, f"failed: {command}"
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        server.terminate()
        server.wait()


def memory(quantization: str, draft: str) -> dict[str, float]:
    """Resident megabytes after an answer in a fresh process, and what accounts for them."""
    code = (
        "import json, re, pathlib\n"
        "from blockdraft.settings.settings import pin_threads; pin_threads()\n"
        "from blockdraft import LLM, SamplingParams\n"
        f"llm = LLM(draft={draft!r}, device='cpu', quantization={quantization!r}, "
        f"draft_quantization={quantization!r})\n"
        "llm.generate([list(range(100, 612))], SamplingParams(temperature=0, max_tokens=32))\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "rss = {k: int(re.search(k + r':\\s+(\\d+)', status)[1]) / 1024 for k in ('VmRSS', 'VmHWM')}\n"
        "weights = sum(p.nbytes for p in llm.engine.models.target.parameters()) / 2**20\n"
        "cache = 544 * llm.engine.cache.num_bytes / (llm.engine.cache.num_pages * 16) / 2**20\n"
        "print(json.dumps(rss | {'weights': weights, 'cache': cache}))\n"
    )
    with all_cores():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["other"] = found["VmRSS"] - found["weights"] - found["cache"]
    return found


# ---- answers of several engines in turn: how fast, and which are the same


@dataclass(frozen=True, slots=True)
class Arm:
    answer: Callable[[list[int]], Answer]
    plain: str  # the arm with the same weights and without drafts, whose answers this one must give


def answers_of(
    arms: Mapping[str, Arm], questions: Sequence[list[int]], rounds: int
) -> dict[str, list[Answer]]:
    """Every question is answered by one arm directly after the other; of each, the best round counts."""
    for arm in arms.values():
        arm.answer(questions[0])  # warms it
    best: dict[str, list[Answer]] = {name: [] for name in arms}
    for ids in questions:
        found = [{name: arm.answer(ids) for name, arm in arms.items()} for _ in range(rounds)]
        for name in arms:
            best[name].append(min((one[name] for one in found), key=lambda one: one.seconds_per_token))
    return best


def figures(arms: Mapping[str, Arm], best: Mapping[str, list[Answer]], exact: str) -> dict[str, dict]:
    return {
        name: {
            "tokens_per_s": sum(one.num_timed for one in answers) / sum(one.seconds for one in answers),
            "tokens_per_step": sum(one.num_timed for one in answers) / sum(one.steps for one in answers),
            "tokens": sum(len(one.tokens) for one in answers),
            "answers": len(answers),
            "same_as_plain": num_same(answers, best[arms[name].plain]),
            "same_as_float32": num_same(answers, best[exact]),
        }
        for name, answers in best.items()
    }


def num_same(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    return sum(one.tokens == other.tokens for one, other in zip(answers, others, strict=True))


def cells(found: Mapping[str, Mapping[str, dict]], name: str) -> list[object]:
    """Return an arm's speed by workload, and how many of its answers agree."""
    each = [workload[name] for workload in found.values()]
    speeds = [f"{one['tokens_per_s']:.1f} ({one['tokens_per_step']:.2f})" for one in each]
    total = sum(one["answers"] for one in each)
    same = [f"{sum(one[key] for one in each)}/{total}" for key in ("same_as_plain", "same_as_float32")]
    return [name, *speeds, *same]
