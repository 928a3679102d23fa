"""Talk in the terminal to a model that is loaded here, or to any OpenAI-compatible server (http://…). /help
lists commands, Ctrl-C stops an answer, Ctrl-D ends the conversation. Piped input is read as one question per
line; only the answers go to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from blockdraft.cli import flags
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.sampling_defaults import NAMES as SAMPLING_NAMES
from blockdraft.errors import RequestError, SettingsError
from blockdraft.settings.merge import flag_of, merge_settings
from blockdraft.settings.model_source import public_id
from blockdraft.settings.settings import LAUNCH_SETTINGS, environment_api_key

if TYPE_CHECKING:
    from blockdraft.cli.chat_answers import Answerer

SUMMARY = "talk to a model in the terminal"
USAGE = "blockdraft chat [MODEL | URL] [flags]"
MAX_TOKENS = 2048
FLAGS = """
--system TEXT: the system message
--api-key KEY: key to send to the server (default: $BLOCKDRAFT_API_KEY)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, "MODEL | URL", "model or server to talk to (default: the default model)")
    flags.add_flags(parser, FLAGS)
    flags.add_verbose(parser)
    flags.add_sampling(parser, max_tokens=MAX_TOKENS, is_chat=True)
    flags.add_settings(parser, leave_out=("seed", "tool_format", "engine", *LAUNCH_SETTINGS))


def run(args: argparse.Namespace) -> int:
    flags.sampling_from(args)  # only for its errors, before the model is loaded
    is_remote = (args.model_first or "").startswith(("http://", "https://"))
    answerer = _server(args) if is_remote else _model(args)
    from blockdraft.cli.chat_talk import Talk

    return Talk(answerer, system=args.system, max_tokens=args.max_tokens).run()


def _model(args: argparse.Namespace) -> Answerer:
    from blockdraft.cli.chat_answers import LocalModel
    from blockdraft.cli.generate import open_llm

    settings = merge_settings(flags.given_settings(args) | {"engine": "native"}).settings
    llm, _ = open_llm(args, asdict(settings))
    if not llm.tokenizer.has_chat_template:
        raise RequestError(f"'{settings.model}' has no chat template: use `blockdraft generate --raw`.")
    sampling = flags.sampling_from(args, llm.engine.models.sampling)
    return LocalModel(llm, sampling, public_id(settings.model) + settings.suffix)


def _server(args: argparse.Namespace) -> Answerer:
    url, args.model_first = args.model_first, None
    given = flags.given_settings(args)
    name = given.pop("model", None)
    if given:
        flag = flag_of(next(iter(given)))
        raise SettingsError(
            f"{flag} does not work with the server {url}, which has its own settings: leave it out."
        )
    from blockdraft.bench.endpoint import probe
    from blockdraft.cli.chat_answers import RemoteModel

    api_key = args.api_key or environment_api_key()
    endpoint = asyncio.run(probe(url, api_key, None if name is None else str(name)))
    return RemoteModel(endpoint, sampling_fields(args), api_key)


def sampling_fields(args: argparse.Namespace) -> dict[str, object]:
    """Return only the given fields: the server knows the recommended values of its model."""
    asked, usual = flags.sampling_from(args), SamplingParams()
    return {
        item.name: getattr(asked, item.name)
        for item in fields(SamplingParams)
        if (
            getattr(args, item.name) is not None
            if item.name in SAMPLING_NAMES
            else getattr(asked, item.name) != getattr(usual, item.name)
        )
    }
