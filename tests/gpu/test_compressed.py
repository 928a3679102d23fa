"""Compressed keys and values on a card: the tokens of plain decoding, for all that `CARD` may serve."""

from dataclasses import replace

import pytest
import torch

from blockdraft.kernels import kv_formats
from tests.lossless import families
from tests.models.families import FULL, GEMMA, GPT_OSS, HYBRID, SLIDING

EIGHT, ALL = ("int8",), tuple(kv_formats.BITS)
SLIDES = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
# name -> family, what differs from its tiny configuration, formats
PAIRS = {
    "heads of 64": ("llama", {"head_dim": 64, "num_key_value_heads": 1}, ALL),
    "heads of 128": ("qwen3", {"head_dim": 128, "num_attention_heads": 8}, ALL),
    "heads of 128, windows": ("qwen3", {"head_dim": 128, **SLIDES}, ("int8", "tq4")),
    "heads of 256, hybrid": ("qwen3_5", {**HYBRID, "head_dim": 256, "num_attention_heads": 16}, ALL),
    "heads of 256 and 512, windows": (
        "gemma4",
        {**GEMMA, "head_dim": 256, "global_head_dim": 512, "sliding_window": 100, "num_attention_heads": 8},
        EIGHT,
    ),
    "heads of 512": (
        "gemma4",
        {**GEMMA, "head_dim": 512, "global_head_dim": 512, "sliding_window": 100, "layer_types": [FULL] * 4},
        ("tq4", "tq4v3"),
    ),
    "heads of 64, windows, sinks": (
        "gpt_oss",
        {**GPT_OSS, "head_dim": 64, "sliding_window": 100, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
        EIGHT,
    ),
}


@pytest.fixture(autouse=True)
def wide_blocks(monkeypatch):
    """Blocks take the kernel that is to be tested."""
    from blockdraft.kernels.triton import kv_mma

    monkeypatch.setattr(kv_mma, "CARD", replace(kv_mma.CARD, has_wide_blocks=True))


CASES = [(name, kv_dtype) for name, (_, _, formats) in PAIRS.items() for kv_dtype in formats]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < kv_formats.CARD.capability,
    reason="compressed keys and values need Hopper, or later",
)
@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_compressed_keys_emit_the_tokens_of_plain_decoding(name, kv_dtype):
    """Run it in parallel (`-n 8`): most of its time is one process's compiling of kernels."""
    family, overrides, _ = PAIRS[name]
    shared = {"dtype": "bfloat16", "device": "cuda", "max_model_len": 300, "page_size": 16}
    pair = families.make_pair(family, overrides, seed=1, draft_head_dim=128, **shared)
    # The hinted drafter draws on the host, which a graph cannot hold.
    families.check_compressed(pair, kv_dtype, drafts=kv_dtype, is_captured=False)
