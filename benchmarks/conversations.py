"""Times prompts that begin like earlier ones: `python -m benchmarks.conversations --shape qwen3.5-35b-a3b`.

Three questions, with random weights of a published shape: how long the second turn of a conversation takes to
its first token, with its past in the prefix cache and without; how much of a shared head a sibling prompt
finds; and how many conversations keep their past when they take turns. Every answer with a hit is compared
with the answer computed whole.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import record
from benchmarks.on_card import load
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import SamplingParams
from blockdraft.planner.plan import Plan
from blockdraft.step.row_sizes import row_sizes

WHOLE = "computed whole"  # the salt of prompts that find nothing


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers."""

    turn: int = 16_384  # the first prompt of a conversation
    new: int = 300  # what the second prompt adds to the first answer
    answer: int = 128
    sibling: int = 12_288
    shared: int = 8192  # of two siblings
    conversations: tuple[int, ...] = (8, 16, 32)

    @property
    def longest(self) -> int:
        return max(self.turn + 2 * self.answer + self.new, self.sibling + self.answer)


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer."""

    token_ids: list[int]
    first_token_s: float
    num_cached: int


class Conversations:
    """An engine that answers one request at a time."""

    def __init__(self, models: LoadedPair, plan: Plan, sizes: Sizes) -> None:
        self.sizes = sizes
        self.engine = Engine(models, plan)
        if models.why_not_captured() is None:
            self.engine.capture(row_sizes(1), [plan.width])
        self._random = random.Random(0)
        self._vocab_size = models.config.vocab_size
        for _ in range(2):  # every kernel is compiled before the first prompt that counts
            self.ask(self.tokens(sizes.turn), salt="warm-up")
            self.ask(self.tokens(sizes.new), salt="warm-up")

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def ask(self, prompt: Sequence[int], salt: str | None = None) -> Asked:
        num_tokens = self.sizes.answer
        params = SamplingParams(
            temperature=1.0, seed=0, max_tokens=num_tokens, ignore_eos=True, cache_salt=salt
        )
        begin, first_s = time.perf_counter(), 0.0
        token_ids: list[int] = []
        self.engine.add(prompt, params)
        while self.engine.has_work:
            for delta in self.engine.step():
                first_s = first_s or time.perf_counter() - begin
                token_ids += delta.token_ids
                if delta.metrics is not None:
                    metrics = delta.metrics
        return Asked(token_ids, first_s, metrics.num_cached_tokens)

    def second_turn(self) -> dict[str, object]:
        """Time both turns, and the second one computed whole."""
        first_prompt = self.tokens(self.sizes.turn)
        first = self.ask(first_prompt)
        prompt = [*first_prompt, *first.token_ids, *self.tokens(self.sizes.new)]
        second, whole = self.ask(prompt), self.ask(prompt, WHOLE)
        assert whole.num_cached == 0
        return {
            "prompt": len(prompt),
            "cached": second.num_cached,
            "first_turn_ms": 1e3 * first.first_token_s,
            "second_turn_ms": 1e3 * second.first_token_s,
            "computed_whole_ms": 1e3 * whole.first_token_s,
            "is_equal": second.token_ids == whole.token_ids,
        }

    def siblings(self) -> dict[str, object]:
        """Ask two prompts that share a head."""
        head, rest = self.tokens(self.sizes.shared), self.sizes.sibling - self.sizes.shared
        self.ask([*head, *self.tokens(rest)])
        prompt = [*head, *self.tokens(rest)]
        found, whole = self.ask(prompt), self.ask(prompt, WHOLE)
        return {
            "shared": self.sizes.shared,
            "cached": found.num_cached,
            "share": found.num_cached / self.sizes.shared,
            "is_equal": found.token_ids == whole.token_ids,
        }

    def held(self, count: int) -> dict[str, object]:
        """Let `count` conversations take two turns each; count those whose second turn finds the first."""
        prompts = [self.tokens(self.sizes.turn) for _ in range(count)]
        answers = [self.ask(prompt).token_ids for prompt in prompts]
        turns = zip(prompts, answers, strict=True)
        second = [self.ask([*one, *answer, *self.tokens(self.sizes.new)]) for one, answer in turns]
        least = min(one.num_cached for one in second)
        held = sum(one.num_cached >= 0.9 * self.sizes.turn for one in second)
        snapshot = self.engine.snapshot()
        return {
            "conversations": count,
            "held": held,
            "least_cached": least,
            "states": snapshot.num_states,
            "evicted": snapshot.num_states_evicted,
        }


def measure(models: LoadedPair, plan: Plan, sizes: Sizes) -> dict[str, object]:
    """Answer all three questions."""
    bench = Conversations(models, plan, sizes)
    found = {"second_turn": bench.second_turn(), "siblings": bench.siblings()}
    return found | {"held": [bench.held(count) for count in sizes.conversations]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3.5-35b-a3b")
    parser.add_argument(
        "--prefix-state-bytes", type=int, default=12 << 30, help="memory for states (default: 12 GiB)"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu (default: cuda)")
    parser.add_argument("--json")
    args = parser.parse_args()
    sizes = Sizes()
    models, plan = load(
        args.shape,
        has_drafter=True,
        max_num_seqs=1,
        max_model_len=sizes.longest + 64,
        device=args.device,
        prefix_cache=True,
        prefix_state_bytes=args.prefix_state_bytes,
        max_prefill_tokens=8192,
    )
    most = max(sizes.conversations) + 4
    found = measure(models, replace(plan, num_pages=most * plan.pages_of_one), sizes)
    where = torch.cuda.get_device_name() if models.device.type == "cuda" else "CPU"
    result = {
        "what": "random weights; one request at a time",
        "device": where,
        "settings": vars(args),
        **record.context(),
        **found,
    }
    record.save(args.json, result)
    print(f"{where}, {args.shape}; RANDOM WEIGHTS")
    for name in ("second_turn", "siblings"):
        part = found[name]
        assert isinstance(part, dict)
        print(record.table([name, ""], [[key, value] for key, value in part.items()]))
    rows = found["held"]
    assert isinstance(rows, list)
    print(record.table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
