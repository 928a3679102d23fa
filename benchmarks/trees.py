"""Tokens that a step commits with trees of drafts, against chains, on prompts of evaluation sets.

    python -m benchmarks.trees --data EVAL [--draft dflash2] [--trees 0 16 32 64] [--limit 8] [--json FILE]

The answers are equal whatever drafts, so the committed tokens depend on no clock. One row at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from benchmarks.ngram import SHORT, short_prompts
from benchmarks.record import context, save, table
from blockdraft.bench.records import Prompt
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import serve
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", default=Settings().draft)
    parser.add_argument("--trees", type=int, nargs="+", default=[0, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=8, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    prompts = list(short_prompts(args.data, args.limit))
    rows = []
    for tree in args.trees:
        for temperature in args.temperatures:
            found = [committed(args, tree, temperature, prompts, name) for name in SHORT]
            rows.append([f"{tree or 'chain'} at T {temperature}", *found, fmean(found)])
            print(*rows[-1], flush=True)
    print(table(["tokens per step", *SHORT, "mean"], rows))
    save(args.json, {"context": context(), "draft": args.draft, "limit": args.limit, "rows": rows})


def committed(
    args: argparse.Namespace, tree: int, temperature: float, prompts: list[Prompt], name: str
) -> float:
    """Return the mean tokens of a step."""
    shape = {"width": 16, "max_num_seqs": 1, "max_model_len": 2048, "prefix_cache": False}
    models, plan = load_models(
        Settings(device=args.device, draft=args.draft, tree=tree, **shape), lambda _: None
    )
    engine = Engine(models, plan)
    for seed, prompt in enumerate(one for one in prompts if one.category == name):
        ids = models.tokenizer.encode_chat(prompt.messages())
        engine.add(ids, SamplingParams(temperature=temperature, seed=seed, max_tokens=args.tokens))
        serve(engine)
    return engine.stats.num_emitted / engine.stats.num_blocks


if __name__ == "__main__":
    main()
