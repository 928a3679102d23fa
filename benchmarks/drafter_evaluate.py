"""Tokens that drafters commit on the same answers: public sets, prompts held out, depth, and temperature.

    python -m benchmarks.drafter_evaluate answers --out DIR [--data EVAL --short FILE --long FILE --seconds N]
    python -m benchmarks.drafter_evaluate run --out DIR --json FILE before=DRAFTER after=DRAFTER

`answers` lets the target answer the evaluation sets of the folder EVAL: greedily up to 400 tokens, the long
prompts up to 256, and GSM8K and MT-Bench once more at temperatures; then, of prompts to train on
(benchmarks/drafter_data.py), all long ones and as many short ones as it can in that time. `run` simulates
every drafter on the former at its whole width (blockdraft/training/probe.py) and prints the tokens that a
step commits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.drafter_draws import draws
from benchmarks.record import context
from blockdraft.bench.records import Prompt
from blockdraft.cache.rows import RowSampling
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.start.memory import release
from blockdraft.training.answers import Document, read_conversations, read_shard
from blockdraft.training.drafter import load_weights, new_drafter
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.export import fit_json
from blockdraft.training.job import AnswerOptions
from blockdraft.training.offline_batch import ROUND, OfflineBatch, make_offline_batch
from blockdraft.training.probe import simulate
from blockdraft.training.regenerate import MAX_TURNS, regenerate
from blockdraft.training.trainer import BlockForward

SETS = {
    "gsm8k": "gsm8k_test",
    "humaneval": "humaneval",
    "mbpp": "mbpp_sanitized_test",
    "mt-bench": "mt_bench",
}
WARM = {"t0.2": (0.2, 0.9), "t0.6": (0.6, 0.95), "t1.0": (1.0, 1.0)}  # temperature, top_p
NUM_WARM = 300  # prompts of each of the two sets, where it has so many
LONG, SHORT = 8192, 1024  # contexts
LENGTHS = ("1000", "2000", "4000", "6000", "7500")


def write_answers(args: argparse.Namespace) -> None:
    """Write all answers, one after the other in one process: two would share the card badly."""
    settings = Settings(
        model=args.model,
        draft="none",
        device=args.device,
        quantization="none",
        max_num_seqs=args.rows,
        max_model_len=LONG,
        max_prefill_tokens=args.max_prefill_tokens,
        cache_bytes=args.cache_bytes,
        prefix_cache=False,
    )
    models, plan = load_models(settings, print)
    bulk = make_offline_batch(models, plan)
    sets = {} if args.data is None else evaluation_prompts(args.data, args.max_tokens, args.limit)
    for name, (prompts, options) in sets.items():
        _answer(bulk, models, prompts, args.out / name, options)
    trained = AnswerOptions(max_tokens=args.max_tokens, sampled=args.sampled, temperature=(0.2, 1.0))
    if args.long is not None:
        _answer(bulk, models, read_conversations(args.long), args.out / "train-long", trained)
    bulk.close()
    del bulk
    release()
    if args.short is not None:
        bulk = make_offline_batch(
            models, replace(plan, max_positions=SHORT + ROUND, max_num_seqs=args.short_rows)
        )
        prompts = read_conversations(args.short)
        _answer(bulk, models, prompts, args.out / "train-short", trained, args.seconds)


def _answer(
    bulk: OfflineBatch,
    models: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    options: AnswerOptions,
    seconds: float | None = None,
) -> None:
    begin = time.monotonic()
    found = regenerate(bulk, models.tokenizer, prompts, folder, options, seconds=seconds)
    num_tokens = sum(len(one.answer_ids) for one in found)
    print(
        f"{folder.name}: {len(found)} answers, {num_tokens} tokens, {time.monotonic() - begin:.1f} s",
        flush=True,
    )


def evaluation_prompts(
    folder: Path, max_tokens: int, limit: int | None = None
) -> dict[str, tuple[list[Prompt], AnswerOptions]]:
    """Return the evaluation prompts, and how they are answered."""
    greedy = AnswerOptions(max_tokens=max_tokens, max_repeat=None)
    short = _short(folder, limit)
    found = {
        "short": (short, greedy),
        "long": (_long(folder, limit), replace(greedy, max_tokens=min(256, max_tokens))),
    }
    warm = [one for name in ("gsm8k", "mt-bench") for one in _first(short, name)]
    for name, (temperature, top_p) in WARM.items():
        options = replace(greedy, sampled=1.0, temperature=(temperature, temperature), top_p=top_p)
        found[name] = (warm, options)
    return found


def _first(prompts: Iterable[Prompt], category: str) -> list[Prompt]:
    return [one for one in prompts if one.category == category][:NUM_WARM]


def _short(folder: Path, limit: int | None) -> list[Prompt]:
    """Return the first turns of the public sets, and all turns of the held-out part of the pool."""
    found = []
    for name, file in SETS.items():
        listed = read_conversations(folder / f"{file}.jsonl.gz")[:limit]
        found += [replace(one, category=name, turns=one.turns[:1]) for one in listed]
    return found + read_conversations(folder / "pool_val.jsonl.gz")[: None if limit is None else 10 * limit]


def _long(folder: Path, limit: int | None) -> list[Prompt]:
    """Under names such as doc_copy-4000; their ids are lc-KIND-LENGTH-NUMBER."""
    listed = read_conversations(folder / "long_context.jsonl.gz")
    named = [replace(one, category=one.id.removeprefix("lc-").rpartition("-")[0]) for one in listed]
    return named[:: 1 if limit is None else max(1, len(named) // limit)]


def evaluate(args: argparse.Namespace) -> None:
    settings = Settings(
        model=args.model,
        draft="none",
        device=args.device,
        quantization="none",
        max_num_seqs=1,
        max_model_len=args.length,
        cache_bytes=args.cache_bytes,
    )
    models, _ = load_models(settings, print)
    answers = {
        name: [one for path in sorted((args.out / name).glob("shard-*.npz")) for one in read_shard(path)]
        for name in ("short", "long", *WARM)
    }
    results: dict[str, object] = {**context(), "drafters": {}}
    for item in args.drafters:
        name, _, source = item.partition("=")
        begin = time.monotonic()
        found = _of_drafter(source, models, answers, args)
        assert isinstance(results["drafters"], dict)
        results["drafters"][name] = found
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def drafter_of(source: str, models: LoadedPair, length: int) -> BlockForward:
    config = read_draft_config(open_checkpoint(source, what="drafter").config, name=source)
    models.target.taps = config.taps
    model = new_drafter(
        config,
        models.target,
        max_positions=length + config.block,
        device=models.device,
        init="random",
        seed=0,
    )
    load_weights(model, source, models.device)
    return BlockForward(model, models.target)


def _of_drafter(
    source: str, models: LoadedPair, answers: dict[str, list[Document]], args: argparse.Namespace
) -> dict[str, object]:
    drafter = drafter_of(source, models, args.length).drafter
    fits: dict[str, dict[str, DrafterFit]] = {}
    committed: dict[str, dict[str, float]] = {}
    for name, documents in answers.items():
        fits[name] = simulate(
            drafter,
            documents,
            length=args.length,
            choose=draws(drafter, sampling_of(documents, *WARM[name])) if name in WARM else None,
        )
        committed[name] = {key: round(fit.committed, 3) for key, fit in fits[name].items()}
        print(f"{name}: {json.dumps(committed[name])}", flush=True)
    committed["long"] |= _by_length(fits["long"])
    return {"committed": committed, "fit": fit_json(fits["short"]), "fit_long": fit_json(fits["long"])}


def sampling_of(documents: Iterable[Document], temperature: float, top_p: float) -> Sequence[RowSampling]:
    """Return the sampling parameters that training/regenerate.py used."""
    return [RowSampling(temperature=temperature, top_p=top_p, seed=one.key // MAX_TURNS) for one in documents]


def _by_length(fits: dict[str, DrafterFit]) -> dict[str, float]:
    """Return the mean of all kinds at each length."""
    found = defaultdict(list)
    for name, fit in fits.items():
        kind, _, length = name.rpartition("-")
        if kind:
            found[length].append(fit.committed)
    return {length: round(mean(found[length]), 3) for length in LENGTHS if length in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    answers = commands.add_parser("answers")
    answers.add_argument("--data", type=Path, help="the folder of evaluation sets; without it none of them")
    answers.add_argument("--limit", type=int, help="prompts of each set, to try it")
    answers.add_argument("--long", type=Path, help="prompts to train on")
    answers.add_argument("--short", type=Path, help="prompts to train on")
    answers.add_argument("--seconds", type=float, help="for the short ones")
    answers.add_argument("--sampled", type=float, default=0.5, help="share, at temperatures of 0.2 to 1")
    answers.add_argument("--rows", type=int, default=512, help="with long contexts")
    answers.add_argument("--short-rows", type=int, default=2560)
    answers.add_argument("--max-prefill-tokens", type=int, default=16384)
    answers.add_argument("--max-tokens", type=int, default=400)
    run = commands.add_parser("run")
    run.add_argument("drafters", nargs="+", metavar="NAME=DRAFTER")
    run.add_argument("--json", type=Path, required=True)
    run.add_argument("--length", type=int, default=8192)
    run.add_argument("--rows-per-step", type=int, default=4)
    run.add_argument("--anchors", type=int, default=768)
    for command in (answers, run):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--model", default="default")
        command.add_argument("--device", default="auto")
        command.add_argument("--cache-bytes", type=_bytes, default="auto")
    args = parser.parse_args()
    {"answers": write_answers, "run": evaluate}[args.command](args)


def _bytes(text: str) -> int | str:
    return text if text == "auto" else int(float(text))


if __name__ == "__main__":
    main()
