"""One stream with a drafter against the same engine without: seconds per token, and tokens per step.

    python -m benchmarks.drafter_speed --set gsm8k=FILE --set humaneval=FILE --json FILE [--draft DRAFTER]

Every prompt is answered by both arms, one directly after the other; which goes first alternates. The first
prompt of a set warms both and is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from blockdraft import LLM, SamplingParams
from blockdraft.training.answers import read_conversations


@dataclass(slots=True)
class Arm:
    width: int
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def answer(self, llm: LLM, question: str, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, width=self.width)
        begin = time.perf_counter()
        (result,) = llm.chat([[{"role": "user", "content": question}]], params)
        self.seconds += time.perf_counter() - begin
        self.num_tokens += len(result.token_ids)
        self.num_steps += result.metrics.steps
        self.answers.append(tuple(result.token_ids))


def measure(llm: LLM, questions: list[str], width: int, max_tokens: int) -> dict[str, float]:
    """Both arms on all questions but the first, which only warms them."""
    for arm in (Arm(1), Arm(width)):
        arm.answer(llm, questions[0], max_tokens)
    plain, draft = Arm(1), Arm(width)
    for number, question in enumerate(questions[1:]):
        for arm in (plain, draft) if number % 2 else (draft, plain):
            arm.answer(llm, question, max_tokens)
    return {
        "prompts": len(questions) - 1,
        "plain_tok_s": round(plain.num_tokens / plain.seconds, 1),
        "draft_tok_s": round(draft.num_tokens / draft.seconds, 1),
        "speed_up": round(draft.num_tokens / draft.seconds / (plain.num_tokens / plain.seconds), 3),
        "tokens_per_step": round(draft.num_tokens / draft.num_steps, 3),
        "same_answers": sum(one == other for one, other in zip(plain.answers, draft.answers, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-ngram", type=int, default=0, help="n-grams beside it (default: none)")
    parser.add_argument("--set", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=int, default=16, help="of each set (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    settings = {"device": args.device, "draft_ngram": args.draft_ngram, "width": args.width}
    llm = LLM(args.model, args.draft, max_num_seqs=1, max_model_len=2048, **settings)
    results = {}
    for item in args.set:
        name, _, path = item.partition("=")
        questions = [one.turns[0] for one in read_conversations(Path(path))[: args.prompts + 1]]
        results[name] = measure(llm, questions, args.width, args.max_tokens)
        print(name, json.dumps(results[name]), flush=True)
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
