"""The noise: Philox's published answers, and numbers that depend on (seed, position, id) alone."""

from __future__ import annotations

import math

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm.compiler import kernel
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Floats, Int, Words, load, store
from blockdraft.kernels.llvm.sampling import LEAST_NOISE, MOST_NOISE, counters, gumbel_of, noise_of
from blockdraft.kernels.llvm.sampling import philox as native_philox
from blockdraft.kernels.noise import gumbel, gumbel_at, philox

needs_kernels = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
# Small, negative, and past 32 bits.
SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64])
POSITIONS = torch.tensor([[0, 1, 2], [5, 4, 3], [0, 1, 2], [7, 2**31, 2**32], [0, 1, 2], [9, 9, 10**6]])


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_its_published_answers(name):
    counter, key, expected = KNOWN[name]
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_is_the_documented_function_of_seed_position_and_id(dtype):
    """The two lines of the module's docstring, one number at a time: what another kernel must match."""
    noise = gumbel(SEEDS, POSITIONS, 11, dtype)
    for row, seed in enumerate(SEEDS.tolist()):
        for column, position in enumerate(POSITIONS[row].tolist()):
            for token in (0, 3, 4, 10):
                seed_bits = seed % 2**64
                counter = (token // 4, position % 2**32, position // 2**32, 0)
                words = philox(
                    tuple(map(torch.tensor, counter)),
                    (torch.tensor(seed_bits % 2**32), torch.tensor(seed_bits // 2**32)),
                )
                u = (int(words[token % 4]) // 512 + 0.5) / 2**23
                expected = -math.log(-math.log(u))
                assert math.isclose(float(noise[row, column, token]), expected, rel_tol=1e-5, abs_tol=1e-5)


def test_noise_does_not_depend_on_the_batch_the_block_or_the_vocabulary():
    whole = gumbel(SEEDS, POSITIONS, 103, torch.float32)
    assert torch.equal(gumbel(SEEDS.flip(0), POSITIONS.flip(0), 103, torch.float32).flip(0), whole)
    for row in range(len(SEEDS)):
        for column in range(POSITIONS.shape[1]):
            alone = gumbel(
                SEEDS[row : row + 1], POSITIONS[row : row + 1, column : column + 1], 103, torch.float32
            )
            assert torch.equal(alone[0, 0], whole[row, column])
    for vocab_size in (1, 2, 3, 4, 5, 100):
        assert torch.equal(gumbel(SEEDS, POSITIONS, vocab_size, torch.float32), whole[..., :vocab_size])


def test_another_seed_position_or_id_is_another_number():
    seeds = torch.tensor([0, 1, 2**32, -1])
    noise = gumbel(seeds, torch.tensor([[0, 1, 2**32]]).expand(4, 3), 64, torch.float64).flatten()
    assert len(set(noise.tolist())) == len(noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_is_finite_and_distributed_as_gumbel(dtype):
    positions = torch.arange(100)[None].expand(4, -1)
    noise = gumbel(torch.arange(4), positions, 5000, dtype)
    assert torch.isfinite(noise).all()
    euler, deviation = 0.5772156649, math.pi / math.sqrt(6)
    assert abs(float(noise.double().mean()) - euler) < 5 * deviation / math.sqrt(noise.numel())
    assert abs(float(noise.double().std()) - deviation) < 0.005
    for value in (-1.0, 0.0, 1.0, 3.0):
        share = float((noise <= value).double().mean())
        assert abs(share - math.exp(-math.exp(-value))) < 0.002


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_extreme_words_give_finite_noise(dtype, monkeypatch):
    monkeypatch.setattr(
        "blockdraft.kernels.noise.philox",
        lambda counter, key: tuple(torch.full((1, 1, 1), word) for word in (0, 0xFFFFFFFF, 0, 0xFFFFFFFF)),
    )
    noise = gumbel(torch.tensor([0]), torch.tensor([[0]]), 4, dtype)
    assert torch.isfinite(noise).all()
    assert noise[0, 0].tolist() == pytest.approx([-2.811, 16.636] * 2, abs=1e-3)


@kernel
def draw(num_blocks: Int, seed: Int, position: Int, noise: Floats) -> None:
    for block in range(num_blocks):
        store(noise + block * 32, noise_of(native_philox(counters(block * 8, 8), position, seed)))


@kernel
def noise_of_words(words: Words, noise: Floats) -> None:
    store(noise, gumbel_of(load(words, 4)))


@needs_kernels
def test_the_cpus_kernels_draw_the_same_noise():
    run = Jit(draw)
    for seed in (5, -3, 2**62 + 12345):
        for position in (1, 0, 2**33 + 7):
            found = torch.empty(4096)
            run(128, seed, position, found)
            expected = gumbel(torch.tensor([seed]), torch.tensor([[position]]), 4096, torch.float64)
            assert torch.allclose(found.double(), expected[0, 0], rtol=0, atol=2e-6)


@needs_kernels
def test_no_word_gives_more_noise_or_less_than_the_cpus_kernels_count_with():
    found = torch.empty(4)
    Jit(noise_of_words)(torch.tensor([0, -1, 511, -512], dtype=torch.int32), found)
    assert LEAST_NOISE < float(found.min()) < -2.81
    assert 16.63 < float(found.max()) < MOST_NOISE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_of_some_tokens_is_that_of_the_vocabulary(dtype):
    seeds, positions = torch.tensor([3, -(2**63)]), torch.tensor([[0, 2**40], [5, 6]])
    ids = torch.tensor([0, 1, 2, 3, 98, 50, 5]).expand(2, 2, -1)
    whole = gumbel(seeds, positions, 99, dtype)
    assert torch.equal(gumbel_at(seeds, positions, ids, dtype), whole.gather(2, ids))
