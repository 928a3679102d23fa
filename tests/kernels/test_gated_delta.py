"""The gated delta rule against transformers' two functions, and its promise on bits: any cut, one state."""

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.gated_delta import reference_convolve, reference_scan
from blockdraft.kernels.kernels import kernels_for

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
# (key heads, value heads per key head, K, V)
SHAPES = [(2, 1, 8, 8), (1, 2, 6, 10), (2, 4, 16, 8), (1, 1, 1, 1), (3, 2, 7, 37), (1, 2, 32, 64)]


class Ops:
    """One implementation of the contract; the kernels are those of the state's dtype, or of the inputs'."""

    def __init__(self, is_reference):
        self.is_reference = is_reference

    def _kernels(self, dtype):
        kernels = kernels_for(dtype, CPU)
        return kernels.references() if self.is_reference else kernels

    def scan(self, *inputs):
        return self._kernels(inputs[-1].dtype).scan(*inputs)

    def fold(self, state, *rest):
        self._kernels(state.dtype).fold(state, *rest)

    def convolve(self, x, *rest):
        return self._kernels(x.dtype).convolve(x, *rest)


REFERENCE, CHOSEN = Ops(is_reference=True), Ops(is_reference=False)


@pytest.fixture(params=["reference", "chosen"])
def ops(request):
    if request.param == "chosen" and why_no_llvm(torch.float32, CPU) is not None:
        pytest.skip("the kernel is not chosen: the reference is tested already")
    return REFERENCE if request.param == "reference" else CHOSEN


class Inputs:
    """Random tokens as a model makes them: gates below 0, beta in (0, 1), a state that is not zero."""

    def __init__(self, num_rows, num_tokens, shape, *, dtype=torch.float64, state_dtype=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        num_groups, shared, key_size, value_size = shape
        num_heads = num_groups * shared

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        tokens = (
            normal(num_rows, num_tokens, num_groups, key_size) * 3,
            normal(num_rows, num_tokens, num_groups, key_size) * 2,
            normal(num_rows, num_tokens, num_heads, value_size),
            -normal(num_rows, num_tokens, num_heads).exp(),
            normal(num_rows, num_tokens, num_heads).sigmoid(),
        )
        self.tokens = tuple(part.to(dtype) for part in tokens)
        self.state = normal(num_rows, num_heads, key_size, value_size).to(state_dtype or dtype)

    def part(self, begin, end, rows=slice(None)):
        return tuple(part[rows, begin:end] for part in self.tokens)

    def by(self, function):
        """The outputs and last state of one of transformers' functions, which compute in float32."""
        q, k, v, gate, beta = self.tokens
        shared = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
        return function(
            q, k, v, g=gate, beta=beta, initial_state=self.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip


def counts_of(*values):
    return torch.tensor(values, dtype=torch.int64)


def run_cut(ops, inputs, cuts, *, rows=slice(None)):
    """Scan and fold piece by piece; `cuts` are (length scanned, tokens kept). Outputs and the last state."""
    state, outs, begin = inputs.state[rows].clone(), [], 0
    for length, kept in cuts:
        out, tape = ops.scan(*inputs.part(begin, begin + length, rows), state)
        ops.fold(state, tape, torch.full((len(state),), kept, dtype=torch.int64))
        outs.append(out[:, :kept])
        begin += kept
    return torch.cat(outs, dim=1), state


# ------------------------------------------------------------------------------------------------ meaning


@pytest.mark.parametrize("function", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_transformers(ops, shape, function):
    inputs = Inputs(2, 70, shape, dtype=torch.float32)  # more than one chunk of 64
    expected, last = inputs.by(function)
    out, state = run_cut(ops, inputs, [(70, 70)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=2e-5)


def test_short_keys_and_queries_are_not_blown_up(ops):
    """Lengths near EPS, and zero."""
    inputs = Inputs(1, 6, (1, 2, 6, 10), dtype=torch.float32)
    q, k = inputs.tokens[:2]
    scale = torch.tensor([1.0, 1e-2, 1e-3, 1e-4, 1e-6, 0.0])[:, None, None]
    q *= scale
    k *= scale.flip(0)
    expected, last = inputs.by(torch_recurrent_gated_delta_rule)
    out, state = run_cut(ops, inputs, [(6, 6)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_is_the_recurrence_written_out(ops, shape):
    """One value head at a time, by matrix products."""
    inputs = Inputs(2, 5, shape)
    q, k, v, gate, beta = inputs.tokens
    expected_out, expected_state = torch.empty_like(v), inputs.state.clone()
    for row in range(2):
        for head in range(v.shape[2]):
            group, s = head // shape[1], expected_state[row, head]
            for t in range(5):
                query, key = (
                    x[row, t, group] / (x[row, t, group].square().sum() + 1e-6).sqrt() for x in (q, k)
                )
                s = s * gate[row, t, head].exp()
                s = s + torch.outer(key, beta[row, t, head] * (v[row, t, head] - key @ s))
                expected_out[row, t, head] = (query / shape[2] ** 0.5) @ s
            expected_state[row, head] = s
    out, state = run_cut(ops, inputs, [(5, 5)])
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_are_computed_in_the_state_s_dtype(ops, dtype):
    inputs = Inputs(2, 9, (2, 2, 16, 8), dtype=dtype, state_dtype=torch.float32)
    out, tape = ops.scan(*inputs.tokens, inputs.state)
    wide = tuple(part.float() for part in inputs.tokens)
    expected, expected_tape = ops.scan(*wide, inputs.state)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    for ours, theirs in zip(tape, expected_tape, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_the_tape_says_what_its_docstring_says(ops):
    inputs = Inputs(1, 1, (1, 2, 4, 3))
    _, k, v, gate, beta = inputs.tokens
    _, tape = ops.scan(*inputs.tokens, inputs.state)
    key = k[0, 0, 0] / (k[0, 0, 0].square().sum() + 1e-6).sqrt()
    held = torch.einsum("k,hkv->hv", key, inputs.state[0] * gate[0, 0].exp()[:, None, None])
    torch.testing.assert_close(tape.decay, gate.exp())
    torch.testing.assert_close(tape.key[0, 0, 0], key)
    torch.testing.assert_close(tape.delta[0, 0], beta[0, 0, :, None] * (v[0, 0] - held))


# ------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_how_a_sequence_is_cut(ops, shape, dtype):
    inputs = Inputs(2, 17, shape, dtype=dtype)
    one_by_one = run_cut(ops, inputs, [(1, 1)] * 17)
    generator = torch.Generator().manual_seed(3)
    cuts = [[(17, 17)]]
    for _ in range(3):
        pieces, done = [], 0
        while done < 17:
            length = int(torch.randint(1, 1 + min(9, 17 - done), (), generator=generator))
            kept = int(torch.randint(0 if pieces else 1, length + 1, (), generator=generator))
            pieces.append((length, kept))
            done += kept
        cuts.append(pieces)
    assert any(kept == 0 for pieces in cuts for _, kept in pieces)
    assert any(0 < kept < length for pieces in cuts for length, kept in pieces)
    for pieces in cuts:
        out, state = run_cut(ops, inputs, pieces)
        assert torch.equal(out, one_by_one[0])
        assert torch.equal(state, one_by_one[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_other_rows(ops, shape, dtype):
    inputs = Inputs(5, 4, shape, dtype=dtype)
    out, state = run_cut(ops, inputs, [(4, 3)])
    for rows in (slice(0, 1), slice(4, 5), slice(1, 4), [3, 0]):
        alone, alone_state = run_cut(ops, inputs, [(4, 3)], rows=rows)
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_state, state[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(ops, dtype):
    inputs = Inputs(3, 8, (2, 4, 40, 56), dtype=dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            results.append(run_cut(ops, inputs, [(8, 6)]))
    finally:
        torch.set_num_threads(threads)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])


def test_bits_do_not_depend_on_strides(ops):
    inputs = Inputs(2, 6, (2, 2, 8, 12), dtype=torch.float32)
    expected, expected_tape = ops.scan(*inputs.tokens, inputs.state)
    spread = tuple(torch.stack([part, part.neg()], dim=-1)[..., 0] for part in inputs.tokens)
    assert not any(part.is_contiguous() for part in spread)
    out, tape = ops.scan(*spread, inputs.state)
    assert torch.equal(out, expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tape, expected_tape, strict=True))


# ------------------------------------------------------------------------------------------------ fold


def test_ragged_counts_keep_each_row_s_own_tokens(ops):
    inputs = Inputs(5, 7, (2, 2, 6, 10))
    _, tape = ops.scan(*inputs.tokens, inputs.state)
    state = inputs.state.clone()
    ops.fold(state, tape, counts_of(3, 0, 7, 1, 6))
    for row, count in enumerate((3, 0, 7, 1, 6)):
        expected = inputs.state[row : row + 1].clone()
        for t in range(count):
            _, step = ops.scan(*inputs.part(t, t + 1, slice(row, row + 1)), expected)
            ops.fold(expected, step, counts_of(1))
        assert torch.equal(state[row], expected[0])


def test_a_fold_of_nothing_changes_nothing_even_if_the_drafts_are_not_numbers(ops):
    inputs = Inputs(2, 3, (1, 2, 6, 10))
    inputs.tokens[2][:] = float("nan")
    _, tape = ops.scan(*inputs.tokens, inputs.state)
    state = inputs.state.clone()
    ops.fold(state, tape, counts_of(0, 0))
    assert torch.equal(state, inputs.state)
    ops.fold(state, tape, counts_of(0, 1))
    assert torch.equal(state[0], inputs.state[0])
    assert state[1].isnan().all()


def test_a_fold_of_part_of_a_larger_store_leaves_the_rest(ops):
    """The states of one layer in a store [rows, layers, H, K, V]."""
    inputs = Inputs(3, 4, (1, 2, 6, 10))
    _, tape = ops.scan(*inputs.tokens, inputs.state)
    expected = inputs.state.clone()
    ops.fold(expected, tape, counts_of(2, 4, 1))
    store = torch.zeros(3, 2, *inputs.state.shape[1:], dtype=torch.float64)
    store[:, 1] = inputs.state
    out, _ = ops.scan(*inputs.tokens, store[:, 1])
    assert torch.equal(out, ops.scan(*inputs.tokens, inputs.state)[0])
    ops.fold(store[:, 1], tape, counts_of(2, 4, 1))
    assert torch.equal(store[:, 1], expected)
    assert not store[:, 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_scan_writes_neither_the_state_nor_its_inputs(ops, dtype, num_tokens):
    inputs = Inputs(2, num_tokens, (2, 2, 6, 40), dtype=dtype)
    before = [part.clone() for part in (*inputs.tokens, inputs.state)]
    out, tape = ops.scan(*inputs.tokens, inputs.state)
    kept = [part.clone() for part in tape]
    ops.fold(inputs.state.clone(), tape, counts_of(1, num_tokens))
    for now, then in zip((*inputs.tokens, inputs.state), before, strict=True):
        assert torch.equal(now, then)
    assert all(torch.equal(now, then) for now, then in zip(tape, kept, strict=True))
    assert out.shape == inputs.tokens[2].shape


def test_training_takes_the_reference_and_has_gradients():
    inputs = Inputs(1, 3, (1, 2, 3, 2))
    leaves = [part.clone().requires_grad_() for part in (*inputs.tokens, inputs.state)]
    assert torch.autograd.gradcheck(lambda *parts: reference_scan(*parts)[0], leaves)


# ------------------------------------------------------------------------------------------------ convolution


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 7, 40])
def test_convolution_agrees_with_conv1d(ops, dtype, width, channels):
    torch.manual_seed(width)
    x = torch.randn(3, 6, channels, dtype=dtype) * 5
    tail, weight = torch.randn(3, width - 1, channels, dtype=dtype), torch.randn(channels, width, dtype=dtype)
    inputs = torch.cat([tail, x], dim=1).double().transpose(1, 2)
    expected = functional.silu(
        functional.conv1d(inputs, weight.double()[:, None], groups=channels).transpose(1, 2)
    )
    out = ops.convolve(x, tail, weight)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 77])
def test_bits_of_a_convolution_depend_neither_on_cuts_nor_on_rows_nor_on_threads(ops, dtype, channels):
    torch.manual_seed(channels)
    x, weight = torch.randn(3, 300, channels).to(dtype) * 4, torch.randn(channels, 4).to(dtype)
    tail = torch.randn(3, 3, channels).to(dtype)
    whole = ops.convolve(x, tail, weight)
    inputs = torch.cat([tail, x], dim=1)
    threads = torch.get_num_threads()
    try:
        for size in (1, 7, 64, 299):
            torch.set_num_threads(1 + size % 3)
            for begin in range(0, 30 if size == 1 else 300, size):
                row = begin % 3
                end = min(begin + size, 300)
                part = ops.convolve(x[row:, begin:end], inputs[row:, begin : begin + 3], weight)
                assert torch.equal(part, whole[row:, begin:end])
    finally:
        torch.set_num_threads(threads)


def test_convolution_has_gradients():
    torch.manual_seed(0)
    parts = [torch.randn(*size, dtype=torch.float64) for size in ((2, 3, 4), (2, 2, 4), (4, 3))]
    assert torch.autograd.gradcheck(reference_convolve, [part.requires_grad_() for part in parts])
