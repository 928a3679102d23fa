"""Packed weights: every format against the library that defines it, or its published layout."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.checkpoints.schemes import (
    FUSED_MXFP4,
    MODELOPT_NVFP4,
    MODELOPT_NVFP4_AWQ,
    AwqScheme,
    CompressedIntScheme,
    GptqScheme,
)
from blockdraft.errors import ModelError
from blockdraft.models.packed import Dense, Scaled, Stacked, quantise_fp8, quantise_int8, stack
from blockdraft.models.packed_gguf import GgufPacked, block_size
from blockdraft.models.packed_groups import Fp4Groups, pack_nibbles, quantise_int4
from tests.checkpoints.packers import (
    FLOAT4,
    FLOAT8,
    FP8,
    INT4,
    INT8,
    Type,
    awq_case,
    blockwise,
    compress,
    gptq_case,
    modelopt_nvfp4,
    modelopt_nvfp4_awq,
    randint,
    randn,
)


def same(found, expected):
    """Equal shape, dtype and bits (but for the sign of zero)."""
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected)


# compressed-tensors: its own compressors write, its own code says what the weight is


def compressed_scheme(layout, weights):
    group = {"targets": ["Linear"], "weights": weights}
    section = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return read_quantization({"quantization_config": section}, None, name="m").scheme("model.layers.0.q_proj")


COMPRESSED = {
    "fp8-tensor": ("float-quantized", {**FLOAT8, "strategy": "tensor"}, (24, 40)),
    "fp8-channel": ("float-quantized", {**FLOAT8, "strategy": "channel"}, (24, 40)),
    "fp8-block": ("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [16, 16]}, (40, 24)),
    "fp8-naive": ("naive-quantized", {**FLOAT8, "strategy": "channel"}, (24, 40)),
    "int8-channel": ("int-quantized", {**INT8, "strategy": "channel"}, (24, 40)),
    "int8-tensor": ("int-quantized", {**INT8, "strategy": "tensor"}, (24, 40)),
    "int8-group": ("int-quantized", {**INT8, "strategy": "group", "group_size": 8}, (24, 40)),
    "int8-asymmetric": ("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}, (24, 40)),
    "mxfp8": (
        "mxfp8-quantized",
        {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (24, 96),
    ),
    "w4-group": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 16}, (24, 48)),
    "w4-channel": ("pack-quantized", {**INT4, "strategy": "channel"}, (24, 48)),
    "w4-odd": ("pack-quantized", {**INT4, "strategy": "channel"}, (13, 37)),
    "w4-tensor": ("pack-quantized", {**INT4, "strategy": "tensor"}, (24, 48)),
    "w4-asymmetric": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 16, "symmetric": False},
        (24, 48),
    ),
    "w4-asymmetric-odd": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 3, "symmetric": False},
        (13, 33),
    ),
    "w8-group": ("pack-quantized", {**INT8, "strategy": "group", "group_size": 16}, (24, 48)),
    "w8-asymmetric-odd": (
        "pack-quantized",
        {**INT8, "strategy": "channel", "symmetric": False},
        (13, 37),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**FLOAT4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        (24, 48),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (24, 96),
    ),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_formats_read_what_the_library_wrote(case):
    layout, weights, shape = COMPRESSED[case]
    weight = randn(*shape) + 0.3  # off centre: zero points matter
    tensors, expected = compress(layout, weights, weight)
    scheme = compressed_scheme(layout, weights)
    specs = scheme.tensors(shape)
    assert specs.keys() == tensors.keys()
    assert all(spec.accepts(tuple(tensors[suffix].shape)) for suffix, spec in specs.items())
    assert all(tensors[suffix].dtype in spec.dtypes for suffix, spec in specs.items())
    packed = scheme.pack(tensors, shape)
    assert packed.shape == shape
    assert same(packed.dequantise(torch.float32), expected)
    assert (packed.dequantise(torch.float32) - weight).abs().max() < 0.6
    stored = sum(tensor.nbytes for suffix, tensor in tensors.items() if suffix != ".weight_shape")
    assert (
        packed.num_bytes <= stored * 1.4
    )  # zero points are kept a byte each, a scale per tensor for each row


def test_activation_ordering_of_compressed_tensors_moves_columns_between_groups():
    weights = {**INT4, "strategy": "group", "group_size": 16}
    tensors, expected = compress("pack-quantized", weights, randn(24, 48))
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    codes = torch.empty(24, 48, dtype=torch.uint8)
    scheme = CompressedIntScheme("w4", 4, 16, is_symmetric=True, has_group_index=True)
    runs = scheme.pack({**tensors, ".weight_g_idx": torch.arange(48) // 16}, (24, 48))
    assert same(runs.dequantise(torch.float32), expected)
    assert runs.group_index is None
    nibbles = runs.codes
    codes[:, 0::2], codes[:, 1::2] = nibbles & 15, nibbles >> 4
    shuffled = pack_nibbles(codes[:, order].contiguous()).contiguous().view(torch.int32)
    index = (torch.arange(48) // 16)[order]
    packed = scheme.pack({**tensors, ".weight_packed": shuffled, ".weight_g_idx": index}, (24, 48))
    assert same(packed.dequantise(torch.float32), expected[:, order])


# fp8 in blocks, as DeepSeek and Qwen publish it


FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (7, 300), (128, 1), (1, 128)])
def test_fp8_blocks_with_whole_and_cut_edges(shape):
    tensors, expected = blockwise(*shape)
    scheme = read_quantization(FP8_BLOCKS, None, name="m").scheme("model.layers.0.q_proj")
    packed = scheme.pack(tensors, shape)
    assert same(packed.dequantise(torch.float32), expected)
    assert packed.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_fp8_blocks_with_power_of_two_scales():
    tensors, _ = blockwise(200, 130)
    codes = randint(120, 130, 2, 2).to(torch.uint8)
    scheme = read_quantization(FP8_BLOCKS, None, name="m").scheme("model.layers.0.q_proj")
    packed = scheme.pack({**tensors, ".weight_scale_inv": codes.view(torch.float8_e8m0fnu)}, (200, 130))
    scale = 2.0 ** (codes.float() - 127)
    expected = (
        tensors[".weight"].float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    )
    assert same(packed.dequantise(torch.float32), expected)


# NVFP4 of ModelOpt, MXFP4 of gpt-oss


def test_modelopt_nvfp4_by_its_published_layout():
    tensors, expected = modelopt_nvfp4(10, 48)
    packed = MODELOPT_NVFP4.pack(tensors, (10, 48))
    assert same(packed.dequantise(torch.float32), expected)
    assert packed.num_bytes == 10 * 24 + 10 * 3 + 4


def test_nvfp4_awq_multiplies_the_inputs_first():
    """In numbers small enough that no sum is rounded: x times the factors, then the stored weight."""
    tensors, _ = modelopt_nvfp4_awq(10, 48, second=2.0**-3)
    tensors[".weight_scale"] = torch.exp2(randint(-2, 3, 10, 3)).to(FP8)
    tensors[".pre_quant_scale"] = randint(1, 200, 48).to(torch.bfloat16)
    x = randint(-9, 10, 5, 48).double()
    stored = MODELOPT_NVFP4.pack(tensors, (10, 48)).dequantise(torch.float64)
    expected = (x * tensors[".pre_quant_scale"].double()) @ stored.T
    packed = MODELOPT_NVFP4_AWQ.pack(tensors, (10, 48))
    assert same(packed.matmul(x), expected)
    assert packed.num_bytes == 10 * 24 + 10 * 3 + 4 + 48 * 2
    without = {name: tensor for name, tensor in tensors.items() if name != ".pre_quant_scale"}
    assert same(MODELOPT_NVFP4_AWQ.pack(without, (10, 48)).dequantise(torch.float64), stored)


def test_experts_with_and_without_factors_are_stacked():
    with_factors, weight = modelopt_nvfp4_awq(8, 32, seed=1)
    without, other = modelopt_nvfp4(8, 32, seed=2)
    both = stack([MODELOPT_NVFP4_AWQ.pack(tensors, (8, 32)) for tensors in (without, with_factors)])
    assert same(both.dequantise(torch.float32), torch.stack((other, weight)))


def test_modelopt_nvfp4_is_what_compressed_tensors_converts():
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    tensors = {
        ".weight": randint(0, 256, 8, 16).to(torch.uint8),
        ".weight_scale": randn(8, 2).abs().to(FP8),
        ".weight_scale_2": torch.tensor(2.0**-7),
    }
    converted = ModelOptNvfp4Converter(targets=["q"]).process({f"q{key}": t for key, t in tensors.items()})
    theirs = compressed_scheme(
        "nvfp4-pack-quantized", {**FLOAT4, "strategy": "tensor_group", "group_size": 16}
    ).pack({key[1:]: tensor for key, tensor in converted.items()}, (8, 32))
    ours = MODELOPT_NVFP4.pack(tensors, (8, 32))
    assert same(ours.dequantise(torch.float32), theirs.dequantise(torch.float32))


def test_fused_mxfp4_experts_agree_with_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = randint(0, 256, 3, 10, 4, 16).to(torch.uint8)
    scales = randint(100, 140, 3, 10, 4).to(torch.uint8)
    scales[0, 0, 0], scales[0, 0, 1] = 1, 250
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    packed = FUSED_MXFP4.pack({"_blocks": blocks, "_scales": scales}, (3, 10, 128))
    assert same(packed.dequantise(torch.float32), expected.contiguous())
    assert same(packed[1].dequantise(torch.float32), expected[1].contiguous())
    assert packed.num_bytes == blocks.nbytes + scales.nbytes


def test_columns_that_are_no_whole_groups_are_refused():
    with pytest.raises(ModelError, match="40 columns are not a multiple of 16"):
        MODELOPT_NVFP4.tensors((8, 40))
    with pytest.raises(ModelError, match="fused experts"):
        AwqScheme("awq", 8).tensors((4, 16, 32))


# GPTQ and AWQ against packers written from their published layouts


RUNS = torch.arange(64) // 16


def gptq(bits=4, group_size=16, *, sym=False, offset=1, reordered=False):
    return GptqScheme("gptq", bits, group_size, sym, offset, is_reordered=reordered)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_zero_points_of_both_formats(bits, offset):
    tensors, expected = gptq_case(bits, RUNS, offset=offset)
    packed = gptq(bits, offset=offset).pack(tensors, (16, 64))
    assert same(packed.dequantise(torch.float32), expected)


def test_symmetric_gptq_needs_no_zero_points():
    tensors, expected = gptq_case(4, RUNS, middle=True)
    packed = gptq(sym=True).pack(tensors, (16, 64))
    assert packed.zero is None
    assert same(packed.dequantise(torch.float32), expected)
    assert packed.num_bytes == tensors[".qweight"].nbytes + tensors[".scales"].nbytes


@pytest.mark.parametrize("offset", [0, 1])
def test_an_unnamed_symmetric_format_is_told_by_its_zero_points(offset):
    tensors, expected = gptq_case(4, RUNS, middle=True, offset=offset)
    scheme = gptq(sym=True, offset=None)
    assert same(scheme.pack(tensors, (16, 64)).dequantise(torch.float32), expected)
    with pytest.raises(ModelError, match="sym = true"):
        scheme.pack(gptq_case(4, RUNS)[0], (16, 64))


def test_a_zero_point_the_first_gptq_format_cannot_store_is_refused():
    tensors, _ = gptq_case(4, RUNS)
    tensors[".qzeros"] = torch.full_like(tensors[".qzeros"], -1)
    with pytest.raises(ModelError, match="stored zero point is 15"):
        gptq().pack(tensors, (16, 64))


def test_gptq_with_activation_order():
    shuffled = RUNS[torch.randperm(64, generator=torch.Generator().manual_seed(4))]
    tensors, expected = gptq_case(4, shuffled)
    packed = gptq(reordered=True).pack(tensors, (16, 64))
    assert same(packed.dequantise(torch.float32), expected)
    assert same(packed[torch.tensor([3, 0])].dequantise(torch.float32), expected[[3, 0]])
    plain, straight = gptq_case(4, RUNS)
    both = stack([gptq().pack(plain, (16, 64)), packed])  # one expert ordered, one not
    assert same(both.dequantise(torch.float32), torch.stack([straight, expected]))
    with pytest.raises(ModelError, match="names group 4"):
        gptq().pack({**tensors, ".g_idx": shuffled.int() + 1}, (16, 64))


def test_gptq_with_one_group_and_without_g_idx():
    tensors, expected = gptq_case(4, torch.zeros(64, dtype=torch.long), groups=1)
    del tensors[".g_idx"]
    assert same(gptq(group_size=None).pack(tensors, (16, 64)).dequantise(torch.float32), expected)


def test_gptq_whose_last_group_is_short():
    index = torch.arange(64) // 24
    tensors, expected = gptq_case(4, index, groups=3)
    assert same(gptq(group_size=24).pack(tensors, (16, 64)).dequantise(torch.float32), expected)


def test_awq_by_its_published_layout():
    tensors, expected = awq_case()
    packed = AwqScheme("awq", 8).pack(tensors, (16, 32))
    assert same(packed.dequantise(torch.float32), expected)
    assert packed.codes.nbytes == tensors[".qweight"].nbytes


def test_awq_agrees_with_the_converter_of_compressed_tensors():
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, expected = awq_case()
    converted = AutoAWQConverter(group_size=8).process({f"q{key}": t for key, t in tensors.items()})
    scheme = compressed_scheme(
        "pack-quantized", {**INT4, "strategy": "group", "group_size": 8, "symmetric": False}
    )
    theirs = scheme.pack({key[1:]: tensor for key, tensor in converted.items()}, (16, 32))
    assert same(theirs.dequantise(torch.float32), expected)


# GGUF


def gguf_types():
    for kind in Type:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


@pytest.mark.parametrize("kind", list(gguf_types()), ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gguf_blocks_of_any_bytes_read_as_in_gguf_py(kind):
    raw = np.random.default_rng(int(kind)).integers(0, 256, (5, 3 * block_size(kind)[1]), np.uint8)
    expected = torch.from_numpy(np.asarray(gguf.quants.dequantize(raw, kind), np.float32))
    packed = GgufPacked(torch.from_numpy(raw), int(kind))
    assert packed.shape == (5, 3 * block_size(kind)[0])
    found = packed.dequantise(torch.float32)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert packed.num_bytes == raw.nbytes


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"])
def test_gguf_weights_survive_the_round_trip(name):
    weight = randn(6, 64)
    packed = GgufPacked(
        torch.from_numpy(gguf.quants.quantize(weight.numpy(), Type[name]).view(np.uint8)), Type[name]
    )
    assert (packed.dequantise(torch.float32) - weight).abs().max() < 0.3
    rows = torch.tensor([[4, 0], [1, 1]])
    assert same(packed[rows].dequantise(torch.float32), packed.dequantise(torch.float32)[rows])


# What all formats share


def examples():
    """One matrix of every class, and of every way a class can be filled."""
    yield "dense", lambda seed: Dense(randn(16, 64, seed=seed))
    yield "scaled-rows", lambda seed: quantise_fp8(randn(16, 64, seed=seed))
    yield (
        "scaled-blocks",
        lambda seed: Scaled(randn(20, 64, seed=seed).to(FP8), randn(3, 2, seed=seed).abs(), block=(8, 48)),
    )
    yield (
        "scaled-zero",
        lambda seed: Scaled(
            randint(-128, 128, 16, 64, seed=seed).to(torch.int8),
            randn(16, 1, seed=seed),
            block=(1, 64),
            zero=randint(-9, 9, 16, 1, seed=seed).to(torch.int8),
        ),
    )
    yield "gptq", lambda seed: gptq().pack(gptq_case(4, RUNS)[0], (16, 64))
    yield (
        "nvfp4",
        lambda seed: Fp4Groups(
            randint(0, 256, 16, 32, seed=seed).to(torch.uint8),
            randn(16, 4, seed=seed).abs().to(FP8),
            multiplier=randn(1, 1, seed=seed).abs(),
        ),
    )
    yield (
        "nvfp4-awq",
        lambda seed: MODELOPT_NVFP4_AWQ.pack(modelopt_nvfp4_awq(16, 64, seed=seed)[0], (16, 64)),
    )
    yield (
        "gguf",
        lambda seed: GgufPacked(
            torch.from_numpy(gguf.quants.quantize(randn(16, 64, seed=seed).numpy(), Type.Q8_0)),
            int(Type.Q8_0),
        ),
    )


EXAMPLES = dict(examples())


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_every_dtype_is_one_rounding_of_the_float32_weight(make):
    packed = make(0)
    values = packed.dequantise(torch.float32)
    assert values.is_contiguous()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert same(packed.dequantise(dtype), values.to(dtype))


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_experts_are_stacked_and_taken_apart(make):
    items = [make(seed) for seed in range(3)]
    experts = stack(items)
    assert experts.shape == (3, *items[0].shape)
    assert experts.num_bytes == sum(item.num_bytes for item in items)
    whole = experts.dequantise(torch.float32)
    for index, item in enumerate(items):
        assert same(whole[index], item.dequantise(torch.float32))
        assert same(experts[index].dequantise(torch.float32), whole[index])
        assert experts[index].shape == item.shape
    some = torch.tensor([2, 0])
    assert same(experts[some].dequantise(torch.float32), whole[some])


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_rows_are_gathered_as_from_an_embedding(make):
    packed = make(0)
    rows = torch.tensor([15, 0, 0, 9])
    found = packed[rows]
    assert found.shape == (4, packed.shape[1])
    assert same(found.dequantise(torch.float32), packed.dequantise(torch.float32)[rows])
    with pytest.raises(TypeError):
        packed[3]


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_product_is_that_of_the_dequantised_weight(make):
    packed, x = make(0), randn(2, 3, 64, seed=9).double()
    expected = x @ packed.dequantise(torch.float64).T
    assert packed.matmul(x).shape == (2, 3, packed.shape[0])
    assert torch.allclose(packed.matmul(x), expected)


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_change_of_dtype_leaves_packed_values_alone(make):
    packed = make(0)
    before, num_bytes = packed.dequantise(torch.float32), packed.num_bytes
    holder = nn.Sequential(packed).to(torch.bfloat16).to("cpu").double()
    assert same(holder[0].dequantise(torch.float32), before)
    assert packed.num_bytes == num_bytes
    assert all(buffer.is_meta for buffer in holder.to("meta").buffers())


def test_parts_in_different_formats_lie_on_top_of_each_other():
    parts = [EXAMPLES["gptq"](0), EXAMPLES["dense"](1), EXAMPLES["nvfp4"](2)]
    fused = Stacked(parts)
    assert fused.shape == (48, 64)
    expected = torch.cat([part.dequantise(torch.float32) for part in parts])
    assert same(fused.dequantise(torch.float32), expected)
    assert fused.num_bytes == sum(part.num_bytes for part in parts)
    x = randn(5, 64)
    assert torch.allclose(fused.matmul(x), x @ expected.T, atol=1e-4)
    experts = stack([fused, Stacked(parts[:])])
    assert experts.shape == (2, 48, 64)
    assert same(experts[1].dequantise(torch.float32), expected)
    with pytest.raises(TypeError, match="rows of a fused projection"):
        fused[torch.tensor([0])]


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ModelError, match="different formats"):
        stack([EXAMPLES["dense"](0), EXAMPLES["nvfp4"](0)])
    with pytest.raises(ModelError, match="different formats"):
        stack([Dense(randn(4, 8)), Dense(randn(4, 9))])
    with pytest.raises(ModelError, match="different formats"):
        stack([gptq(sym=True).pack(gptq_case(4, RUNS, middle=True)[0], (16, 64)), EXAMPLES["gptq"](0)])
    with pytest.raises(ModelError, match="differ in rows only"):
        Stacked([Dense(randn(4, 8)), Dense(randn(4, 9))])


# Quantised at run time


@pytest.mark.parametrize(("quantise", "bound"), [(quantise_fp8, 2**-4), (quantise_int8, 0.51 / 127)])
def test_run_time_quantisation_stays_within_half_a_step(quantise, bound):
    weight = randn(4, 20, 50) * torch.logspace(-6, 6, 20).unsqueeze(-1)
    weight[1, 3] = 0.0
    weight[2, 5] = 1e-44
    packed = quantise(weight)
    found = packed.dequantise(torch.float32)
    peak = weight.abs().amax(-1, keepdim=True)
    step = weight.abs().clamp(min=2**-9 / 448 * peak) if quantise is quantise_fp8 else peak
    assert packed.shape == weight.shape
    assert torch.isfinite(found).all()
    assert ((found - weight).abs() <= step * bound + 1e-37).all()
    assert (found[1, 3] == 0).all()
    assert packed.num_bytes == weight.numel() + 4 * 4 * 20
    assert packed.scale.dtype == torch.float32


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (48, 16)])
def test_int4_at_run_time_stays_within_half_a_step_of_its_group(columns, group):
    weight = randn(3, 20, columns) * torch.logspace(-6, 6, 20).unsqueeze(-1)
    weight[1, 3] = 0.0
    weight[2, 5] = 1e-44
    packed = quantise_int4(weight)
    found = packed.dequantise(torch.float32)
    groups = weight.unflatten(-1, (-1, group))
    bound = (groups.abs().amax(-1, keepdim=True) * (0.54 / 7.5)).expand(groups.shape).reshape(weight.shape)
    assert ((found - weight).abs() <= bound + 1e-29).all()
    assert (found[1, 3] == 0).all()
    assert packed.group_size == group
    assert packed.num_bytes == weight.numel() // 2 + 2 * weight.numel() // group
    assert found.unflatten(-1, (-1, group))[0, 0, 0].unique().numel() <= 16


def test_weights_that_are_not_numbers_are_not_quantised():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="infinite or undefined"):
            quantise_fp8(torch.tensor([[1.0, value]]))
        with pytest.raises(ModelError, match="infinite or undefined"):
            quantise_int4(torch.tensor([[1.0, value] * 16]))
    with pytest.raises(ModelError, match="rows of 50 values"):
        quantise_int4(torch.ones(2, 50))
