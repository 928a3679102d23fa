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
from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.text.tokenizer import Tokenizer
from tests.server.asking import listening
from tests.server.remote import remote_engine

PAIR = Path(__file__).parents[1] / "fixtures/pair"
NAME = "org/pair"
# What the pair writes after tN is tN+1: with these names it thinks from t3 to t6.
THINKING = {"t3": "<think>", "t6": "</think>"}
OPENING = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)


def models():
    return loaded()[0]


def plan():
    return loaded()[1]


@functools.cache
def loaded(max_model_len=512, max_queue=8):
    """Models and plan."""
    settings = Settings(
        model=str(PAIR / "target"),
        draft=str(PAIR / "draft"),
        device="cpu",
        dtype="float64",
        max_queue=max_queue,
        max_model_len=max_model_len,
    )
    return load_models(settings, lambda _: None)


def thinking_tokenizer(chat_template=None):
    """The pair's tokenizer with two tokens called <think> and </think>; tokens are parted by spaces."""
    return spelled_tokenizer(THINKING, chat_template)


def spelled_tokenizer(names, chat_template=None, special=()):
    """The pair's tokenizer with other names for some tokens, some of them special."""
    parts = open_checkpoint(str(PAIR / "target")).tokenizer_parts()
    content = json.loads(parts.tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    content["decoder"] = None
    like = content["added_tokens"][0]
    for name in special:
        content["added_tokens"].append({**like, "id": content["model"]["vocab"][name], "content": name})
    content["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    template = parts.chat_template if chat_template is None else chat_template
    return Tokenizer(replace(parts, tokenizer=tokenizer, chat_template=template))


@contextlib.contextmanager
def app_over(models, name=NAME, plan=None):
    with remote_engine(lambda startup: Engine(models, plan or loaded()[1])) as engine:
        yield make_app(engine, name=name, options=ServerOptions())


@contextlib.contextmanager
def client_of(models, name=NAME, plan=None):
    """OpenAI's client of a server over `models`."""
    with app_over(models, name, plan) as app, listening(app) as (host, port):
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)


def byte_tokenizer():
    """The pair's tokenizer with byte-level tokens: after t3 it writes an emoji in two parts and more."""
    parts = open_checkpoint(str(PAIR / "target")).tokenizer_parts()
    content = json.loads(parts.tokenizer.to_str())
    spelled = {number: f" t{number}".encode() for number in range(62)}
    spelled |= {number: bytes([0xC0 + number]) for number in range(20, 32)}  # first bytes of characters
    spelled |= {4: b"\xf0\x9f", 5: b"\x98\x80", 6: b" x", 7: b" \xe2\x82", 8: b" y"}
    names = {"".join(BYTE_NAMES[byte] for byte in raw): number for number, raw in spelled.items()}
    content["model"]["vocab"] = {**names, "<eos>": 62, "<mask>": 63}
    content["model"]["unk_token"] = "<mask>"
    content["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return Tokenizer(replace(parts, tokenizer=tokenizers.Tokenizer.from_str(json.dumps(content))))


# How byte-level tokenizers write a byte: the printable ones as they are, the others from U+0100 on.
BYTE_NAMES = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
BYTE_NAMES |= {
    byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in BYTE_NAMES)
}
