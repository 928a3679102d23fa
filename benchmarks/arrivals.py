"""Measures how arriving prompts slow running answers: `python -m benchmarks.arrivals --shape qwen3-8b`.

Requests go through Engine.step in this process; weights are random and drafts are accepted by chance. First
the capacity: as many requests as the plan has rows, another for each that ends. Then requests arrive by
chance (Poisson) at a share of it. TPOT is an answer's time per token behind its first step. TTFT runs from
arrival to first token; its ratio is to the prefill of one prompt, alone. A gap is between two steps of an
answer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch

from benchmarks import record
from benchmarks.on_card import load
from benchmarks.shapes import SHAPES
from blockdraft.engine.chunks import Chunks
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import SamplingParams
from blockdraft.planner.plan import Plan
from blockdraft.settings.acceptance_profile import acceptance_rates
from blockdraft.step.row_sizes import row_sizes

WARM_REQUESTS = 2  # per row, before the capacity counts


class Alternating(Chunks):
    """The scheduler that `Chunks` is compared with: one chunk, then one decode step; prompts in order."""

    def take(self, left: Items[int], *, is_decoding: bool) -> list[int]:
        self._num_owed, room, counts = 1, self.most, []
        for rest in left:
            counts.append(min(rest, room))
            room -= counts[-1]
        return counts


@dataclass
class Answer:
    """One request: when it came, and when each of its steps was there."""

    arrival_s: float
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        return self.times_s[0] - self.arrival_s

    @property
    def per_token_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


class Load:
    """Requests of one size, through one engine."""

    def __init__(self, engine: Engine, *, num_prompt: int, num_answer: int, seed: int = 0) -> None:
        self.engine = engine
        self.num_prompt = num_prompt
        self.sampling = SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=num_answer, ignore_eos=True, seed=0
        )
        self.random = random.Random(seed)
        self.answers: dict[str, Answer] = {}
        self.ended: list[Answer] = []

    def add(self, arrival_s: float) -> None:
        vocab_size = self.engine.models.config.vocab_size
        prompt = [self.random.randrange(vocab_size) for _ in range(self.num_prompt)]
        name = self.engine.add(prompt, replace(self.sampling, seed=self.random.randrange(1 << 30)))
        self.answers[name] = Answer(arrival_s)

    def step(self) -> int:
        """Run one step; return how many answers ended."""
        deltas, now_s = self.engine.step(), time.perf_counter()
        before = len(self.ended)
        for delta in deltas:
            answer = self.answers[delta.request_id]
            answer.times_s.append(now_s)
            answer.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended.append(self.answers.pop(delta.request_id))
        return len(self.ended) - before

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def prompt_s(self) -> float:
        """Return the seconds to prefill one prompt alone; this also warms up."""
        times, scheduler = [], self.engine.scheduler
        for _ in range(5):
            begin_s = time.perf_counter()
            self.add(begin_s)
            while scheduler.waiting or not all(sequence.is_decoding for sequence in scheduler.running):
                self.engine.step()
            self.engine.wait()
            times.append(time.perf_counter() - begin_s)
            self.drain()
        return statistics.median(times)

    def capacity(self, seconds: float) -> tuple[float, float]:
        """Requests and tokens per second, in a closed loop of as many as there are rows."""
        num_rows = self.engine.plan.max_num_seqs
        for _ in range(num_rows):
            self.add(time.perf_counter())
        self._replace_ended(lambda: len(self.ended) >= WARM_REQUESTS * num_rows)
        self.ended.clear()
        emitted, begin_s = self.engine.stats.num_emitted, time.perf_counter()
        self._replace_ended(lambda: time.perf_counter() - begin_s > seconds and len(self.ended) > 0)
        took_s = time.perf_counter() - begin_s
        found = len(self.ended) / took_s, (self.engine.stats.num_emitted - emitted) / took_s
        self.drain()
        return found

    def _replace_ended(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            for _ in range(self.step()):
                self.add(time.perf_counter())

    def arrive(self, rate: float, seconds: float) -> float:
        """Serve Poisson arrivals until all have ended; the tokens per second from first to last."""
        begin_s, at_s = time.perf_counter(), 0.0
        coming = []
        while (at_s := at_s + self.random.expovariate(rate)) < seconds:
            coming.append(begin_s + at_s)
        self.ended.clear()
        for arrival_s in coming:
            while (now_s := time.perf_counter()) < arrival_s:
                if self.engine.has_work:
                    self.step()
                else:
                    time.sleep(min(1e-3, arrival_s - now_s))
            self.add(arrival_s)
        self.drain()
        return sum(answer.num_tokens for answer in self.ended) / (time.perf_counter() - begin_s)


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return median and p99 of milliseconds."""
    return {f"{name}_p{percent}_ms": 1e3 * percentile(values, percent / 100) for percent in (50, 99)}


def measure(models: LoadedPair, plan: Plan, args: argparse.Namespace) -> dict[str, object]:
    engine = Engine(models, plan)
    if args.turns:
        engine.scheduler.chunks = Alternating(plan.max_prefill_tokens)
    if models.device.type == "cuda":
        engine.capture(row_sizes(plan.max_num_seqs), sorted({1, plan.width}))
    load = Load(engine, num_prompt=args.prompt, num_answer=args.answer)
    prompt_s = load.prompt_s()
    requests_per_s, tokens_per_s = load.capacity(args.capacity_seconds)
    rate = args.rate_share * requests_per_s if args.rate is None else args.rate
    arrived_tokens_per_s = load.arrive(rate, args.seconds)
    per_token = [answer.per_token_s for answer in load.ended]
    first = [answer.first_token_s for answer in load.ended]
    gaps = [gap for answer in load.ended for gap in answer.gaps_s]
    return {
        "max_prefill_tokens": plan.max_prefill_tokens,
        "width": plan.width,
        "max_num_seqs": plan.max_num_seqs,
        "prompt_ms": 1e3 * prompt_s,
        "capacity_requests_per_s": requests_per_s,
        "capacity_tokens_per_s": tokens_per_s,
        "requests_per_s": rate,
        "num_requests": len(load.ended),
        "tokens_per_s": arrived_tokens_per_s,
        **spread("tpot", per_token),
        "tpot_ratio": percentile(per_token, 0.99) / percentile(per_token, 0.5),
        **spread("ttft", first),
        "ttft_ratio": percentile(first, 0.99) / prompt_s,
        **spread("gap", gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--rate-share", type=float, default=0.7, help="of the capacity (default: 0.7)")
    parser.add_argument("--rate", type=float, help="requests per second, instead of a share")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt (default: 1000)")
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer (default: 200)")
    parser.add_argument("--committed", type=float, default=4.5, help="tokens per step (default: 4.5)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--max-prefill-tokens", type=int, help="most tokens of a prefill step (default: the plan's)"
    )
    parser.add_argument("--turns", action="store_true", help="one whole chunk, one decode step: to compare")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals (default: 20)")
    parser.add_argument("--capacity-seconds", type=float, default=10.0)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu (default: cuda)")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: use --device cpu with --shape tiny.")
    models, plan = load(
        args.shape,
        has_drafter=True,
        max_num_seqs=args.rows,
        max_model_len=args.prompt + args.answer + 1,
        device=args.device,
        **({} if args.max_prefill_tokens is None else {"max_prefill_tokens": args.max_prefill_tokens}),
    )
    rates = acceptance_rates(f"mean:{args.committed}", width=plan.width, block=plan.block)
    found = measure(replace(models, rates=rates), plan, args)
    where = torch.cuda.get_device_name() if models.device.type == "cuda" else "CPU"
    result = {
        "what": "random weights and drafts accepted by chance: timing only",
        "device": where,
        "settings": vars(args),
        **record.context(),
        **found,
    }
    record.save(args.json, result)
    print(f"{where}, {args.shape}; RANDOM WEIGHTS AND ACCEPTANCE, timing only")
    print(record.table(["", ""], [[name, value] for name, value in found.items()]))


if __name__ == "__main__":
    main()
