"""Code shared by several commands: flags, text tables, and hiding of keys."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
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
HIDDEN = "***"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NOT_SECRET = ("TOKENS", "TOKENIZER")  # --max-num-batched-tokens


def add_settings(parser: argparse.ArgumentParser, leave_out: Iterable[str] = ()) -> None:
    """Add one flag per field of Settings, with the help text of the field."""
    group = parser.add_argument_group("engine")
    launched = [name for name in SETTING_NAMES if name in LAUNCH_SETTINGS and name not in leave_out]
    other = parser.add_argument_group("vllm and sglang") if launched else group
    for item in fields(Settings):
        if item.name in leave_out:
            continue
        text = f"{item.metadata['help']} (default: {shown(item.default)})".replace("%", "%%")
        where = other if item.name in launched else group
        # Flags that are not given are absent: the environment or the recipe may set them.
        where.add_argument(flag_of(item.name), default=argparse.SUPPRESS, help=text, **_options(item.name))
        if item.name == "verify":
            off: dict[str, Any] = {"action": "store_const", "const": "off", "default": argparse.SUPPRESS}
            where.add_argument("--no-verify", dest="verify", help="the same as --verify off", **off)


def add_model(
    parser: argparse.ArgumentParser, metavar: str = "MODEL", text: str = "the same as --model MODEL"
) -> None:
    """Add a first argument that names the model, as --model does."""
    parser.add_argument("model_first", nargs="?", metavar=metavar, help=text)


def given_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that were given as flags, by field name."""
    given = {name: value for name, value in vars(args).items() if name in SETTING_NAMES}
    for name in ADDED_UP:
        if name in given:
            given[name] = tuple(given[name])
    first = getattr(args, "model_first", None)
    if first is not None and given.setdefault("model", first) != first:
        raise SettingsError(f"two models were given, '{first}' and '{given['model']}': give one.")
    return given


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the Settings, merged from recipe, environment and flags."""
    return noted(merge_settings(given_settings(args)))


def noted(resolved: MergedSettings) -> Settings:
    """Print notes on ignored parts of the recipe; return the Settings."""
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


def add_flags(group: argparse._ActionsContainer, text: str, /, **more: object) -> None:
    """Add the flags of `text`, one per line as in --help: `--flag VALUE: what it does`.

    VALUE gives the type (_TYPES). {a,b} are choices, three dots mean repeatable. A flag without VALUE is a
    switch. Indented lines continue a line. `more` has a flag's default, or a dict for `add_argument`.
    """
    for line in filter(None, re.sub(r"\n +", " ", text).splitlines()):
        head, _, help_text = line.partition(": ")
        flag, _, value = head.partition(" ")
        options: dict[str, Any] = {"help": help_text}
        if not value:
            options |= {"action": "store_true", "default": False}
        elif value.startswith("{"):
            options["choices"] = value[1:-1].split(",")
        else:
            name = value.removesuffix("...")
            options |= {"metavar": name, "type": _TYPES.get(name, str)}
            options |= {} if name == value else {"action": "append"}
        own = more.get(flag[2:].replace("-", "_"), {})
        group.add_argument(flag, **options | (own if isinstance(own, dict) else {"default": own}))


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int = 512, is_chat: bool = False) -> None:
    """Add the flags of one request. A chat has no --n and no --logprobs."""
    # No default: None stands for the model's value, which is not known yet.
    first = f"""
--temperature X: randomness of the answer; 0 is greedy (default: the model's)
--top-p X: sample from the likeliest tokens whose probabilities sum to X (default: the model's)
--top-k N: sample from the N likeliest tokens; 0: from all (default: the model's)
--min-p X: drop tokens with less than X times the highest probability (default: the model's)
--presence-penalty X: subtract X from the logit of every token already in the answer (default: 0)
--frequency-penalty X: lower a token's logit by X for each use in the answer (default: 0)
--repetition-penalty X: divide the logits of tokens in the prompt or the answer by X (default: the model's)
--max-tokens N: longest answer in tokens (default: {max_tokens})
--min-tokens N: do not stop before N tokens (default: 0)
"""
    several = """
--n N: number of answers (default: 1)
--logprobs N: with --json: log-probabilities of each token and of the N likeliest
"""
    last = """
--seed N: seed for sampling (default: one fixed seed)
--stop TEXT...: stop before TEXT; repeatable
--ignore-eos: continue past the model's end token
--logit-bias ID=VALUE...: add VALUE to the logit of token ID; repeatable
"""
    defaults = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": max_tokens, "min_tokens": 0}
    # args.seed is the engine's setting of that name.
    own = {"n": 1, "seed": {"dest": "sampling_seed"}, "logit_bias": {"type": _bias, "default": []}}
    text = first + ("" if is_chat else several) + last
    add_flags(parser.add_argument_group("sampling"), text, **defaults, **own)


def sampling_from(
    args: argparse.Namespace, model_defaults: Mapping[str, float] | None = None
) -> SamplingParams:
    """Return the sampling parameters: from the flags, else the model's recommended values."""
    left_out = [name for name in SAMPLING_NAMES if getattr(args, name) is None]
    given = argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in left_out})
    # args.width and args.seed are the engine's settings of those names.
    own = {"logit_bias": dict(args.logit_bias), "seed": args.sampling_seed, "width": None}
    own |= {name: value for name, value in (model_defaults or {}).items() if name in left_out}
    return dataclass_from(SamplingParams, given, **own)


def dataclass_from(kind: type[T], args: argparse.Namespace, **given: object) -> T:
    """Return a dataclass. Its fields come from `given`, else from the flags with their names."""
    names = [item.name for item in fields(kind) if item.name not in given and item.name in args]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names}, **given)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "--verbose: show loading progress even if stderr is not a terminal")


def reporter(args: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints progress to stderr; without --verbose, only if it is a terminal."""
    if args.verbose or sys.stderr.isatty():
        return lambda message: print(message, file=sys.stderr, flush=True)
    return lambda message: None


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Yield the rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        yield indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def prompt_from(text: str) -> str:
    """Return the prompt; for "-", read it from stdin without the last newline."""
    return text if text != "-" else read_stdin("the prompt").removesuffix("\n")


def read_stdin(what: str) -> str:
    """Read all of stdin; on a terminal, say that we wait for it."""
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        waits = f"reading {what} from this terminal: end it with {key} on a line of its own"
        print(waits, file=sys.stderr, flush=True)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise not_text(error) from None


def show_anything() -> None:
    """Make stdout replace characters that the terminal cannot show."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def not_text(error: UnicodeDecodeError) -> SettingsError:
    encoding = error.encoding
    return SettingsError(f"stdin is not {encoding} text ({error.reason}): convert it to {encoding}.")


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = tuple(f"{key}={text}" for key, text in value.items())
    text = " ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return text or "none"


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
    """Wrap `read` so that its errors are those that argparse expects."""

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


# The type of a value by its name in --help; other names are strings.
_TYPES = {"N": int, "X": float, "S": float, "FILE": Path, "FOLDER": Path}
_METAVARS = {
    "chat_template": "FILE",
    "synthetic_acceptance": "PROFILE",
    "engine_args": "TEXT",
    "engine_version": "VERSION",
    "head_address": "HOST",
}


# ---- keys in command lines


def is_secret(name: str) -> bool:
    """Return whether the value of a flag or variable of this name may be a key."""
    text = name.upper()
    for harmless in _NOT_SECRET:
        text = text.replace(harmless, "")
    return any(word in text for word in _SECRET)


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words with keys hidden: in `--api-key KEY`, `--api-key=KEY` and inside --engine-args=."""
    return tuple(_masked(word, before) for word, before in zip(words, ("", *words), strict=False))


def _masked(word: str, before: str) -> str:
    flag, equals, value = word.partition("=")
    if flag == "--engine-args" and equals:
        return f"{flag}={shlex.join(masked(shlex.split(value)))}"
    if flag == "--engine-env" and equals:
        name, _, _ = value.partition("=")
        return f"{flag}={name}={HIDDEN}" if is_secret(name) else word
    if flag.startswith("-") and equals and is_secret(flag):
        return f"{flag}={HIDDEN}"
    takes_secret = before.startswith("-") and "=" not in before and is_secret(before)
    # A file name is not secret, and a flag is not the value of the flag before it.
    is_value = takes_secret and not before.endswith("-file") and not word.startswith("--")
    return HIDDEN if is_value else word
