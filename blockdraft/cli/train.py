"""Train a drafter: the target answers the prompts, and the drafter learns to predict the answers. `blockdraft
serve --draft FOLDER/drafter` uses the result. Every stage can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from blockdraft.cli.flags import add_flags, dataclass_from
from blockdraft.errors import SettingsError
from blockdraft.planner.resolver import named_drafter
from blockdraft.settings.settings import MTP
from blockdraft.training.job import (
    CPU_ROWS,
    TRAINED,
    AnswerOptions,
    DrafterShape,
    Job,
    Objective,
    TrainingRecipe,
)

SUMMARY = "train a drafter for a target"
USAGE = "blockdraft train TARGET --prompts FILE --out FOLDER (--minutes N | --steps N) [flags]"


_SHAPE, _RECIPE, _OBJECTIVE = DrafterShape(), TrainingRecipe(), Objective()
RUN_FLAGS = """
--out FOLDER: folder for all results
--minutes X: time for all stages together
--steps N: number of training steps, instead of --minutes
--resume: continue an interrupted run
--from DRAFTER: start from this drafter, to improve it or to adapt it to a fine-tuned target: folder, hub id,
  auto (the drafter that ships for the target) or dflash2 (its DFlash2 head)
--device NAME: cpu, cuda or cuda:N (default: auto)
--dtype NAME: number format of the target (default: auto)
--quiet: print nothing; FOLDER/log.txt has the log
"""
ANSWER_FLAGS = """
--prompts FILE...: file of JSON lines {"messages": […], "category": "…"}, also .gz or .xz; repeatable
--held-out [NAME=]FILE...: prompts for evaluation as NAME; repeatable (default: a few of --prompts)
--answers FOLDER...: also train on these answers (FOLDER/answers of another run); repeatable
--answer-minutes X: part of --minutes for answering (default: a fifth)
--max-prompts N: train on at most N prompts
--max-answer N: longest answer in tokens (default: 400, or half of --length)
--max-repeat N: cut an answer that repeats its last N tokens; 0: never (default: 64)
--sampled X: share of the answers that are sampled at --temperature (default: 0, all greedy)
--temperature X[,X]: for sampled answers; with X,X each answer gets a value between the two (default: 0.7)
--top-p X: as in `blockdraft generate`, for sampled answers (default: 0.95)
--rows N: answers generated at once (default: 2048, CPU: 16)
--length N: longest prompt and answer together, in tokens (default: 1024)
"""
SHAPE_FLAGS = f"""
--kind {{{",".join(TRAINED)}}}: dflash2 adds convolutions and a selector of candidates, dspark a Markov
  head; with --from, they are added to a DFlash drafter (default: the kind of --from, else dflash)
--rank N: rank of the token-pair tables of dflash2 and dspark (default: {_SHAPE.rank})
--candidates N: candidates per position of dflash2 (default: {_SHAPE.num_candidates})
--block N: block size in tokens, anchor included (default: 16)
--layers N: number of layers (default: 5)
--taps N,N,…: target layers whose features the drafter reads, counted from 0 (default: 5 evenly spaced)
--inner-size N: width of the MLPs (default: the target's)
--bidirectional: let drafts see later drafts too; serving with a smaller --width then saves no drafting time
--mask-token ID: id of the mask token (default: an unused special token)
--init {{random,target}}: start from random weights, or from the target's last layers (default: random)
"""
RECIPE_FLAGS = f"""
--optimizer {{muon,adamw}}: optimizer of the matrices (default: {_RECIPE.optimizer})
--rate X: highest learning rate (default: {_RECIPE.rate})
--rows-per-step N: rows of --length tokens per step (default: {_RECIPE.rows_per_step}, CPU: {CPU_ROWS})
--anchors N: blocks drafted per row, at random places (default: {_RECIPE.num_anchors})
--short-blocks X: use half-size blocks for the first share X of the run; that part is a third faster
  (default: 0)
--anchoring {{even,walk}}: even: blocks begin anywhere; walk: mostly at positions where a decoding step would
  begin (default: {_RECIPE.anchoring})
--deep-weight X: draw anchors at or after position --deep-from X times as often
  (default: {_RECIPE.deep_weight:g})
--deep-from N: first position to which --deep-weight applies (default: {_RECIPE.deep_from})
--phases N: train on N parts of the rows in turn, to save memory (default: {_RECIPE.phases})
--weighting {{dpace,decay,uniform}}: how the loss weighs the positions (default: {_OBJECTIVE.weighting})
--gamma X: decay length of --weighting decay (default: {_OBJECTIVE.gamma:g})
--hardness X: with dpace: weigh hard blocks more, by expected accepted length ** -X
  (default: {_OBJECTIVE.hardness:g})
--distill X: share of the loss that is the divergence from the target's distribution (default: 0)
--selector-weight X: weight of the selector's loss, with --kind dflash2 (default: 1)
--train {{all,added,selector}}: with --from, the parts of a dflash2 drafter to train: all, those that DFlash2
  adds, or its selector (default: all)
--average X: export a moving average of the weights with this decay; 0: the last weights (default: 0)
--seed N: training seed (default: {_RECIPE.seed})
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group
    target_help = "folder, hub id or GGUF file"
    parser.add_argument("model", nargs="?", default="default", metavar="TARGET", help=target_help)
    parser.argument_default = argparse.SUPPRESS  # without a flag, the job's own default holds
    add_flags(add("run"), RUN_FLAGS, out={"required": True}, **{"from": {"dest": "start_from"}})
    add_flags(
        add("answers"),
        ANSWER_FLAGS,
        held_out={"type": _named_file},
        max_answer={"dest": "max_tokens"},
        max_repeat=64,
        temperature={"type": _range},
        rows={"dest": "bulk_rows"},
        length=1024,
    )
    add_flags(
        add("drafter"),
        SHAPE_FLAGS,
        candidates={"dest": "num_candidates"},
        layers={"dest": "num_layers"},
        taps={"type": _numbers},
        bidirectional={"dest": "is_causal", "action": "store_false", "default": True},
        mask_token={"dest": "mask_token_id", "type": int},
    )
    dests = {"anchors": "num_anchors", "selector_weight": "selector", "train": "trained"}
    # Not args.seed: the answers have their own seed, which no flag sets.
    seed = {"dest": "training_seed", "default": _RECIPE.seed}
    add_flags(add("recipe"), RECIPE_FLAGS, seed=seed, **{name: {"dest": to} for name, to in dests.items()})


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    job = _job(args)
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        log_file = (job.out / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        reason = f"--out {job.out} cannot be written ({error.strerror})"
        raise SettingsError(f"{reason}: choose another folder.") from None
    from blockdraft.start.driver_warmup import quick_imports

    with quick_imports():
        from blockdraft.cli.progress import listener, stage_bars
        from blockdraft.start.loading import resolve_device
        from blockdraft.training.run import train

    if "rows_per_step" not in args and resolve_device(job.device) == "cpu":
        job = replace(job, recipe=replace(job.recipe, rows_per_step=CPU_ROWS))
    try:
        with log_file as log, stage_bars(is_quiet=args.quiet) as bars:
            train(job, listener(log, bars, is_quiet=args.quiet), resume=args.resume)
    except KeyboardInterrupt:
        command = job.command if args.resume else f"{job.command} --resume"
        way_on = f"; to continue from the last checkpoint: {command}"
        has_begun = (job.out / "run.json").exists()
        print(f"interrupted{way_on if has_begun else ' before the run began'}", file=sys.stderr)
        raise
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Refuse missing files first: a mistyped path is the likeliest mistake."""
    files = [("--prompts", path) for path in vars(args).get("prompts", ())]
    files += [("--held-out", path) for _, path in vars(args).get("held_out", ())]
    for flag, path in files:
        if not path.exists() or path.is_dir():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise SettingsError(f"{flag} {path} {what}: give the path of a JSONL file of prompts.")


def _job(args: argparse.Namespace) -> Job:
    given, asked = vars(args), vars(args).get("start_from")
    start = named_drafter(args.model, asked)
    if asked == "auto" and start == "none":
        raise SettingsError(f"--from auto: no drafter ships for '{args.model}': name one, or leave it out.")
    if start == MTP:
        raise SettingsError("--from mtp: an MTP head is trained with its model, not here: leave it out.")
    given.setdefault("max_tokens", max(1, min(AnswerOptions().max_tokens, args.length // 2)))
    return dataclass_from(
        Job,
        args,
        prompts=tuple(given.get("prompts", ())),
        more_answers=tuple(given.get("answers", ())),
        held_out=tuple(given.get("held_out", ())),
        start_from=start,
        shape=dataclass_from(DrafterShape, args),
        answers=dataclass_from(AnswerOptions, args, max_repeat=args.max_repeat or None),
        recipe=dataclass_from(
            TrainingRecipe, args, objective=dataclass_from(Objective, args), seed=args.training_seed
        ),
        command=shlex.join(["blockdraft", *sys.argv[1:]]),
    )


def _named_file(text: str) -> tuple[str | None, Path]:
    name, equals, path = text.rpartition("=")
    return (name if equals else None), Path(path)


def _range(text: str) -> tuple[float, float]:
    try:
        lowest, highest = (float(part) for part in (text if "," in text else f"{text},{text}").split(","))
        return lowest, highest
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor two such as 0.2,1.0") from None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of layers such as 1,7,14") from None
