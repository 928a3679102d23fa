"""DFlash2 in pages against tests/reference.py on the same weights in float64: block logits, and the walk."""

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.cache.rows import RowSampling
from blockdraft.kernels.noise import gumbel
from blockdraft.models.dflash import DFlash2
from blockdraft.models.packed import Packed
from blockdraft.step.pairs import DFlash2Drafter
from tests import tiny
from tests.fixtures import make_pair
from tests.models.checkpoints import load, write_draft
from tests.models.test_dflash import (
    FULL,
    HIDDEN,
    SWA,
    VOCAB,
    Drafting,
    make,
    masks,
    random_chunks,
    random_features,
    sliding,
)
from tests.reference import block_hidden, block_logits, pair_walk

__all__ = ["make"]  # the fixture with its targets
# name: (keys at the top, keys of dflash_config, what speculators' layout adds, the masks of the two layers)
VARIANTS = {
    "full": ({}, {}, None, [FULL, FULL]),
    "three taps": ({}, {"conv_kernel_size": 3}, None, [FULL, FULL]),
    "more taps than columns": ({"block_size": 2}, {"conv_kernel_size": 4}, None, [FULL, FULL]),
    "one group": ({}, {"conv_group_size": HIDDEN}, None, [FULL, FULL]),
    "block 16": ({"block_size": 16}, {"selector_top_k": 16}, None, [FULL, FULL]),
    "first by its column": ({}, {"selector_skips_first": True}, None, [FULL, FULL]),
    "all candidates": ({}, {"selector_top_k": VOCAB}, None, [FULL, FULL]),
    "as published": (SWA | {"is_causal": False}, {}, None, [sliding(6, causal=False)] * 2),
    "multiplier and softcap": (
        {},
        {"output_multiplier": 0.3, "final_logit_softcapping": 2.0, "input_embedding_scale": 1.7},
        None,
        [FULL, FULL],
    ),
    "speculators causal": (
        SWA,
        {},
        {"sliding_window_non_causal": False},
        [sliding(6, causal=True, anchored=True)] * 2,
    ),
}


@pytest.fixture(scope="module")
def pair(make, tmp_path_factory):
    """Folders of a pair, and its reference: (features, anchor, masks) -> logits, hidden; then its weights."""

    def write(top=(), dflash=(), speculators=None):
        target, _, reference = make()
        _, _, embedding, head = reference.args
        config = make_pair.dflash2_config(**dict(dflash)) | dict(top)
        weights = make_pair.draft_weights(config, torch.Generator().manual_seed(8))
        folder = tmp_path_factory.mktemp("dflash2")
        write_draft(
            folder, config if speculators is None else tiny.to_speculators(config, speculators), weights
        )
        wide = {name: weight.double() for name, weight in weights.items()}

        def reference(*args):
            logits = block_logits(wide, config, embedding, head, *args)
            return logits, block_hidden(wide, config, embedding, *args)[1:]

        return target, folder, reference, wide, config

    return write


@pytest.mark.parametrize("variant", VARIANTS)
def test_block_logits_and_drafts_are_those_of_the_reference(pair, variant):
    *files, kinds = VARIANTS[variant]
    *folders, reference, weights, config = pair(*files)
    drafting, features = Drafting(folders), random_features()
    assert isinstance(drafting.drafter, DFlash2Drafter)
    block, own = drafting.drafter.block, config["dflash_config"]
    expected = [reference(f, 3 + row, masks(block, *kinds)) for row, f in enumerate(features)]
    bench = drafting.absorb(features, random_chunks())
    rows, anchor = bench.rows, bench.rows.anchor[bench.rows.active][:, None]
    actual = drafting.drafter.block_logits(anchor, bench.cache.view(rows, block))
    torch.testing.assert_close(actual, torch.stack([one[0] for one in expected]), rtol=0, atol=1e-10)
    for temperature in (0.0, 0.7):
        starts = rows.length[rows.active]
        for row, (length, token) in enumerate(zip(starts.tolist(), anchor.flatten().tolist(), strict=True)):
            rows.place(
                row, [0] * length + [token], length, RowSampling(temperature=temperature, seed=9 + row)
            )
        rows.activate(range(len(features)))
        got = drafting.drafter.draft(rows, bench.cache, bench.cache.view(rows, block), block)
        positions = starts[:, None] + 1 + torch.arange(block - 1)
        noise = gumbel(torch.tensor([9, 10, 11]), positions, VOCAB, torch.float64)
        for row, (logits, hidden) in enumerate(expected):
            drafts = pair_walk(
                weights,
                logits,
                hidden,
                anchor[row],
                own["selector_top_k"],
                temperature,
                noise[row],
                skips_first=own.get("selector_skips_first", False),
            )
            assert got[row].tolist() == [int(anchor[row]), *drafts], temperature


@pytest.mark.parametrize("width", [2, 5])
def test_narrow_steps_draft_the_first_columns_of_the_block(pair, width):
    *folders, _, _, _ = pair()
    drafting, features = Drafting(folders), random_features()
    bench = drafting.absorb(features, random_chunks())
    whole, narrow = (
        drafting.drafter.draft(bench.rows, bench.cache, bench.cache.view(bench.rows, one), one)
        for one in (drafting.drafter.block, width)
    )
    assert torch.equal(narrow, whole[:, :width])


@pytest.mark.parametrize(
    ("width", "num_rows", "is_walked"), [(7, 3, False), (8, 3, True), (8, 4, True), (8, 5, False)]
)
def test_where_the_selector_alone_was_trained_blocks_are_drafted_without_it_if_narrow_or_many(
    pair, width, num_rows, is_walked
):
    *folders, _, _, _ = pair()
    drafting, lengths = Drafting(folders, num_rows=num_rows), [9, 12, 7, 11, 8][:num_rows]
    drafting.drafter.model.is_convolved = False
    bench = drafting.absorb(random_features(lengths), random_chunks(lengths))
    rows, cache = bench.rows, bench.cache
    anchor = rows.anchor[rows.active][:, None]
    likeliest = drafting.drafter.block_logits(anchor, cache.view(rows, 8)).argmax(dim=-1)
    drafts = drafting.drafter.draft(rows, cache, cache.view(rows, width), width)[:, 1:]
    assert torch.equal(drafts[:, :6], likeliest[:, :6]) != is_walked


def test_the_identity_is_the_drafter_it_began_as(make, tmp_path):
    """Kernels whose first tap is 1 and nothing else, pairs that are worth 0: DFlash, number for number."""
    target, draft, _ = make()
    weights, config = load_file(draft / "model.safetensors"), make_pair.dflash2_config(selector_top_k=16)
    extra = make_pair.dflash2_weights(config)
    for name, weight in extra.items():
        weight.zero_()
        if name.endswith("base_kernel"):
            weight[:, 0] = 1.0
    write_draft(tmp_path, config, weights | extra)
    features, found = random_features(), []
    for folder in (draft, tmp_path):
        drafting = Drafting((target, folder))
        bench = drafting.absorb(features, random_chunks())
        rows, cache = bench.rows, bench.cache
        anchor = rows.anchor[rows.active][:, None]
        logits = drafting.drafter.block_logits(anchor, cache.view(rows, drafting.drafter.block))
        found.append((logits, drafting.drafter.draft(rows, cache, cache.view(rows, 8), 8)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_convolutions_and_selector_stay_exact_where_the_drafter_is_quantised(pair):
    *folders, _, weights, _ = pair()
    model = load(*folders, dtype="float32", draft_quantization="int8").drafter.model
    assert isinstance(model, DFlash2)
    packed = {name for name, module in model.named_modules() if isinstance(module, Packed)}
    assert {"fc.weight", "layers.0.qkv.weight", "layers.1.mlp.down.weight"} <= packed
    own = {name: value for name, value in model.named_parameters() if "conv" in name or "selector" in name}
    assert len(own) == 3 + 2 * 2 * 2
    for name, value in own.items():
        assert torch.equal(value, weights[name].float()), name
