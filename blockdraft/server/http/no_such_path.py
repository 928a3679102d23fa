"""What to tell a client that asked for a path which this server does not have."""

from __future__ import annotations

import re

_HAS = (
    "this server has /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, "
    "/tokenize and /detokenize; /openapi.json describes them."
)
_BASE = "set the client's base URL to http://HOST:PORT/v1"

# Ours, as a client asks for it whose base URL lacks /v1 or has too much of it.
_OURS = re.compile(r"(?:/\w+){0,3}?/(chat/completions|completions|responses|models|messages)(/.*)?")
# Anthropic's clients add /v1 themselves.
_TWICE = re.compile(r"/v1(/v1)+(/.*)?")
_PARTS_OF_OPENAI = {
    "embeddings": "embeddings",
    "audio": "speech",
    "images": "images",
    "videos": "videos",
    "moderations": "moderation",
    "files": "files",
    "uploads": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "conversations": "conversations",
    "realtime": "realtime sessions",
    "evals": "evaluations",
    "rerank": "reranking",
    "score": "scoring by a path of its own",
    "engines": "engines",
}
_LLAMA_CPP = {"completion", "infill", "props", "slots", "apply-template", "embedding", "lora-adapters"}
_TEXT_GENERATION = {"generate", "generate_stream", "info", "get_model_info"}


def no_such_path(path: str) -> str:
    """Say what is missing, and what there is."""
    if _TWICE.fullmatch(path):
        return (
            f"no such path: /v1 is there twice. Anthropic's clients add it themselves, so their base URL is "
            f"http://HOST:PORT; that of OpenAI's is http://HOST:PORT/v1. {_capital(_HAS)}"
        )
    if path.startswith("/v1beta/"):
        return _other("Gemini's API")
    found = _OURS.fullmatch(path)
    if found is not None and not path.startswith("/v1/"):
        return f"no such path: this is /v1/{found[1]} here: {_BASE}."
    if path.startswith("/api/"):
        return _other("Ollama's API")
    first = path.removeprefix("/v1").strip("/").partition("/")[0]
    if first in _PARTS_OF_OPENAI:
        return f"no such path: this server writes text and has no {_PARTS_OF_OPENAI[first]}; {_HAS}"
    if first in _LLAMA_CPP:
        return _other("an API of llama.cpp's own")
    if first in _TEXT_GENERATION:
        return _other("an API of TGI's or SGLang's own")
    return f"no such path: {_HAS}"


def _other(name: str) -> str:
    return f"no such path: this is {name}, which this server does not speak: {_BASE}, as for OpenAI's; {_HAS}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
