"""The training set of a drafter: the target's answers to prompts, stored in shards.

A document is one prompt, with the chat template applied, and the target's own answer to that prompt. Each
turn of a conversation is a separate document, whose prompt is everything before it. A shard is one .npz file:

    tokens [T] uint32, prompt_sizes [D], answer_sizes [D], categories [D], is_greedy [D], keys [D], names [C]
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from blockdraft.bench.records import Prompt
from blockdraft.errors import SettingsError
from blockdraft.jsonl import Row, read_rows
from blockdraft.text.content import json_kind
from blockdraft.text.tokenizer import Tokenizer

T = TypeVar("T", Prompt, "Document")
_HINT = ' A line is {"messages": [{"role": "user", "content": "…"}], "category": "…"}.'


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and the target's own answer to it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    category: str
    is_greedy: bool
    key: int = 0  # identifies the conversation and its turn; the writer chooses the numbers


def read_conversations(path: Path) -> list[Prompt]:
    """Read JSON lines {"messages": [{"role": "user", "content": …}, …], "category": …}, also .xz and .gz.

    Assistant turns are dropped because the target writes its own. A line may have a string "prompt" in place
    of "messages": one user message.
    """
    found = [_conversation(row) for row in read_rows(path, SettingsError, hint=_HINT)]
    if not found:
        raise SettingsError(f"{path} holds no prompts.")
    return found


def _conversation(row: Row) -> Prompt:
    messages = row.fields.get("messages", [{"role": "user", "content": row.fields.get("prompt")}])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise row.error("'messages' is not a list of objects")
    texts: dict[str, list[str]] = {"user": [], "system": [], "assistant": []}
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in texts or not isinstance(content, str):
            raise row.error(f"a message of role {role!r} whose content is {json_kind(content)}")
        texts[role].append(content)
    if not texts["user"]:
        raise row.error("no user message")
    return Prompt(
        id=str(row.fields.get("id", row.place.number)),
        category=str(row.fields.get("category", "all")),
        turns=tuple(texts["user"]),
        system=texts["system"][0] if texts["system"] else None,
    )


def write_shard(path: Path, documents: Iterable[Document]) -> None:
    """Write `documents` into one file atomically."""
    listed = list(documents)
    names = sorted({document.category for document in listed})
    tokens = [token for document in listed for token in (*document.prompt_ids, *document.answer_ids)]
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.array(tokens, dtype=np.uint32),
            prompt_sizes=np.array([len(document.prompt_ids) for document in listed], dtype=np.int32),
            answer_sizes=np.array([len(document.answer_ids) for document in listed], dtype=np.int32),
            categories=np.array([names.index(document.category) for document in listed], dtype=np.int32),
            is_greedy=np.array([document.is_greedy for document in listed], dtype=bool),
            keys=np.array([document.key for document in listed], dtype=np.int64),
            names=np.array(names, dtype=str),
        )
    partial.rename(path)


def read_shard(path: Path) -> list[Document]:
    try:
        with np.load(path, allow_pickle=False) as shard:
            arrays = {name: shard[name] for name in shard.files}
        names = [str(name) for name in arrays["names"]]
        columns = ("prompt_sizes", "answer_sizes", "categories", "is_greedy", "keys")
        rows = zip(*(arrays[column].tolist() for column in columns), strict=True)
        tokens = arrays["tokens"].tolist()
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise SettingsError(f"'{path}' is not a shard of answers ({error}): delete it.") from None
    documents, begin = [], 0
    for prompt_size, answer_size, category, is_greedy, key in rows:
        middle, end = begin + prompt_size, begin + prompt_size + answer_size
        prompt_ids, answer_ids = tuple(tokens[begin:middle]), tuple(tokens[middle:end])
        documents.append(Document(prompt_ids, answer_ids, names[category], is_greedy, key))
        begin = end
    return documents


def first_of_each(listed: Iterable[T], count: int) -> tuple[list[T], list[T]]:
    """Split a list into the first `count` items of each category and all other items, both in order."""
    seen: Counter[str] = Counter()
    first, rest = list[T](), list[T]()
    for one in listed:
        (first if seen[one.category] < count else rest).append(one)
        seen[one.category] += 1
    return first, rest


def encode_conversation(tokenizer: Tokenizer, one: Prompt, said: Sequence[str] = ()) -> list[int]:
    """Return the token ids of a conversation's next prompt, with the chat template if there is one."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(one.messages(said))
    return encode_plain(tokenizer, one, said)


def encode_plain(tokenizer: Tokenizer, one: Prompt, said: Sequence[str] = ()) -> list[int]:
    """Return the token ids of the conversation as plain lines, without a chat template."""
    return tokenizer.encode("\n".join(str(message["content"]) for message in one.messages(said)))
