"""Compressed keys and values: what a query reads compressed, and the references against dense attention."""

import pytest
import torch

from blockdraft.errors import SettingsError
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.kv_codec import FORMATS
from blockdraft.kernels.kv_formats import WIDEST_BLOCK
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels import compressed_case

NEAR = PositionRule(window=16)


# ---- positions


def test_the_boundary_is_where_the_rule_says():
    ends = [NEAR.compressed_end_at(t) for t in range(210)]
    assert ends == [0] * 80 + [64] * 64 + [128] * 64 + [192] * 2
    assert NEAR.compressed_end_at(torch.arange(210)).tolist() == ends


def test_whatever_a_block_reads_compressed_was_committed():
    """For every width and place: what is compressed lies before the block, so no draft ever is."""
    for start in range(300):
        for query in range(start, start + WIDEST_BLOCK):
            assert PositionRule(window=WIDEST_BLOCK).compressed_end_at(query) <= start


def test_a_window_narrower_than_a_block_is_refused():
    with pytest.raises(SettingsError, match="window of 15 tokens is narrower than a block of 16"):
        PositionRule(window=15)


# ---- pages


def check(**options):
    case = compressed_case.make(**options)
    REFERENCE.compress(case.pages, case.tiles)
    out = REFERENCE.attend_compressed(case.q, case.pages, case.blocks, case.mask, None)
    torch.testing.assert_close(out, case.expected(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("form", "page_size"), [*zip(FORMATS, (16, 64, 24), strict=True)])
def test_reading_pages_is_dequantising_then_attending(form, page_size):
    check(form=form, lengths=(300, 17, 213, 640), counts=(16,) * 4, page_size=page_size)


@pytest.mark.parametrize("length", range(190, 290, 14))
def test_the_border_may_lie_at_every_offset(length):
    check(lengths=(length, length + 1), counts=(16, 16), rule=NEAR)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_of_a_prompt_reads_its_own_keys_compressed(window):
    check(lengths=(500, 260), counts=(500, 100), mask=Mask(scale=0.2, window=window))


def test_only_what_was_asked_for_is_compressed():
    case = compressed_case.make(lengths=(400, 400), counts=(16, 16))
    tiles = case.tiles
    tiles.counts[0] = 0  # nothing of the first row
    REFERENCE.compress(case.pages, tiles)
    for row in range(2):
        position = torch.arange(400)
        place = tiles.table[row, position // 16] * 16 + position % 16
        is_written = ~case.pages.keys.scale[0, 0, place].isnan()
        assert is_written.sum() == (0 if row == 0 else int(tiles.ends[1]))
