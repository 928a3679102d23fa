"""The promise of cache/recurrent.py: a committed state follows from the committed tokens, bit for bit.

Here the inputs of the layer are given, so the promise holds on every machine, for the PyTorch reference and
for the CPU kernels. tests/lossless/test_every_family.py has the same for whole models.
"""

from types import SimpleNamespace

import pytest
import torch

from blockdraft.cache.cache import Cache
from blockdraft.cache.recurrent import RecurrentState, RecurrentStates, Scan
from blockdraft.cache.spec import Recurrent, bytes_per_row
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.gated_delta import DeltaWeights, SaveTable
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from tests.checkpoints.published import CONFIGS as PUBLISHED
from tests.kernels.delta_layer import DeltaLayer, is_same
from tests.lossless import families
from tests.lossless.families import HYBRID_NAMES
from tests.matrix import slow_but
from tests.models.checkpoints import CPU, Bench

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SPECS = [
    Recurrent(num_key_heads=2, num_heads=4, key_dim=8, value_dim=12, conv_width=4),
    Recurrent(num_key_heads=1, num_heads=3, key_dim=5, value_dim=7, conv_width=2),
]
NAN = float("nan")
ROWS = (2, 0)  # of four, in this order; nobody owns 1 and 3


@pytest.fixture(params=["reference", "chosen"])
def kernel(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(Layer, "is_reference", True)
    elif why_no_llvm(torch.float32, CPU) is not None:
        pytest.skip("the kernel is not chosen: the reference is tested already")


both_kernels = pytest.mark.usefixtures("kernel")


class Layer(DeltaLayer):
    """One on the CPU, by the reference or by the kernels."""

    is_reference = False

    def __init__(self, spec, num_tokens, dtype, seed=0, num_slots=0):
        kernels = REFERENCE if self.is_reference else kernels_for(dtype, CPU)
        states = RecurrentStates(
            spec, num_layers=1, num_rows=4, dtype=dtype, device=CPU, kernels=kernels, num_slots=num_slots
        )
        super().__init__(states, num_tokens, dtype, seed=seed)


@both_kernels
@pytest.mark.parametrize("width", slow_but([4, 16], 4))
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_accepted_count_commits_the_state_of_decoding_token_by_token(dtype, spec, width):
    """Rejected drafts are not numbers: one that is folded shows."""
    generator = torch.Generator().manual_seed(width)
    repeats = 16 // width
    decks = [(torch.randperm(width * repeats, generator=generator) % width + 1).tolist() for _ in ROWS]
    length = sum(decks[0])
    layer = Layer(spec, length, dtype)
    expected = [layer.decode(row, length) for row in ROWS]
    layer.poison()
    lengths = [0, 0]
    for counts in zip(*decks, strict=True):
        reads = layer.scan(ROWS, lengths, (width, width), is_known=False, num_true=counts)
        layer.commit(ROWS, lengths, counts)
        for place, (all_reads, states) in enumerate(expected):
            start, end = lengths[place], lengths[place] + counts[place]
            assert torch.equal(reads[place][: counts[place]], all_reads[start:end])
            assert is_same(layer.copy(ROWS[place]), states[end])
            lengths[place] = end
    assert lengths == [length, length]


@both_kernels
@pytest.mark.parametrize(
    "chunks",
    slow_but(
        [[(1, 1)] * 3, [(3, 3)], [(1, 2), (4, 1), (5, 20)], [(16, 9), (9, 16)]],
        [(3, 3)],
        [(1, 2), (4, 1), (5, 20)],
    ),
)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_tokens_in_any_pieces_leave_the_state_of_decoding_token_by_token(dtype, spec, chunks):
    layer = Layer(spec, 25, dtype)
    expected = [layer.decode(row, 25) for row in ROWS]
    layer.poison()
    lengths = [0, 0]
    for counts in chunks:
        reads = layer.scan(ROWS, lengths, counts, is_known=True)
        for place, (all_reads, states) in enumerate(expected):
            start, end = lengths[place], lengths[place] + counts[place]
            assert torch.equal(reads[place], all_reads[start:end])
            assert is_same(layer.copy(ROWS[place]), states[end])
            lengths[place] = end


@both_kernels
@pytest.mark.parametrize("pieces", [[(4, 1), (1, 2), (7, 9)], [(12, 12)]], ids=str)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_states_are_saved_on_the_way_and_restored(spec, is_known, pieces):
    """Every third of two rows but one, in pieces that skip several; a row that takes one up continues."""
    layer = Layer(spec, 12, torch.float32, num_slots=10)
    expected = {row: layer.decode(row, 12) for row in ROWS}
    layer.poison()
    slots = torch.tensor([[6, 0, 4, 9], [0, 0, 0, 0], [7, 8, 5, 10], [0, 0, 0, 0]])
    layer.saves = SaveTable(slots, grid=3)
    lengths = [0, 0]
    for counts in pieces:
        if is_known:
            layer.scan(ROWS, lengths, counts, is_known=True)
        else:
            layer.scan(ROWS, lengths, (12, 12), is_known=False, num_true=counts)
            layer.commit(ROWS, lengths, counts)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    for row in ROWS:
        for cell, slot in enumerate(slots[row].tolist()):
            if slot > 0:
                assert is_same(layer.copy(slot), expected[row][1][3 * cell + 3]), (row, cell)
    assert all(part.isnan().all() for slot in (1, 3, 11, 12) for part in layer.copy(slot))
    for slot, row in ((8, 2), (4, 0)):
        layer.states.restore(slot, row)
    reads = layer.scan(ROWS, (6, 9), (3, 3), is_known=True)
    assert torch.equal(reads[0], expected[2][0][6:9])
    assert torch.equal(reads[1], expected[0][0][9:])


@both_kernels
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_to_verify_writes_neither_state_nor_tail(dtype, start):
    layer = Layer(SPECS[0], 30, dtype)
    if start:
        layer.scan(ROWS, (0, 0), (start, start), is_known=True)
    before = [layer.copy(row) for row in range(4)]
    for _ in range(2):  # and a block that is never committed leaves nothing for the next
        layer.scan(ROWS, (start, start), (16, 16), is_known=False)
        assert all(is_same(layer.copy(row), before[row]) for row in range(4))
    layer.scan(ROWS, (start, start), (1, 1), is_known=True)  # a block of one token: commit leaves it alone
    after = [layer.copy(row) for row in range(4)]
    layer.commit(ROWS, (start, start), (1, 1))
    assert all(is_same(layer.copy(row), after[row]) for row in range(4))


@both_kernels
@pytest.mark.parametrize("is_known", [True, False])
def test_a_new_sequence_sees_nothing_of_the_row_s_last_one(is_known):
    layer, fresh = Layer(SPECS[0], 40, torch.float64), Layer(SPECS[0], 40, torch.float64)
    fresh.storage.state.zero_()
    fresh.storage.tail.zero_()
    layer.decode(2, 40)
    results = []
    for one in (layer, fresh):
        reads = one.scan((2,), (0,), (6,), is_known=is_known)[0]
        if not is_known:
            one.commit((2,), (0,), (6,))
        results.append((reads, *one.copy(2)))
    assert is_same(*results)
    assert not results[0][0].isnan().any()


@both_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_commit_together_do_not_meet(dtype):
    """Also when the other row holds no numbers; and rows of nobody stay as they are."""
    layer = Layer(SPECS[0], 30, dtype)
    alone = []
    for row, count in zip(ROWS, (2, 9), strict=True):
        layer.poison()
        layer.scan((row,), (0,), (7,), is_known=True)
        reads = layer.scan((row,), (7,), (10,), is_known=False)[0]
        layer.commit((row,), (7,), (count,))
        alone.append((reads, *layer.copy(row)))
    for broken in (None, 0, 1):
        layer.poison()
        idle = [layer.copy(row) for row in (1, 3)]
        layer.scan(ROWS, (0, 0), (7, 7), is_known=True)
        if broken is not None:
            layer.storage.state[ROWS[broken]] = NAN
        reads = layer.scan(ROWS, (7, 7), (10, 10), is_known=False)
        layer.commit(ROWS, (7, 7), (2, 9))
        for place, row in enumerate(ROWS):
            if place != broken:
                assert is_same((reads[place], *layer.copy(row)), alone[place])
        assert all(is_same(layer.copy(row), before) for row, before in zip((1, 3), idle, strict=True))


def test_layers_of_several_shapes_are_committed_together_and_do_not_meet():
    """Two layers of one shape around one of another, in one cache: each has the bits of a layer alone."""
    specs = (SPECS[0], SPECS[1], SPECS[0])
    alone = [Layer(spec, 9, torch.float64, seed) for seed, spec in enumerate(specs)]
    cache = Cache(
        specs,
        num_pages=2,
        num_rows=4,
        page_size=1,
        dtype=torch.float64,
        device=CPU,
        kernels=kernels_for(torch.float64, CPU),
    )
    rows = SimpleNamespace(
        active=torch.tensor(ROWS),
        length=torch.tensor([3, 0, 3, 0]),
        page_table=torch.zeros(4, 9).long(),
        exact_table=None,
        saves=None,
    )
    assert cache.num_bytes == sum(layer.storage.num_bytes for layer in alone)
    begin, block = cache.view(rows, 3, is_known=True), cache.view(rows, 6)
    begin._rows.starts.zero_()
    for view, start, count, is_known in ((begin, 0, 3, True), (block, 3, 6, False)):
        for index, layer in enumerate(alone):
            tokens = layer.inputs[list(ROWS), start : start + count].flatten(0, 1).split(layer.sizes, dim=1)
            got = view.scan(index, *tokens, layer.weights)
            expected = layer.scan(ROWS, (start, start), (count, count), is_known=is_known)
            assert torch.equal(got, torch.cat(expected))
    cache.commit(rows, block.starts, torch.tensor([6, 2]))
    for layer, storage in zip(alone, cache.storage, strict=True):
        layer.commit(ROWS, (3, 3), (6, 2))
        for row in ROWS:
            assert is_same((storage.state[row], storage.tail[row]), layer.copy(row))


def test_a_block_that_some_layer_has_not_scanned_is_not_committed():
    layer = Layer(SPECS[0], 4, torch.float64)
    layer.states = RecurrentStates(SPECS[0], num_layers=2, num_rows=4, dtype=torch.float64, device=CPU)
    layer.storage = RecurrentState(layer.states, 1)
    layer.scan(ROWS, (0, 0), (4, 4), is_known=False)
    with pytest.raises(AssertionError, match="every layer"):
        layer.commit(ROWS, (0, 0), (1, 1))


# ---- whole models


def bench_at(models, lengths):
    """Rows of a hybrid after a prompt of so many tokens each."""
    bench = Bench(
        models.config.layer_specs(),
        num_rows=len(lengths),
        max_length=64,
        vocab_size=models.config.vocab_size,
        page_size=5,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 90, (length,), generator=generator) for length in lengths]
    bench.prefill(models.target, prompts, [[length] for length in lengths])
    return bench


@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_a_verify_forward_leaves_every_state_as_it_was(name):
    models = families.models(name)
    bench = bench_at(models, (9, 4))
    layers = families.recurrent_layers(bench.cache)
    before = [(layer.state.clone(), layer.tail.clone()) for layer in layers]
    models.target(torch.arange(32), bench.cache.view(bench.rows, 16))
    assert len(layers) >= 2
    assert all(is_same((layer.state, layer.tail), old) for layer, old in zip(layers, before, strict=True))
    bench.cache.commit(bench.rows, bench.rows.length[:2], torch.tensor([1, 1]))
    for layer, (state, tail) in zip(layers, before, strict=True):
        assert not torch.equal(layer.state[:2], state[:2])
        assert not torch.equal(layer.tail[:2], tail[:2])


# ---- memory


def held_bytes(tensors):
    """All memory that these tensors keep alive: a part of another keeps the whole."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def tape_bytes(states):
    return held_bytes([part for block in states._block.values() for part in (block.inputs, *block.tape)])


@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_a_verified_block_holds_the_memory_that_is_planned_for_it(name):
    models, num_rows = families.models(name), 3
    bench = bench_at(models, (9, 4, 6))
    models.target(torch.arange(48), bench.cache.view(bench.rows, 16))
    layers = families.recurrent_layers(bench.cache)
    states = sum(layer.num_bytes for layer in layers) // (num_rows + 1)  # and the scratch row
    groups = list(bench.cache._states.values())
    tapes = sum(tape_bytes(states) for states in groups) // num_rows
    assert states + tapes == bytes_per_row(models.config.layer_specs(), 8, 16)
    bench.cache.commit(bench.rows, bench.rows.length[:3], torch.tensor([1, 16, 5]))
    assert not any(states._block for states in groups)


def test_qwen3_next_80b_needs_one_state_and_a_small_tape_per_sequence(capsys, record_property):
    """Published shape, real tensors of one layer in bfloat16, against the planned number for all."""
    config = read_model_config(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"], name="Qwen3-Next")
    specs = [spec for spec in config.layer_specs() if isinstance(spec, Recurrent)]
    expected = Recurrent(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
    assert specs == [expected] * 36
    planned = bytes_per_row(config.layer_specs(), 2, 16)

    states = RecurrentStates(expected, num_layers=1, num_rows=1, dtype=torch.bfloat16, device=CPU)
    layer = RecurrentState(states, 0)
    x = torch.ones(16, expected.conv_channels, dtype=torch.bfloat16)
    gate = torch.zeros(16, 32, dtype=torch.bfloat16)
    conv = torch.ones(expected.conv_channels, 4, dtype=torch.bfloat16)
    weights = DeltaWeights(conv, torch.zeros(32), torch.zeros(32))
    where = Scan(torch.tensor([0]), torch.tensor([0]), (16,), is_known=False)
    layer.scan(x, gate, gate, weights, where)
    state, tape = 36 * layer.num_bytes, 36 * tape_bytes(states)
    assert state + tape == planned

    snapshots = 16 * 36 * layer.state.nbytes
    text = (
        f"Qwen3-Next-80B-A3B, per sequence at width 16 in bfloat16: state {state:,} bytes, tape {tape:,}, "
        f"together {planned:,}; 16 snapshots of the state would be {snapshots:,}"
    )
    record_property("bytes_per_sequence", text)
    with capsys.disabled():
        print(f"\n{text}")  # noqa: T201
    assert planned < 1.5 * 36 * layer.state.nbytes
    assert planned * 10 < snapshots
