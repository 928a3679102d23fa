"""Turns requests into prompts, and checks them while the field at fault is known.

Encoding takes long for long conversations: the routes run these functions in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import SamplingParams, check_request
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import CompletionRequest
from blockdraft.server.api.fields import field_at_fault
from blockdraft.text.tokenizer import Tokenizer

MAX_SCORES = 1 << 19  # log-probabilities of prompt tokens in one answer: some 20 MB of JSON


@field_at_fault("prompt")
def encode_prompts(asked: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    if asked.suffix:
        return [fill_in(prompt, asked, tokenizer) for prompt in asked.prompt]
    return [
        tokenizer.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in asked.prompt
    ]


# What tells a model to write what stands between two texts: in front of the first, of the second, of its own.
_FILL_IN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)


def fill_in(prompt: str | list[int], asked: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
    """A prompt whose answer goes between it and `suffix`. Raises RequestError without tokens for that."""
    for tokens in _FILL_IN_TOKENS:
        first, second, own = (tokenizer.token_id(token) for token in tokens)
        if first is not None and second is not None and own is not None:
            break
    else:
        raise RequestError(
            "'suffix' needs a fill-in-the-middle model, and this one has no tokens for it: leave it out.",
            "suffix",
        )
    before = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    after = tokenizer.encode(asked.suffix or "", add_special_tokens=False)
    # What the tokenizer puts in front of every text, if anything.
    start = tokenizer.encode("", add_special_tokens=True) if asked.add_special_tokens else []
    return [*start, first, *before, second, *after, own]


def echoed_texts(asked: CompletionRequest, prompts: Items[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The prompts as text, if the request asks for an echo."""
    if not asked.echo:
        return []
    return [
        prompt if isinstance(prompt, str) else tokenizer.decode(ids, asked.skip_special_tokens)
        for prompt, ids in zip(asked.prompt, prompts, strict=True)
    ]


def token_texts(tokens: Items[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def check_tokens(tokens: Items[int], info: EngineInfo) -> None:
    """Raises RequestError for an id outside the vocabulary, which decoding would skip silently."""
    wrong = next((token for token in tokens if token >= info.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"tokens: token id {wrong} is outside the vocabulary (0 to {info.vocab_size - 1}).", "tokens"
        )


def check_prompts(prompts: Items[Items[int]], field: str, sampling: SamplingParams, info: EngineInfo) -> None:
    """Raises RequestError for prompts that the engine can never run; they come from `field`."""
    names = {"prompt": field, "width": "speculative"}
    for prompt_ids in prompts:
        try:
            check_request(
                prompt_ids,
                sampling,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                most_context=info.most_context,
                block=info.block,
            )
        except RequestError as error:
            raise RequestError(str(error), names.get(error.field or "", error.field), error.code) from None


def check_scores(prompts: Items[Items[int]], field: str, sampling: SamplingParams) -> None:
    """Raises RequestError for more log-probabilities of prompts than one answer may hold."""
    if sampling.prompt_logprobs is None:
        return
    num_tokens, num_each = sampling.n * sum(map(len, prompts)), 1 + sampling.prompt_logprobs
    if num_tokens * num_each > MAX_SCORES:
        raise RequestError(
            f"{num_tokens} tokens of prompts with {num_each} log-probabilities each are more than the "
            f"{MAX_SCORES} that one answer may hold: send fewer prompts at once, or ask for fewer each.",
            field,
        )
