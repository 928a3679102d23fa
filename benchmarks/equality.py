"""Counts the ways of serving a prompt that give == answers, through the real engine.

    python -m benchmarks.equality [--pair default|qwen3-8b|qwen3.5-35b-a3b] [--device cuda] [--out FILE]

The baseline is every prompt alone, at width 1, prefilled whole and without a prefix hit. Each line of the
table serves the same prompts in another way, greedy and at temperature 0.7 with a seed. "default" is the
shipped pair with its own drafter; the others have random weights, prompts of random tokens, and a drafter
that replays the baseline with errors sown in. The exit code is 1 where an answer differs, or where a line
did not do what it is there for.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.shapes import SHAPES, write_shape
from blockdraft.bench.workloads import load_all
from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import Delta, Metrics, SamplingParams
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.planner.plan import Plan
from blockdraft.settings.settings import Settings
from blockdraft.start.compile_ahead import CompileAhead, run_steps
from blockdraft.start.loading import load_models, resolve_device
from blockdraft.step.drafter import Drafter, Weightless
from blockdraft.step.row_sizes import row_sizes
from blockdraft.text.tokenizer import Tokenizer

SHIPPED = "default"
TEMPERATURE = 0.7
WIDTHS = (1, 4, 16)
TREE = 32  # tokens of the shipped drafter's trees
ROWS = 32
CHUNK = 48  # prompt tokens per prefill step, where prompts come in many
NUM_PROMPT = 96  # tokens of a random prompt
STEPS_BETWEEN = 2  # arrivals, in a batch that changes
WRONG = 1 / 7  # of the replayed drafts: a block of 16 is accepted at every length, whole ones included
SHOWN = 6  # differences of one line that are printed
STATE_BYTES = 8 << 30  # for the states of all prompts
NO_LIMIT = 1 << 40  # bytes of cache that the plan may count on: this program sets the pages itself


# ---- what is asked, and what came back


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt at one temperature. Its number is its seed, and its place in a replayed table."""

    number: int
    prompt_ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer and its metrics."""

    token_ids: list[int]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the baseline's."""

    prompt: int
    token: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Counts answers of one temperature that are == the baseline's, and where others differ."""

    num_answers: int
    differences: tuple[Difference, ...] = ()

    @property
    def num_equal(self) -> int:
        return self.num_answers - len(self.differences)

    def __str__(self) -> str:
        text = f"{self.num_equal} of {self.num_answers} equal"
        if not self.differences:
            return text
        return f"{text}, the first parts at token {min(one.token for one in self.differences)}"

    def as_json(self) -> dict[str, object]:
        places = [[one.prompt, one.token] for one in self.differences]
        return {"equal": self.num_equal, "of": self.num_answers, "prompt_and_token": places}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve all asks."""

    name: str
    widths: tuple[int | None, ...]  # of the asks, in turn; None: trees
    is_alone: bool = False
    is_changing: bool = False  # asks of different lengths, one every few steps
    chunk: int | None = None  # None: long enough for any prompt
    finds_prefix: bool = False
    is_preempted: bool = False

    def why_untested(self, metrics: Sequence[Metrics]) -> str | None:
        """Return why this way tested nothing; None: it did."""
        if self.finds_prefix and any(one.num_cached_tokens == 0 for one in metrics):
            return "not every prompt was found in the prefix cache"
        if self.is_preempted and not any(one.preemptions for one in metrics):
            return "nothing was preempted"
        if self.widths != (1,) and not any(sum(one.accepted) for one in metrics):
            return "no draft was accepted"
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one way of serving."""

    way: str
    greedy: Agreement
    sampled: Agreement
    tokens_per_step: float
    seconds: float
    untested: str | None = None

    @property
    def is_well(self) -> bool:
        return self.untested is None and not self.greedy.differences and not self.sampled.differences

    def as_json(self) -> dict[str, object]:
        return {
            "way": self.way,
            "greedy": self.greedy.as_json(),
            "sampled": self.sampled.as_json(),
            "tokens_per_step": self.tokens_per_step,
            "seconds": self.seconds,
            "untested": self.untested,
        }


# ---- serving


class Equality:
    """One engine, captured where it can be, that answers the same prompts in every way."""

    def __init__(
        self,
        models: LoadedPair,
        plan: Plan,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        replays: bool,
        ahead: CompileAhead | None = None,
    ) -> None:
        """`replays`: the baseline is drafted, with errors, and not what the pair's drafter believes."""
        self.num_prompts, self.num_tokens = len(prompts), num_tokens
        asked = [(tuple(ids), temperature) for temperature in (0.0, TEMPERATURE) for ids in prompts]
        self.asks = [Ask(number, *one) for number, one in enumerate(asked)]
        self.answers: list[list[int]] = []  # the baseline's
        self._longest = max(map(len, prompts))
        drafter = models.drafter
        if replays:
            drafter = ReplayingDrafter(
                drafter,
                num_answers=len(self.asks),
                num_positions=self._longest + num_tokens + plan.block,
                device=models.device,
            )
        self._has_prefix_cache = plan.prefix_cache
        plan = replace(plan, max_queue=len(self.asks))
        room = len(self.asks) * plan.pages_of(self._longest)  # for prompts that are remembered
        room += plan.max_num_seqs * plan.pages_of(self._longest + num_tokens + plan.scratch + plan.page_size)
        plan = replace(
            plan,
            num_pages=room,
            max_prefill_tokens=max(plan.max_prefill_tokens, self._longest),
            prefix_cache=False,
        )
        self.engine = Engine(replace(models, drafter=drafter), plan)
        self.widths = tuple(sorted({min(width, plan.block) for width in WIDTHS}))
        if ahead is not None:
            compile_steps(self.engine, ahead)
        self.why_not_captured = models.why_not_captured()
        if self.why_not_captured is None:
            self.engine.capture(row_sizes(plan.max_num_seqs), self.widths)

    def learn_baseline(self) -> Line:
        """Every prompt alone, at width 1, whole, without a prefix hit: what all others are compared with."""
        self.answers = []
        begin = time.perf_counter()
        found = self._serve(Way("baseline", (1,), is_alone=True))
        seconds = time.perf_counter() - begin
        self.answers = [one.token_ids for one in found]
        drafter = self.engine.models.drafter
        if isinstance(drafter, ReplayingDrafter):
            texts = [[*ask.prompt_ids, *ids] for ask, ids in zip(self.asks, self.answers, strict=True)]
            drafter.learn(texts, vocab_size=self.engine.models.config.vocab_size)
        everyone = Agreement(self.num_prompts)
        return Line("alone, width 1: the baseline", everyone, everyone, _per_step(found), seconds)

    def lines(self) -> Iterator[Line]:
        """Each as soon as it is known; the baseline has to be known already."""
        yield from map(self.line, self.ways())

    def ways(self) -> list[Way]:
        rows = min(self.engine.plan.max_num_seqs, len(self.asks))
        widest, chunk = self.widths[-1:], min(CHUNK, max(1, self._longest // 2))
        shown = ", ".join(map(str, self.widths))
        ways = [Way(f"alone, width {width}", (width,), is_alone=True) for width in self.widths[1:]]
        if self.engine.plan.tree:
            ways.append(Way(f"alone, trees of {self.engine.plan.tree}", (None,), is_alone=True))
        ways += [Way(f"among {rows} rows, width {width}", (width,)) for width in self.widths]
        ways.append(Way(f"a changing batch, widths {shown}", self.widths, is_changing=True))
        if self._has_prefix_cache:
            ways.append(Way("with a prefix hit", widest, finds_prefix=True))
        ways.append(Way(f"in chunks of {chunk} tokens", widest, chunk=chunk))
        ways.append(Way("after preemption", widest, is_preempted=True))
        return ways

    def left_out(self) -> list[str]:
        """Ways that this pair has not."""
        if self._has_prefix_cache:
            return []
        why = self.engine.plan.reasons.get("prefix_cache", "it is switched off")
        return [f"with a prefix hit: {why}"]

    def line(self, way: Way) -> Line:
        begin, num_trees = time.perf_counter(), self.engine.stats.num_trees
        found = self._serve(way)
        seconds = time.perf_counter() - begin
        halves = (range(self.num_prompts), range(self.num_prompts, 2 * self.num_prompts))
        greedy, sampled = (self._agreement(way, found, numbers) for numbers in halves)
        untested = way.why_untested([one.metrics for one in found])
        if way.widths == (None,) and self.engine.stats.num_trees == num_trees:
            untested = "no tree was verified"
        return Line(way.name, greedy, sampled, _per_step(found), seconds, untested)

    def _agreement(self, way: Way, found: Sequence[Answer], numbers: range) -> Agreement:
        differences = []
        for prompt, number in enumerate(numbers):
            expected = self.answers[number][: self._num_asked(way, number)]
            token = _first_difference(found[number].token_ids, expected)
            if token is not None:
                differences.append(Difference(prompt, token))
        return Agreement(len(numbers), tuple(differences))

    def _num_asked(self, way: Way, number: int) -> int:
        """Return the tokens of an answer: all, or a number from half of them on."""
        spread = self.num_tokens // 2 + 1
        return self.num_tokens - 37 * number % spread if way.is_changing else self.num_tokens

    def _serve(self, way: Way) -> list[Answer]:
        engine, plan = self.engine, self.engine.plan
        chunk = plan.max_prefill_tokens if way.chunk is None else way.chunk
        engine.replan(replace(plan, max_prefill_tokens=chunk, prefix_cache=way.finds_prefix))
        if way.finds_prefix:
            self._run(way, is_first_token_only=True)  # leaves the prompts in the cache
        held = self._hold_pages() if way.is_preempted else []
        deltas = self._run(way)
        engine.scheduler.pages.release(held)
        engine.replan(plan)
        engine.check()
        return _gathered(deltas, len(self.asks))

    def _run(self, way: Way, *, is_first_token_only: bool = False) -> list[Delta]:
        deltas: list[Delta] = []
        for ask in self.asks:
            params = SamplingParams(
                temperature=ask.temperature,
                seed=ask.number,
                width=way.widths[ask.number % len(way.widths)],
                max_tokens=1 if is_first_token_only else self._num_asked(way, ask.number),
                ignore_eos=True,
            )
            self.engine.add(ask.prompt_ids, params, str(ask.number))
            if way.is_alone:
                deltas += self._drain()
            elif way.is_changing:
                for _ in range(STEPS_BETWEEN):
                    deltas += self.engine.step()
        return deltas + self._drain()

    def _drain(self) -> list[Delta]:
        deltas = []
        while self.engine.has_work:
            deltas += self.engine.step()
        return deltas

    def _hold_pages(self) -> list[int]:
        """Take pages away until as many rows can begin as there are, but cannot end side by side."""
        plan, pages = self.engine.plan, self.engine.scheduler.pages
        first = self.asks[: plan.max_num_seqs]
        to_begin = sum(plan.pages_of(len(ask.prompt_ids) - 1 + plan.block) for ask in first)
        to_end = plan.pages_of(self._longest + self.num_tokens + plan.scratch)
        return pages.allocate(pages.num_free - max(to_begin, to_end))


class ReplayingDrafter(Weightless):
    """Drafts the known answers with errors sown in; `own` absorbs features as when it is served.

    Random weights never agree with a random drafter, so every draft would be refused and only the first
    column of a block be tested. A row's seed is the number of its answer. The table never moves and the host
    is never asked, so a graph that was captured before the answers were known replays them.
    """

    def __init__(self, own: Drafter, *, num_answers: int, num_positions: int, device: torch.device) -> None:
        self.block = own.block
        self._own = own
        self._drafts = torch.zeros((num_answers, num_positions), dtype=torch.int64, device=device)
        self._columns = torch.arange(1, self.block, device=device)

    def learn(self, texts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        """Draft these from now on, prompt and answer each, but for one token in seven."""
        table = torch.zeros(self._drafts.shape, dtype=torch.int64)
        for row, token_ids in zip(table, texts, strict=True):
            row[: len(token_ids)] = torch.tensor(token_ids)
        is_wrong = torch.rand(table.shape, generator=torch.Generator().manual_seed(0)) < WRONG
        self._drafts.copy_(torch.where(is_wrong, (table + 1) % vocab_size, table))

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        numbers = rows.sampling().integers(Whole.SEED)[:, None]
        places = view.starts[:, None] + self._columns[: width - 1]
        drafts = self._drafts[numbers, places.clamp(max=self._drafts.shape[1] - 1)]
        return torch.cat((anchor, drafts), dim=1)

    def absorb(self, features: Tensor, view: View) -> None:
        self._own.absorb(features, view)


def compile_steps(engine: Engine, ahead: CompileAhead) -> None:
    """At once, as a start does."""
    with ahead.collecting() as is_useful:
        if is_useful:
            run_steps(engine)
    ahead.wait(lambda done, total, name: None)


def _gathered(deltas: Sequence[Delta], count: int) -> list[Answer]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    metrics: dict[int, Metrics] = {}
    for delta in deltas:
        number = int(delta.request_id)
        tokens[number] += delta.token_ids
        if delta.metrics is not None:
            metrics[number] = delta.metrics
    return [Answer(tokens[number], metrics[number]) for number in range(count)]


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first place where two answers differ; None: they are equal."""
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        if mine != theirs:
            return place
    return None if len(found) == len(expected) else min(len(found), len(expected))


def _per_step(answers: Sequence[Answer]) -> float:
    return sum(len(one.token_ids) for one in answers) / sum(one.metrics.steps for one in answers)


# ---- pairs


def load(pair: str, device: str) -> tuple[LoadedPair, Plan]:
    """Load the shipped pair, or random weights of a published shape."""
    common = {"device": device, "max_num_seqs": ROWS, "cache_bytes": NO_LIMIT}
    common["prefix_state_bytes"] = STATE_BYTES
    if pair == SHIPPED:
        return load_models(Settings(**common, tree=TREE), lambda line: None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_shape(pair, Path(folder))
        named = Settings(model=str(target), draft=str(draft), load_format="dummy", **common)  # type: ignore[arg-type]
        return load_models(named, lambda line: None)


def make_prompts(pair: str, count: int, *, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Return prompts of the built-in classes in turn, through the chat template; or random tokens."""
    if pair != SHIPPED:
        draw = random.Random(0)
        return [[draw.randrange(vocab_size) for _ in range(NUM_PROMPT)] for _ in range(count)]
    classes = [workload.prompts for workload in load_all(is_offline=True)]
    turns = [prompt.turns[0] for prompts in zip(*classes, strict=True) for prompt in prompts]
    return [tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns[:count]]


# ---- the table


def table(lines: Sequence[Line]) -> str:
    header = ["way", "greedy", f"T {TEMPERATURE}", "tokens per step", "s"]
    rows: list[list[object]] = [
        [line.way, line.greedy, line.sampled, line.tokens_per_step, line.seconds] for line in lines
    ]
    return record.table(header, rows)


def remarks(lines: Sequence[Line]) -> Iterator[str]:
    """Yield where answers differ, and what was not tested."""
    for line in lines:
        for name, agreement in (("greedy", line.greedy), (f"T {TEMPERATURE}", line.sampled)):
            shown = [f"prompt {one.prompt} at token {one.token}" for one in agreement.differences[:SHOWN]]
            more = len(agreement.differences) - len(shown)
            if shown:
                yield f"{line.way}, {name}: {', '.join(shown)}{f' and {more} more' if more else ''}"
        if line.untested is not None:
            yield f"{line.way}: NOT TESTED, {line.untested}"


def verdict(lines: Sequence[Line]) -> str:
    agreements = [one for line in lines for one in (line.greedy, line.sampled)]
    equal = sum(one.num_equal for one in agreements)
    total = sum(one.num_answers for one in agreements)
    untested = sum(line.untested is not None for line in lines)
    return f"{equal} of {total} answers equal" + (f"; ways not tested: {untested}" if untested else "")


def main(words: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(words)
    is_shipped = args.pair == SHIPPED
    num_prompts = args.prompts or (64 if is_shipped else 16)
    num_tokens = args.tokens or (256 if is_shipped else 96)
    begin = time.perf_counter()
    device = torch.device(resolve_device(args.device))
    ahead = CompileAhead(device, ["equality", args.pair])  # its workers begin while weights are read
    models, plan = load(args.pair, args.device)
    prompts = make_prompts(
        args.pair, num_prompts, tokenizer=models.tokenizer, vocab_size=models.config.vocab_size
    )
    equality = Equality(models, plan, prompts, num_tokens, replays=not is_shipped, ahead=ahead)
    load_s = time.perf_counter() - begin
    print(f"{args.pair} on {models.device} in {models.dtype}: {len(prompts)} prompts, {num_tokens} tokens")
    print(f"loaded in {load_s:.1f} s; {_shown_graphs(equality)}", flush=True)
    baseline = equality.learn_baseline()
    lines = []
    for line in equality.lines():
        lines.append(line)
        print(
            f"  {line.way}: {line.greedy}; T {TEMPERATURE}: {line.sampled}; {line.seconds:.1f} s", flush=True
        )
    print(table([baseline, *lines]))
    for text in (*remarks(lines), *(f"left out: {why}" for why in equality.left_out()), verdict(lines)):
        print(text)
    result = {
        "what": "answers that are == to those of every prompt alone, at width 1",
        "settings": vars(args) | {"prompts": len(prompts), "tokens": num_tokens},
        **record.context(),
        "device": str(models.device),
        "dtype": models.dtype,
        "load_s": load_s,
        "seconds": time.perf_counter() - begin,
        "lines": [line.as_json() for line in lines],
        "left_out": equality.left_out(),
        "verdict": verdict(lines),
    }
    record.save(args.out, result)
    ahead.close(is_done=True)
    return 0 if all(line.is_well for line in lines) else 1


def _shown_graphs(equality: Equality) -> str:
    graphs = equality.engine.graphs
    return f"no graphs: {equality.why_not_captured}" if graphs is None else f"{len(graphs)} graphs"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pair", choices=(SHIPPED, *SHAPES), default=SHIPPED, help="(default: the shipped one)"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--prompts", type=int, metavar="N", help="(default: 64, of random ones 16)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each answer (default: 256, or 96)")
    parser.add_argument("--out", metavar="FILE", help="write everything that was found as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
