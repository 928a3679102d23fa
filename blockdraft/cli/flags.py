"""Flags that several commands share (one per setting, and those of a request), and text tables."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from blockdraft.engine.request import SamplingParams
from blockdraft.engine.sampling_defaults import NAMES as SAMPLING_NAMES
from blockdraft.errors import SettingsError
from blockdraft.settings.merge import ADDED_UP, MergedSettings, flag_of, merge_settings
from blockdraft.settings.settings import (
    CHOICES,
    DEFAULTS,
    LAUNCH_SETTINGS,
    SETTING_NAMES,
    SETTING_TYPES,
    Auto,
    Settings,
    read_setting,
    read_variable,
)

T = TypeVar("T")


def add_settings(parser: argparse.ArgumentParser, leave_out: Iterable[str] = ()) -> None:
    """Add one flag per field of Settings, with the field's help."""
    group = parser.add_argument_group("engine")
    launched = [name for name in SETTING_NAMES if name in LAUNCH_SETTINGS and name not in leave_out]
    other = parser.add_argument_group("vllm and sglang") if launched else group
    for item in fields(Settings):
        if item.name in leave_out:
            continue
        text = f"{item.metadata['help']} (default: {_shown(item.default)})".replace("%", "%%")
        where = other if item.name in launched else group
        # A flag that is not given is absent: environment or recipe may set it.
        where.add_argument(flag_of(item.name), default=argparse.SUPPRESS, help=text, **_options(item.name))
        if item.name == "verify":
            off: dict[str, Any] = {"action": "store_const", "const": "off", "default": argparse.SUPPRESS}
            where.add_argument("--no-verify", dest="verify", help="the same as --verify off", **off)


def add_model(
    parser: argparse.ArgumentParser, metavar: str = "MODEL", text: str = "the same as --model MODEL"
) -> None:
    """Let the first argument name the model, as --model does."""
    parser.add_argument("model_first", nargs="?", metavar=metavar, help=text)


def given_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that were given as flags, by field name."""
    given = {name: value for name, value in vars(args).items() if name in SETTING_NAMES}
    for name in ADDED_UP:
        if name in given:
            given[name] = tuple(given[name])
    first = getattr(args, "model_first", None)
    if first is not None:
        if given.get("model", first) != first:
            raise SettingsError(f"two models were given, '{first}' and '{given['model']}': give one.")
        given["model"] = first
    return given


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the Settings of recipe, environment and flags together."""
    return noted(merge_settings(given_settings(args)))


def noted(resolved: MergedSettings) -> Settings:
    """Print what was left out of the recipe; return the Settings."""
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    return resolved.settings


def flags_of(settings: Settings) -> list[str]:
    """Return the flags of `blockdraft serve` that give these settings, without --recipe."""
    flags: list[str] = []
    for name, default in DEFAULTS.items():
        value = getattr(settings, name)
        if value == default or name == "recipe":
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name, value))
        elif name == "engine_args":
            flags.append(f"{flag_of(name)}={shlex.join(value)}")
        elif name == "engine_env":
            flags += [f"{flag_of(name)}={variable}={text}" for variable, text in value]
        else:
            flags += [flag_of(name), "none" if value is None else str(value)]
    return flags


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int = 512, is_chat: bool = False) -> None:
    """Add the flags of one request; a chat has no --n and no --logprobs."""
    group = parser.add_argument_group("sampling")
    add = numbers_of(group)
    # None: the model's value, not known yet.
    add("--temperature", float, None, "0 is greedy (default: recommended by the model)")
    top_p_help = "sample from the likeliest tokens whose probabilities sum to N (default: the model's)"
    add("--top-p", float, None, top_p_help)
    add("--top-k", int, None, "sample from the N likeliest tokens; 0: from all (default: the model's)")
    min_p_help = "drop tokens with less than N times the probability of the likeliest (default: the model's)"
    add("--min-p", float, None, min_p_help)
    add("--presence-penalty", float, 0.0, "lower the logit of every token that the answer has used by N")
    add("--frequency-penalty", float, 0.0, "lower a token's logit by N for each use in the answer")
    repetition_help = "divide the logits of tokens in the prompt or the answer by N (default: the model's)"
    add("--repetition-penalty", float, None, repetition_help)
    add("--max-tokens", int, max_tokens, f"longest answer in tokens (default: {max_tokens})")
    add("--min-tokens", int, 0, "do not stop before N tokens")
    if not is_chat:
        add("--n", int, 1, "number of answers")
        logprobs_help = "with --json: log-probabilities of each token and of the N likeliest"
        add("--logprobs", int, None, logprobs_help)
    seed_help = "seed of the sampling (default: the same in every run)"
    # Not args.seed, which is the engine's setting of that name.
    group.add_argument("--seed", dest="sampling_seed", type=int, metavar="N", help=seed_help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before TEXT; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="continue past the model's end token")
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID=VALUE",
        help="add VALUE to the logit of token ID; repeatable",
    )


def numbers_of(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """Return a function that adds a flag with a number to `group`."""

    def number(
        flag: str,
        kind: type[float],
        default: float | None,
        text: str | None,
        *,
        dest: str | None = None,
        metavar: str = "N",
    ) -> None:
        group.add_argument(flag, type=kind, default=default, help=text, dest=dest, metavar=metavar)

    return number


def sampling_from(
    args: argparse.Namespace, model_defaults: Mapping[str, float] | None = None
) -> SamplingParams:
    """Return the sampling parameters of the flags, else the model's recommended ones."""
    left_out = [name for name in SAMPLING_NAMES if getattr(args, name) is None]
    given = argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in left_out})
    recommended = {name: value for name, value in (model_defaults or {}).items() if name in left_out}
    # Not args.width, which is the engine's setting of that name, nor args.seed.
    return dataclass_from(
        SamplingParams,
        given,
        logit_bias=dict(args.logit_bias),
        seed=args.sampling_seed,
        width=None,
        **recommended,
    )


def dataclass_from(kind: type[T], args: argparse.Namespace, **given: object) -> T:
    """Return a dataclass whose fields come from `given`, else from flags of the same name."""
    names = [item.name for item in fields(kind) if item.name not in given and item.name in args]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names}, **given)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true", help="report loading on stderr even if it is no terminal"
    )


def reporter(args: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints progress to stderr, or nothing if stderr is no terminal."""
    if args.verbose or sys.stderr.isatty():
        return lambda message: print(message, file=sys.stderr, flush=True)
    return lambda message: None


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Yield the rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        yield indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def prompt_from(text: str) -> str:
    """Return the prompt, read from stdin without its last newline if it is "-"."""
    return text if text != "-" else read_stdin("the prompt").removesuffix("\n")


def read_stdin(what: str) -> str:
    """Read all of stdin; on a terminal, say that we wait for it."""
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        print(
            f"reading {what} from this terminal: end it with {key} on a line of its own",
            file=sys.stderr,
            flush=True,
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"stdin is not {error.encoding} text ({error.reason}): convert it to {error.encoding}."
        ) from None


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, ()) else str(default)


def _options(name: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the flag of a setting."""
    hint = SETTING_TYPES[name]
    if hint in (bool, bool | Auto):
        return {"action": argparse.BooleanOptionalAction}
    if name in CHOICES:
        return {"choices": CHOICES[name]}
    if name == "engine_env":
        return {"action": "append", "type": _reader(read_variable), "metavar": "NAME=VALUE"}
    action = "extend" if name in ADDED_UP else "store"
    metavar = _METAVARS.get(name, "NAME" if hint in (str, str | None) else "N")
    return {"action": action, "type": _reader(partial(read_setting, name)), "metavar": metavar}


def _reader(read: Callable[[str], object]) -> Callable[[str], object]:
    """Wrap `read` so that it raises errors as argparse wants them."""

    def reads(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reads


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=VALUE, such as 42=-100") from None


_METAVARS = {
    "chat_template": "FILE",
    "synthetic_acceptance": "PROFILE",
    "engine_args": "TEXT",
    "engine_version": "VERSION",
    "head_address": "HOST",
}
