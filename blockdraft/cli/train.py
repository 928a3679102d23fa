"""blockdraft train: a drafter for your own target, from prompts alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from blockdraft.cli.flags import dataclass_from, numbers_of
from blockdraft.errors import SettingsError
from blockdraft.models.draft_config import KIND_NAMES
from blockdraft.settings.settings import Settings
from blockdraft.settings.shipped import with_drafter
from blockdraft.training.job import CPU_ROWS, AnswerOptions, DrafterShape, Job, Objective, TrainingRecipe

SUMMARY = "train a drafter for a target"
USAGE = "blockdraft train TARGET --prompts FILE --out FOLDER (--minutes N | --steps N) [flags]"
DESCRIPTION = (
    "Train a drafter: the target answers the prompts, the drafter learns to predict the answers, "
    "and FOLDER/drafter is what `serve --draft` takes. Every stage can be interrupted and resumed."
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
    add("--out", type=Path, required=True, metavar="FOLDER", help="everything goes there")
    add("--minutes", type=float, metavar="N", help="time for all stages together")
    add("--steps", type=int, metavar="N", help="training steps, instead of --minutes")
    add("--resume", action="store_true", help="go on where an interrupted run stopped")
    start_help = (
        "begin with this drafter, to train it further or for a fine-tuned target: folder, hub id, auto, the "
        "one that ships for the target, or dflash2, its DFlash2 head"
    )
    add("--from", dest="start_from", metavar="DRAFTER", help=start_help)
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", default="auto", metavar="NAME", help="of the target (default: auto)")
    add("--quiet", action="store_true", help="no lines, only the log in FOLDER/log.txt")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add, number = group.add_argument, numbers_of(group)
    prompts_help = 'JSON lines of {"messages": […], "category": "…"}, .gz or .xz too; may be repeated'
    add("--prompts", type=Path, action="append", default=[], metavar="FILE", help=prompts_help)
    add(
        "--held-out",
        type=_named_file,
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts to measure with, under NAME (default: a few of each category of --prompts)",
    )
    answers_help = "a folder of answers to train on, too (FOLDER/answers of another run); may be repeated"
    add("--answers", type=Path, action="append", default=[], metavar="DIR", help=answers_help)
    number("--answer-minutes", float, None, "of --minutes, for answers (default: a fifth)")
    number("--max-prompts", int, None, "train on this many prompts at most")
    answer_help = "tokens (default: 400, or half of --length)"
    number("--max-answer", int, None, answer_help, dest="max_tokens")
    repeat_help = "cut an answer whose last N tokens it has said before; 0: never (default: 64)"
    number("--max-repeat", int, 64, repeat_help)
    number("--sampled", float, 0.0, "answered at --temperature (default: 0)", metavar="SHARE")
    warm_help = "or a range: each answer has its own (default: 0.7)"
    add("--temperature", type=_range, default=AnswerOptions().temperature, metavar="N[,N]", help=warm_help)
    number("--top-p", float, 0.95, "(default: 0.95)")
    number("--rows", int, None, "answers at once (default: 2048, CPU: 16)", dest="bulk_rows")
    number("--length", int, 1024, "longest prompt and answer (default: 1024)")


def _add_shape(group: argparse._ArgumentGroup) -> None:
    add, number = group.add_argument, numbers_of(group)
    kind_help = (
        "dflash2: convolutions, and a choice among candidates; dspark: drafts know the one before, and how "
        "sure they are; with --from, added to a DFlash drafter (default: that of --from, or dflash)"
    )
    add("--kind", choices=tuple(KIND_NAMES), help=kind_help)
    shape = DrafterShape()
    number("--rank", int, shape.rank, f"of pairs of tokens, dflash2 and dspark (default: {shape.rank})")
    candidates_help = f"of dflash2, per column (default: {shape.num_candidates})"
    number("--candidates", int, shape.num_candidates, candidates_help, dest="num_candidates")
    number("--block", int, 16, "anchor included (default: 16)")
    number("--layers", int, 5, "(default: 5)", dest="num_layers")
    taps_help = "target layers to read, from 0 (default: 5, evenly)"
    add("--taps", type=_numbers, metavar="N,N,…", help=taps_help)
    number("--inner-size", int, None, "of the MLPs (default: the target's)")
    causal_help = "drafts see those after them, too; narrow widths then cost as much as the whole block"
    add("--bidirectional", dest="is_causal", action="store_false", help=causal_help)
    mask_help = "(default: an unused special token)"
    number("--mask-token", int, None, mask_help, dest="mask_token_id", metavar="ID")
    init_help = "begin with noise, or with the target's last layers (default: random)"
    add("--init", choices=("random", "target"), default="random", help=init_help)


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    recipe, objective = TrainingRecipe(), Objective()
    add, number = group.add_argument, numbers_of(group)
    add("--optimizer", choices=("muon", "adamw"), default=recipe.optimizer)
    number("--rate", float, recipe.rate, f"(default: {recipe.rate})")
    rows_help = f"packed rows of --length (default: {recipe.rows_per_step}, CPU: {CPU_ROWS})"
    number("--rows-per-step", int, None, rows_help)
    number("--anchors", int, recipe.num_anchors, "blocks per row, drawn anew", dest="num_anchors")
    short_help = "of the run, at its beginning, with blocks of half the length: steps cost a third less"
    number("--short-blocks", float, recipe.short_blocks, short_help, metavar="SHARE")
    anchoring_help = "anchors anywhere, or mostly where the drafter's own steps would begin"
    add("--anchoring", choices=("even", "walk"), default=recipe.anchoring, help=anchoring_help)
    deep_help = "how often anchors from --deep-from on are drawn, against others"
    number("--deep-weight", float, recipe.deep_weight, f"{deep_help} (default: {recipe.deep_weight:g})")
    number("--deep-from", int, recipe.deep_from, f"a position (default: {recipe.deep_from})")
    phases_help = "train on this many parts of the rows, one after the other: their features fit in memory"
    number("--phases", int, recipe.phases, f"{phases_help} (default: {recipe.phases})")
    add("--weighting", choices=("dpace", "decay", "uniform"), default=objective.weighting)
    number("--gamma", float, objective.gamma, "of --weighting decay")
    hardness_help = "of --weighting dpace: blocks count by the inverse Nth power of the length they expect"
    number("--hardness", float, objective.hardness, hardness_help)
    distill_help = "of the divergence from the target's distribution in the loss"
    number("--distill", float, objective.distill, distill_help, metavar="SHARE")
    selector_help = "of dflash2: of its choice among candidates in the loss (default: 1)"
    number("--selector-weight", float, objective.selector, selector_help, dest="selector")
    train_help = "of dflash2, with --from: all, what it adds to DFlash, or its selector alone (default: all)"
    add("--train", dest="trained", choices=("all", "added", "selector"), default="all", help=train_help)
    number("--average", float, recipe.average, "decay of averaged weights")
    # Not args.seed: the answers have a seed of their own, which no flag sets.
    number("--seed", int, recipe.seed, None, dest="training_seed")


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    job = _job(args)
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        log_file = (job.out / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write --out {job.out} ({error.strerror}): choose another.") from None
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
    """Name what is not there before anything else: a mistyped path is the likeliest mistake."""
    files = [("--prompts", path) for path in args.prompts]
    files += [("--held-out", path) for _, path in args.held_out]
    for flag, path in files:
        if not path.exists() or path.is_dir():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise SettingsError(f"{flag} {path} {what}: give the path of a JSONL file of prompts.")


def _interrupted(job: Job, *, is_resumed: bool) -> str:
    if not (job.out / "run.json").exists():
        return "interrupted before anything was done"
    command = job.command if is_resumed else f"{job.command} --resume"
    return f"interrupted; to go on (steps since the last checkpoint are done again): {command}"


def _start(model: str, asked: str | None) -> str | None:
    """The drafter to begin with; None: noise."""
    found = with_drafter(Settings(model=model, draft=asked)).draft
    if asked == "auto" and found == "none":
        raise SettingsError(f"--from {asked}: no drafter ships for '{model}'. Name one, or begin without.")
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
