"""Attention over compressed pages against "dequantise, then attend", for the references."""

import pytest
import torch

from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.kv_codec import FORMATS
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels import compressed_case


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("page_size", [16, 64, 24])
def test_reading_pages_is_dequantising_then_attending(form, page_size):
    case = compressed_case.make(form=form, lengths=(300, 17, 213, 640), counts=(16,) * 4, page_size=page_size)
    REFERENCE.compress(case.pages, case.tiles)
    out = REFERENCE.attend_compressed(case.q, case.pages, case.blocks, case.mask, None)
    assert torch.allclose(out, case.expected(), atol=2e-5)


@pytest.mark.parametrize("length", range(190, 290, 7))
def test_the_border_may_lie_at_every_offset(length):
    case = compressed_case.make(lengths=(length, length + 1), counts=(16, 16), rule=PositionRule(window=16))
    REFERENCE.compress(case.pages, case.tiles)
    out = REFERENCE.attend_compressed(case.q, case.pages, case.blocks, case.mask, None)
    assert torch.allclose(out, case.expected(), atol=2e-5)


def test_a_chunk_of_a_prompt_reads_its_own_keys_compressed():
    case = compressed_case.make(lengths=(500, 260), counts=(500, 100))
    REFERENCE.compress(case.pages, case.tiles)
    out = REFERENCE.attend_compressed(case.q, case.pages, case.blocks, case.mask, None)
    assert torch.allclose(out, case.expected(), atol=2e-5)


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
