"""blockdraft train: train a drafter for your own target, from prompts alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from blockdraft.cli.flags import dataclass_from, numbers_of
from blockdraft.errors import SettingsError
from blockdraft.models.draft_config import KIND_NAMES
from blockdraft.planner.resolver import named_drafter
from blockdraft.training.job import CPU_ROWS, AnswerOptions, DrafterShape, Job, Objective, TrainingRecipe

SUMMARY = "train a drafter for a target"
USAGE = "blockdraft train TARGET --prompts FILE --out FOLDER (--minutes N | --steps N) [flags]"
DESCRIPTION = (
    "Train a drafter: the target answers the prompts, and the drafter learns to predict the answers. "
    "`blockdraft serve --draft FOLDER/drafter` uses the result. Every stage can be interrupted and resumed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="default", metavar="TARGET", help="folder, hub id or GGUF"
    )
    _add_run(parser.add_argument_group("run"))
    _add_answers(parser.add_argument_group("answers"))
    _add_shape(parser.add_argument_group("drafter"))
    _add_recipe(parser.add_argument_group("recipe"))


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for all results")
    add("--minutes", type=float, metavar="N", help="time for all stages together")
    add("--steps", type=int, metavar="N", help="number of training steps, instead of --minutes")
    add("--resume", action="store_true", help="continue an interrupted run")
    start_help = (
        "start from this drafter, to improve it or to adapt it to a fine-tuned target: folder, hub id, auto "
        "(the drafter that ships for the target) or dflash2 (its DFlash2 head)"
    )
    add("--from", dest="start_from", metavar="DRAFTER", help=start_help)
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", default="auto", metavar="NAME", help="number format of the target (default: auto)")
    add("--quiet", action="store_true", help="print nothing; FOLDER/log.txt has the log")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add, number = group.add_argument, numbers_of(group)
    prompts_help = 'file of JSON lines {"messages": […], "category": "…"}, also .gz or .xz; repeatable'
    add("--prompts", type=Path, action="append", default=[], metavar="FILE", help=prompts_help)
    add(
        "--held-out",
        type=_named_file,
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts for evaluation, reported as NAME (default: a few of each category of --prompts)",
    )
    answers_help = "also train on these answers (FOLDER/answers of another run); repeatable"
    add("--answers", type=Path, action="append", default=[], metavar="DIR", help=answers_help)
    number("--answer-minutes", float, None, "part of --minutes for answering (default: a fifth)")
    number("--max-prompts", int, None, "train on at most N prompts")
    answer_help = "longest answer in tokens (default: 400, or half of --length)"
    number("--max-answer", int, None, answer_help, dest="max_tokens")
    repeat_help = "cut an answer that repeats its last N tokens; 0: never (default: 64)"
    number("--max-repeat", int, 64, repeat_help)
    sampled_help = "share of the answers that are sampled at --temperature (default: 0, all greedy)"
    number("--sampled", float, 0.0, sampled_help, metavar="SHARE")
    warm_help = "of sampled answers; with two numbers, each answer draws one between them (default: 0.7)"
    add("--temperature", type=_range, default=AnswerOptions().temperature, metavar="N[,N]", help=warm_help)
    number("--top-p", float, 0.95, "of sampled answers (default: 0.95)")
    number("--rows", int, None, "answers generated at once (default: 2048, CPU: 16)", dest="bulk_rows")
    number("--length", int, 1024, "longest prompt and answer together, in tokens (default: 1024)")


def _add_shape(group: argparse._ArgumentGroup) -> None:
    add, number = group.add_argument, numbers_of(group)
    kind_help = (
        "dflash2 adds convolutions and a selector that chooses among candidates, dspark a Markov head; with "
        "--from, these are added to a DFlash drafter (default: the kind of --from, else dflash)"
    )
    add("--kind", choices=tuple(KIND_NAMES), help=kind_help)
    shape = DrafterShape()
    rank_help = f"rank of the token-pair tables of dflash2 and dspark (default: {shape.rank})"
    number("--rank", int, shape.rank, rank_help)
    candidates_help = f"candidates per position of dflash2 (default: {shape.num_candidates})"
    number("--candidates", int, shape.num_candidates, candidates_help, dest="num_candidates")
    number("--block", int, 16, "block size in tokens, anchor included (default: 16)")
    number("--layers", int, 5, "number of layers (default: 5)", dest="num_layers")
    taps_help = "target layers whose features it reads, counted from 0 (default: 5 evenly spaced)"
    add("--taps", type=_numbers, metavar="N,N,…", help=taps_help)
    number("--inner-size", int, None, "width of the MLPs (default: the target's)")
    causal_help = "drafts also see later drafts; a smaller --width then saves no time when serving"
    add("--bidirectional", dest="is_causal", action="store_false", help=causal_help)
    mask_help = "id of the mask token (default: an unused special token)"
    number("--mask-token", int, None, mask_help, dest="mask_token_id", metavar="ID")
    init_help = "start from random weights, or from the target's last layers (default: random)"
    add("--init", choices=("random", "target"), default="random", help=init_help)


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    recipe, objective = TrainingRecipe(), Objective()
    add, number = group.add_argument, numbers_of(group)
    optimizer_help = f"(default: {recipe.optimizer})"
    add("--optimizer", choices=("muon", "adamw"), default=recipe.optimizer, help=optimizer_help)
    number("--rate", float, recipe.rate, f"highest learning rate (default: {recipe.rate})")
    rows_help = f"rows of --length tokens per step (default: {recipe.rows_per_step}, CPU: {CPU_ROWS})"
    number("--rows-per-step", int, None, rows_help)
    anchors_help = f"blocks drafted per row, at random places (default: {recipe.num_anchors})"
    number("--anchors", int, recipe.num_anchors, anchors_help, dest="num_anchors")
    short_help = "train this first share of the run with half blocks, a third faster (default: 0)"
    number("--short-blocks", float, recipe.short_blocks, short_help, metavar="SHARE")
    anchoring_help = (
        "even: blocks begin anywhere; walk: mostly where the drafter's own steps would begin "
        f"(default: {recipe.anchoring})"
    )
    add("--anchoring", choices=("even", "walk"), default=recipe.anchoring, help=anchoring_help)
    deep_help = "draw anchors from position --deep-from on N times as often as earlier ones"
    number("--deep-weight", float, recipe.deep_weight, f"{deep_help} (default: {recipe.deep_weight:g})")
    number("--deep-from", int, recipe.deep_from, f"a position (default: {recipe.deep_from})")
    phases_help = "split the rows into N parts and train on one after the other, to save memory"
    number("--phases", int, recipe.phases, f"{phases_help} (default: {recipe.phases})")
    weighting_help = f"how the loss weighs positions in a block (default: {objective.weighting})"
    choices = ("dpace", "decay", "uniform")
    add("--weighting", choices=choices, default=objective.weighting, help=weighting_help)
    number(
        "--gamma", float, objective.gamma, f"decay length of --weighting decay (default: {objective.gamma:g})"
    )
    hardness_help = "with --weighting dpace: divide a block's weight by its expected length to the power N"
    number("--hardness", float, objective.hardness, f"{hardness_help} (default: {objective.hardness:g})")
    distill_help = "share of the loss that is the divergence from the target's distribution (default: 0)"
    number("--distill", float, objective.distill, distill_help, metavar="SHARE")
    selector_help = "weight of the selector's loss, with --kind dflash2 (default: 1)"
    number("--selector-weight", float, objective.selector, selector_help, dest="selector")
    train_help = (
        "what to train of a dflash2 drafter, with --from: everything, only what DFlash2 adds, or only its "
        "selector (default: all)"
    )
    add("--train", dest="trained", choices=("all", "added", "selector"), default="all", help=train_help)
    average_help = "decay of a moving average of the weights, which is then exported; 0: none (default: 0)"
    number("--average", float, recipe.average, average_help)
    # Not args.seed: the answers have a seed of their own, which no flag sets.
    number("--seed", int, recipe.seed, f"training seed (default: {recipe.seed})", dest="training_seed")


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    job = _job(args)
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        log_file = (job.out / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"--out {job.out} cannot be written ({error.strerror}): choose another folder."
        ) from None
    from blockdraft.start.driver_warmup import quick_imports

    with quick_imports():
        from blockdraft.cli.training_progress import listener, stage_bars
        from blockdraft.start.loading import resolve_device
        from blockdraft.training.run import train

    if args.rows_per_step is None and resolve_device(job.device) == "cpu":
        job = replace(job, recipe=replace(job.recipe, rows_per_step=CPU_ROWS))
    try:
        with log_file as log, stage_bars(is_quiet=args.quiet) as bars:
            train(job, listener(log, bars, is_quiet=args.quiet), resume=args.resume)
    except KeyboardInterrupt:
        print(_interrupted(job, is_resumed=args.resume), file=sys.stderr)
        raise
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Refuse missing files first: a mistyped path is the likeliest mistake."""
    files = [("--prompts", path) for path in args.prompts]
    files += [("--held-out", path) for _, path in args.held_out]
    for flag, path in files:
        if not path.exists() or path.is_dir():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise SettingsError(f"{flag} {path} {what}: give the path of a JSONL file of prompts.")


def _interrupted(job: Job, *, is_resumed: bool) -> str:
    if not (job.out / "run.json").exists():
        return "interrupted before the run began"
    command = job.command if is_resumed else f"{job.command} --resume"
    return f"interrupted; to continue from the last checkpoint: {command}"


def _start(model: str, asked: str | None) -> str | None:
    """Return the drafter to start from; None: random weights."""
    found = named_drafter(model, asked)
    if asked == "auto" and found == "none":
        raise SettingsError(f"--from {asked}: no drafter ships for '{model}'. Name one, or leave --from out.")
    return found


def _job(args: argparse.Namespace) -> Job:
    rows = TrainingRecipe().rows_per_step if args.rows_per_step is None else args.rows_per_step
    if args.max_tokens is None:
        args.max_tokens = max(1, min(AnswerOptions().max_tokens, args.length // 2))
    return dataclass_from(
        Job,
        args,
        prompts=tuple(args.prompts),
        more_answers=tuple(args.answers),
        held_out=tuple(args.held_out),
        start_from=_start(args.model, args.start_from),
        shape=dataclass_from(DrafterShape, args),
        answers=dataclass_from(AnswerOptions, args, max_repeat=args.max_repeat or None),
        recipe=dataclass_from(
            TrainingRecipe,
            args,
            objective=dataclass_from(Objective, args),
            seed=args.training_seed,
            rows_per_step=rows,
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
