"""Tokens that drafts from n-grams commit, alone and beside the default drafter, by how much must agree.

    python -m benchmarks.ngram record --data EVAL --out FILE [--tokens 96 --limit 4 --sets gsm8k,…]
    python -m benchmarks.ngram run --out FILE --json RESULT

`record` lets the default pair answer prompts of the evaluation sets, plainly, and notes what the drafter
proposes at every token, so that any rule can be simulated on the same answers exactly: every step drafts
behind the tokens committed so far, which are the same ones whatever was drafted. `run` does that: the drafter
alone, n-grams alone, and n-grams that overrule the drafter where so many tokens agree. Tokens per step depend
on no clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from torch import Tensor

from benchmarks.record import context, save, table
from blockdraft.bench.records import Prompt
from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import serve
from blockdraft.kernels.ngram_lookup import MOST
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.step.drafter import Drafter, Weightless
from blockdraft.training.answers import read_conversations

SHORT = {"gsm8k": "gsm8k_test", "mt-bench": "mt_bench", "humaneval": "humaneval"}
LONG = (
    *("doc_copy-4000", "code_rewrite-4000", "doc_copy-1000", "code_rewrite-1000", "book_summary-4000"),
    *("book_continue-1000", "doc_keypoints-4000", "code_explain-1000", "doc_copy-6000"),
)
WIDTHS = (16, 8, 4)
LEAST = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
Drafts = Sequence[int]
Rule = Callable[[Sequence[int], int, Drafts], Drafts]  # the text, how much of it is known, the drafter's


class Noted(Weightless):
    """Plain decoding by a drafter that says what it would have proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self.block = drafter.block
        self._drafter = drafter
        self.proposed: dict[int, list[int]] = {}  # by the anchor's position

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        block = self._drafter.draft(rows, cache, cache.view(rows, self.block), self.block)
        [position] = rows.length[rows.active].tolist()
        self.proposed[position] = block[0, 1:].tolist()
        return block[:, :width].contiguous()

    def absorb(self, features: Tensor, view: View) -> None:
        self._drafter.absorb(features, view)


def record(args: argparse.Namespace) -> None:
    settings = Settings(device=args.device, max_num_seqs=1, prefix_cache=False, draft_ngram=0)
    models, plan = load_models(settings, print)
    prompts = [one for one in _prompts(args.data, args.limit) if one.category in args.sets]
    with args.out.open("a", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            begin = time.monotonic()
            noted = Noted(models.drafter)
            engine = Engine(replace(models, drafter=noted), plan)
            ids = models.tokenizer.encode_chat(prompt.messages())
            temperature = args.temperature
            engine.add(ids, SamplingParams(temperature=temperature, seed=7, max_tokens=args.tokens, width=1))
            answer = [token for delta in serve(engine) for token in delta.token_ids]
            line = {"set": prompt.category, "prompt": list(ids), "answer": answer, "drafts": noted.proposed}
            file.write(json.dumps(line) + "\n")
            file.flush()
            size = f"{len(ids)} + {len(answer)} tokens, {time.monotonic() - begin:.0f} s"
            print(f"{number + 1}/{len(prompts)} {prompt.category}: {size}", flush=True)


def short_prompts(folder: Path, limit: int) -> Iterable[Prompt]:
    """Yield the first turns of `limit` conversations of each set of short questions."""
    for name, file in SHORT.items():
        listed = read_conversations(folder / f"{file}.jsonl.gz")
        for one in listed[:: len(listed) // limit][:limit]:
            yield replace(one, category=name, turns=one.turns[:1])


def _prompts(folder: Path, limit: int) -> Iterable[Prompt]:
    yield from short_prompts(folder, limit)
    long = read_conversations(folder / "long_context.jsonl.gz")
    for kind in LONG:
        yield from [replace(one, category=kind) for one in long if one.id.startswith(f"lc-{kind}-")][:limit]


# ---- rules


def recalled(text: Sequence[int], known: int, count: int, most: int) -> tuple[int, list[int]]:
    """Return how many of the last tokens of text[:known] occurred before, and `count` drafts."""
    last, best, end = known - 1, 0, 0
    for at in range(last - 1, -1, -1):
        if text[at] != text[last]:
            continue
        matched = 1
        while matched < most and matched <= at and text[at - matched] == text[last - matched]:
            matched += 1
        if matched > best:
            best, end = matched, at
            if best == most:
                break
    return best, [text[end + 1 + place % (last - end)] for place in range(count)] if best else []


def drafter_alone(text: Sequence[int], known: int, drafts: Drafts) -> Drafts:
    return drafts


def ngrams_alone(least: int, most: int = MOST) -> Rule:
    def rule(text: Sequence[int], known: int, drafts: Drafts) -> Drafts:
        matched, found = recalled(text, known, len(drafts), most)
        return found if matched >= least else ()

    return rule


def beside(least: int, most: int = MOST) -> Rule:
    def rule(text: Sequence[int], known: int, drafts: Drafts) -> Drafts:
        matched, found = recalled(text, known, len(drafts), most)
        return found if matched >= least else drafts

    return rule


def steps_of(line: dict[str, object], rule: Rule, width: int) -> int:
    prompt, answer, proposed = line["prompt"], line["answer"], line["drafts"]
    assert isinstance(prompt, list)
    assert isinstance(answer, list)
    assert isinstance(proposed, dict)
    text, known, steps = [*prompt, *answer], len(prompt), 0
    while known < len(text):
        drafts = rule(text, known, proposed[str(known - 1)])[: width - 1]
        right = 0
        while right < len(drafts) and known + right < len(text) and drafts[right] == text[known + right]:
            right += 1
        known, steps = known + right + 1, steps + 1
    return steps


def run(args: argparse.Namespace) -> None:
    with args.out.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    rules = {"drafter": drafter_alone}
    rules |= {f"ngram {least}": ngrams_alone(least) for least in LEAST[:4]}
    rules |= {f"ngram 2, {most} compared": ngrams_alone(2, most) for most in (4, 8, 16)}
    rules |= {f"beside {least}": beside(least) for least in LEAST[1:]}
    rules |= {f"beside 4, {most} compared": beside(4, most) for most in (8, 16)}
    sets = list(dict.fromkeys(line["set"] for line in lines))
    result: dict[str, object] = {**context(), "answers": {name: _size(lines, name) for name in sets}}
    for width in WIDTHS:
        found = {name: _committed(lines, rule, width) for name, rule in rules.items()}
        result[f"width {width}"] = found
        print(f"\ntokens per step, width {width}")
        print(table(["", *sets, "all"], [[name, *row.values()] for name, row in found.items()]))
    save(args.json, result)


def _size(lines: Iterable[dict[str, list[int]]], name: str) -> dict[str, int]:
    chosen = [line for line in lines if line["set"] == name]
    return {"prompts": len(chosen), "tokens": sum(len(line["answer"]) for line in chosen)}


def _committed(lines: Sequence[dict[str, list[int]]], rule: Rule, width: int) -> dict[str, float]:
    """By set, and the mean of all sets."""
    tokens: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    for line in lines:
        tokens[str(line["set"])] += len(line["answer"])
        steps[str(line["set"])] += steps_of(line, rule, width)
    found = {name: round(tokens[name] / steps[name], 3) for name in tokens}
    return {**found, "all": round(mean(found.values()), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--data", type=Path, required=True, help="the folder of evaluation sets")
    recording.add_argument("--limit", type=int, default=4, help="prompts of each set")
    recording.add_argument("--tokens", type=int, default=96, help="of each answer, at most")
    recording.add_argument("--sets", type=lambda text: text.split(","), default=[*SHORT, *LONG])
    recording.add_argument("--device", default="cpu")
    recording.add_argument("--temperature", type=float, default=0.0)
    running = commands.add_parser("run")
    running.add_argument("--json", help="where the result goes")
    for command in (recording, running):
        command.add_argument(
            "--out", type=Path, required=True, help="the recorded answers, which more are added to"
        )
    args = parser.parse_args()
    {"record": record, "run": run}[args.command](args)


if __name__ == "__main__":
    main()
