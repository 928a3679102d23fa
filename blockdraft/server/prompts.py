"""Turns requests into prompts that the engine can run, checked while the field at fault can be named.

Encoding takes long for long conversations: the routes run these functions beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TypeVar

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import SamplingParams, check_request
from blockdraft.errors import RequestError
from blockdraft.server.fields import ChatRequest, CompletionRequest, TokenizeRequest
from blockdraft.text.tokenizer import Tokenizer

T = TypeVar("T")


def encode_chat(asked: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_chat(
        asked.messages,
        add_special_tokens=False,
        split_special_tokens=asked.split_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **asked.template_kwargs,
    )


def encode_prompts(asked: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    return [
        tokenizer.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in asked.prompt
    ]


def echoed_texts(asked: CompletionRequest, prompts: Items[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The prompts as text, if they are to be repeated."""
    if not asked.echo:
        return []
    return [
        prompt if isinstance(prompt, str) else tokenizer.decode(ids, asked.skip_special_tokens)
        for prompt, ids in zip(asked.prompt, prompts, strict=True)
    ]


def tokenize(asked: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    """As in vLLM, special tokens are added to prompts but not to conversations, unless told otherwise."""
    if asked.prompt is not None:
        is_added = asked.add_special_tokens is not False
        return with_field_error("prompt", tokenizer.encode)(asked.prompt, is_added)
    return with_field_error("messages", tokenizer.encode_chat)(
        asked.messages or [],
        add_special_tokens=bool(asked.add_special_tokens),
        split_special_tokens=asked.split_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **asked.chat_template_kwargs,
    )


def token_texts(tokens: Items[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def with_field_error(field: str, action: Callable[..., T]) -> Callable[..., T]:
    """`action`, whose RequestErrors name the field they are about."""

    def act(*args: object, **kwargs: object) -> T:
        try:
            return action(*args, **kwargs)
        except RequestError as error:
            raise RequestError(str(error), field) from None

    return act


def check_prompts(prompts: Items[Items[int]], field: str, sampling: SamplingParams, info: EngineInfo) -> None:
    """Raises RequestError for what the engine can never run; the prompts come from `field`."""
    names = {"prompt": field, "width": "speculative"}
    for prompt_ids in prompts:
        try:
            check_request(
                prompt_ids,
                sampling,
                vocab_size=info.vocab_size,
                max_context=info.max_context,
                block=info.block,
            )
        except RequestError as error:
            raise RequestError(str(error), names.get(error.field or "", error.field), error.code) from None
