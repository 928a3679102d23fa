"""What a block sees in training: nothing at or past its anchor, nothing of others; and it is what serves.

The classic failure (dossier, 3.2) is a block that reads its anchor's own feature, which all but spells out
the first draft: training looks splendid, and serving accepts nothing.
"""

from dataclasses import replace

import pytest
import torch

from blockdraft.cache.rows import Rows as CacheRows
from blockdraft.kernels.attention import Mask
from blockdraft.training import view
from blockdraft.training.export import named_weights
from blockdraft.training.features import FeatureReader
from blockdraft.training.packing import draw, pack, with_anchors
from blockdraft.training.trainer import BlockForward
from tests.models.checkpoints import Bench, load
from tests.reference import block_logits, visible
from tests.tiny import TARGET
from tests.training import pairs

LENGTH = 48
SIZES = ((5, 14), (1, 9), (7, 20), (3, 8), (9, 4), (2, 30))  # a document begins with its anchor, too
FULL = {"window": None, "causal": False}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}


def window(*, causal, anchored=False):
    return {"window": 5, "causal": causal, "anchored": anchored}


# name: (what the files say, the masks of the two layers as tests/reference.py spells them)
VARIANTS = {
    "full": ({}, [FULL, FULL]),
    "causal": ({"top": {"is_causal": True}}, [FULL | {"causal": True}] * 2),
    "windows": ({"top": SLIDING | {"is_causal": False}}, [window(causal=False)] * 2),
    "causal windows": ({"top": SLIDING}, [window(causal=True)] * 2),
    "mixed": ({"top": MIXED}, [window(causal=True), FULL]),
    "anchored windows": (
        {"top": SLIDING, "speculators": {"sliding_window_non_causal": True}},
        [window(causal=False, anchored=True)] * 2,
    ),
    "causal anchored windows": (
        {"top": MIXED, "speculators": {}},
        [window(causal=True, anchored=True), FULL],
    ),
    "from the anchor": ({"dflash": {"sample_from_anchor": True}}, [FULL, FULL]),
    "causal, from the anchor": (
        {"top": {"is_causal": True}, "dflash": {"sample_from_anchor": True}},
        [FULL | {"causal": True}] * 2,
    ),
    "block 3": ({"top": {"block_size": 3}}, [FULL, FULL]),
    "block 16": ({"top": {"block_size": 16}}, [FULL, FULL]),
    "other heads": (
        {"top": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10, "rope_theta": 300.0}},
        [FULL, FULL],
    ),
    "scales and a cap": (
        {
            "dflash": {
                "output_multiplier": 1.7,
                "final_logit_softcapping": 1.5,
                "input_embedding_scale": 5.5,
            }
        },
        [FULL, FULL],
    ),
}


class Scene:
    """A random drafter over two packed rows of several documents."""

    def __init__(self, **files):
        self.raw = pairs.draft_json(**files)
        self.model = pairs.random_drafter(self.raw)
        self.forward = BlockForward(self.model, pairs.target())
        self.block = self.forward.block
        self.rows, _ = pack(pairs.random_documents(SIZES), LENGTH)
        chosen = range(len(self.rows))
        self.batch = draw(self.rows, chosen, 12, self.block, torch.Generator().manual_seed(0))
        self.features = pairs.random_features(self.batch)

    def hidden(self, features=None, batch=None):
        """[blocks, B - 1, E]"""
        batch = self.batch if batch is None else batch
        with torch.no_grad():
            return self.forward(batch, self.features if features is None else features)

    def blocks(self):
        """(number, row, start, anchor) of those that are real."""
        for row, number in self.batch.is_real.nonzero().tolist():
            start, anchor = (int(x[row, number]) for x in (self.batch.block_starts, self.batch.anchors))
            yield row * self.batch.anchors.shape[1] + number, row, start, anchor

    def places(self):
        """[R * L] row of each feature, and its place in the row."""
        place = torch.arange(LENGTH).expand(len(self.rows), LENGTH)
        row = torch.arange(len(self.rows))[:, None].expand(place.shape)
        return row.flatten(), place.flatten()

    def disturbed(self, where):
        noise = torch.randn(self.features.shape, generator=torch.Generator().manual_seed(9))
        return torch.where(where[:, None], 30 * noise.double(), self.features)


@pytest.fixture(params=["mixed", "anchored windows", "from the anchor"])
def scene(request):
    return Scene(**VARIANTS[request.param][0])


def test_the_scene_has_every_kind_of_block():
    blocks = list(Scene().blocks())
    assert len(blocks) > 18
    assert any(anchor == start for _, _, start, anchor in blocks), "one without any context"
    assert any(start > 0 and anchor > start for _, _, start, anchor in blocks), "one in a later document"
    assert {row for _, row, _, _ in blocks} >= {0, 1}


def test_features_at_and_past_the_anchor_change_nothing_in_its_block(scene):
    before = scene.hidden()
    row_of, place_of = scene.places()
    for number, row, _, anchor in list(scene.blocks())[::2]:
        after = scene.hidden(scene.disturbed((row_of == row) & (place_of >= anchor)))
        assert torch.equal(after[number], before[number]), f"block {number} saw past its anchor"


def test_the_feature_before_the_anchor_is_seen(scene):
    before = scene.hidden()
    row_of, place_of = scene.places()
    for number, row, start, anchor in list(scene.blocks())[::3]:
        after = scene.hidden(scene.disturbed((row_of == row) & (place_of == anchor - 1)))
        assert torch.equal(after[number], before[number]) == (anchor == start)


def test_other_documents_and_other_rows_change_nothing(scene):
    before = scene.hidden()
    row_of, place_of = scene.places()
    for number, row, start, _ in list(scene.blocks())[::3]:
        end = int(scene.rows.ends[row, start])
        mine = (row_of == row) & (place_of >= start) & (place_of < end)
        after = scene.hidden(scene.disturbed(~mine))
        assert torch.equal(after[number], before[number])


def test_another_blocks_anchor_changes_nothing_but_that_block(scene):
    before = scene.hidden()
    for number, row, _, anchor in list(scene.blocks())[::3]:
        tokens = scene.batch.tokens.clone()
        tokens[row, anchor] = (tokens[row, anchor] + 7) % 60
        after = scene.hidden(batch=replace(scene.batch, tokens=tokens))
        same = (after == before).flatten(1).all(dim=1)
        is_real = scene.batch.is_real.flatten()
        assert torch.equal(same[is_real].nonzero().flatten(), _others(is_real, number))


def _others(is_real, number):
    listed = is_real.nonzero().flatten()
    return (listed != number).nonzero().flatten()


def test_tokens_after_the_anchor_and_other_documents_change_nothing_through_the_target():
    """With real features: the target reads each document from its beginning, and only up to the anchor."""
    scene = Scene()
    reader = FeatureReader(pairs.target(), num_rows=len(scene.rows), length=LENGTH)
    everything = range(len(scene.rows))
    before = scene.hidden(reader.read(scene.rows, everything)[1])
    generator = torch.Generator().manual_seed(4)
    for number, row, start, anchor in list(scene.blocks())[::3]:
        tokens = torch.randint(0, 60, scene.batch.tokens.shape, generator=generator)
        tokens[row, start : anchor + 1] = scene.batch.tokens[row, start : anchor + 1]
        batch = replace(scene.batch, tokens=tokens)
        disturbed = replace(scene.rows, tokens=tokens.int())
        after = scene.hidden(reader.read(disturbed, everything)[1], batch)
        torch.testing.assert_close(after[number], before[number], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_serving_and_the_reference_agree_on_every_block(variant, tmp_path):
    files, kinds = VARIANTS[variant]
    scene = Scene(**files)
    logits = scene.forward.head().logits(scene.hidden())
    folder = pairs.write_drafter(tmp_path, scene.raw, scene.model)
    served = serve(scene, load(TARGET, folder, dtype="float64", max_model_len=100, width=scene.block))
    weights = named_weights(scene.model, torch.float64)
    config = pairs.draft_json(**{name: part for name, part in files.items() if name != "speculators"})
    embedding = pairs.target().embedding.weight.data
    columns = scene.model.config.num_columns
    masks = [lambda count, kind=kind: visible(count, columns, **kind) for kind in kinds]
    for place, (number, row, start, anchor) in enumerate(scene.blocks()):
        torch.testing.assert_close(logits[number], served[place], rtol=0, atol=1e-10)
        features = scene.features.view(len(scene.rows), LENGTH, -1)[row, start:anchor]
        token = int(scene.batch.tokens[row, anchor])
        expected = block_logits(weights, config, embedding, embedding, features, token, masks)
        torch.testing.assert_close(logits[number], expected, rtol=0, atol=1e-10)


def serve(scene, models):
    """The drafter that serves, over a real cache: [real blocks, B - 1, V]."""
    blocks = list(scene.blocks())
    specs = models.config.layer_specs() + models.draft_config.layer_specs()
    bench = Bench(
        specs,
        num_rows=len(blocks),
        max_length=LENGTH + 2 * scene.block,
        vocab_size=pairs.VOCAB,
        page_size=5,
        dtype=torch.float64,
    )
    assert isinstance(bench.rows, CacheRows)
    for place, (_, row, start, anchor) in enumerate(blocks):
        bench.rows.anchor[place] = scene.batch.tokens[row, anchor]
        if anchor > start:
            bench.rows.activate([place])
            features = scene.features[row * LENGTH + start : row * LENGTH + anchor]
            models.drafter.absorb(features, bench.cache.view(bench.rows, (anchor - start,)))
            bench.rows.extend((anchor - start,))
    bench.rows.activate(range(len(blocks)))
    anchors = bench.rows.anchor[bench.rows.active][:, None]
    with torch.no_grad():
        return models.drafter.block_logits(anchors, bench.cache.view(bench.rows, models.drafter.num_columns))


# ---- FlexAttention's tiles

KINDS = {
    "full": Mask(scale=1.0, is_causal=False),
    "causal": Mask(scale=1.0, is_causal=True),
    "window": Mask(scale=1.0, is_causal=False, window=40),
    "causal anchored window": Mask(scale=1.0, is_causal=True, window=40, is_anchored=True),
}
# row length, block, anchors; beyond the first, edges of tiles fall inside blocks and between the two parts
SHAPES = [(256, 16, 16), (200, 16, 16), (256, 10, 13), (300, 7, 37), (64, 8, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_hold_every_pair_that_the_dense_mask_shows(kind, shape):
    length, block, num_anchors = shape
    sizes = [(3 + 11 * k % 29, 5 + 17 * k % 43) for k in range(12)]
    sizes = [size for size in sizes if sum(size) <= length]
    rows, _ = pack(pairs.random_documents(sizes), length)
    batch = draw(rows, range(len(rows)), num_anchors, block, torch.Generator().manual_seed(0))
    see = view.sees(batch, KINDS[kind])
    dense, tiles = view.dense_mask(batch, see), view._tiles(batch, see)
    size = batch.anchors.shape[1] * block
    assert dense.shape == (len(rows), 1, size, length + size)
    assert tuple(tiles.shape) == (len(rows), 1, size, length + size)

    row, query, key = torch.meshgrid(
        *(torch.arange(n) for n in (*dense.shape[:1], *dense.shape[2:])), indexing="ij"
    )
    assert torch.equal(tiles.mask_mod(row, torch.zeros_like(row), query, key), dense[:, 0])

    listed = tiles.to_dense()[:, 0].bool()  # [R, query tiles, key tiles]
    _, _, at, to = dense.nonzero().unbind(1)
    assert listed[dense.nonzero()[:, 0], at // view.TILE, to // view.TILE].all()
    if kind == "full":
        is_needed = torch.zeros_like(listed)
        is_needed[dense.nonzero()[:, 0], at // view.TILE, to // view.TILE] = True
        assert (listed & ~is_needed).sum() <= len(rows), "hardly any tile is computed for nothing"


def test_layers_of_one_kind_share_their_mask():
    rows, _ = pack(pairs.random_documents(SIZES), LENGTH)
    batch = with_anchors(rows, [0], torch.tensor([[5, 6]]), 4)
    full, causal = KINDS["full"], KINDS["causal"]
    masks = view.block_masks(batch, {0: full, 1: causal, 2: full})
    assert masks[0] is masks[2]
    assert not torch.equal(masks[0], masks[1])
