"""GGUF files: parsed like gguf-py does, seen as Hugging Face checkpoints, refused when damaged."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from blockdraft.checkpoints import fetch
from blockdraft.checkpoints.checkpoint import TensorInfo
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.checkpoints.gguf_config import hugging_face_names, permuted_heads
from blockdraft.checkpoints.gguf_header import GgufHeader
from blockdraft.engine.sampling_defaults import sampling_defaults
from blockdraft.errors import ModelError
from blockdraft.models.packed_gguf import unpack
from tests.checkpoints import gguf_files
from tests.checkpoints.gguf_files import (
    BPE_MERGES,
    BPE_TOKENS,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUANTISED,
    SPM_PIECES,
    SPM_SCORES,
    SPM_TOKENS,
    Type,
    expert_metadata,
    expert_weights,
    weights,
    write,
)
from tests.memory import peak_growth_mb


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def open_gguf(path: Path) -> GgufCheckpoint:
    return GgufCheckpoint(path, name=path.name)


def read_everything(path: Path) -> None:
    checkpoint = open_gguf(path)
    for name in checkpoint.tensors():
        checkpoint.read(name)
    checkpoint.tokenizer_parts()


def refusal(path: Path) -> str:
    """The message of the ModelError that opening and reading everything must end in."""
    with pytest.raises(ModelError) as caught:
        read_everything(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_metadata_and_tensor_table_match_gguf_py(tiny: Path):
    ours, theirs = GgufHeader(tiny, name="tiny"), gguf.GGUFReader(tiny)
    expected = {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key}
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in ours.metadata.items()} == expected
    table = {t.name: (tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors}
    assert {n: (t.shape, t.offset, t.num_bytes) for n, t in ours.tensors.items()} == table


def test_every_quantisation_dequantises_as_gguf_py_does(tiny: Path):
    header, theirs = GgufHeader(tiny, name="tiny"), gguf.GGUFReader(tiny)
    names = {stored: name for name, stored in hugging_face_names(header).items()}
    permuted = tuple(f"{part}.weight" for part in permuted_heads(header))
    assert {t.tensor_type for t in theirs.tensors} == {*QUANTISED.values(), Type.F32}
    for tensor in theirs.tensors:
        if names[tensor.name].endswith(permuted):
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        read = open_gguf(tiny).read(names[tensor.name])
        assert read.dtype == (torch.float16 if tensor.tensor_type == Type.F16 else torch.float32)
        assert np.array_equal(read.float().numpy(), expected), tensor.name


def test_tensor_table_gives_the_types_that_read_returns(tmp_path: Path):
    path = write(tmp_path / "a.gguf", kinds={**QUANTISED, "blk.0.attn_v.weight": Type.BF16})
    checkpoint = open_gguf(path)
    table = checkpoint.tensors()
    assert table["model.embed_tokens.weight"] == TensorInfo((48, HIDDEN), torch.float32)
    assert table["model.layers.0.mlp.up_proj.weight"] == TensorInfo((FFN, HIDDEN), torch.float16)
    assert table["model.layers.0.self_attn.v_proj.weight"].dtype == torch.bfloat16
    for name, info in table.items():
        read = checkpoint.read(name)
        assert (tuple(read.shape), read.dtype) == info
    types = {name: kind for name in table if (kind := checkpoint.ggml_type(name)) is not None}
    assert types == {
        "model.embed_tokens.weight": Type.Q8_0,
        "model.layers.0.mlp.gate_proj.weight": Type.Q4_1,
        "model.layers.0.mlp.down_proj.weight": Type.Q4_0,
    }


# Every storage that rows can have, with and without the permutation of q and k.
MIXED = {
    "token_embd.weight": Type.F16,
    "blk.0.attn_q.weight": Type.Q8_0,
    "blk.0.attn_k.weight": Type.F16,
    "blk.0.attn_v.weight": Type.Q4_1,
    "blk.0.ffn_gate.weight": Type.BF16,
    "blk.0.ffn_down.weight": Type.Q5_0,
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufCheckpoint:
    tensors = weights("qwen2")  # with a bias, which is permuted too
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return open_gguf(write(path, architecture=request.param, tensors=tensors, kinds=MIXED))


def test_any_slice_of_rows_is_that_slice_of_the_tensor(mixed: GgufCheckpoint):
    for name, info in mixed.tensors().items():
        whole, num_rows = mixed.read(name), info.shape[0]
        for begin in range(0, num_rows + 1, 5):
            assert torch.equal(mixed.read(name, begin), whole[begin:])
            for end in {begin, *range(begin, num_rows + 1, 7), num_rows}:
                assert torch.equal(mixed.read(name, begin, end), whole[begin:end]), (name, begin, end)


def test_packed_rows_dequantise_to_what_read_returns(mixed: GgufCheckpoint):
    packed = [name for name in mixed.tensors() if mixed.ggml_type(name) is not None]
    assert len(packed) == 3
    for name in packed:
        num_rows, num_columns = mixed.tensors()[name].shape
        block_length, block_bytes = gguf.GGML_QUANT_SIZES[Type(mixed.ggml_type(name))]
        rows, expected = mixed.read_packed(name), mixed.read(name)
        assert rows.dtype == torch.uint8
        assert rows.shape == (num_rows, num_columns // block_length * block_bytes)
        assert torch.equal(unpack(rows, mixed.ggml_type(name)).view_as(expected), expected)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
@pytest.mark.parametrize("read", ["read", "read_packed"])
def test_a_scale_that_is_no_number_is_refused_by_the_tensor(tmp_path: Path, kind: Type, read: str):
    path = write(tmp_path / "a.gguf", kinds={"blk.0.ffn_up.weight": kind})
    info = GgufHeader(path, name="a").tensors["blk.0.ffn_up.weight"]
    last = info.offset + info.num_bytes - gguf.GGML_QUANT_SIZES[kind][1]
    data = bytearray(path.read_bytes())
    data[last : last + 2] = b"\x00\x7e"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"a scale of 'model\.layers\.0\.mlp\.up_proj\.weight' is infinite"):
        getattr(open_gguf(path), read)("model.layers.0.mlp.up_proj.weight")


def test_packed_rows_are_in_hugging_face_order(mixed: GgufCheckpoint):
    expected = gguf.quants.quantize(weights("qwen2")["blk.0.attn_q.weight"], Type.Q8_0)
    rows = mixed.read_packed("model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(rows.numpy(), expected)


def test_a_tensor_that_is_not_there_is_named(tiny: Path):
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        open_gguf(tiny).ggml_type("lm_head.weight")


def test_what_is_read_is_memory_of_its_own(tiny: Path):
    checkpoint = open_gguf(tiny)
    for name, info in checkpoint.tensors().items():
        read = checkpoint.read(name, 0, 2)
        assert read.untyped_storage().nbytes() == read.nbytes, (name, info)
        read.zero_()
        assert checkpoint.read(name, 0, 2).any()


def test_file_cut_after_opening_is_named(tiny: Path):
    checkpoint = open_gguf(tiny)
    os.truncate(tiny, 5000)
    with pytest.raises(ModelError, match=r"'tiny\.gguf' is truncated"):
        [checkpoint.read(name) for name in checkpoint.tensors()]


@pytest.mark.slow
def test_loading_in_slices_keeps_the_file_out_of_memory(tmp_path: Path):
    tensors = weights() | {"blk.0.ffn_up.weight": np.zeros((50_000, 1024), np.float16)}  # 102 MB
    path = write(tmp_path / "a.gguf", tensors=tensors)
    assert peak_growth_mb(GgufCheckpoint, path, tensor="model.layers.0.mlp.up_proj.weight") < 30


# Mixtures of experts.


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_experts_are_sliced_as_rows(tmp_path: Path, architecture: str):
    tensors = expert_weights(architecture)
    path = write(
        tmp_path / "a.gguf",
        architecture=architecture,
        tensors=tensors,
        metadata=expert_metadata(architecture),
        kinds={"blk.0.ffn_gate_exps.weight": Type.MXFP4},
    )
    checkpoint = open_gguf(path)
    down = checkpoint.read("model.layers.0.mlp.experts.down_proj", 1, 3)
    assert np.array_equal(down.numpy(), tensors["blk.0.ffn_down_exps.weight"][1:3])
    name = "model.layers.0.mlp.experts.gate_proj"
    assert checkpoint.ggml_type(name) == Type.MXFP4
    assert checkpoint.tensors()[name].shape == (EXPERTS, EXPERT_FFN, HIDDEN)
    stored = gguf.quants.quantize(tensors["blk.0.ffn_gate_exps.weight"], Type.MXFP4)
    packed = checkpoint.read_packed(name)[1:3]
    assert packed.shape == (2, EXPERT_FFN, HIDDEN // 32 * 17)
    assert np.array_equal(packed.numpy(), stored[1:3])
    values = checkpoint.read(name, 1, 3)
    assert np.array_equal(values.numpy(), gguf.quants.dequantize(stored, Type.MXFP4)[1:3])
    assert torch.equal(unpack(packed, Type.MXFP4).view_as(values), values)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_used_count", 0),
        ("gpt-oss", "attention.sliding_window_pattern", 3),
        ("gpt-oss", "rope.freq_base_swa", 1.0),
        ("gpt-oss", "rope.scaling.yarn_attn_factor", 2.0),
        ("gpt-oss", "rope.scaling.yarn_ext_factor", 0.5),
    ],
)
def test_unknown_mixtures_are_refused_by_key(tmp_path: Path, architecture: str, key: str, value: float):
    path = write(
        tmp_path / "a.gguf",
        architecture=architecture,
        tensors=expert_weights(architecture),
        metadata=expert_metadata(architecture) | {f"{architecture}.{key}": value},
    )
    assert f"{architecture}.{key}" in refusal(path)


def test_config_speaks_hugging_face(tiny: Path):
    config = dict(open_gguf(tiny).config)
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": 48,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


def test_output_weight_unties_and_biases_show_in_the_config(tmp_path: Path):
    tensors = weights("qwen2") | {"output.weight": np.ones((48, HIDDEN), np.float32)}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", architecture="qwen2", tensors=tensors))
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.tensors()["lm_head.weight"].shape == (48, HIDDEN)


def test_rope_factors_become_rope_scaling(tmp_path: Path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = open_gguf(write(tmp_path / "a.gguf", tensors=weights() | {"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "factors",
        "factors": factors.tolist(),
    }
    assert not any("rope" in name for name in checkpoint.tensors())


def test_linear_rope_scaling_is_read(tmp_path: Path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", metadata=scaling))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_file_is_sampled_as_llama_cpp_does_it(tiny: Path):
    assert open_gguf(tiny).generation_file == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert open_gguf(tiny).own_sampling == {}


def test_what_a_file_recommends_goes_before_llama_cpps_defaults(tmp_path: Path):
    keys = {"temp": -1.0, "top_k": 20, "penalty_repeat": 1.05, "xtc_probability": 0.5}
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    file = open_gguf(write(tmp_path / "x.gguf", metadata=metadata))
    assert file.own_sampling == {"temperature": 0.0, "top_k": 20, "repetition_penalty": 1.05}
    rest = {"top_p": 0.95, "min_p": 0.05}
    assert sampling_defaults(file.generation_file, name="x") == {**file.own_sampling, **rest}


def test_a_file_says_which_published_model_it_is(tmp_path: Path):
    metadata = {
        "general.name": "Qwen3 8B",
        "general.basename": "Qwen3",
        "general.size_label": "8B",
        "general.base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B-Base",
    }
    file = open_gguf(write(tmp_path / "x.gguf", metadata=metadata))
    assert file.published_names == ("Qwen3 8B", "Qwen3-8B", "Qwen/Qwen3-8B-Base")
    assert open_gguf(write(tmp_path / "y.gguf")).published_names == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gptneox"}, "gptneox"),
        ({"architecture": "qwen2moe"}, "qwen2moe"),
        ({"architecture": "qwen3next"}, "qwen3next"),
        ({"architecture": "gemma4"}, "gemma4"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"metadata": {"llama.expert_count": 8}}, "8 experts"),
        ({"metadata": {"split.count": 3}}, "split"),
        ({"metadata": {"llama.attention.key_length": 16, "llama.rope.dimension_count": 8}}, "rope"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "k_proj"),
        ({"metadata": {"llama.block_count": "one"}}, "block_count"),
        ({"metadata": {"llama.block_count": 1 << 31}}, "block_count"),
        ({"metadata": {"tokenizer.ggml.pre": "falcon"}}, "falcon"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "t5"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 9999}}, "9999"),
        ({"tokenizer": None}, "tokenizer.ggml.tokens"),
        (
            {"tensors": weights() | {"blk.0.ffn_up_exps.weight": np.ones((2, 2, 32), np.float32)}},
            "ffn_up_exps",
        ),
        ({"kinds": {"output_norm.weight": Type.Q8_0}}, "vector in blocks of 32"),
        ({"tensors": weights() | {"blk.0.ssm_a.weight": np.ones(32, np.float32)}}, "ssm_a"),
        ({"tensors": {"output_norm.weight": np.ones(32, np.float32)}}, "token_embd"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, changes: dict, words: str):
    assert words in refusal(write(tmp_path / "a.gguf", **changes))


# Damage. The header is: magic, u32 version, u64 tensors, u64 keys, then the first key's u64 length.


@pytest.mark.parametrize(
    ("offset", "patch", "words"),
    [
        (0, b"PK\x03\x04", "instead of b'GGUF'"),
        (4, struct.pack("<I", 1), "version is 1"),
        (4, struct.pack("<I", 9), "version is 9"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "'tiny.gguf' cannot be read"),
        (16, struct.pack("<Q", 1 << 60), "metadata"),
        (24, struct.pack("<Q", 1 << 60), "in the middle"),
        (32, b"\xff\xff", "UTF-8"),
    ],
)
def test_damaged_header_is_refused(tiny: Path, offset: int, patch: bytes, words: str):
    data = bytearray(tiny.read_bytes())
    data[offset : offset + len(patch)] = patch
    tiny.write_bytes(data)
    assert words in refusal(tiny)


def patch_after(path: Path, marker: bytes, patch: bytes, *, skip: int = 0) -> None:
    data = bytearray(path.read_bytes())
    start = data.index(marker) + len(marker) + skip
    data[start : start + len(patch)] = patch
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("marker", "skip", "patch", "words"),
    [
        (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 50), "metadata"),
        (b"tokenizer.ggml.tokens", 0, struct.pack("<I", 77), "unknown type 77"),
        (b"tokenizer.ggml.tokens", 4, struct.pack("<I", 9), "unknown type 9"),
        (b"tokenizer.ggml.tokens", 16, struct.pack("<Q", (1 << 64) - 1), "in the middle"),
        (b"tokenizer.ggml.tokens", 16, struct.pack("<Q", 1 << 20), "in the middle"),
        (b"tokenizer.ggml.tokens", 24, b"\xff", "UTF-8"),
        (b"output_norm.weight", 0, struct.pack("<I", 4000), "4000 dimensions"),
        (b"output_norm.weight", 4, struct.pack("<Q", 0), "empty dimension"),
        (b"output_norm.weight", 4, struct.pack("<Q", 1 << 62), "truncated"),
        (b"output_norm.weight", 12, struct.pack("<I", 99), "unknown type 99"),
        (b"output_norm.weight", 12, struct.pack("<I", Type.I32), "I32"),
        (b"output_norm.weight", 16, struct.pack("<Q", 1 << 62), "truncated"),
        (b"output_norm.weight", 16, struct.pack("<Q", 4), "multiple of 32"),
    ],
)
def test_damaged_entry_is_refused(tiny: Path, marker: bytes, skip: int, patch: bytes, words: str):
    patch_after(tiny, marker, patch, skip=skip)
    assert words in refusal(tiny)


def test_repeated_tensor_is_refused(tiny: Path):
    tiny.write_bytes(tiny.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    assert "'blk.0.attn_k.weight' appears twice" in refusal(tiny)


def test_repeated_key_is_refused(tiny: Path):
    entry = struct.pack("<Q3sII", 3, b"key", 4, 0)
    tiny.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entry + entry)
    assert "'key' appears twice" in refusal(tiny)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf")


@settings(max_examples=50, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(whole: Path, fraction: float):
    data_end = max(info.offset + info.num_bytes for info in GgufHeader(whole, name="w").tensors.values())
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(whole.read_bytes()[: int(fraction * data_end)])
    refusal(cut)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_flipped_metadata_byte_never_escapes_as_another_error(whole: Path, data: st.DataObject):
    content = bytearray(whole.read_bytes())
    first_tensor = min(info.offset for info in GgufHeader(whole, name="w").tensors.values())
    content[data.draw(st.integers(0, first_tensor - 1))] ^= data.draw(st.integers(1, 255))
    flipped = whole.with_name("flipped.gguf")
    flipped.write_bytes(content)
    try:
        read_everything(flipped)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most flips are harmless, and that is fine


def test_missing_file_and_folder_are_refused(tmp_path: Path):
    assert "cannot open" in refusal(tmp_path / "absent.gguf")
    assert "cannot open" in refusal(tmp_path)


# Tokenizers.


def test_byte_level_tokenizer_splits_digits_and_merges(tiny: Path):
    parts = open_gguf(tiny).tokenizer_parts()
    assert parts.tokenizer.encode("ab  12").tokens == ["ab", "ĠĠ", "1", "2"]
    assert parts.tokenizer.decode(parts.tokenizer.encode("ab é 12").ids) == "ab é 12"
    assert (parts.bos_token, parts.eos_token, parts.eos_ids) == ("<bos>", "<eos>", (0, 3))
    assert parts.chat_template == "{{ messages }}"


def test_merges_of_no_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_files, "BPE_MERGES", ["a nowhere"])
    assert "cannot be rebuilt" in refusal(write(tmp_path / "a.gguf"))


def test_control_tokens_are_special_and_user_defined_ones_are_not(tiny: Path):
    tokenizer = open_gguf(tiny).tokenizer_parts().tokenizer
    ids = tokenizer.encode("a<think>b<eot>").ids
    assert [tokenizer.id_to_token(id_) for id_ in ids] == ["a", "<think>", "b", "<eot>"]
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["ab", "1", "2", "1"]),
        ("gpt-2", ["ab", "12", "1"]),
        ("qwen2", ["ab", "1", "2", "1"]),
        ("llama-bpe", ["ab", "12", "1"]),
    ],
)
def test_pre_tokenizer_follows_its_name(tmp_path: Path, pre: str, tokens: list[str]):
    path = write(tmp_path / "a.gguf", metadata={"tokenizer.ggml.pre": pre})
    tokenizer = open_gguf(path).tokenizer_parts().tokenizer
    assert tokenizer.encode("ab121", add_special_tokens=False).tokens == tokens


def test_only_llama3_takes_whole_words_that_no_merge_makes(tmp_path: Path):
    llama3 = write(tmp_path / "llama3.gguf", metadata={"tokenizer.ggml.pre": "llama-bpe"})
    qwen2 = write(tmp_path / "qwen2.gguf", metadata={"tokenizer.ggml.pre": "qwen2"})
    assert open_gguf(llama3).tokenizer_parts().tokenizer.encode("cd").tokens == ["<bos>", "cd"]
    assert open_gguf(qwen2).tokenizer_parts().tokenizer.encode("cd").tokens == ["c", "d"]


def test_llama3_words_take_a_leading_symbol_and_qwen2_composes_accents(tmp_path: Path):
    llama3, qwen2 = (
        open_gguf(write(tmp_path / f"{pre}.gguf", metadata={"tokenizer.ggml.pre": pre}))
        .tokenizer_parts()
        .tokenizer
        for pre in ("llama-bpe", "qwen2")
    )
    splits = llama3.pre_tokenizer.pre_tokenize_str("(ab) 12345\n\n it's")
    assert [text for text, _ in splits] == ["(ab", ")", "Ġ", "123", "45", "ĊĊ", "Ġit", "'s"]
    assert qwen2.encode("e\u0301").ids == qwen2.encode("\u00e9").ids


# As tiktoken publishes it for o200k_base and o200k_harmony.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def o200k(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "o200k.gguf"
    write(path, metadata={"tokenizer.ggml.pre": "gpt-4o"})
    return open_gguf(path).tokenizer_parts().tokenizer


@settings(max_examples=50, deadline=None)
@given(text=st.text("aAbB1' \n/é日'sTǅ\u0301ʰ<", max_size=20))
def test_gpt_4o_tokens_are_those_of_the_published_pipeline(o200k: Tokenizer, text: str):
    vocabulary = {token: id_ for id_, token in enumerate(BPE_TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in BPE_MERGES]
    published = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert o200k.encode(text).ids == published.encode(text).ids
    assert o200k.decode(o200k.encode(text).ids) == text


@pytest.mark.parametrize(
    ("metadata", "starts_with_bos"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos_is_added_as_the_file_says(tmp_path: Path, metadata: dict, starts_with_bos: bool):
    tokenizer = open_gguf(write(tmp_path / "a.gguf", metadata=metadata)).tokenizer_parts().tokenizer
    assert tokenizer.encode("ab").tokens == (["<bos>", "ab"] if starts_with_bos else ["ab"])
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece BPE by its definition: join the best-scored neighbours, leftmost first."""
    scores = dict(zip(SPM_TOKENS, SPM_SCORES, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in SPM_PIECES]
        if not pairs:
            return pieces
        best = min(pairs)[1]
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]


@settings(max_examples=50, deadline=None)
@given(text=st.text("abc ", min_size=1, max_size=12))
def test_sentencepiece_merges_follow_the_scores(sentencepiece: Path, text: str):
    tokenizer = open_gguf(sentencepiece).tokenizer_parts().tokenizer
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == sentencepiece_reference(" " + text)
    assert tokenizer.decode(encoding.ids) == text


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "spm.gguf", tokenizer="llama")


def test_sentencepiece_falls_back_to_bytes_and_starts_with_bos(sentencepiece: Path):
    tokenizer = open_gguf(sentencepiece).tokenizer_parts().tokenizer
    encoding = tokenizer.encode("aé\n")
    assert encoding.tokens == ["<s>", "▁a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(encoding.ids) == "aé\n"


def test_sentencepiece_without_space_prefix(tmp_path: Path):
    path = write(tmp_path / "a.gguf", tokenizer="llama", metadata={"tokenizer.ggml.add_space_prefix": False})
    tokenizer = open_gguf(path).tokenizer_parts().tokenizer
    encoding = tokenizer.encode(" a", add_special_tokens=False)
    assert encoding.tokens == ["▁a"]
    assert tokenizer.decode(encoding.ids) == " a"


# The real thing, when it is on this machine.


@pytest.fixture(scope="module")
def default_model() -> GgufCheckpoint:
    path = fetch.cache_dir() / fetch.SMOLLM2.gguf
    if not path.exists():
        pytest.skip("the default model is not in the cache")
    return GgufCheckpoint(path, name="default")


def test_default_model_tokenises_like_the_original(default_model: GgufCheckpoint):
    parts = default_model.tokenizer_parts()
    assert parts.tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    text = "<|im_start|>user\nHéllo 2024, 日本\t!<|im_end|>\n"
    ids = parts.tokenizer.encode(text).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert parts.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert parts.eos_ids == (2,)
