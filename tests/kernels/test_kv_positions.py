import pytest
import torch

from blockdraft.errors import SettingsError
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_codec import FORMATS
from blockdraft.kernels.kv_formats import WIDEST_BLOCK
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels.dense_compressed import reference_attend_compressed
from tests.matrix import slow_but

RULE = PositionRule(window=16, stride=8, sinks=4)
LENGTH, HEADS, GROUPS, DIM = 90, 6, 2, 64
MASK = Mask(scale=DIM**-0.5)


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(LENGTH, heads, DIM, generator=generator).to(dtype) for heads in (HEADS, GROUPS, GROUPS)
    )


def attended(q, k, v, start, end, rule=RULE, mask=MASK, form=FORMATS["tq4v3"]):
    """Queries [start, end), as a step has them that has keys and values up to `end`."""
    exact = k[:end], v[:end]
    compressed = form.keys_back(k[:end]), form.values_back(v[:end])
    return reference_attend_compressed(q[start:end], exact, compressed, rule, mask)


def one_query(q, k, v, position, rule, mask=MASK, form=FORMATS["tq4v3"]):
    """Straight from the rule, key by key, in float64."""
    k_back, v_back = form.keys_back(k), form.values_back(v)
    first = 0 if mask.window is None else max(0, position - mask.window + 1)
    keys, values = [], []
    for key in range(first, position + 1):
        is_compressed = rule.sinks <= key < rule.stride * ((position - rule.window) // rule.stride)
        keys.append((k_back if is_compressed else k)[key])
        values.append((v_back if is_compressed else v)[key])
    shared = HEADS // GROUPS
    keys, values = (torch.stack(x).double().repeat_interleave(shared, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,lhd->hl", q[position].double(), keys) * mask.scale
    return torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), values)


def test_the_boundary_is_where_the_rule_says():
    ends = [PositionRule(window=16, stride=8).compressed_end_at(t) for t in range(50)]
    assert ends == [0] * 24 + [8] * 8 + [16] * 8 + [24] * 8 + [32] * 2


@pytest.mark.parametrize(
    "rule",
    [RULE, PositionRule(16, 1, 0), PositionRule(17, 7, 3), PositionRule(40, 16, 0), PositionRule(16, 32, 50)],
    ids=str,
)
@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.float64], torch.float64))
def test_every_query_reads_by_the_rule(rule, dtype):
    """Every position is one, so the boundary lies at every offset of a stride."""
    q, k, v = drawn(dtype)
    whole = attended(q, k, v, 0, LENGTH, rule)
    assert whole.dtype == dtype
    for position in range(LENGTH):
        expected = one_query(q, k, v, position, rule)
        assert torch.allclose(
            whole[position].double(), expected, atol=1e-5 if dtype == torch.float32 else 1e-12
        )


def test_a_sliding_window_hides_what_is_behind_it():
    q, k, v = drawn(torch.float64)
    mask = Mask(scale=MASK.scale, window=30)
    whole = attended(q, k, v, 0, LENGTH, mask=mask)
    for position in range(LENGTH):
        assert torch.allclose(whole[position], one_query(q, k, v, position, RULE, mask), atol=1e-12)


@pytest.mark.parametrize("width", slow_but(range(1, WIDEST_BLOCK + 1), 2, 7, WIDEST_BLOCK))
def test_blocks_of_any_width_are_one_model(width):
    """A block from every position on, with nothing known behind it, has the bits of one long prefill."""
    q, k, v = drawn()
    whole = attended(q, k, v, 0, LENGTH)
    for start in range(LENGTH - width + 1):
        assert torch.equal(attended(q, k, v, start, start + width), whole[start : start + width])


@pytest.mark.parametrize("chunk", slow_but([1, 7, 8, 13, 24, 64], 7, 64))
def test_prefill_in_chunks_is_one_model(chunk):
    q, k, v = drawn()
    parts = [attended(q, k, v, start, min(start + chunk, LENGTH)) for start in range(0, LENGTH, chunk)]
    assert torch.equal(torch.cat(parts), attended(q, k, v, 0, LENGTH))


def test_whatever_a_block_reads_compressed_was_committed():
    """For every width and place: what is compressed lies before the block, so no draft ever is."""
    for start in range(300):
        for query in range(start, start + WIDEST_BLOCK):
            assert PositionRule(window=WIDEST_BLOCK, stride=1).compressed_end_at(query) <= start


def test_short_texts_are_exact():
    q, k, v = drawn()
    short = RULE.window + RULE.stride
    exact = reference_attend_compressed(q[:short], (k[:short], v[:short]), (k[:short], v[:short]), RULE, MASK)
    assert torch.equal(attended(q, k, v, 0, short), exact)


def test_a_window_narrower_than_a_block_is_refused():
    with pytest.raises(SettingsError, match="window of 15 tokens is narrower than a block of 16"):
        PositionRule(window=15)


@pytest.mark.parametrize("wrong", [{"stride": 0}, {"sinks": -1}])
def test_rules_without_a_meaning_are_refused(wrong):
    with pytest.raises(SettingsError, match="Keys cannot be compressed"):
        PositionRule(**wrong)
