"""Answer one prompt. The text streams to stdout. Then one line on stderr gives tokens, seconds and speed. The
seconds include reading the prompt but not loading the model; the speed in brackets leaves out the first step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.cli import flags
from blockdraft.engine.request import Delta
from blockdraft.errors import RequestError, SettingsError
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.settings import LAUNCH_SETTINGS

if TYPE_CHECKING:
    from blockdraft.llm import LLM, Completion, Result

SUMMARY = "answer one prompt"
USAGE = "blockdraft generate [PROMPT] [flags]"
FLAGS = """
--file FILE...: append the text of FILE to the prompt; repeatable; '-': stdin
--system TEXT: the system message
--raw: continue the text without a chat template
--json: print one JSON object at the end instead of text
"""
FORM_FLAGS = """
--json-schema FILE: JSON that matches the schema in FILE; '-': stdin
--regex TEXT: text that matches this regular expression
--choice TEXT...: one of the TEXTs given; repeatable
--grammar FILE: text of the grammar in FILE (Lark, or llama.cpp's GBNF)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt_help = "the prompt; '-' reads it from stdin, as does a pipe without PROMPT"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=prompt_help)
    flags.add_flags(parser, FLAGS, file={"default": [], "type": str})
    flags.add_verbose(parser)
    flags.add_sampling(parser)
    forms = parser.add_argument_group("structured output", "make the answer follow one of these")
    texts = {"json_schema": {"type": str}, "grammar": {"type": str}}  # strings, since "-" is not a path
    flags.add_flags(forms.add_mutually_exclusive_group(), FORM_FLAGS, **texts)
    # Here --seed is the sampling seed, there are no tools, and only our engine can run.
    flags.add_settings(parser, leave_out=("seed", "tool_format", "engine", *LAUNCH_SETTINGS))


def _form(args: argparse.Namespace) -> StructuredOutputs | None:
    if args.json_schema is not None:
        return StructuredOutputs(json=_read("--json-schema", args.json_schema))
    if args.grammar is not None:
        return StructuredOutputs(grammar=_read("--grammar", args.grammar))
    if args.regex is None and args.choice is None:
        return None
    return StructuredOutputs(regex=args.regex, choice=args.choice)


def _read(flag: str, name: str) -> str:
    if name == "-":
        return flags.read_stdin(flag)
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"{flag} {name} cannot be read: {reason}.") from None


def _prompt(args: argparse.Namespace) -> str:
    """Return PROMPT and the files, separated by blank lines; read stdin if neither is given."""
    first = args.prompt
    if first is None and not args.file:
        is_free = "-" not in (args.json_schema, args.grammar)  # whether no other flag reads stdin
        if sys.stdin is None or sys.stdin.isatty() or not is_free:
            raise SettingsError("no prompt was given: add PROMPT, or --file FILE, or '-' for stdin.")
        first = "-"
    parts = [] if first is None else [flags.prompt_from(first)]
    prompt = "\n\n".join([*parts, *(_read("--file", name).removesuffix("\n") for name in args.file)])
    if prompt == "":
        raise SettingsError("the prompt is empty: give PROMPT, or --file FILE, or '-' for stdin.")
    return prompt


def _check_sources(args: argparse.Namespace) -> None:
    if [args.prompt, args.json_schema, args.grammar, *args.file].count("-") > 1:
        raise SettingsError("'-' was given twice, but stdin can be read only once: name a file for one.")
    if args.raw and args.system is not None:
        raise SettingsError("--system needs the chat template, which --raw leaves out: give one of them.")


def run(args: argparse.Namespace) -> int:
    settings = merge_settings(flags.given_settings(args) | {"engine": "native"}).settings
    _check_sources(args)
    form = _form(args)
    # Only for its errors, before the model is loaded.
    sampling = replace(flags.sampling_from(args), structured_outputs=form)
    if sampling.logprobs is not None and not args.json:
        raise SettingsError("--logprobs are only shown in JSON: add --json.")
    prompt = _prompt(args)
    llm, warnings = open_llm(args, asdict(settings))
    if not args.raw and not llm.tokenizer.has_chat_template:
        raise RequestError(f"'{settings.model}' has no chat template: add --raw to continue plain text.")
    sampling = replace(flags.sampling_from(args, llm.engine.models.sampling), structured_outputs=form)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    if args.json:
        (result,) = llm.generate(prompt, sampling) if args.raw else llm.chat(messages, sampling)
        _print_json(llm, result, warnings)
        return 0
    seen, begun_s = list[Delta](), time.monotonic()
    try:
        _print_text(llm.stream(prompt if args.raw else messages, sampling), sampling.n, seen)
    except KeyboardInterrupt:
        _tell_stopped(seen, time.monotonic() - begun_s)
        raise
    timing_only = f" (timing only: {settings.suffix})" if settings.suffix else ""
    line = speed_line(seen, has_drafter=llm.engine.models.draft_name is not None)
    print(line + timing_only, file=sys.stderr)
    return 0


def open_llm(args: argparse.Namespace, asked: dict[str, Any]) -> tuple[LLM, list[str]]:
    """Load an engine with the settings `asked` in this process. Print its warnings; return it and them."""
    from blockdraft.start.driver_warmup import quick_imports
    from blockdraft.start.preflight import pin_cpu_threads

    pin_cpu_threads(str(asked["device"]))
    with quick_imports():
        from blockdraft.llm import LLM

    warnings: list[str] = []
    given = {**asked, "recipe": None}  # `asked` already contains the recipe's settings
    llm = LLM(report=flags.reporter(args), warn=warnings.append, **given)
    warnings += llm.engine.models.labels.notices
    for line in llm.engine.models.labels.chosen:
        print(line, file=sys.stderr)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return llm, warnings


def _tell_stopped(seen: list[Delta], seconds: float) -> None:
    """Print the speed of a stopped answer, if it had begun."""
    num_tokens = sum(len(delta.token_ids) for delta in seen)
    if num_tokens:
        print(flush=True)
        print("stopped after", _speed(num_tokens, seconds, len(seen)), file=sys.stderr)


def _print_text(deltas: Iterator[Delta], num_choices: int, seen: list[Delta]) -> None:
    """Stream one answer, or print several with their numbers when all are complete. Append to `seen`."""
    flags.show_anything()
    for delta in deltas:
        seen.append(delta)
        if num_choices == 1:
            print(delta.text, end="", flush=True)
    if num_choices == 1:
        print(flush=True)
    else:
        for index in range(num_choices):
            text = "".join(delta.text for delta in seen if delta.index == index)
            print(f"[{index + 1} of {num_choices}]\n{text}", flush=True)


def speed_line(deltas: list[Delta], *, has_drafter: bool) -> str:
    """Return a line with the total speed of all choices, which the module's docstring defines."""
    metrics = [delta.metrics for delta in deltas if delta.metrics is not None]
    num_tokens, steps = sum(m.num_tokens for m in metrics), sum(m.steps for m in metrics)
    seconds, first_s = max(m.seconds for m in metrics), min(m.first_token_s for m in metrics)
    later = ""
    if len(metrics) == 1 and seconds > first_s:
        num_later = num_tokens - len(deltas[0].token_ids)
        later = f" ({num_later / (seconds - first_s):.1f} after the first step)"
    return _speed(num_tokens, seconds, steps, later) + ("" if has_drafter else " (no drafter)")


def _speed(num_tokens: int, seconds: float, steps: int, later: str = "") -> str:
    rate, per_step = (num_tokens / count if count else 0.0 for count in (seconds, steps))
    return f"{num_tokens} tokens in {seconds:.1f} s: {rate:.1f} tok/s{later}, {per_step:.2f} tokens per step"


def _print_json(llm: LLM, result: Result, warnings: list[str]) -> None:
    choices, models = [_choice(answer) for answer in result.outputs], llm.engine.models
    answer = {
        **choices[0],
        "model": models.config.name + llm.settings.suffix,
        "draft": models.draft_name,
        "width": llm.engine.plan.width,
        "sampling_defaults": dict(models.sampling),
    }
    more = {"chosen": models.labels.chosen, "warnings": warnings, "choices": choices[1:] and choices}
    answer |= {name: value for name, value in more.items() if value}
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(answer, ensure_ascii=not is_unicode, allow_nan=False))


def _choice(answer: Completion) -> dict[str, object]:
    choice: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "metrics": {**asdict(answer.metrics), "tokens_per_step": answer.metrics.tokens_per_step},
    }
    if answer.logprobs is not None:
        choice["logprobs"] = [
            {
                "token_id": item.token_id,
                "logprob": _finite(item.logprob),
                "top": [[token_id, _finite(logprob)] for token_id, logprob in item.top],
            }
            for item in answer.logprobs
        ]
    return choice


def _finite(value: float) -> float | None:
    """Return the value, or None for -inf (a forbidden token's log-probability): JSON has no infinity."""
    return value if math.isfinite(value) else None
