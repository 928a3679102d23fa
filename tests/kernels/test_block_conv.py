"""Convolutions along a block on a CPU: the kernel has the reference's bits."""

import pytest
import torch

from blockdraft.kernels.block_conv import reference_block_conv
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm.block_conv import BlockConvKernel
from blockdraft.kernels.llvm.tape import Arena, StepTape

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, CPU) is not None, reason="the CPU kernels are not chosen"
)


def make_case(num_columns, size, group, taps, dtype=torch.float32, num_blocks=3):
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_tokens = num_blocks * num_columns
    x, onto = noise(num_tokens, size), noise(num_tokens, size)
    return x, noise(2, taps, size), noise(num_tokens, 2, taps, size // group), onto


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_columns", "size", "group", "taps"),
    [(1, 32, 16, 2), (3, 48, 16, 2), (8, 20, 4, 3), (2, 32, 1, 4), (4, 1040, 16, 2), (3, 40, 20, 2)],
)
def test_blocks_are_convolved_to_the_bits_of_the_reference(num_columns, size, group, taps, dtype):
    x, base, deltas, onto = make_case(num_columns, size, group, taps, dtype)
    block_conv = BlockConvKernel(dtype)
    for side in (0, 1):
        for stream in (None, onto):
            args = (x, base[side], deltas[:, side], num_columns, stream)
            assert torch.equal(block_conv(*args), reference_block_conv(*args))


def test_what_is_given_in_other_orders_of_memory():
    x, base, deltas, onto = make_case(4, 32, 16, 2)
    args = (x.mT.contiguous().mT, base[0].mT.contiguous().mT, deltas[:, 1].mT.contiguous().mT, 4)
    for stream in (None, onto.mT.contiguous().mT):
        block_conv = BlockConvKernel(torch.float32)
        assert torch.equal(block_conv(*args, stream), reference_block_conv(*args, stream))


def test_a_recorded_convolution_is_one_part_of_the_tape():
    x, base, deltas, onto = make_case(8, 64, 16, 2)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        y = BlockConvKernel(torch.float32)(x, base[0], deltas[:, 0], 8, onto)
    x.mul_(0.5)
    onto.sub_(1.0)
    tape.replay()
    assert torch.equal(y, reference_block_conv(x, base[0], deltas[:, 0], 8, onto))
    assert len(tape) == 1
