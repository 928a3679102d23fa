"""GGUF files: parsed like gguf-py does, seen as Hugging Face checkpoints, refused when damaged."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from blockdraft.errors import ModelError
from blockdraft.models import fetch
from blockdraft.models.gguf import GgufCheckpoint
from blockdraft.models.gguf_file import GgufFile

Type = gguf.GGMLQuantizationType
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 16, 64, 96
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

BPE_TOKENS = ["<eos>", "<bos>", "<think>", "<eot>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
BPE_MERGES = ["a b", "Ġ Ġ", "1 2", "ab 1", "Ġ ab"]
BPE_TOKENS += [merge.replace(" ", "") for merge in BPE_MERGES]
BPE_TOKENS += ["cd"]  # which no merge makes
BPE_TYPES = [CONTROL, CONTROL, USER_DEFINED, CONTROL] + [NORMAL] * (len(BPE_TOKENS) - 4)

SPM_PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *SPM_PIECES]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SPM_PIECES)
# "bc" is worth more than "ab", so "abc" is built as a + bc.
SPM_SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -4.0, -5.0, -2.0]


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q_proj and k_proj."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def weights(architecture: str = "llama") -> dict[str, np.ndarray]:
    """Hugging Face-ordered weights under GGUF names, one layer."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (48, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        shapes["blk.0.attn_q.bias"] = (HEADS * HEAD_DIM,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


QUANTISED = {
    "token_embd.weight": Type.Q8_0,
    "blk.0.ffn_gate.weight": Type.Q4_1,
    "blk.0.ffn_down.weight": Type.Q4_0,
    "blk.0.ffn_up.weight": Type.F16,
}


def write(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: str | None = "gpt2",
    metadata: dict[str, str | float | bool] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if tokenizer == "gpt2":
        add_bpe(writer)
    elif tokenizer == "llama":
        add_sentencepiece(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
        }
        add[type(value)](key, value)
    for name, values in (weights(architecture) if tensors is None else tensors).items():
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            values = permute(values, HEADS if "attn_q." in name else KV_HEADS)
        kind = QUANTISED.get(name, Type.F32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_bpe(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BPE_TOKENS)
    writer.add_token_types(BPE_TYPES)
    writer.add_token_merges(BPE_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages }}")


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_types(SPM_TYPES)
    writer.add_token_scores(SPM_SCORES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def open_gguf(path: Path) -> GgufCheckpoint:
    return GgufCheckpoint(path, name=path.name)


def read_everything(path: Path) -> None:
    checkpoint = open_gguf(path)
    for name in checkpoint.shapes():
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
    ours, theirs = GgufFile(tiny, name="tiny"), gguf.GGUFReader(tiny)
    expected = {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key}
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in ours.metadata.items()} == expected
    table = {t.name: (tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors}
    assert {n: (t.shape, t.offset, t.num_bytes) for n, t in ours.tensors.items()} == table


def test_every_quantisation_dequantises_as_gguf_py_does(tiny: Path):
    ours, theirs = GgufFile(tiny, name="tiny"), gguf.GGUFReader(tiny)
    assert {t.tensor_type for t in theirs.tensors} == {*QUANTISED.values(), Type.F32}
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        read = ours.read(tensor.name)
        assert read.dtype == torch.float32
        assert np.array_equal(read.numpy(), expected), tensor.name


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_come_back_in_hugging_face_order(tmp_path: Path, architecture: str):
    checkpoint = open_gguf(write(tmp_path / "a.gguf", architecture=architecture))
    stored = weights(architecture)
    q_proj = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    k_proj = checkpoint.read("model.layers.0.self_attn.k_proj.weight")
    assert np.array_equal(q_proj.numpy(), stored["blk.0.attn_q.weight"])
    assert np.array_equal(k_proj.numpy(), stored["blk.0.attn_k.weight"])


def test_llama_biases_are_unpermuted_too(tmp_path: Path):
    tensors = weights("qwen2")
    checkpoint = open_gguf(write(tmp_path / "a.gguf", tensors=tensors))
    bias = checkpoint.read("model.layers.0.self_attn.q_proj.bias")
    assert np.array_equal(bias.numpy(), tensors["blk.0.attn_q.bias"])


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


def test_names_and_shapes_speak_hugging_face(tiny: Path):
    shapes = open_gguf(tiny).shapes()
    assert shapes["model.embed_tokens.weight"] == (48, HIDDEN)
    assert shapes["model.norm.weight"] == (HIDDEN,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (HIDDEN, FFN)
    assert shapes["model.layers.0.post_attention_layernorm.weight"] == (HIDDEN,)
    assert len(shapes) == len(weights())


def test_output_weight_unties_and_biases_show_in_the_config(tmp_path: Path):
    tensors = weights("qwen2") | {"output.weight": np.ones((48, HIDDEN), np.float32)}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", architecture="qwen2", tensors=tensors))
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.shapes()["lm_head.weight"] == (48, HIDDEN)


def test_rope_factors_become_rope_scaling(tmp_path: Path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = open_gguf(write(tmp_path / "a.gguf", tensors=weights() | {"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "factors",
        "factors": factors.tolist(),
    }
    assert not any("rope" in name for name in checkpoint.shapes())


def test_linear_rope_scaling_is_read(tmp_path: Path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", metadata=scaling))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_tensors_outlive_a_closed_file(tiny: Path):
    checkpoint = open_gguf(tiny)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert np.array_equal(norm.numpy(), weights()["output_norm.weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gptneox"}, "gptneox"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"metadata": {"llama.expert_count": 8}}, "8 experts"),
        ({"metadata": {"split.count": 3}}, "split"),
        ({"metadata": {"llama.attention.key_length": 16, "llama.rope.dimension_count": 8}}, "rope"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "k_proj"),
        ({"metadata": {"llama.block_count": "one"}}, "block_count"),
        ({"metadata": {"tokenizer.ggml.pre": "falcon"}}, "falcon"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "t5"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 9999}}, "9999"),
        ({"tokenizer": None}, "tokenizer.ggml.tokens"),
        ({"tensors": weights() | {"blk.0.ssm_a.weight": np.ones(32, np.float32)}}, "ssm_a"),
        ({"tensors": {"output_norm.weight": np.ones(32, np.float32)}}, "token_embd"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, changes: dict, words: str):
    assert words in refusal(write(tmp_path / "a.gguf", **changes))


def test_missing_tensor_is_named(tiny: Path):
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        open_gguf(tiny).read("lm_head.weight")


# Damage. The header is: magic, u32 version, u64 tensors, u64 keys, then the first key's u64 length.


@pytest.mark.parametrize(
    ("offset", "patch", "words"),
    [
        (0, b"PK\x03\x04", "instead of b'GGUF'"),
        (4, struct.pack("<I", 1), "version is 1"),
        (4, struct.pack("<I", 9), "version is 9"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "tensors"),
        (16, struct.pack("<Q", 1 << 60), "metadata keys"),
        (16, struct.pack("<Q", 60000), "metadata"),
        (24, struct.pack("<Q", 1 << 60), "string of"),
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
        (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 50), "array of"),
        (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 23), "metadata"),
        (b"tokenizer.ggml.tokens", 0, struct.pack("<I", 77), "unknown type 77"),
        (b"tokenizer.ggml.tokens", 4, struct.pack("<I", 9), "unknown type 9"),
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


@settings(max_examples=150, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(whole: Path, fraction: float):
    data_end = max(info.offset + info.num_bytes for info in GgufFile(whole, name="w").tensors.values())
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(whole.read_bytes()[: int(fraction * data_end)])
    refusal(cut)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flipped_metadata_byte_never_escapes_as_another_error(whole: Path, data: st.DataObject):
    content = bytearray(whole.read_bytes())
    first_tensor = min(info.offset for info in GgufFile(whole, name="w").tensors.values())
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


@settings(max_examples=100, deadline=None)
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


def test_default_model_has_the_published_shape(default_model: GgufCheckpoint):
    shapes = default_model.shapes()
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 134_515_008
    assert default_model.config["num_hidden_layers"] == 30
    assert torch.isfinite(default_model.read("model.layers.29.self_attn.q_proj.weight")).all()
