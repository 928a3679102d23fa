"""The gated delta rule in Triton: what it computes, and its promise on bits.

Without a card it is interpreted, at some 30 ms for each program of a kernel: few tokens, few heads.
"""

import functools
from dataclasses import replace

import pytest
import torch

from blockdraft.cache.recurrent import RecurrentState, RecurrentStates, Scan
from blockdraft.cache.spec import Recurrent
from blockdraft.kernels.gated_delta import (
    DeltaWeights,
    SaveTable,
    gates,
    reference_convolve,
    reference_fold,
    reference_scan,
)
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.triton import gated_delta
from tests.kernels.delta_layer import NAN, DeltaLayer, is_same
from tests.kernels.implementations import DEVICE, HAS_CARD, on_card, slow_interpreted

REAL = Recurrent(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
SMALL = Recurrent(num_key_heads=1, num_heads=2, key_dim=8, value_dim=6, conv_width=4)
ODD = Recurrent(num_key_heads=1, num_heads=1, key_dim=5, value_dim=20, conv_width=2)  # two slices of values
LEAST = Recurrent(num_key_heads=2, num_heads=4, key_dim=2, value_dim=1, conv_width=1)
MORE = [  # than the interpreter has time for
    pytest.param(spec, dtype, marks=on_card)
    for spec in (SMALL, ODD, LEAST, REAL)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}

NUM_TOKENS = 15 if HAS_CARD else 5
# Tokens that two rows keep of each block, and what known tokens come in: less than the tail, none, and more.
WIDTH, KEPT = (5, [(1, 5, 2, 3, 4), (4, 2, 5, 3, 1)]) if HAS_CARD else (3, [(1, 3), (3, 2)])
CHUNKS = [[(2, 0), (0, 1), (2, 3)]]
if HAS_CARD:
    CHUNKS += [[(1, 1), (1, 2)], [(2, 0), (0, 3), (9, 1)], [(11, 4), (1, 7)]]

small_and_more = pytest.mark.parametrize(("spec", "dtype"), [(SMALL, torch.float32), *MORE], ids=str)


class Layer(DeltaLayer):
    """One for the card, or for the interpreter; a layer of several, `index`, has inputs of its own."""

    def __init__(self, spec, num_tokens, dtype=torch.float32, index=0, states=None):
        place = index if states else 0
        super().__init__(states or states_of(spec, 1, dtype), num_tokens, dtype, index=place, seed=index)

    def where(self, rows, starts, counts, *, is_known):
        return scan_of(rows, starts, counts, is_known=is_known)

    def expected(self, row, length):
        """Reads and last state by the reference, in float64 throughout."""
        spec = self.spec
        x, beta, gate = self.inputs[row, :length].double().cpu().split(self.sizes, dim=1)
        weights = DeltaWeights(*(part.double().cpu() for part in self.weights))
        beta, gate = gates(beta, gate, weights)
        tail = x.new_zeros(1, spec.conv_width - 1, spec.conv_channels)
        mixed = reference_convolve(x[None], tail, weights.conv)
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        q, k, v = mixed.split((keys, keys, values), dim=2)
        q, k = (part.unflatten(2, (-1, spec.key_dim)) for part in (q, k))
        v = v.unflatten(2, (-1, spec.value_dim))
        state = x.new_zeros(1, spec.num_heads, spec.key_dim, spec.value_dim)
        reads, tape = reference_scan(q, k, v, gate[None], beta[None], state)
        reference_fold(state, tape, torch.tensor([length]))
        return reads[0], state[0]


@functools.cache
def decoded(spec, dtype, row, length):
    """`decode` of a layer of its own: the same inputs as any other layer's of this shape."""
    return Layer(spec, NUM_TOKENS, dtype).decode(row, length)


def states_of(spec, num_layers, dtype=torch.float32, kernels=None, num_slots=0):
    kernels = kernels or kernels_for(dtype, DEVICE, is_interpreted=True)
    return RecurrentStates(
        spec,
        num_layers=num_layers,
        num_rows=4,
        dtype=dtype,
        device=DEVICE,
        kernels=kernels,
        num_slots=num_slots,
    )


def scan_of(rows, starts, counts, *, is_known):
    offsets = on_device([sum(counts[:place]) for place in range(len(counts) + 1)])
    return Scan(on_device(rows), on_device(starts), None, is_known, offsets, max(counts))


def on_device(values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def assert_near(got, expected, dtype):
    """Within the dtype's tolerance of the expected numbers' root mean square."""
    scale = expected.square().mean().sqrt().item()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double().cpu(), expected, rtol=tolerance, atol=tolerance * scale)


# ---- meaning


@pytest.mark.parametrize(
    ("spec", "dtype"), [(SMALL, torch.float32), (ODD, torch.float16), (LEAST, torch.float32), *MORE], ids=str
)
def test_known_tokens_agree_with_the_reference_in_float64(spec, dtype):
    layer = Layer(spec, 5, dtype)
    reads = layer.scan((2, 0), (0, 0), (3, 5), is_known=True)
    for row, length, got in ((2, 3, reads[0]), (0, 5, reads[1])):
        expected, state = layer.expected(row, length)
        assert got.dtype == dtype
        assert_near(got, expected, dtype)
        assert_near(layer.storage.state[row], state, dtype)
        last = layer.inputs[row, length - spec.conv_width + 1 : length, : spec.conv_channels]
        assert torch.equal(layer.storage.tail[row], last)


def test_inputs_may_lie_apart():
    """Qwen3-Next's logits are interleaved, and with one value head per key head they come as a view."""
    layer = Layer(SMALL, 2)
    expected = layer.scan((2,), (0,), (2,), is_known=False)[0]
    apart = [part.T.contiguous().T for part in layer.inputs[2].split(layer.sizes, dim=1)]
    got = layer.storage.scan(*apart, layer.weights, scan_of((2,), (0,), (2,), is_known=False))
    assert torch.equal(got, expected)


def test_logits_far_from_zero_give_the_gates_of_the_reference():
    """Also where log(1 + exp(x)) needs more than float32's 1 + exp(x) holds, in heads that forget fast."""
    slow = [-60.0, -18.0, -12.0, -11.0, -10.0, -9.0, -8.0, -7.0]
    logits = torch.tensor([*slow, -1e-3, 0.0, 1e-3, 6.0, 80.0], device=DEVICE)
    spec = Recurrent(num_key_heads=1, num_heads=len(logits), key_dim=4, value_dim=1, conv_width=2)
    layer = Layer(spec, 1)
    layer.inputs[0, 0, -len(logits) :] = logits
    layer.weights.gate_bias.zero_()
    layer.weights.decay_log[: len(slow)] = 4
    layer.scan((0,), (0,), (1,), is_known=False)
    decay = layer.states._block_in_place.tape.decay[0]
    _, beta, gate = layer.inputs[0].double().split(layer.sizes, dim=1)
    _, expected = gates(beta, gate, DeltaWeights(*(part.double() for part in layer.weights)))
    torch.testing.assert_close(decay.double(), expected.exp(), rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(
        decay.double()[:, : len(slow)], expected.exp()[:, : len(slow)], rtol=0, atol=6e-7
    )
    assert (decay <= 1).all()


def test_what_is_not_a_number_is_not_hidden():
    layer = Layer(SMALL, 2)
    whole = layer.inputs
    for part in range(3):
        layer.inputs = whole.clone()
        layer.inputs.split(layer.sizes, dim=2)[part][0, 1] = NAN
        reads = layer.scan((0,), (0,), (2,), is_known=True)[0]
        assert reads[0].isfinite().all()
        assert reads[1].isnan().all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_card)], ids=str
)
@pytest.mark.parametrize("shape", [(2, 5, 6), pytest.param((40, 32, 128), marks=on_card)], ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
def test_the_gated_norm_is_its_reference(shape, dtype, is_wide):
    generator = torch.Generator().manual_seed(1)
    read = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    wide = torch.randn(shape[0], 3 + shape[1] * shape[2], generator=generator).to(dtype).to(DEVICE) * 4
    weight = torch.randn(shape[2], generator=generator).to(torch.float32 if is_wide else dtype).to(DEVICE)
    z = wide[:, 3:]  # part of a projection
    gated_norm = kernels_for(dtype, DEVICE, is_interpreted=True).gated_norm
    got = gated_norm(read, z, weight, 1e-5)
    expected = REFERENCE.gated_norm(read.double(), z.double(), weight.double(), 1e-5).cpu()
    same_rounding = REFERENCE.gated_norm(read, z, weight, 1e-5)
    assert got.dtype == dtype
    assert got.shape == shape
    if dtype != torch.float32:
        assert (got == same_rounding).float().mean() > 0.9
    tolerance = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    for token in range(shape[0]):
        assert torch.equal(
            gated_norm(read[token : token + 1], z[token : token + 1], weight, 1e-5)[0], got[token]
        )


# ---- bits


@small_and_more
def test_every_accepted_count_commits_the_state_of_decoding_token_by_token(spec, dtype):
    """Rejected drafts are not numbers: one that is folded shows."""
    layer = Layer(spec, NUM_TOKENS, dtype)
    expected = [decoded(spec, dtype, row, sum(kept)) for row, kept in zip((2, 0), KEPT, strict=True)]
    lengths = [0, 0]
    for counts in zip(*KEPT, strict=True):
        reads = layer.scan((2, 0), lengths, (WIDTH, WIDTH), is_known=False, num_true=counts)
        layer.commit((2, 0), lengths, counts)
        for place, (all_reads, states) in enumerate(expected):
            start, end = lengths[place], lengths[place] + counts[place]
            assert torch.equal(reads[place][: counts[place]], all_reads[start:end])
            assert is_same(layer.copy((2, 0)[place]), states[end])
            lengths[place] = end


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@small_and_more
def test_known_tokens_in_any_pieces_leave_the_state_of_decoding_token_by_token(spec, dtype, chunks):
    layer = Layer(spec, NUM_TOKENS, dtype)
    expected = [decoded(spec, dtype, row, sum(kept)) for row, kept in zip((2, 0), KEPT, strict=True)]
    lengths = [0, 0]
    for counts in chunks:
        reads = layer.scan((2, 0), lengths, counts, is_known=True)
        for place, (all_reads, states) in enumerate(expected):
            start, end = lengths[place], lengths[place] + counts[place]
            assert torch.equal(reads[place], all_reads[start:end])
            if end > 0:
                assert is_same(layer.copy((2, 0)[place]), states[end])
            lengths[place] = end


@pytest.mark.parametrize("is_known", [True, False])
@small_and_more
def test_states_are_saved_on_the_way_and_restored(spec, dtype, is_known):
    """Of two rows, in pieces that skip none or several; a row that takes one up goes on from it."""
    pieces, grid = [(2, 1), (2, 3)], 2
    layer = Layer(spec, NUM_TOKENS, dtype, states=states_of(spec, 1, dtype, num_slots=5))
    expected = [decoded(spec, dtype, row, sum(kept)) for row, kept in zip((2, 0), KEPT, strict=True)]
    slots = on_device([[6, 4], [0, 0], [0, 7], [0, 0]])
    layer.saves = SaveTable(slots, grid)
    lengths = [0, 0]
    for counts in pieces:
        if is_known:
            layer.scan((2, 0), lengths, counts, is_known=True)
        else:
            layer.scan((2, 0), lengths, (WIDTH, WIDTH), is_known=False, num_true=counts)
            layer.commit((2, 0), lengths, counts)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    for place, cell, slot in ((0, 1, 7), (1, 0, 6), (1, 1, 4)):
        assert is_same(layer.copy(slot), expected[place][1][grid * (cell + 1)])
    assert all(layer.storage.state[slot].isnan().all() for slot in (5, 8))
    layer.states.restore(4, 1)
    assert is_same(layer.copy(1), layer.copy(4))


@small_and_more
def test_a_block_to_verify_writes_neither_state_nor_tail(spec, dtype):
    layer = Layer(spec, 4, dtype)
    layer.scan((2,), (0,), (1,), is_known=True)
    before = [layer.copy(row) for row in range(4)]
    for _ in range(2):  # and a block that is never committed leaves nothing for the next
        layer.scan((2,), (1,), (2,), is_known=False)
        assert all(is_same(layer.copy(row), before[row]) for row in range(4))
    layer.scan((2,), (1,), (1,), is_known=True)  # a block of one token: commit leaves it alone
    after = [layer.copy(row) for row in range(4)]
    layer.commit((2,), (1,), (1,))
    assert all(is_same(layer.copy(row), after[row]) for row in range(4))


def test_a_fold_of_nothing_leaves_the_row():
    layer = Layer(SMALL, 3)
    layer.scan((2, 0), (0, 0), (1, 1), is_known=True)
    before = layer.copy(0)
    layer.scan((2, 0), (1, 1), (2, 2), is_known=False, num_true=(2, 0))
    layer.commit((2, 0), (1, 1), (2, 0))
    assert is_same(layer.copy(0), before)
    assert layer.storage.state[2].isfinite().all()


@slow_interpreted
@small_and_more
def test_rows_that_commit_together_do_not_meet(spec, dtype):
    """Even when the other row's tokens are no numbers; and rows of nobody stay as they are."""
    rows, kept = (2, 0), (1, 2)
    layer = Layer(spec, 3, dtype)
    layer.scan(rows[1:], (0,), (1,), is_known=True)
    reads = layer.scan(rows[1:], (1,), (2,), is_known=False)[0]
    layer.commit(rows[1:], (1,), kept[1:])
    alone = reads, *layer.copy(rows[1])
    layer.poison()
    idle = [layer.copy(row) for row in (1, 3)]
    layer.scan(rows, (0, 0), (1, 1), is_known=True)
    reads = layer.scan(rows, (1, 1), (2, 2), is_known=False, num_true=(0, 2))
    layer.commit(rows, (1, 1), kept)
    assert is_same((reads[1], *layer.copy(rows[1])), alone)
    assert layer.storage.state[rows[0]].isnan().all()
    assert all(is_same(layer.copy(row), before) for row, before in zip((1, 3), idle, strict=True))


@slow_interpreted
def test_padding_rows_may_all_be_the_scratch_row():
    layer = Layer(SMALL, 2)
    alone = layer.scan((2,), (0,), (2,), is_known=False)[0]
    layer.commit((2,), (0,), (2,))
    expected = layer.copy(2)
    layer.poison()
    reads = layer.scan((2, 3, 3), (0, 0, 0), (2, 2, 2), is_known=False)
    layer.commit((2, 3, 3), (0, 0, 0), (2, 1, 1))
    assert is_same((reads[0], *layer.copy(2)), (alone, *expected))


def test_a_stream_that_is_filled_up_for_a_graph_leaves_its_rows_as_alone():
    """Rows of unequal counts, more rows of nothing than are looked at at once, and the scratch row's tokens.

    No row has as many tokens as the graph allows one.
    """
    alone = [Layer(SMALL, 3) for _ in range(2)]
    expected = [
        (layer.scan((row,), (0,), (count,), is_known=True)[0], *layer.copy(row))
        for layer, row, count in zip(alone, (2, 0), (1, 3), strict=True)
    ]
    layer = Layer(SMALL, 3)
    rows, counts = (2, 0, *(3,) * 33), (1, 3, *(0,) * 32, 2)
    starts = (0,) * len(rows)
    where = scan_of(rows, starts, counts, is_known=True)._replace(max_count=sum(counts))
    reads = layer.scan(rows, starts, counts, is_known=True, where=where)
    for place, row in enumerate((2, 0)):
        assert is_same((reads[place], *layer.copy(row)), expected[place])
    assert layer.storage.state[1].isnan().all()
    assert layer.storage.state[3].isfinite().all(), "the scratch row begins at zero each time"


@slow_interpreted
@small_and_more
def test_numbers_do_not_depend_on_how_a_state_lies_in_memory(spec, dtype):
    found = []
    for inner in (3, 4):  # key or value
        layer = Layer(spec, 2, dtype)
        states = layer.states
        states.state = states.state.transpose(inner, 4).contiguous().transpose(inner, 4)
        layer.storage = RecurrentState(states, 0)
        layer.scan((2,), (0,), (1,), is_known=True)
        reads = layer.scan((2,), (1,), (1,), is_known=False)[0]
        layer.commit((2,), (1,), (1,))
        found.append((reads, *layer.copy(2)))
    assert min(spec.key_dim, spec.value_dim) == 1 or found[0][1].stride() != found[1][1].stride()
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- layers

UNEVEN = Recurrent(
    num_key_heads=1, num_heads=1, key_dim=6, value_dim=3, conv_width=2
)  # no multiple of 16 bytes


@pytest.mark.parametrize(("spec", "dtype"), [(UNEVEN, torch.float32), *MORE], ids=str)
def test_layers_that_are_folded_by_one_launch_do_not_meet(spec, dtype):
    """Each has the bits of a layer that is alone, in the forward before too; whichever scans first."""
    rows, known, kept = (2, 0), (1, 2), (3, 1)
    alone = []
    for index in range(3):
        layer = Layer(spec, 5, dtype, index)
        first = layer.scan(rows, (0, 0), known, is_known=True)
        reads = layer.scan(rows, known, (3, 3), is_known=False)
        layer.commit(rows, known, kept)
        alone.append((*first, *reads, *layer.copy(2), *layer.copy(0)))

    folds, kernels = [], kernels_for(dtype, DEVICE, is_interpreted=True)
    in_place = kernels.scan_in_place
    counting = in_place._replace(fold=lambda *args: folds.append(1) or in_place.fold(*args))
    states = states_of(spec, 3, dtype, replace(kernels, scan_in_place=counting))
    layers = [Layer(spec, 5, dtype, index, states) for index in range(3)]
    idle = [layer.copy(row) for layer in layers for row in (1, 3)]
    order, found = (1, 0, 2), {}
    where = scan_of(rows, (0, 0), known, is_known=True)
    for index in order:
        found[index] = layers[index].scan(rows, (0, 0), known, is_known=True, where=where)
    where = scan_of(rows, known, (3, 3), is_known=False)
    for index in order:
        found[index] += layers[index].scan(rows, known, (3, 3), is_known=False, where=where)
    layers[0].commit(rows, known, kept)
    assert len(folds) == 1
    for index, layer in enumerate(layers):
        assert is_same((*found[index], *layer.copy(2), *layer.copy(0)), alone[index])
    assert all(
        is_same(copy, before)
        for copy, before in zip([layer.copy(row) for layer in layers for row in (1, 3)], idle, strict=True)
    )


def test_a_block_that_some_layer_has_not_scanned_is_not_committed():
    states = states_of(LEAST, 2)
    layers = [Layer(LEAST, 2, index=index, states=states) for index in range(2)]
    where = scan_of((2,), (0,), (1,), is_known=False)
    for layer in layers:
        layer.scan((2,), (0,), (1,), is_known=False, where=where)
    layers[0].scan((2,), (0,), (1,), is_known=False)  # another forward
    with pytest.raises(AssertionError, match="every layer"):
        layers[0].commit((2,), (0,), (1,))


def test_a_tape_is_as_large_as_planned():
    layer = Layer(SMALL, 2)
    layer.scan((2,), (0,), (2,), is_known=False)
    tape = sum(part.untyped_storage().nbytes() for part in layer.states._block_in_place.tape)
    row = (layer.storage.state.nbytes + layer.storage.tail.nbytes) // 4
    assert row + tape == SMALL.bytes_per_row(4, 2)


# ---- on the card


@on_card
def test_many_tokens_of_real_rows_agree_with_the_reference_and_do_not_depend_on_pieces():
    layer = Layer(REAL, 700, torch.bfloat16)
    whole = layer.scan((2, 0), (0, 0), (700, 60), is_known=True)
    states = layer.copy(2), layer.copy(0)
    expected, state = layer.expected(0, 60)
    assert_near(whole[1], expected, torch.bfloat16)
    assert_near(states[1][0], state, torch.bfloat16)
    layer.poison()
    first = layer.scan((0, 2), (0, 0), (59, 650), is_known=True)
    layer.scan((1, 2, 0), (0, 650, 59), (1, 50, 1), is_known=False)
    layer.commit((1, 2, 0), (0, 650, 59), (1, 50, 1))
    assert torch.equal(first[1], whole[0][:650])
    assert is_same(layer.copy(2), states[0])
    assert is_same(layer.copy(0), states[1])


@on_card
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("width", [1, 16])
def test_a_captured_step_follows_its_tensors(num_rows, width):
    """Rows, starts and counts are read when the graph runs, not when it was made."""
    layer = Layer(REAL, 40, torch.bfloat16)
    rows, starts, counts = (on_device([3] * num_rows) for _ in range(3))
    starts.zero_()
    counts.fill_(1)
    stream = layer.inputs[0, :1].repeat(num_rows * width, 1)
    offsets = on_device([width * place for place in range(num_rows + 1)])
    x, beta, gate = stream.split(layer.sizes, dim=1)
    z = torch.randn(num_rows * width, 4096, device=DEVICE, dtype=torch.bfloat16)
    norm = torch.ones(128, device=DEVICE, dtype=torch.bfloat16)
    gated_norm = kernels_for(torch.bfloat16, DEVICE).gated_norm

    def step():
        where = Scan(rows, starts, None, False, offsets, width)
        reads = layer.storage.scan(x, beta, gate, layer.weights, where)
        layer.states.commit(rows, starts, counts)
        return reads, gated_norm(reads, z, norm, 1e-6)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    layer.poison()
    other = Layer(REAL, 40, torch.bfloat16)
    lengths, chosen = [0] * num_rows, list(range(num_rows))
    for turn in range(4):
        kept = [1 + (turn * 5 + row * 3) % width for row in chosen]
        if max(lengths) + width > 40:
            break
        rows.copy_(on_device(chosen))
        starts.copy_(on_device(lengths))
        counts.copy_(on_device(kept))
        stream.copy_(torch.cat([layer.inputs[row, lengths[row] : lengths[row] + width] for row in chosen]))
        graph.replay()
        reads = torch.cat(other.scan(chosen, lengths, (width,) * num_rows, is_known=False))
        other.commit(chosen, lengths, kept)
        assert is_same(captured, (reads, gated_norm(reads, z, norm, 1e-6)))
        lengths = [length + count for length, count in zip(lengths, kept, strict=True)]
        assert all(is_same(layer.copy(row), other.copy(row)) for row in chosen)


@small_and_more
def test_programs_of_several_tokens_have_the_bits_of_one_for_each(spec, dtype, monkeypatch):
    """Rows begin and end inside programs, and one begins with a tail."""
    rows, starts, counts = (2, 3), (1, 0), (2, NUM_TOKENS)
    found = []
    for tokens in (1, 4):
        monkeypatch.setattr(gated_delta, "MANY_TOKENS", 1)
        monkeypatch.setattr(gated_delta, "MIX_TOKENS", tokens)
        layer = Layer(spec, NUM_TOKENS, dtype)
        layer.scan((2,), (0,), (1,), is_known=True)
        reads = layer.scan(rows, starts, counts, is_known=True)
        found.append([*reads, *(part for row in rows for part in layer.copy(row))])
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)
    assert not any(part.isnan().any() for part in found[0])
