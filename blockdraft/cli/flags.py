"""What commands share: flags (Settings as they are declared, SamplingParams by hand), and tables of text."""

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
    """One flag per field of Settings; its help is the field's own."""
    group = parser.add_argument_group("engine")
    launched = [name for name in SETTING_NAMES if name in LAUNCH_SETTINGS and name not in leave_out]
    other = parser.add_argument_group("vllm and sglang") if launched else group
    for item in fields(Settings):
        if item.name in leave_out:
            continue
        text = f"{item.metadata['help']} (default: {_shown(item.default)})".replace("%", "%%")
        where = other if item.name in launched else group
        # What is not given is not there: other layers may say it.
        where.add_argument(flag_of(item.name), default=argparse.SUPPRESS, help=text, **_options(item.name))
        if item.name == "verify":
            off: dict[str, Any] = {"action": "store_const", "const": "off", "default": argparse.SUPPRESS}
            where.add_argument("--no-verify", dest="verify", help="the same as --verify off", **off)


def add_model(
    parser: argparse.ArgumentParser, metavar: str = "MODEL", text: str = "the same as --model MODEL"
) -> None:
    """The model as the first word, as well as by --model."""
    parser.add_argument("model_first", nargs="?", metavar=metavar, help=text)


def given_settings(args: argparse.Namespace) -> dict[str, object]:
    """What the flags ask for, by field name, and nothing that they do not mention."""
    given = {name: value for name, value in vars(args).items() if name in SETTING_NAMES}
    for name in ADDED_UP:
        if name in given:
            given[name] = tuple(given[name])
    first = getattr(args, "model_first", None)
    if first is not None:
        if given.get("model", first) != first:
            raise SettingsError(f"two models, '{first}' and '{given['model']}': give one.")
        given["model"] = first
    return given


def settings_from(args: argparse.Namespace) -> Settings:
    """The Settings of the recipe, the environment and the flags together."""
    return noted(merge_settings(given_settings(args)))


def noted(resolved: MergedSettings) -> Settings:
    """The Settings, once what was left out of a recipe has been said."""
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    return resolved.settings


def flags_of(settings: Settings) -> list[str]:
    """The flags of `blockdraft serve` that ask for these settings, without their recipe."""
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
    """The flags of one request; those of a conversation are without what makes more than one text of it."""
    group = parser.add_argument_group("sampling")
    add = numbers_of(group)
    # None: the model's own, which is not known yet.
    add("--temperature", float, None, "0 is greedy (default: what the model's makers recommend)")
    add("--top-p", float, None, "sample from the likeliest tokens of this much probability (default: theirs)")
    add("--top-k", int, None, "sample from this many likeliest tokens; 0: all (default: theirs)")
    add("--min-p", float, None, "drop tokens less likely than this share of the likeliest (default: theirs)")
    add("--presence-penalty", float, 0.0, "subtracted from tokens the answer has used")
    add("--frequency-penalty", float, 0.0, "subtracted per use in the answer")
    repetition_help = "divides the logits of tokens used in prompt and answer (default: theirs)"
    add("--repetition-penalty", float, None, repetition_help)
    add("--max-tokens", int, max_tokens, f"longest answer (default: {max_tokens})")
    add("--min-tokens", int, 0, "do not stop before this many tokens")
    if not is_chat:
        add("--n", int, 1, "answers to give")
        add("--logprobs", int, None, "log-probabilities of each token and the N likeliest; with --json")
    seed_help = "of the sampling noise (default: the same for every run)"
    # Not args.seed, which is the engine's setting of that name.
    group.add_argument("--seed", dest="sampling_seed", type=int, metavar="N", help=seed_help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID=VALUE",
        help="added to a token's logit; may be repeated",
    )


def numbers_of(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """A function that adds a flag with a number to `group`."""

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
    """What the flags say and, where they do not, what the model's makers recommend."""
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
    """A dataclass of what is given, and of the flags whose values have the names of its fields."""
    names = [item.name for item in fields(kind) if item.name not in given and item.name in args]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names}, **given)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true", help="say on stderr what is being loaded, terminal or not"
    )


def reporter(args: argparse.Namespace) -> Callable[[str], None]:
    """Where progress messages go: stderr, if somebody looks at it."""
    if args.verbose or sys.stderr.isatty():
        return lambda message: print(message, file=sys.stderr, flush=True)
    return lambda message: None


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Columns side by side, for people."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        yield indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def prompt_from(text: str) -> str:
    """The prompt itself, or stdin without its last newline when it is "-"."""
    return text if text != "-" else read_stdin("the prompt").removesuffix("\n")


def read_stdin(what: str) -> str:
    """All of it; who sits at a terminal is told that it is waited for."""
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        print(
            f"reading {what} from this terminal: {key} on a line of its own ends it",
            file=sys.stderr,
            flush=True,
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SettingsError(f"stdin is not {error.encoding} text ({error.reason}): convert it.") from None


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, ()) else str(default)


def _options(name: str) -> dict[str, Any]:
    """How argparse reads the flag of a setting."""
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
    """The same, with errors as argparse wants them."""

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
