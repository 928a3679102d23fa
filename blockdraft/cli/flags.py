"""Flags: Settings as they are declared, SamplingParams by hand, and the values they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import get_type_hints

from blockdraft.engine.request import SamplingParams
from blockdraft.errors import SettingsError
from blockdraft.machine import may_have_gpu
from blockdraft.settings import CHOICES, SETTING_NAMES, Auto, Settings, pin_threads


def add_settings(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """One flag per field of Settings; its help is the field's own."""
    group = parser.add_argument_group("engine")
    hints = get_type_hints(Settings)
    for item in fields(Settings):
        if item.name in leave_out:
            continue
        flag = f"--{item.name.replace('_', '-')}"
        text = f"{item.metadata['help']} (default: {_shown(item.default)})".replace("%", "%%")
        if hints[item.name] in (bool, bool | Auto):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=item.default, help=text)
        elif item.name in CHOICES:
            group.add_argument(flag, choices=CHOICES[item.name], default=item.default, help=text)
        else:
            kind = _READERS.get(hints[item.name], str)
            metavar = "N" if kind is not str else _METAVARS.get(item.name, "NAME")
            group.add_argument(flag, type=kind, default=item.default, metavar=metavar, help=text)


def settings_from(args: argparse.Namespace) -> Settings:
    """The Settings that the flags ask for; fields without a flag keep their default."""
    given = vars(args)
    return Settings(**{name: given[name] for name in SETTING_NAMES if name in given})


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")

    def add(flag: str, kind: Callable[[str], object], default: object, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, metavar="N", help=text)

    add("--temperature", float, 0.0, "0 is greedy, and the default here (the server's is OpenAI's 1.0)")
    add("--top-p", float, 1.0, "sample from the likeliest tokens that hold this much probability")
    add("--top-k", int, 0, "sample from this many likeliest tokens; 0: all")
    add("--min-p", float, 0.0, "drop tokens less likely than this share of the likeliest")
    add("--presence-penalty", float, 0.0, "subtracted from tokens the answer has used")
    add("--frequency-penalty", float, 0.0, "subtracted per use in the answer")
    add("--repetition-penalty", float, 1.0, "divides the logits of tokens used in prompt and answer")
    add("--max-tokens", int, 512, "longest answer (default: 512)")
    add("--min-tokens", int, 0, "do not stop before this many tokens")
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


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=dict(args.logit_bias),
        seed=args.sampling_seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        min_tokens=args.min_tokens,
        max_tokens=args.max_tokens,
        logprobs=args.logprobs,
    )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true", help="say on stderr what is being loaded, terminal or not"
    )


def reporter(args: argparse.Namespace) -> Callable[[str], None]:
    """Where progress messages go: stderr, if somebody looks at it."""
    if args.verbose or sys.stderr.isatty():
        return lambda message: print(message, file=sys.stderr, flush=True)
    return lambda message: None


def bind_threads(settings: Settings) -> None:
    """Pin the CPU's threads where the model will surely run on it. Before torch is imported."""
    if settings.device == "cpu" or (settings.device == "auto" and not may_have_gpu()):
        pin_threads()


def prompt_from(text: str) -> str:
    """The prompt itself, or stdin without its last newline when it is "-"."""
    if text != "-":
        return text
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"stdin is not {error.encoding} text ({error.reason}): convert it.") from None


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def _int_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number or 'auto'") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=VALUE, such as 42=-100") from None


_METAVARS = {"synthetic_acceptance": "PROFILE"}
_READERS: dict[object, Callable[[str], object]] = {
    int: int,
    int | None: int,
    float: float,
    int | Auto: _int_or_auto,
}
