"""From requests to prompts the engine can run, checked while the field at fault can still be named.

Encoding takes long for long conversations: the routes run these functions beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TypeVar

from blockdraft.errors import RequestError
from blockdraft.server.backend import Info
from blockdraft.server.body import FieldError
from blockdraft.server.fields import ChatRequest, CompletionRequest, TokenizeRequest
from blockdraft.text.tokenizer import Tokenizer

T = TypeVar("T")


def encode_chat(asked: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_chat(
        asked.messages,
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
        return blaming("prompt", tokenizer.encode)(asked.prompt, is_added)
    text = blaming("messages", tokenizer.render)(
        asked.messages or [],
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **asked.chat_template_kwargs,
    )
    return tokenizer.encode(text, bool(asked.add_special_tokens))


def token_texts(tokens: Items[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def blaming(field: str, action: Callable[..., T]) -> Callable[..., T]:
    """`action`, whose RequestErrors name the field they are about."""

    def act(*args: object, **kwargs: object) -> T:
        try:
            return action(*args, **kwargs)
        except RequestError as error:
            raise FieldError(str(error), field) from None

    return act


def check_tokens(asked: ChatRequest | CompletionRequest, info: Info) -> None:
    width = asked.speculative.width
    if width is not None and width > info.block:
        raise FieldError(
            f"'speculative' has width {width}: this engine verifies {info.block} tokens per step at most.",
            "speculative",
        )
    for field, token_ids in (("logit_bias", asked.logit_bias), ("stop_token_ids", asked.stop_token_ids)):
        _check_vocabulary(field, list(token_ids), info)


def check_prompt(prompt_ids: Items[int], field: str, info: Info) -> None:
    if not prompt_ids:
        raise FieldError(f"'{field}' is empty: a prompt needs at least one token.", field)
    if len(prompt_ids) >= info.max_context:
        raise FieldError(
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {info.max_context} and the "
            f"answer needs at least one: shorten '{field}', or raise --max-context.",
            field,
            code="context_length_exceeded",
        )
    _check_vocabulary(field, prompt_ids, info)


def _check_vocabulary(field: str, token_ids: Items[int], info: Info) -> None:
    if token_ids and max(token_ids) >= info.vocab_size:
        raise FieldError(
            f"'{field}' has token id {max(token_ids)}, outside the vocabulary of {info.vocab_size} tokens.",
            field,
        )
