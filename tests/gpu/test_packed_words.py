"""Four-bit weights on a card: the bits and the tokens of the same files unpacked, in graphs."""

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed
from blockdraft.kernels.triton import narrow, packed
from blockdraft.kernels.triton.packed_few import Division, takes
from blockdraft.models.packed_words import Words, pack_for_kernel
from tests.kernels.implementations import DEVICE, normal
from tests.kernels.test_triton_packed import IN_FLOAT32, KINDS

BF16 = torch.bfloat16
FILES = (
    "nvfp4-modelopt", "nvfp4-awq", "nvfp4-compressed", "mxfp4-compressed", "gptq-symmetric", "awq-biases",
    "auto-round-unnamed", "int4-compressed", "gguf-q4_0", "gguf-q4_1", "gguf-q8_0",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_four_bits_emit_the_tokens_of_unpacked_weights(tmp_path, name, monkeypatch):
    for library in ("gguf", "compressed_tensors"):  # which write the files
        pytest.importorskip(library)
    from tests.checkpoints.test_quantised import IN_WORDS, in_tiles, loaded, tokens, top_packed

    assert set(FILES) == IN_WORDS.keys()
    pair, code = in_tiles(tmp_path, name), IN_WORDS[name][1]
    monkeypatch.setitem(
        MEASURED, (torch.cuda.get_device_capability(), code), KernelSpeed(16, plain=1, gated=4)
    )
    monkeypatch.setattr(narrow, "MAX_ROWS", 0)
    kept, both, unpacked = (
        loaded(pair.packed, storage, dtype="bfloat16", device="cuda") for storage in ("keep", "both", "none")
    )
    for one in (kept, both):
        assert any(isinstance(weight, Words) for _, weight in top_packed(one[0].target))
    assert name == "nvfp4-awq" or kept[0].why_not_captured() is None
    assert both[0].why_not_captured() is None
    assert tokens(kept) == tokens(both) == tokens(unpacked)


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("int4 of a row", *IN_FLOAT32)])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 33])
def test_the_loop_of_a_few_tokens_has_the_bits_of_unpacked_weights(kind, num_tokens):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the loop was measured on Hopper")
    kernels, weight = kernels_for(BF16, DEVICE), KINDS[kind](1024, 4096 + 128)
    words, values = pack_for_kernel(weight).weight, weight.dequantise(BF16)
    x, bias = normal(num_tokens, 4096 + 128, dtype=BF16), normal(1024, dtype=BF16, seed=2)
    onto = normal(num_tokens, 1024, dtype=BF16, seed=3)
    expected = kernels.linear(x, values, bias, onto.clone())
    for division in (Division(8), Division(16)):
        assert takes(x, words, "none", division)
        assert torch.equal(packed.linear(x, words, bias, onto=onto, config=division), expected)
