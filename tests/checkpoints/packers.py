"""Reference packers: a checkpoint's tensors by suffix, and the float32 weight that they stand for.

compressed-tensors' own compressors write its formats; the others are written from their published layouts
without any code of ours, so that a test compares two independent readings.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Type = gguf.GGMLQuantizationType

FLOAT8 = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
FLOAT4 = {"num_bits": 4, "type": "float"}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


# compressed-tensors


def reductions(args, weight):
    """The smallest and largest value of every scale's block, in the shape the library keeps them."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    if args.strategy == "block":
        tall, wide = args.block_structure
        padded = nn.functional.pad(weight, (0, -columns % wide, 0, -rows % tall))
        blocks = padded.reshape(-(-rows // tall), tall, -(-columns // wide), wide)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(rows, -1, args.group_size)
    return groups.amin(-1), groups.amax(-1)


def compress(layout, weights, weight):
    """The checkpoint's tensors by suffix, and the weight as the library reads them back in float32."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    low, high = reductions(args, weight)
    state["weight_scale"], zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    written = compressor.compress(state, scheme)
    tensors = {f".{key}": value for key, value in written.items()}
    if layout != "nvfp4-pack-quantized":
        return tensors, compressor.decompress(written, scheme)["weight"].float()
    # Its own decompress is in bfloat16; the same two steps in float32.
    values = unpack_fp4_from_uint8(written["weight_packed"], *weight.shape, dtype=torch.float32)
    scale, second = written["weight_scale"].float(), written["weight_global_scale"]
    return tensors, dequantize(values, scale, args=args, global_scale=second, dtype=torch.float32)


# fp8


def blockwise(rows, columns, seed=0, side=128, size=1.0):
    """fp8 in square blocks, as DeepSeek and Qwen publish it."""
    values = randn(rows, columns, seed=seed).to(FP8)
    scale = (size * randn(-(-rows // side), -(-columns // side), seed=seed + 1).abs()).to(torch.bfloat16)
    expected = torch.empty(rows, columns)
    for row in range(rows):
        for start in range(0, columns, side):
            block = slice(start, start + side)
            expected[row, block] = values[row, block].float() * scale[row // side, start // side].float()
    return {".weight": values, ".weight_scale_inv": scale}, expected


def per_tensor(weight):
    """fp8 with one scale, as AutoFP8 and ModelOpt write it."""
    scale = weight.abs().max() / FP8_MAX
    values = (weight / scale).to(FP8)
    return {".weight": values, ".weight_scale": scale}, values.float() * scale


# 4-bit floats


def reference_e2m1(codes):
    return torch.tensor([(-1.0 if code & 8 else 1.0) * E2M1[code & 7] for code in codes.flatten().tolist()])


def modelopt_nvfp4(rows, columns, seed=0, second=0.037):
    """The even column of a byte is its low half; the second scale multiplies."""
    codes = randint(0, 16, rows, columns, seed=seed)
    scale = randn(rows, columns // 16, seed=seed).abs().to(FP8)
    tensors = {
        ".weight": (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8),
        ".weight_scale": scale,
        ".weight_scale_2": torch.tensor(second),
    }
    factors = (scale.float() * torch.tensor(second)).unsqueeze(-1)
    return tensors, (reference_e2m1(codes).view(rows, columns // 16, 16) * factors).view(rows, columns)


def modelopt_nvfp4_awq(rows, columns, seed=0, second=0.037):
    """The same, of a weight whose columns were divided by factors that its inputs are multiplied with."""
    tensors, stored = modelopt_nvfp4(rows, columns, seed=seed, second=second)
    factors = (randn(columns, seed=seed + 1).abs() + 0.25).to(torch.bfloat16)
    return {**tensors, ".pre_quant_scale": factors}, torch.einsum("rc,c->rc", stored, factors.float())


def fused_mxfp4(experts, rows, columns, seed=0):
    """The experts of gpt-oss, and what transformers makes of them: [experts, columns, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = randint(0, 256, experts, rows, columns // 32, 16, seed=seed).to(torch.uint8)
    scales = randint(121, 125, experts, rows, columns // 32, seed=seed + 1).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": scales}, expected


# GPTQ and AWQ


def words(codes, bits, axis):
    """Codes packed along `axis` into int32, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = codes.long().movedim(axis, -1).reshape(*codes.movedim(axis, -1).shape[:-1], -1, per_word)
    packed = sum(grouped[..., place] << (bits * place) for place in range(per_word))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32).movedim(-1, axis).contiguous()


def gptq_case(bits, group_index, rows=16, columns=64, groups=4, offset=1, middle=False, seed=1, size=1.0):
    codes = randint(0, 1 << bits, columns, rows, seed=seed)
    zeros = randint(1, 1 << bits, groups, rows, seed=seed + 1)
    if middle:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = (size * randn(groups, rows, seed=seed + 2)).to(torch.float16)
    expected = (codes - zeros[group_index]).float() * scales[group_index].float()
    tensors = {
        ".qweight": words(codes, bits, 0),
        ".qzeros": words(zeros - offset, bits, 1),
        ".scales": scales,
        ".g_idx": group_index.to(torch.int32),
    }
    return tensors, expected.T.contiguous()


def awq_case(rows=16, columns=32, group=8, seed=1, size=1.0):
    codes = randint(0, 16, columns, rows, seed=seed)
    zeros = randint(0, 16, columns // group, rows, seed=seed + 1)
    scales = (size * randn(columns // group, rows, seed=seed + 2)).to(torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # place p of a word holds row order[p] of its eight
    place = torch.tensor([8 * (row // 8) + order[row % 8] for row in range(rows)])
    tensors = {
        ".qweight": words(codes[:, place], 4, 1),
        ".qzeros": words(zeros[:, place], 4, 1),
        ".scales": scales,
    }
    index = torch.arange(columns) // group
    expected = (codes - zeros[index]).float() * scales[index].float()
    return tensors, expected.T.contiguous()


# GGUF

# Where a K-quant keeps its float16 scales, for which gguf-py has no quantiser.
_HALVES = {Type.Q4_K: {0: 2e-3, 2: 1e-2}, Type.Q5_K: {0: 1e-3, 2: 1e-2}, Type.Q6_K: {208: 5e-5}}


def gguf_blocks(weight, kind, seed=0):
    """uint8 rows of blocks of `kind`, and what gguf-py reads there; K-quants hold any codes."""
    if kind not in _HALVES:
        raw = gguf.quants.quantize(weight.numpy(), kind)
    else:
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*weight.shape[:-1], weight.shape[-1] // length, num_bytes)
        raw = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        for start, value in _HALVES[kind].items():
            raw[..., start : start + 2] = np.array([value], np.float16).view(np.uint8)
        raw = raw.reshape(*weight.shape[:-1], -1)
    return raw, torch.from_numpy(np.asarray(gguf.quants.dequantize(raw, kind), np.float32))
