"""The server over the fixture pair, for the tests of this folder."""

import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path

import openai
import tokenizers

from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.engine.engine import Engine
from blockdraft.engine.loop import EngineLoop
from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.text.tokenizer import Tokenizer
from tests.server.asking import listening

PAIR = Path(__file__).parents[1] / "fixtures/pair"
NAME = "org/pair"
# What the pair writes after tN is tN+1: with these names it thinks from t3 to t6.
THINKING = {"t3": "<think>", "t6": "</think>"}
OPENING = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)


@functools.cache
def models(max_context=512, max_queue=8):
    settings = Settings(
        model=str(PAIR / "target"),
        draft=str(PAIR / "draft"),
        device="cpu",
        dtype="float64",
        max_queue=max_queue,
        max_context=max_context,
    )
    return load_models(settings, lambda _: None)


def thinking_tokenizer(chat_template=None):
    """The pair's tokenizer with two tokens called <think> and </think>; tokens are parted by spaces."""
    parts = open_checkpoint(str(PAIR / "target")).tokenizer_parts()
    content = json.loads(parts.tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {THINKING.get(token, token): i for token, i in vocabulary.items()}
    content["decoder"] = None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    template = parts.chat_template if chat_template is None else chat_template
    return Tokenizer(replace(parts, tokenizer=tokenizer, chat_template=template))


@contextlib.contextmanager
def app_over(models, name=NAME):
    loop = EngineLoop(lambda startup: Engine(models)).wait()
    try:
        yield make_app(loop, name=name, options=ServerOptions())
    finally:
        loop.close()


@contextlib.contextmanager
def client_of(models, name=NAME):
    """OpenAI's client of a server over `models`."""
    with app_over(models, name) as app, listening(app) as (host, port):
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
