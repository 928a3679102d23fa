"""Compare exact with compressed keys and values on texts. For each format, report the bytes per token,
the share of positions with the same likeliest token, the changes in perplexity and distribution at each
depth, and how many hidden facts (needles) are found; then advise for or against the format. The texts run
through slow reference code, so this does not measure speed. If the model has a drafter, the engine also
answers questions with each format, and a column shows the tokens committed per step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_flags, table
from blockdraft.errors import SettingsError
from blockdraft.settings.settings import DTYPES, QUANTIZATIONS

if TYPE_CHECKING:
    from blockdraft.check.kv_study import FormatReport, KvReport
    from blockdraft.engine.loaded_pair import LoadedPair
    from blockdraft.planner.plan import Plan
    from blockdraft.text.tokenizer import Tokenizer

SUMMARY = "measure the effect of compressed keys and values (int8, tq4, tq4v3) on a model"
USAGE = "blockdraft kv [MODEL] [flags]"
FORMATS = ("int8", "tq4", "tq4v3")  # defined in kernels/kv_codec.py, which imports torch
NEEDLES_FROM = 1024  # tokens; shorter texts have no needles by default
# Counted tokens, a text's length, texts with needles, answers: minutes on two cores, less on a card.
SMALL, LARGE = (1024, 1536, 1, 4), (65_536, 4096, 8, 32)


FLAGS = f"""
--kv-dtype {{{",".join(FORMATS)}}}: measure this format; repeatable (default: all)
--texts FILE: a text per line (JSON lines of prompts, also .gz or .xz) (default: a few pages of our own)
--tokens N: tokens to count (default: {LARGE[0]}, CPU: {SMALL[0]})
--length N: tokens of each text (default: {LARGE[1]}, CPU: {SMALL[1]})
--needles N: texts with ten needles each (default: {LARGE[2]}, CPU: {SMALL[2]})
--answers N: questions to answer with drafts; 0: none (default: {LARGE[3]}, CPU: {SMALL[3]})
--draft NAME: the drafter: folder, hub id, none, auto (the one that ships for the model) or dflash2 (its
  DFlash2 head) (default: auto)
--device NAME: cpu, cuda or cuda:N (default: auto)
--dtype {{{",".join(DTYPES)}}}: number format of the model (default: auto)
--quantization {{{",".join(QUANTIZATIONS)}}}: weights of the model (default: auto; on a CPU none, because
  int8 products would hide small differences)
--json FILE: also write all measurements to FILE
--quiet: show no progress on stderr
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_help = "folder, hub id, GGUF file, or 'default'"
    parser.add_argument("model", nargs="?", default="default", metavar="MODEL", help=model_help)
    autos = dict.fromkeys(("draft", "device", "dtype", "quantization"), "auto")
    add_flags(parser, FLAGS, **autos, kv_dtype={"dest": "formats", "action": "append"})


def run(args: argparse.Namespace) -> int:
    from blockdraft.start.driver_warmup import quick_imports
    from blockdraft.start.preflight import pin_cpu_threads

    _check(args)
    pin_cpu_threads(args.device)
    with quick_imports():
        from blockdraft.check.kv_quality import formats_for
        from blockdraft.check.kv_study import study
        from blockdraft.check.kv_texts import begin_of, built_in, long_enough
        from blockdraft.start.loading import load_pair

    def note(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    models, plan = load_pair(note, **_settings(args))
    formats, refused = formats_for(models, args.formats)
    tokens, length, num_needles, num_answers = _sizes(args, models, plan)
    begin = begin_of(length)
    if args.texts is None:
        texts: Iterator[list[int]] = built_in(models.tokenizer.encode, length)
    else:
        read = texts_of(args.texts, models.tokenizer)
        texts = iter(long_enough(read, length, str(args.texts)))
    chosen = list(itertools.islice(texts, max(1, -(-tokens // (length - begin)))))
    counts = {"num_needles": num_needles, "num_answers": num_answers}
    report = study(models, plan, formats, chosen, begin=begin, note=note, **counts)
    for line in lines(report, args):
        print(line)
    for name in refused:
        print(f"{name}: heads of this model cannot be rotated: use int8.")
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("length", 1), ("needles", 0), ("answers", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise SettingsError(f"--{name} {value} is not at least {least}.")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise SettingsError(f"cannot write --json {args.json}: there is no such folder.")


def _settings(args: argparse.Namespace) -> dict[str, object]:
    from blockdraft.start.loading import resolve_device

    is_cpu = resolve_device(args.device) == "cpu"
    return {
        "model": args.model,
        "draft": "none" if args.answers == 0 else args.draft,
        "device": args.device,
        "dtype": args.dtype,
        "quantization": "none" if is_cpu and args.quantization == "auto" else args.quantization,
        "graphs": False,
        **({} if args.length is None else {"max_model_len": args.length}),
    }


def _sizes(args: argparse.Namespace, models: LoadedPair, plan: Plan) -> tuple[int, int, int, int]:
    """Return tokens, length, needles and answers: as given, or values that take minutes on this device."""
    tokens, length, needles, answers = SMALL if models.device.type == "cpu" else LARGE
    length = min(length, plan.max_model_len) if args.length is None else args.length
    needles = needles if length >= NEEDLES_FROM else 0
    needles = needles if args.needles is None else args.needles
    return args.tokens or tokens, length, needles, answers if args.answers is None else args.answers


def texts_of(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of a file's prompts, in an order that is equal in every run."""
    from blockdraft.bench import prompt_files

    prompts = prompt_files.prompts_of(prompt_files.read(path).rows, name="kv", category="kv")
    for prompt in random.Random("kv").sample(prompts, len(prompts)):
        if tokenizer.has_chat_template:
            yield tokenizer.encode_chat(prompt.messages(), add_generation_prompt=False)
        else:
            yield tokenizer.encode("\n\n".join(prompt.turns))


def lines(report: KvReport, args: argparse.Namespace) -> Iterator[str]:
    source = "our own text" if args.texts is None else str(args.texts)
    yield (
        f"{args.model}, {report.dtype}: {report.num_texts} texts of {report.length} tokens ({source}), "
        f"{report.num_tokens} tokens counted from depth {report.begin} on"
    )
    drafts = "" if report.committed is None else f", {report.committed:.2f} tokens committed per step"
    yield f"exact: {report.exact_bytes:.0f} bytes per token, perplexity {report.perplexity:.2f}{drafts}"
    yield ""
    deep = [f"from {first}" for first, _ in report.depths]
    header = (
        "format",
        "bytes",
        "ratio",
        "same, %",
        "perplexity, %",
        "KL",
        "99th",
        *deep,
        "needles",
        "committed",
    )
    num_columns = len(header) - (report.committed is None)
    yield from table([row[:num_columns] for row in (header, *map(_row, report.formats))])
    yield "KL: mean divergence in 1/1000 nat per token, its 99th percentile, and its mean by depth."
    if report.committed is not None:
        yield f"committed: tokens per step of {report.num_answers} greedy answers with drafts by that cache."
    yield ""
    yield from (str(one.sentence) for one in report.formats)


def _row(one: FormatReport) -> tuple[str, ...]:
    loss, needles = one.loss, one.needles
    found = "-"
    if needles is not None:
        found = f"{needles.num_found} (exact {needles.num_exact}) of {needles.num_hidden}"
    return (
        one.name,
        f"{one.num_bytes:.0f}",
        f"{one.ratio:.2f}x",
        f"{loss.same_percent:.2f}",
        f"{loss.perplexity_percent:+.2f} ±{loss.error_percent:.2f}",
        f"{loss.divergence:.2f}",
        f"{loss.divergence_99th:.1f}",
        *(f"{each.divergence:.2f}" for each in one.by_depth),
        found,
        "-" if one.committed is None else f"{one.committed:.2f}",
    )
