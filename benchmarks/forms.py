"""What a form of the answer costs, and what it gains: `python -m benchmarks.forms`.

Four ways to answer the same questions with JSON, one stream: free or held to a schema, with drafts or plain.
Tokens per second count what each way wrote. With `--shape`, on a card and with random weights instead: what a
step of many rows takes when every answer has a form, against none; drafts are kept as the weights would have
it, so both arms commit about a token per step, and the same kernels run.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from blockdraft.settings.settings import pin_threads

pin_threads()

import tokenizers  # noqa: E402
import torch  # noqa: E402

from benchmarks import record  # noqa: E402
from blockdraft import LLM, SamplingParams, StructuredOutputs  # noqa: E402
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.planner.plan import Plan  # noqa: E402
from blockdraft.text.tokenizer import Tokenizer  # noqa: E402

TEXT, WHOLE = {"type": "string", "maxLength": 60}, {"type": "integer"}


def record_of(**properties: object) -> dict[str, object]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def list_of(items: object, at_most: int = 4) -> dict[str, object]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": at_most}


QUESTIONS = [
    (
        "Extract the booking as JSON: Okonkwo here, six people on the 14th of March 2025 at half past seven.",
        record_of(
            name=TEXT, date={"type": "string", "format": "date"}, time=TEXT, party_size=WHOLE, notes=TEXT
        ),
    ),
    (
        "List three employees of a shipyard as JSON.",
        list_of(record_of(id=WHOLE, name=TEXT, role=TEXT, skills=list_of(TEXT, 3)), 3),
    ),
    (
        "Turn this into JSON: Lentil soup for four. Two onions, three carrots, 300 g of lentils; 30 minutes.",
        record_of(
            title=TEXT,
            servings=WHOLE,
            ingredients=list_of(record_of(name=TEXT, amount=WHOLE, unit=TEXT)),
            minutes=WHOLE,
        ),
    ),
    (
        "Classify this message as JSON: I was charged twice in June, please fix this today!",
        record_of(
            category={"enum": ["billing", "technical", "delivery", "praise"]}, urgency=WHOLE, summary=TEXT
        ),
    ),
    (
        "Describe the city of Lisbon as JSON.",
        record_of(
            city=TEXT, country=TEXT, population=WHOLE, is_capital={"type": "boolean"}, rivers=list_of(TEXT, 2)
        ),
    ),
    (
        "Plan a day in the garden as JSON.",
        record_of(
            season={"enum": ["spring", "summer", "autumn"]}, tasks=list_of(record_of(hour=WHOLE, task=TEXT))
        ),
    ),
]
ARMS = {
    "free, plain": (False, 1),
    "free, drafts": (False, None),
    "form, plain": (True, 1),
    "form, drafts": (True, None),
}


def time_answers(llm: LLM, rounds: int, max_tokens: int) -> list[dict[str, object]]:
    found: dict[str, list[tuple[int, int, float]]] = {arm: [] for arm in ARMS}
    answers: dict[tuple[bool, int], str] = {}
    for number in range(-1, rounds):  # the first warms up
        for arm, (has_form, width) in ARMS.items():  # in turns: the machine may change under us
            for index, (question, schema) in enumerate(QUESTIONS):
                form = StructuredOutputs(json=schema) if has_form else None
                params = SamplingParams(
                    temperature=0, max_tokens=max_tokens, width=width, structured_outputs=form
                )
                (result,) = llm.chat([{"role": "user", "content": question}], params)
                metrics = result.metrics
                assert answers.setdefault((has_form, index), result.text) == result.text, "drafts changed it"
                if has_form and result.finish_reason == "stop":
                    json.loads(result.text)
                if number >= 0:
                    found[arm].append(
                        (metrics.num_tokens, metrics.steps, metrics.seconds - metrics.first_token_s)
                    )
    return [_summary(arm, values) for arm, values in found.items()]


def _summary(arm: str, values: list[tuple[int, int, float]]) -> dict[str, object]:
    tokens, steps, seconds = (sum(column) for column in zip(*values, strict=True))
    return {
        "arm": arm,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / steps,
        "ms_per_step": seconds / steps * 1e3,
    }


# ---- a card, random weights


def large_tokenizer(size: int) -> Tokenizer:
    """One of `size` entries: the default model's, and pieces made of two of its words."""
    from blockdraft.checkpoints.opening import open_checkpoint

    source = open_checkpoint("default").tokenizer_parts()
    data = json.loads(source.tokenizer.to_str())
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    words, rng = [word for word in vocabulary if word.isalpha()], random.Random(1)
    while len(vocabulary) < size:
        pair = [rng.choice(words), rng.choice(words)]
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    return Tokenizer(TokenizerParts(made, None, None, source.eos_token, source.eos_ids))


FORMS = {
    "none": None,
    "any text": StructuredOutputs(regex=r"(.|\n)*"),
    "JSON": StructuredOutputs(
        json=list_of(record_of(name={"type": "string"}, tags=list_of({"type": "string"}, 99)), 999)
    ),
}


def time_steps(
    models: LoadedPair, plan: Plan, *, rows: int, width: int, context: int, steps: int
) -> Iterator[dict[str, object]]:
    """Every row has the form, at temperature 1, behind `context` tokens."""
    for name, form in FORMS.items():
        engine = Engine(models, plan)
        engine.capture([rows], [width], [(rows, width)])
        params = SamplingParams(
            temperature=1.0, max_tokens=100_000, structured_outputs=form, ignore_eos=form is None
        )
        for number in range(rows):
            prompt = [(7919 * index + 31 * number) % 40_000 for index in range(context + 1)]
            engine.add(prompt, replace(params, seed=number))
        while not engine.scheduler.running or not all(one.is_decoding for one in engine.scheduler.running):
            engine.step()
        for _ in range(5):
            engine.step()
        engine.wait()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        assert len(engine.scheduler.running) == rows, "answers ended on the way"
        engine.drop_graphs()
        yield {
            "form": name,
            "rows": rows,
            "width": width,
            "context": context,
            "ms": statistics.median(times) * 1e3,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--shape", help="time steps of this shape on a card instead: qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {"settings": vars(args), **record.context()}
    if args.shape is None:
        llm = LLM()
        result["answers"] = found = time_answers(llm, args.rounds, args.max_tokens)
        keys = ("tokens_per_s", "tokens_per_step", "ms_per_step", "tokens")
        print(
            record.table(["one stream", *keys], [[one["arm"], *(one[key] for key in keys)] for one in found])
        )
    else:
        from benchmarks.gpu_step import load

        models, plan = load(
            args.shape, has_drafter=True, max_num_seqs=max(args.rows), max_model_len=args.context + 1024
        )
        models = replace(models, tokenizer=large_tokenizer(models.config.vocab_size - 293))
        options = {"width": args.width, "context": args.context, "steps": args.steps}
        result["gpu"] = torch.cuda.get_device_name()
        result["steps"] = found = [
            one for rows in args.rows for one in time_steps(models, plan, rows=rows, **options)
        ]
        print(record.table(["form", "rows", "ms"], [[one["form"], one["rows"], one["ms"]] for one in found]))
    record.save(args.json, result)


if __name__ == "__main__":
    main()
