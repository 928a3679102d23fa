"""Runs the few PTX instructions of `kernels.triton.packed_asm` on a CPU, for many lanes at once."""

import re

import torch

from blockdraft.kernels.packed import _to_bfloat16

ALL = 0xFFFFFFFF


def run(text, inputs, num_outputs):
    """The outputs of the assembly for inputs $num_outputs, …: int64 tensors of 32 bits."""
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}

    def read(name):
        return torch.tensor(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        found = re.fullmatch(r"([\w.]+) (.+);", line)
        name, operands = found[1], re.findall(r"\{.*?\}|[$\w]+", found[2])
        if name == "mov.b32" and operands[0].startswith("{"):
            low, high = operands[0].strip("{}").split(", ")
            registers[low], registers[high] = read(operands[1]) & 0xFFFF, read(operands[1]) >> 16
        else:
            registers[operands[0]] = _RUN[name](*map(read, operands[1:]))
    return [registers[f"${i}"] for i in range(num_outputs)]


def _prmt(a, b, selector):
    both, out = b << 32 | a, 0
    for i in range(4):
        byte = int(selector) >> (4 * i) & 15
        assert byte < 8, "no byte is replaced by its sign"
        out = out | (both >> (8 * byte) & 0xFF) << (8 * i)
    return out


def _lop3(a, b, c, table):
    assert int(table) == 0xEA
    return a & b | c


def _bf16(bits):
    return (bits << 16).to(torch.int32).view(torch.float32).double()


def _fma(a, b, c):
    halves = (torch.stack((one, one >> 16)) & 0xFFFF for one in torch.broadcast_tensors(a, b, c))
    x, y, z = map(_bf16, halves)
    bits = _to_bfloat16(x * y + z).float().view(torch.int32).to(torch.int64) & ALL
    assert not (bits & 0xFFFF).any()
    return bits[0] >> 16 | bits[1]


def _f16(bits):
    return _f32_bits(bits.to(torch.int16).view(torch.float16).float())


def _f32_bits(value):
    return value.view(torch.int32).to(torch.int64) & ALL


def _f32(bits):
    return bits.to(torch.int32).view(torch.float32)


_RUN = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "shl.b32": lambda a, by: a << by & ALL,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
    "cvt.f32.f16": _f16,
    "sub.f32": lambda a, b: _f32_bits(_f32(a) - _f32(b)),
}
