"""Convolutions along a block: the CPU's kernel has the reference's bits, a GPU's has its numbers."""

import pytest
import torch

from blockdraft.kernels.block_conv import reference_block_conv, reference_conv_after, reference_conv_before
from blockdraft.kernels.llvm.block_conv import BlockConvKernel
from blockdraft.kernels.llvm.tape import Arena, StepTape
from tests.kernels.implementations import DEVICE, HALF, only_llvm, only_triton, quiet
from tests.matrix import slow_but

pytestmark = [quiet, pytest.mark.usefixtures("implementation")]


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
@only_llvm
def test_blocks_are_convolved_to_the_bits_of_the_reference(num_columns, size, group, taps, dtype):
    x, base, deltas, onto = make_case(num_columns, size, group, taps, dtype)
    block_conv = BlockConvKernel(dtype)
    for side in (0, 1):
        for stream in (None, onto):
            args = (x, base[side], deltas[:, side], num_columns, stream)
            expected = reference_block_conv(*args)
            assert torch.equal(block_conv(*args), expected)
            turned = (
                one.mT.contiguous().mT if isinstance(one, torch.Tensor) else one for one in args
            )  # other orders of memory
            assert torch.equal(block_conv(*turned), expected)


@only_llvm
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


SHAPES = [
    (1, 1, 32, 16, 2),
    (3, 2, 32, 1, 4),
    (3, 4, 1040, 16, 2),
    (2, 16, 120, 20, 2),
    (3, 3, 48, 16, 2),
    (9, 8, 20, 4, 3),
]


@pytest.mark.parametrize("dtype", slow_but([HALF, torch.float32], HALF))
@pytest.mark.parametrize(
    ("num_blocks", "num_columns", "size", "group", "taps"), slow_but(SHAPES, *SHAPES[:4])
)
@only_triton
def test_blocks_are_convolved_between_products_and_norms_as_by_the_reference(
    implementation, num_blocks, num_columns, size, group, taps, dtype
):
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    x, onto = noise(num_blocks * num_columns, size), noise(num_blocks * num_columns, size)
    base, projection = noise(2, taps, size), noise(2 * taps * size // group, size) / size**0.5
    bound = {HALF: 2e-2, torch.float32: 1e-5}[dtype]

    def wide(*values):
        return (one.double() if isinstance(one, torch.Tensor) else one for one in values)

    mixed, deltas = implementation.kernels.conv_before(x, base[0], projection, num_columns)
    _, expected = reference_conv_before(*wide(x, base[0], projection, num_columns))
    torch.testing.assert_close(deltas.double(), expected, rtol=bound, atol=bound)
    assert torch.equal(mixed, reference_block_conv(x, base[0], deltas[:, 0], num_columns))
    rest, weight = (base[1], deltas[:, 1], num_columns, onto), noise(size)
    stream, normed = implementation.kernels.conv_after(x, *rest, weight, 1e-6)
    _, expected = reference_conv_after(*wide(x, *rest, weight), 1e-6)
    assert torch.equal(stream, reference_block_conv(x, *rest))
    torch.testing.assert_close(normed.double(), expected, rtol=bound, atol=bound)
