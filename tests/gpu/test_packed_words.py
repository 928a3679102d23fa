"""Four-bit weights on a card: the bits and the tokens of the same files unpacked, in graphs."""

from dataclasses import replace

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.packed_speeds import MEASURED
from blockdraft.kernels.triton import narrow, packed
from blockdraft.models.packed_words import Words, pack_for_kernel
from tests.checkpoints.quantised import Pair
from tests.checkpoints.test_quantised import IN_WORDS, TILES, loaded, tokens, top_packed
from tests.kernels.implementations import DEVICE, normal
from tests.kernels.test_triton_packed import KINDS

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", IN_WORDS)
def test_files_of_four_bits_emit_the_tokens_of_unpacked_weights(tmp_path, name, monkeypatch):
    form, code = IN_WORDS[name]
    monkeypatch.setitem(MEASURED, (torch.cuda.get_device_capability(), code), 16)
    monkeypatch.setattr(narrow, "MAX_ROWS", 0)
    pair = Pair(tmp_path, replace(form, overrides={**TILES, "attention_bias": name == "awq-biases"}))
    kept, unpacked = (
        loaded(pair.packed, storage, dtype="bfloat16", device="cuda") for storage in ("keep", "none")
    )
    assert any(isinstance(weight, Words) for _, weight in top_packed(kept[0].target))
    assert name == "nvfp4-awq" or kept[0].why_not_captured() is None
    assert tokens(kept) == tokens(unpacked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 33, 64, 65, 300])
def test_products_have_the_bits_of_unpacked_weights(kind, num_tokens):
    """Of our kernel up to 64 tokens, and of cuBLAS beyond; whole steps, and a step with a tail."""
    kernels = kernels_for(BF16, DEVICE)
    for rows, columns in ((1024, 4096), (1056, 4096 + 384)):
        weight = KINDS[kind](rows, columns)
        words, values = pack_for_kernel(weight), weight.dequantise(BF16)
        assert torch.equal(packed.unpack(words.weight, BF16), values)
        x, bias = normal(num_tokens, columns, dtype=BF16), normal(rows, dtype=BF16, seed=2)
        onto = normal(num_tokens, rows, dtype=BF16, seed=3)
        got = packed.linear(x, words.weight, bias, onto=onto)
        assert torch.equal(got, kernels.linear(x, values, bias, onto.clone()))
        got = packed.linear(x, words.weight, gate="silu")
        assert torch.equal(got, kernels.gated_linear(x, values, None, "silu"))
