"""blockdraft train: a drafter for your own target, from prompts alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from blockdraft.training.job import AnswerOptions, DrafterShape, Job, Objective, TrainingRecipe

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
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="everything goes there")
    group.add_argument("--minutes", type=float, metavar="N", help="time for all stages together")
    group.add_argument("--steps", type=int, metavar="N", help="training steps, instead of --minutes")
    group.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    group.add_argument(
        "--from",
        dest="start_from",
        metavar="DRAFTER",
        help="begin with this drafter: to train it further, or for a fine-tuned target",
    )
    group.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: auto)")
    group.add_argument("--dtype", default="auto", metavar="NAME", help="of the target (default: auto)")
    group.add_argument("--quiet", action="store_true", help="no lines, only the log in FOLDER/log.txt")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help='JSON lines of {"messages": […], "category": "…"}, .gz or .xz too; may be repeated',
    )
    group.add_argument(
        "--held-out",
        type=_named_file,
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts to measure with, under NAME (default: a few of each category of --prompts)",
    )
    group.add_argument(
        "--answer-minutes", type=float, metavar="N", help="of --minutes, for answers (default: a fifth)"
    )
    group.add_argument("--max-prompts", type=int, metavar="N", help="train on this many prompts at most")
    group.add_argument("--max-answer", type=int, default=400, metavar="N", help="tokens (default: 400)")
    group.add_argument(
        "--max-repeat",
        type=int,
        default=64,
        metavar="N",
        help="cut an answer whose last N tokens it has said before; 0: never (default: 64)",
    )
    group.add_argument(
        "--sampled", type=float, default=0.0, metavar="SHARE", help="answered at --temperature (default: 0)"
    )
    group.add_argument("--temperature", type=float, default=0.7, metavar="N", help="(default: 0.7)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="N", help="(default: 0.95)")
    group.add_argument("--rows", type=int, metavar="N", help="answers at once (default: 2048, CPU: 16)")
    group.add_argument(
        "--length", type=int, default=1024, metavar="N", help="longest prompt and answer (default: 1024)"
    )


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block", type=int, default=16, metavar="N", help="anchor included (default: 16)")
    group.add_argument("--layers", type=int, default=5, metavar="N", help="(default: 5)")
    group.add_argument(
        "--taps", type=_numbers, metavar="N,N,…", help="target layers to read, from 0 (default: 5, evenly)"
    )
    group.add_argument("--inner-size", type=int, metavar="N", help="of the MLPs (default: the target's)")
    group.add_argument(
        "--bidirectional",
        action="store_true",
        help="drafts see those after them, too; narrow widths then cost as much as the whole block",
    )
    group.add_argument("--mask-token", type=int, metavar="ID", help="(default: an unused special token)")
    group.add_argument(
        "--init",
        choices=("random", "target"),
        default="random",
        help="begin with noise, or with the target's last layers (default: random)",
    )


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    recipe, objective = TrainingRecipe(), Objective()
    add = group.add_argument
    add("--optimizer", choices=("muon", "adamw"), default=recipe.optimizer)
    add("--rate", type=float, default=recipe.rate, metavar="N", help=f"(default: {recipe.rate})")
    add(
        "--rows-per-step", type=int, default=recipe.rows_per_step, metavar="N", help="packed rows of --length"
    )
    add("--anchors", type=int, default=recipe.num_anchors, metavar="N", help="blocks per row, drawn anew")
    add(
        "--short-blocks",
        type=float,
        default=recipe.short_blocks,
        metavar="SHARE",
        help="of the run, at its beginning, with blocks of half the length: steps cost a third less",
    )
    add(
        "--anchoring",
        choices=("even", "walk"),
        default=recipe.anchoring,
        help="anchors anywhere, or mostly where the drafter's own steps would begin",
    )
    add("--weighting", choices=("dpace", "decay", "uniform"), default=objective.weighting)
    add("--gamma", type=float, default=objective.gamma, metavar="N", help="of --weighting decay")
    add(
        "--hardness",
        type=float,
        default=objective.hardness,
        metavar="N",
        help="of --weighting dpace: blocks count by the inverse Nth power of the length they expect",
    )
    add(
        "--distill",
        type=float,
        default=objective.distill,
        metavar="SHARE",
        help="of the divergence from the target's distribution in the loss",
    )
    add("--average", type=float, default=recipe.average, metavar="N", help="decay of averaged weights")
    add("--seed", type=int, default=recipe.seed, metavar="N")


def run(args: argparse.Namespace) -> int:
    job = _job(args)
    job.out.mkdir(parents=True, exist_ok=True)
    from blockdraft.cli.training_progress import listener, stage_bars
    from blockdraft.training.run import train

    with (job.out / "log.txt").open("a") as log, stage_bars(is_quiet=args.quiet) as bars:
        train(job, listener(log, bars, is_quiet=args.quiet), resume=args.resume)
    return 0


def _job(args: argparse.Namespace) -> Job:
    shape = DrafterShape(
        block=args.block,
        num_layers=args.layers,
        taps=args.taps,
        inner_size=args.inner_size,
        is_causal=not args.bidirectional,
        mask_token_id=args.mask_token,
    )
    answers = AnswerOptions(
        max_tokens=args.max_answer,
        sampled=args.sampled,
        temperature=args.temperature,
        top_p=args.top_p,
        max_repeat=args.max_repeat or None,
    )
    recipe = TrainingRecipe(
        rows_per_step=args.rows_per_step,
        num_anchors=args.anchors,
        short_blocks=args.short_blocks,
        anchoring=args.anchoring,
        optimizer=args.optimizer,
        rate=args.rate,
        average=args.average,
        objective=Objective(
            weighting=args.weighting, gamma=args.gamma, hardness=args.hardness, distill=args.distill
        ),
        seed=args.seed,
    )
    return Job(
        out=args.out,
        prompts=tuple(args.prompts),
        held_out=tuple(args.held_out),
        model=args.model,
        start_from=args.start_from,
        device=args.device,
        dtype=args.dtype,
        steps=args.steps,
        minutes=args.minutes,
        answer_minutes=args.answer_minutes,
        max_prompts=args.max_prompts,
        length=args.length,
        bulk_rows=args.rows,
        init=args.init,
        shape=shape,
        answers=answers,
        recipe=recipe,
        command=shlex.join(["blockdraft", *sys.argv[1:]]),
    )


def _named_file(text: str) -> tuple[str | None, Path]:
    name, equals, path = text.rpartition("=")
    return (name if equals else None), Path(path)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of layers such as 1,7,14") from None
