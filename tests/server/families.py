"""Tokenizers in the style of each family: bytes, the family's markup, and a small template of our own."""

import functools
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "fixtures/templates"
_GEMMA = (
    "<turn|>",
    "<|turn>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|think|>",
)
_HARMONY = ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
# family: special tokens, the first of which ends an answer, and markup that is not called special
FAMILIES = {
    "smollm2": (("<|im_end|>", "<|im_start|>"), ()),
    "qwen3": (("<|im_end|>", "<|im_start|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "qwen3_coder": (("<|im_end|>", "<|im_start|>"), ("<tool_call>", "</tool_call>")),
    "gemma4": (_GEMMA, ()),
    "llama31": (("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"), ()),
    "gpt_oss": (_HARMONY, ()),
}
FORMAT_OF = {
    "smollm2": "plain",
    "qwen3": "hermes",
    "qwen3_coder": "qwen_xml",
    "gemma4": "gemma",
    "llama31": "llama",
    "gpt_oss": "harmony",
}


@functools.cache
def family_tokenizer(family):
    special, markup = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in markup])
    template = (TEMPLATES / f"{family}.jinja").read_text()
    return Tokenizer(
        TokenizerParts(tokenizer, template, None, special[0], (tokenizer.token_to_id(special[0]),))
    )
