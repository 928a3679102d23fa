"""Short training runs that differ in one thing each: what the choices in docs/training.md rest on.

    python -m benchmarks.drafter_experiments answers --prompts FILE --evaluate NAME=F --out DIR --seconds 60
    python -m benchmarks.drafter_experiments run --out DIR --steps 200 base rate-1e-3 …

`answers` lets the target answer prompts; `run` trains a fresh drafter (or, with --from, one that knows
something) for each variant, all for as many steps, and prints the tokens that it would commit per step on
each evaluation set (greedy answers, width 16). The first variant's time holds what a process does only once:
to compare times, name it twice.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.start.memory import release
from blockdraft.training.answers import Document, read_conversations, read_shard
from blockdraft.training.drafter import draft_json, load_weights, new_drafter
from blockdraft.training.job import AnswerOptions, DrafterShape, Objective, TrainingRecipe
from blockdraft.training.objective import block_loss
from blockdraft.training.offline_batch import make_offline_batch
from blockdraft.training.packing import pack
from blockdraft.training.probe import simulate
from blockdraft.training.regenerate import regenerate
from blockdraft.training.trainer import Trainer

T = TypeVar("T")

MASK_ID = 16  # a reserved token of SmolLM2
BASE = TrainingRecipe(warm_up=0.05)
OLD = replace(BASE, rate=2e-3)  # from the target's layers: the last table of docs/training-experiments.md
BOTH_WAYS = DrafterShape(is_causal=False)
# name -> (shape, recipe, how the weights begin, share of the documents)
VARIANTS = {
    "base": (DrafterShape(), BASE, "random", 1.0),
    "target-start": (BOTH_WAYS, OLD, "target", 1.0),
    "target-start-causal": (DrafterShape(), OLD, "target", 1.0),
    "target-start-4e-3": (BOTH_WAYS, replace(OLD, rate=4e-3), "target", 1.0),
    "target-start-adamw": (BOTH_WAYS, replace(OLD, optimizer="adamw", rate=1e-3), "target", 1.0),
    "bidirectional-2e-3": (BOTH_WAYS, OLD, "random", 1.0),
    "bidirectional": (BOTH_WAYS, BASE, "random", 1.0),
    "adamw-1e-3": (DrafterShape(), replace(BASE, optimizer="adamw", rate=1e-3), "random", 1.0),
    "rate-1.5e-3": (DrafterShape(), replace(BASE, rate=1.5e-3), "random", 1.0),
    "rate-6e-3": (DrafterShape(), replace(BASE, rate=6e-3), "random", 1.0),
    "decay-7": (DrafterShape(), replace(BASE, objective=Objective("decay")), "random", 1.0),
    "distill-half": (DrafterShape(), replace(BASE, objective=Objective(distill=0.5)), "random", 1.0),
    "distill-all": (DrafterShape(), replace(BASE, objective=Objective(distill=1.0)), "random", 1.0),
    "average": (DrafterShape(), replace(BASE, average=0.99), "random", 1.0),
    "hardness-2": (DrafterShape(), replace(BASE, objective=Objective(hardness=2.0)), "random", 1.0),
    "walk": (DrafterShape(), replace(BASE, anchoring="walk"), "random", 1.0),
    "walk-hardness-1": (
        DrafterShape(),
        replace(BASE, anchoring="walk", objective=Objective(hardness=1.0)),
        "random",
        1.0,
    ),
    "short-blocks": (DrafterShape(), replace(BASE, short_blocks=0.7), "random", 1.0),
    "layers-3": (DrafterShape(num_layers=3), BASE, "random", 1.0),
    "layers-8": (DrafterShape(num_layers=8, inner_size=768), BASE, "random", 1.0),
    "taps-3": (DrafterShape(num_taps=3), BASE, "random", 1.0),
    "taps-to-the-end": (DrafterShape(taps=(5, 11, 17, 23, 29)), BASE, "random", 1.0),
    "taps-8": (DrafterShape(num_taps=8), BASE, "random", 1.0),
    "data-eighth": (DrafterShape(), BASE, "random", 0.125),
    "anchors-256": (DrafterShape(), replace(BASE, rows_per_step=12, num_anchors=256), "random", 1.0),
}


def write_answers(args: argparse.Namespace) -> None:
    """Write the target's answers to training and evaluation prompts as shards under --out."""
    conversations = read_conversations(args.prompts)
    random.Random(0).shuffle(conversations)
    settings = Settings(
        model=args.model,
        draft="none",
        device=args.device,
        max_num_seqs=args.rows,
        max_model_len=args.context,
        max_prefill_tokens=args.max_prefill_tokens,
        cache_bytes=args.cache_bytes,
        quantization="none",
        prefix_cache=False,
    )
    begin = time.monotonic()
    models, plan = load_models(settings, print)
    bulk = make_offline_batch(models, plan)
    print(f"engine: {time.monotonic() - begin:.1f} s")
    tokenizer = models.tokenizer
    evaluation = []
    for item in args.evaluate:
        name, _, path = item.partition("=")
        listed = read_conversations(Path(path))[: args.limit]
        evaluation += [
            replace(one, turns=one.turns[:1], category=one.category if name == "pool" else name)
            for one in listed
        ]
    begin = time.monotonic()
    found = regenerate(
        bulk, tokenizer, evaluation, args.out / "evaluate", AnswerOptions(max_tokens=512, max_repeat=None)
    )
    print(f"evaluation: {len(found)} documents, {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    found = regenerate(
        bulk,
        tokenizer,
        conversations,
        args.out / "train",
        AnswerOptions(max_tokens=args.max_tokens, sampled=args.sampled, temperature=tuple(args.temperature)),
        seconds=args.seconds,
        report=lambda tally: (
            print(
                f"  {tally.num_documents} documents, {tally.num_answer_tokens} tokens, "
                f"{time.monotonic() - begin:.1f} s"
            )
            if tally.is_filed
            else None
        ),
    )
    taken = time.monotonic() - begin
    num_tokens = sum(len(document.answer_ids) for document in found)
    print(f"training: {len(found)} documents, {num_tokens} tokens, {num_tokens / taken:.0f} tok/s")


def run_variants(args: argparse.Namespace) -> None:
    """Train each variant, evaluate, write JSON."""
    torch._dynamo.config.recompile_limit = 64  # every objective and shape; past it, silently not compiled
    settings = Settings(
        model=args.model, draft="none", device=args.device, max_num_seqs=1, max_model_len=args.length
    )
    models, _ = load_models(settings, print)
    train = [one for path in sorted((args.out / "train").glob("*.npz")) for one in read_shard(path)]
    evaluate = [one for path in sorted((args.out / "evaluate").glob("*.npz")) for one in read_shard(path)]
    random.Random(1).shuffle(evaluate)
    results = []
    for name in args.variants:
        result = _run_variant(name, args, models, train[: args.documents], evaluate[: args.evaluate])
        results.append(result)
        print(json.dumps(result), flush=True)
        args.json.write_text(json.dumps(results, indent=1))


def _run_variant(
    name: str, args: argparse.Namespace, models: LoadedPair, train: list[Document], evaluate: list[Document]
) -> dict[str, object]:
    release()
    trainer = _trainer(name, args, models, train)
    begin = time.monotonic()
    run = trainer.run(steps=args.steps)
    last = next(run)  # with what has to be compiled
    _wait()
    compiled = time.monotonic() - begin
    begin = time.monotonic()
    for progress in run:
        last = progress
    _wait()
    taken = time.monotonic() - begin
    trainer.features.forget()
    if args.profile:
        print(json.dumps(_parts_of_a_step(trainer)), flush=True)
    begin = time.monotonic()
    recipe = trainer.recipe
    with trainer.averaged():
        fits = simulate(
            trainer.forward.drafter,
            evaluate,
            length=args.length,
        )
    return {
        "variant": name,
        "start": args.start_from or VARIANTS[name][2],
        "steps": trainer.step_number,
        "seconds": round(taken, 1),
        "compile_s": round(compiled, 1),
        "evaluate_s": round(time.monotonic() - begin, 1),
        "ms_per_step": round(1e3 * taken / max(trainer.step_number - 1, 1), 1),
        "rate": recipe.rate,
        "loss": round(last.loss.item(), 4),
        "committed": {key: round(fit.committed, 3) for key, fit in fits.items()},
    }


def _trainer(name: str, args: argparse.Namespace, models: LoadedPair, documents: list[Document]) -> Trainer:
    shape, recipe, init, share = VARIANTS[name]
    recipe = replace(recipe, rows_per_step=max(1, int(recipe.rows_per_step * args.scale)))
    config = read_draft_config(draft_json(shape, models.config, {}, MASK_ID), name=name)
    models.target.taps = config.taps
    model = new_drafter(
        config,
        models.target,
        max_positions=args.length + config.block,  # as `train` has it: what is compiled here serves there
        device=models.device,
        init=init,
        seed=0,
    )
    if args.start_from is not None:
        load_weights(model, args.start_from, models.device)
        recipe = replace(recipe, rate=args.rate)
    rows, _ = pack(documents[: int(len(documents) * share)], args.length)
    return Trainer(model, models.target, rows.to(models.device), recipe)


def _parts_of_a_step(trainer: Trainer) -> dict[str, float]:
    """Milliseconds of each part, waiting for the device between them: the median of seven steps."""
    parts: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        _wait()
        begin = time.monotonic()
        result = work()
        _wait()
        parts.setdefault(name, []).append(1e3 * (time.monotonic() - begin))
        return result

    head = trainer.forward.head()
    for _ in range(7):
        chosen = trainer._chosen()
        batch = timed("batch", lambda chosen=chosen: trainer._batch(chosen, trainer.forward.block))
        states, features = timed("target", lambda chosen=chosen: trainer.features.read(chosen))
        hidden = timed("drafter", lambda batch=batch, features=features: trainer.forward(batch, features))
        scores = timed(
            "loss",
            lambda batch=batch, hidden=hidden, states=states: block_loss(
                hidden,
                batch.labels.flatten(0, 1),
                head,
                trainer.recipe.objective,
                trainer._teacher(batch, states),
            ),
        )
        timed("backward", scores.loss.backward)
        timed("optimizer", lambda: [optimizer.step() for optimizer in trainer._optimizers])
        trainer.model.zero_grad()
    return {name: round(sorted(values)[3], 2) for name, values in parts.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    answers = commands.add_parser("answers")
    answers.add_argument("--prompts", type=Path, required=True)
    answers.add_argument("--evaluate", action="append", default=[], metavar="NAME=FILE")
    answers.add_argument("--limit", type=int, default=100_000, help="prompts of each evaluation set")
    answers.add_argument("--seconds", type=float, default=60)
    answers.add_argument("--sampled", type=float, default=0.0)
    answers.add_argument("--temperature", type=float, nargs=2, default=[0.7, 0.7], metavar=("FROM", "TO"))
    answers.add_argument("--max-tokens", type=int, default=400)
    answers.add_argument("--cache-bytes", type=lambda text: int(float(text)), default="auto")
    answers.add_argument("--rows", type=int, default=2048)
    answers.add_argument("--context", type=int, default=1024)
    answers.add_argument("--max-prefill-tokens", type=int, default=16384)
    run = commands.add_parser("run")
    run.add_argument("variants", nargs="+", choices=sorted(VARIANTS))
    run.add_argument("--steps", type=int, default=200)
    run.add_argument("--profile", action="store_true", help="time the parts of a step, too")
    run.add_argument("--from", dest="start_from", metavar="DRAFTER", help="begin with its weights, not noise")
    run.add_argument("--rate", type=float, default=1e-3, help="with --from (default: 1e-3)")
    run.add_argument("--evaluate", type=int, default=700, help="held-out answers (default: 700)")
    run.add_argument("--documents", type=int, help="train on this many of them")
    run.add_argument("--length", type=int, default=1024)
    run.add_argument("--scale", type=float, default=1.0, help="of the rows per step, to try it on a CPU")
    run.add_argument("--json", type=Path, default=Path("experiments.json"))
    for command in (answers, run):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--model", default="default")
        command.add_argument("--device", default="cuda")
    args = parser.parse_args()
    {"answers": write_answers, "run": run_variants}[args.command](args)


if __name__ == "__main__":
    main()
