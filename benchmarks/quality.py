"""The loss of quality by a quantisation, on this device: against the same model without it.

    python -m benchmarks.quality [--quantization int8] [--data DIR] [--json FILE]

Both arms are loaded as the engine loads them. Each reads the same texts, whole and without a cache
(perplexity by set, and how often the likeliest token is the same), and answers the same prompts greedily with
drafts (tokens committed per step, by category). The texts are the prompts that ship with `blockdraft bench`;
with `--data`, those of every .jsonl, .jsonl.gz or .jsonl.xz file of a folder, which may bring answers:
"answer", a list of them as "reference", or the messages of an assistant.

What every text begins with (a template's system prompt) is not counted. The error behind a change of
perplexity is a standard error, of the differences token by token: it is far smaller than the perplexities'.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks import record  # noqa: E402
from blockdraft.bench import prompt_files, workloads  # noqa: E402
from blockdraft.bench.records import Prompt  # noqa: E402
from blockdraft.check.uncached_view import WholeView  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.engine.request import Metrics, SamplingParams  # noqa: E402
from blockdraft.errors import BenchError  # noqa: E402
from blockdraft.jsonl import Row  # noqa: E402
from blockdraft.planner.plan import Plan  # noqa: E402
from blockdraft.settings.settings import Settings  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.text.tokenizer import Tokenizer  # noqa: E402
from blockdraft.training.evaluate import DrafterFit, fit_of_metrics, run_engine  # noqa: E402

BASE = "none"
KINDS = ("int8", "fp8", "keep")
TEXT = 512  # tokens of a text that are read
ASKED = 1024  # tokens of a prompt that is answered, at most
ROWS = 8
SLICE = 128  # tokens whose logits are there at a time


# ---- what is read and asked


@dataclass(frozen=True, slots=True)
class Talk:
    """A prompt of a set, and the answers that its file has to the first turns of it."""

    of: str  # its set
    prompt: Prompt
    answers: tuple[str, ...] = ()

    def messages(self) -> list[dict[str, object]]:
        """Return the messages up to the first turn without an answer, or the last answer."""
        turns = len(self.prompt.turns)
        messages = self.prompt.messages(self.answers[: turns - 1])
        if len(self.answers) >= turns:
            messages.append({"role": "assistant", "content": self.answers[turns - 1]})
        return messages


def shipped() -> list[Talk]:
    """Return the prompts of `blockdraft bench`, a set for each class."""
    return [Talk(one.name, prompt) for one in workloads.load_all() for prompt in one.prompts]


def in_folder(folder: Path) -> list[Talk]:
    """Every row of every file, a set for each file."""
    talks = []
    for path in sorted(folder.glob("*.jsonl*")):
        name, rows = path.name.split(".")[0], prompt_files.read(path).rows
        prompts = prompt_files.prompts_of(rows, name=name, category=name)
        talks += [Talk(name, prompt, _answers(row)) for prompt, row in zip(prompts, rows, strict=True)]
    if not talks:
        raise BenchError(f"{folder} holds no .jsonl, .jsonl.gz or .jsonl.xz file.")
    return talks


def _answers(row: Row) -> tuple[str, ...]:
    messages = row.fields.get("messages")
    listed = messages if isinstance(messages, list) else []
    said = [one.get("content") for one in listed if isinstance(one, dict) and one.get("role") == "assistant"]
    for found in (said, row.fields.get("reference"), row.fields.get("answer")):
        answers = found if isinstance(found, list) else [found]
        if answers and all(isinstance(one, str) and one for one in answers):
            return tuple(answers)
    return ()


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens, which both arms get."""

    texts: Mapping[str, Sequence[list[int]]]  # by set
    num_common: int  # tokens that every text begins with
    asked: Mapping[str, Sequence[list[int]]]  # prompts, by category


def prepare(
    talks: Sequence[Talk],
    models: LoadedPair,
    plan: Plan,
    *,
    tokens_per_set: int,
    prompts_per_category: int,
    max_tokens: int,
) -> Work:
    """A sample of the talks, the same every time: so many tokens of a set, so many prompts of a category."""
    tokenizer, longest = models.tokenizer, min(ASKED, plan.max_model_len - max_tokens)
    mixed = random.Random("quality").sample(talks, len(talks))
    texts: dict[str, list[list[int]]] = {talk.of: [] for talk in talks}
    asked: dict[str, list[list[int]]] = {talk.prompt.category: [] for talk in talks}
    for talk in mixed:
        if sum(map(len, texts[talk.of])) < tokens_per_set:
            texts[talk.of].append(_encode(tokenizer, talk.messages(), is_asked=False)[:TEXT])
        if len(asked[talk.prompt.category]) < prompts_per_category:
            ids = _encode(tokenizer, talk.prompt.messages(), is_asked=True)
            asked[talk.prompt.category] += [ids] if len(ids) <= longest else []
    columns = zip(*itertools.chain.from_iterable(texts.values()), strict=False)
    common = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return Work(texts, sum(1 for _ in common), {name: prompts for name, prompts in asked.items() if prompts})


def _encode(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], *, is_asked: bool) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages, add_generation_prompt=is_asked)
    return tokenizer.encode("\n\n".join(str(message["content"]) for message in messages))


# ---- one arm


@dataclass(frozen=True, slots=True)
class Reading:
    """The surprise in nats of every counted token, and the likeliest token in its place."""

    losses: Tensor
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(self.losses.mean().item())


@dataclass(frozen=True, slots=True)
class Arm:
    """The results of one model."""

    readings: Mapping[str, Reading]
    fits: Mapping[str, DrafterFit]  # empty: there is no drafter
    answers: Mapping[str, Sequence[tuple[int, ...]]]
    about: str


@torch.inference_mode()
def read(models: LoadedPair, texts: Iterable[Sequence[int]], num_common: int) -> Reading:
    """Score all tokens of the texts after the common ones, each given those before it."""
    target, specs, first = models.target, models.config.layer_specs(), max(num_common - 1, 0)
    losses, likeliest = [torch.zeros(0)], [torch.zeros(0, dtype=torch.long)]
    for text in texts:
        tokens = torch.tensor(text, device=models.device)
        hidden, _ = target(tokens, WholeView(specs, count=len(text), device=models.device))
        slices = torch.split(hidden[first:-1], SLICE), torch.split(tokens[first + 1 :], SLICE)
        for before, token in zip(*slices, strict=True):
            logits = target.logits(before).float()
            losses.append(functional.cross_entropy(logits, token, reduction="none").cpu())
            likeliest.append(logits.argmax(dim=-1).cpu())
    return Reading(torch.cat(losses).double(), torch.cat(likeliest))


def answer(
    models: LoadedPair, plan: Plan, asked: Mapping[str, Sequence[list[int]]], max_tokens: int
) -> tuple[dict[str, DrafterFit], dict[str, list[tuple[int, ...]]]]:
    """By category, and "all": how the drafts fared, and what was written."""
    engine = Engine(models, plan)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    listed = [(name, ids) for name, each in asked.items() for ids in each]
    written: list[list[int]] = [[] for _ in listed]
    metrics: dict[int, Metrics] = {}
    for deltas in run_engine(engine, [(ids, params) for _, ids in listed]):
        for delta in deltas:
            written[int(delta.request_id)] += delta.token_ids
            if delta.metrics is not None:
                metrics[int(delta.request_id)] = delta.metrics
    numbers = {name: [i for i, (mine, _) in enumerate(listed) if mine == name] for name in asked}
    numbers["all"] = list(range(len(listed)))
    fits = {name: fit_of_metrics([metrics[i] for i in mine]) for name, mine in numbers.items()}
    return fits, {name: [tuple(written[i]) for i in mine] for name, mine in numbers.items()}


def measure(models: LoadedPair, plan: Plan, work: Work, max_tokens: int) -> Arm:
    readings = {name: read(models, texts, work.num_common) for name, texts in work.texts.items()}
    everything = (torch.cat([getattr(one, part) for one in readings.values()]) for part in Reading.__slots__)
    readings["all"] = Reading(*everything)
    fits, answers = (
        answer(models, plan, work.asked, max_tokens) if models.draft_config is not None else ({}, {})
    )
    drafter = f", the drafter's {plan.draft_quantization}" if fits else ""
    return Arm(
        readings, fits, answers, f"{models.device}, {plan.dtype}, weights {plan.quantization}{drafter}"
    )


# ---- both


def perplexities(base: Arm, arm: Arm) -> list[dict[str, object]]:
    """A line for every set."""
    lines: list[dict[str, object]] = []
    for name, before in base.readings.items():
        after = arm.readings[name]
        change = after.losses - before.losses
        lines.append(
            {
                "set": name,
                "tokens": len(change),
                "before": before.perplexity,
                "after": after.perplexity,
                "change_percent": 100 * math.expm1(change.mean().item()),
                "error_percent": 100 * change.std().item() / math.sqrt(max(len(change), 1)),
                "same_likeliest_percent": 100 * (after.likeliest == before.likeliest).double().mean().item(),
            }
        )
    return lines


def commits(base: Arm, arm: Arm) -> list[dict[str, object]]:
    """A line for every category."""
    lines: list[dict[str, object]] = []
    for name, before in base.fits.items():
        after = arm.fits[name]
        pairs = zip(base.answers[name], arm.answers[name], strict=True)
        lines.append(
            {
                "category": name,
                "answers": before.num_documents,
                "same_answers": sum(one == other for one, other in pairs),
                "steps": before.num_steps,
                "before": before.committed,
                "after": after.committed,
                "change_percent": 100 * (after.committed / before.committed - 1),
            }
        )
    return lines


def report(lines: Sequence[Mapping[str, object]], names: Mapping[str, str]) -> str:
    """Return a table of lines; `names` has the key and heading of each column."""
    return record.table(list(names.values()), [[line[key] for key in names] for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=KINDS, default=KINDS[0])
    parser.add_argument("--draft-quantization", choices=(BASE, *KINDS), help="default: the target's")
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--data", type=Path, help="a folder of sets, instead of the prompts that ship")
    parser.add_argument("--tokens", type=int, default=4000, help="read of each set (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="answered of each category (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (%(default)s)")
    parser.add_argument("--json")
    args = parser.parse_args()
    settings = vars(args) | {"data": None if args.data is None else args.data.name}
    result: dict[str, object] = {"settings": settings, **record.context()}
    kind, draft_kind = args.quantization, args.draft_quantization or args.quantization
    talks = shipped() if args.data is None else in_folder(args.data)
    arms, work = {}, None
    for target, drafter in ((kind, draft_kind), (BASE, BASE)):  # what may be refused is tried first
        models, plan = load_models(
            Settings(
                model=args.model,
                draft=args.draft,
                device=args.device,
                dtype=args.dtype,
                quantization=target,
                draft_quantization=drafter,
                width=args.width,
                max_num_seqs=ROWS,
                graphs=False,
            ),
            print,
        )
        work = work or prepare(
            talks,
            models,
            plan,
            tokens_per_set=args.tokens,
            prompts_per_category=args.prompts,
            max_tokens=args.max_tokens,
        )
        arms[target] = measure(models, plan, work, args.max_tokens)
        del models
        gc.collect()
        torch.cuda.empty_cache()  # what the next plan counts as free
    base, arm = arms[BASE], arms[kind]
    result |= {"arms": {"before": base.about, "after": arm.about}}
    result["perplexity"] = lines = perplexities(base, arm)
    heading = {"before": BASE, "after": kind, "change_percent": "%"}
    reading = {"set": "perplexity", "tokens": "tokens", **heading, "error_percent": "+-"}
    print(f"\n{BASE}: {base.about}\n{kind}: {arm.about}\n")
    print(report(lines, reading | {"same_likeliest_percent": "same likeliest, %"}))
    if base.fits:
        result["tokens_per_step"] = lines = commits(base, arm)
        answering = {"category": "tokens per step", "answers": "answers", "same_answers": "the same"}
        print("\n" + report(lines, answering | heading))
    record.save(args.json, result)


if __name__ == "__main__":
    main()
