"""Paged attention against one softmax per query in float64, and its promises on bits and on stray memory."""

import itertools
import math

import pytest
import torch

from blockdraft.kernels.attention import KEY_CHUNK, QUERY_SLICE, Mask, Reads, attend

SCALE = 0.3
MASKS = {
    "causal": Mask(scale=SCALE),
    "bidirectional": Mask(scale=SCALE, is_causal=False),
    "window 1": Mask(scale=SCALE, window=1),
    "window": Mask(scale=SCALE, window=7),
    "wide window": Mask(scale=SCALE, window=300),
    "bidirectional window": Mask(scale=SCALE, is_causal=False, window=4),
    "anchored": Mask(scale=SCALE, window=5, is_anchored=True),
    "anchored bidirectional": Mask(scale=SCALE, is_causal=False, window=5, is_anchored=True),
}


class Memory:
    """Random keys and values in shuffled pages; `poison` fills whatever no row can reach."""

    def __init__(self, starts, width, *, num_heads=4, num_groups=2, dim=8, page_size=5, dtype=torch.float64):
        generator = torch.Generator().manual_seed(len(starts) * 1000 + width)
        self.starts, self.width, self.page_size = starts, width, page_size
        num_pages = max(-(-(start + width) // page_size) for start in starts)
        total = len(starts) * num_pages
        pages = torch.randperm(total, generator=generator) + 1  # page 0 is nobody's
        self.pages = pages.view(len(starts), num_pages)
        shape = (num_groups, (total + 1) * page_size, dim)
        self.keys = torch.randn(shape, dtype=dtype, generator=generator)
        self.values = torch.randn(shape, dtype=dtype, generator=generator)
        self.q = torch.randn(len(starts), width, num_heads, dim, dtype=dtype, generator=generator)
        self.keys[:, 0] = self.values[:, 0] = 0

    def slots(self, row):
        position = torch.arange(self.starts[row] + self.width)
        return self.pages[row][position // self.page_size] * self.page_size + position % self.page_size

    def poison(self):
        stray = torch.ones(self.keys.shape[1], dtype=torch.bool)
        stray[0] = False
        for row in range(len(self.starts)):
            stray[self.slots(row)] = False
        assert stray.any()
        self.keys[:, stray] = self.values[:, stray] = float("nan")

    def attend(self, mask, rows=slice(None), sinks=None):
        reads = Reads(
            pages=self.pages[rows],
            starts=torch.tensor(self.starts)[rows],
            width=self.width,
            page_size=self.page_size,
        )
        return attend(self.q[rows], self.keys, self.values, reads, mask, sinks)


def sees(mask, start, width, query, key):
    """The contract of Mask, for one query and one key by position."""
    if key > query if mask.is_causal else key >= start + width:
        return False
    if mask.window is None:
        return True
    if mask.is_anchored:
        return key >= start - mask.window
    return abs(query - key) < mask.window


def naive(memory, mask, sinks=None):
    """One query and one head at a time, only over the keys it sees; the sink's weight is dropped."""
    out = torch.empty_like(memory.q, dtype=torch.float64)
    shared = memory.q.shape[2] // memory.keys.shape[0]
    for row, start in enumerate(memory.starts):
        slots = memory.slots(row)
        for column in range(memory.width):
            seen = [key for key in range(len(slots)) if sees(mask, start, memory.width, start + column, key)]
            k, v = (t[:, slots[seen]].double() for t in (memory.keys, memory.values))  # [G, S, D]
            for head in range(memory.q.shape[2]):
                scores = k[head // shared] @ memory.q[row, column, head].double() * mask.scale
                logits = scores if sinks is None else torch.cat([scores, sinks[head : head + 1].double()])
                out[row, column, head] = logits.softmax(0)[: len(seen)] @ v[head // shared]
    return out


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [1, 6])
def test_ragged_rows_agree_with_one_softmax_per_query(name, width):
    memory = Memory([0, 23, 3, 11], width)
    torch.testing.assert_close(memory.attend(MASKS[name]), naive(memory, MASKS[name]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6)])
def test_query_heads_share_the_right_key_heads(num_heads, num_groups):
    memory = Memory([4, 9], 3, num_heads=num_heads, num_groups=num_groups)
    mask = MASKS["causal"]
    torch.testing.assert_close(memory.attend(mask), naive(memory, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_any_page_size_reads_the_same_keys(page_size):
    memory = Memory([17, 0, 40], 4, page_size=page_size)
    mask = MASKS["causal"]
    torch.testing.assert_close(memory.attend(mask), naive(memory, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "wide window", "window", "anchored bidirectional"])
@pytest.mark.parametrize("starts", [[KEY_CHUNK - 3], [KEY_CHUNK, 5], [2 * KEY_CHUNK + 9, 1, KEY_CHUNK + 40]])
def test_several_chunks_of_keys_are_merged_into_one_softmax(name, starts):
    memory = Memory(starts, 5, num_heads=2, num_groups=1, page_size=16)
    torch.testing.assert_close(memory.attend(MASKS[name]), naive(memory, MASKS[name]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [QUERY_SLICE, QUERY_SLICE + 1, 2 * QUERY_SLICE + 7])
@pytest.mark.parametrize("name", ["causal", "window", "bidirectional window", "anchored"])
def test_long_prefill_is_sliced_without_losing_its_place(name, width):
    memory = Memory([6, 0], width, num_heads=2, num_groups=1, dim=4)
    torch.testing.assert_close(memory.attend(MASKS[name]), naive(memory, MASKS[name]), rtol=0, atol=1e-12)


def test_large_scores_do_not_overflow():
    memory = Memory([300], 2, dtype=torch.float32)
    memory.q *= 1e4
    out = memory.attend(MASKS["causal"])
    torch.testing.assert_close(out.double(), naive(memory, MASKS["causal"]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_what_others_left_in_memory_is_never_read(name, dtype):
    memory = Memory([0, 270, 13], 6, dtype=dtype, page_size=7)
    clean = memory.attend(MASKS[name])
    memory.poison()
    assert torch.equal(memory.attend(MASKS[name]), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("name", MASKS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(name, width, dtype):
    memory = Memory([13, 700, 0, 255, 256, 100], width, dtype=dtype, num_heads=6, num_groups=2)
    together = memory.attend(MASKS[name])
    for row in range(len(memory.starts)):
        assert torch.equal(memory.attend(MASKS[name], slice(row, row + 1))[0], together[row])
    assert torch.equal(memory.attend(MASKS[name], slice(0, 3)), together[:3])
    assert torch.equal(memory.attend(MASKS[name], [5, 1, 3]), together[[5, 1, 3]])


def test_bits_of_a_causal_query_do_not_depend_on_what_follows_it():
    memory = Memory([30, 250], 8)
    before = memory.attend(MASKS["causal"])
    for row in range(2):
        last = memory.slots(row)[-3:]
        memory.keys[:, last] *= -2
        memory.values[:, last] += 5
    after = memory.attend(MASKS["causal"])
    assert torch.equal(after[:, :5], before[:, :5])
    assert not torch.equal(after[:, 5:], before[:, 5:])


SINKS = {
    "small": [-3.0, 0.4, -0.1, 1.5],
    "large": [9.0, 2.0, 40.0, 5.0],
    "one is none": [float("-inf"), 0.5, float("-inf"), 1.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("name", MASKS)
def test_a_sink_takes_its_share_and_has_no_value(name, sinks, dtype):
    memory = Memory([0, 270, 11], 6, dtype=dtype)
    given = torch.tensor(SINKS[sinks], dtype=dtype)
    expected = naive(memory, MASKS[name], given)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    out = memory.attend(MASKS[name], sinks=given)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def test_half_precision_rounds_once():
    """Sums are made in float32, so an output is the nearest bfloat16 but for ties."""
    memory = Memory([270], 6, dtype=torch.bfloat16)
    sinks = torch.tensor(SINKS["small"], dtype=torch.bfloat16)
    exact = naive(memory, MASKS["causal"], sinks)
    error = (memory.attend(MASKS["causal"], sinks=sinks).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


@pytest.mark.parametrize("width", [QUERY_SLICE + 1])
def test_slices_of_a_long_prefill_keep_their_sinks(width):
    memory = Memory([6, 0], width, dim=4)
    sinks = torch.tensor(SINKS["small"], dtype=torch.float64)
    expected = naive(memory, MASKS["causal"], sinks)
    torch.testing.assert_close(memory.attend(MASKS["causal"], sinks=sinks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_bits_with_sinks_do_not_depend_on_the_other_rows(name):
    memory = Memory([13, 700, 0, 256], 3, dtype=torch.float32)
    sinks = torch.tensor(SINKS["small"])
    together = memory.attend(MASKS[name], sinks=sinks)
    for row in range(len(memory.starts)):
        assert torch.equal(memory.attend(MASKS[name], slice(row, row + 1), sinks=sinks)[0], together[row])


def test_sinks_have_gradients():
    memory = Memory([5], 2)
    sinks = torch.tensor(SINKS["small"], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: memory.attend(MASKS["window"], sinks=s), (sinks,))


def test_masks_of_one_forward_are_kept_apart():
    """Layers share one Reads: a cached mask must not serve a layer with another one."""
    memory = Memory([9], 4)
    reads = Reads(pages=memory.pages, starts=torch.tensor([9]), width=4, page_size=memory.page_size)
    for is_causal, window, is_anchored in itertools.product((True, False), (None, 3, 5), (True, False)):
        mask = Mask(scale=SCALE, is_causal=is_causal, window=window, is_anchored=is_anchored)
        out = attend(memory.q, memory.keys, memory.values, reads, mask)
        torch.testing.assert_close(out, naive(memory, mask), rtol=0, atol=1e-12)


def test_a_query_that_sees_one_key_returns_its_value():
    memory = Memory([0], 1)
    value = memory.values[:, memory.slots(0)[0]]  # [G, D]
    torch.testing.assert_close(memory.attend(MASKS["causal"])[0, 0], value.repeat_interleave(2, 0))
    assert math.isclose(float(memory.attend(MASKS["window 1"])[0, 0, 0, 0]), float(value[0, 0]))
