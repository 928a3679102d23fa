"""The drafter in pages against tests/reference.py, which has no cache, on the same weights in float64."""

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.cache.rows import RowSampling
from blockdraft.errors import ModelError
from blockdraft.step.decode import decode_parts, run_all_parts
from blockdraft.step.prefill import prefill_step
from tests import tiny
from tests.fixtures import make_pair
from tests.matrix import slow_but
from tests.models.checkpoints import bench_of, cut, load, write_draft, write_target
from tests.reference import block_logits, visible

VOCAB, HIDDEN, LAYERS = 64, 32, 4
SLIDING = ["sliding_attention", "sliding_attention"]
MIXED = ["sliding_attention", "full_attention"]
LENGTHS = (19, 7, 1)  # context of each row


def block_logits_of(drafter, rows, cache):
    return drafter.block_logits(rows.anchor[rows.active][:, None], cache.view(rows, drafter.num_columns))


def write_small_target(folder, *, is_tied=False):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return write_target(folder, config, seed=5)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """write_pair on targets that are written once."""

    @functools.cache
    def target(is_tied):
        folder = tmp_path_factory.mktemp("target")
        return folder, write_small_target(folder, is_tied=is_tied)

    def write_pair(*, is_tied=False, **files):
        folder, model = target(is_tied)
        draft = tmp_path_factory.mktemp("draft")
        config, weights = write_random_draft(draft, **files)
        wide = {name: weight.double() for name, weight in weights.items()}
        embedding = model.get_input_embeddings().weight.detach().double()
        head = wide.get("lm_head.weight", model.get_output_embeddings().weight.detach().double())
        return folder, draft, functools.partial(block_logits, wide, config, embedding, head)

    return write_pair


def write_random_draft(folder, *, top=(), dflash=(), speculators=None, own_head=None, layout=None):
    """A drafter in any layout. Returns its configuration as the reference reads it, and its tensors."""
    config = copy.deepcopy(make_pair.draft_config()) | dict(top)
    config["dflash_config"] |= dict(dflash)
    generator = torch.Generator().manual_seed(6)
    weights = make_pair.draft_weights(config, generator)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    if own_head is not None:
        weights |= {"lm_head.weight": torch.randn(len(own_head), HIDDEN, generator=generator) * 0.2}
        weights |= {"d2t": own_head - torch.arange(len(own_head))}
        weights |= {"t2d": torch.isin(torch.arange(VOCAB), own_head)}
    written = config if speculators is None else tiny.to_speculators(config, speculators)
    write_draft(folder, written if layout is None else layout(config), weights)
    return config, weights


class Drafting:
    """A loaded pair and a cache; features are given by hand."""

    def __init__(self, folders, *, page_size=5, num_rows=3):
        self.models = load(*folders, dtype="float64", max_model_len=100)
        self.drafter = self.models.drafter
        self.page_size, self.num_rows = page_size, num_rows

    def absorb(self, features, chunks):
        """A fresh cache that took each row's features [C, taps * E] in pieces; anchors are 3, 4, …"""
        max_length = max(map(len, features)) + 2 * self.drafter.block
        bench = bench_of(self.models, self.num_rows, max_length, self.page_size)
        num_steps = max(map(len, chunks))
        done = [0] * len(features)
        for step in range(num_steps):
            active = [row for row in range(len(features)) if step < len(chunks[row])]
            counts = tuple(chunks[row][step] for row in active)
            bench.rows.activate(active)
            pieces = [features[r][done[r] : done[r] + n] for r, n in zip(active, counts, strict=True)]
            self.drafter.absorb(torch.cat(pieces), bench.cache.view(bench.rows, counts))
            bench.rows.extend(counts)
            for row, count in zip(active, counts, strict=True):
                done[row] += count
        bench.rows.activate(range(len(features)))
        bench.rows.anchor[: len(features)] = torch.arange(3, 3 + len(features))
        return bench

    def logits(self, features, chunks):
        bench = self.absorb(features, chunks)
        return block_logits_of(self.drafter, bench.rows, bench.cache)


def random_features(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = len(make_pair.TAPS) * HIDDEN
    return [torch.randn(n, size, dtype=torch.float64, generator=generator) for n in lengths]


def random_chunks(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [cut(n, min(n, 1 + 2 * row), generator) for row, n in enumerate(reversed(lengths))][::-1]


def masks(block, *kinds):
    return [functools.partial(visible, block=block, **kind) for kind in kinds]


def sliding(window, *, causal, anchored=False):
    return {"window": window, "causal": causal, "anchored": anchored}


def without_head_dim(config):
    return {key: value for key, value in config.items() if key != "head_dim"}


FULL = {"window": None, "causal": False}
CAUSAL = {"window": None, "causal": True}
FROM_ANCHOR = {"sample_from_anchor": True}
USED = {"use_sliding_window": True}
SWA = USED | {"layer_types": SLIDING, "sliding_window": 6}
# name: (what the files say, the masks of the two layers)
VARIANTS = {
    "full": ({}, [FULL, FULL]),
    "tied target": ({"is_tied": True}, [FULL, FULL]),
    "z-lab windows are causal": ({"top": SWA}, [sliding(6, causal=True)] * 2),
    "z-lab mixed": (
        {"top": USED | {"layer_types": MIXED, "sliding_window": 6, "block_size": 16}},
        [sliding(6, causal=True), FULL],
    ),
    "is_causal false": ({"top": SWA | {"is_causal": False}}, [sliding(6, causal=False)] * 2),
    "speculators causal": (
        {"top": USED | {"layer_types": MIXED, "sliding_window": 6}, "speculators": {}},
        [sliding(6, causal=True, anchored=True), FULL],
    ),
    "speculators non-causal": (
        {"top": SWA, "speculators": {"sliding_window_non_causal": True}},
        [sliding(6, causal=False, anchored=True)] * 2,
    ),
    "JetSpec's causal head": ({"dflash": {"causal_head": True}}, [CAUSAL, CAUSAL]),
    "from the anchor": ({"dflash": FROM_ANCHOR}, [FULL, FULL]),
    "from the anchor, DeepSpec": ({"dflash": FROM_ANCHOR, "layout": tiny.to_deepspec}, [FULL, FULL]),
    "from the anchor, SpecForge": ({"dflash": FROM_ANCHOR, "layout": tiny.to_specforge}, [FULL, FULL]),
    "from the anchor, speculators": (
        {"dflash": FROM_ANCHOR, "top": SWA, "speculators": {"sliding_window_non_causal": True}},
        [sliding(6, causal=False, anchored=True)] * 2,
    ),
    "scales and softcap": (
        {"dflash": {"input_embedding_scale": 5.5, "output_multiplier": 1.7, "final_logit_softcapping": 1.5}},
        [FULL, FULL],
    ),
    "scales and softcap at the top": (
        {"top": {"input_embedding_scale": 5.5, "output_multiplier": 1.7, "final_logit_softcapping": 1.5}},
        [FULL, FULL],
    ),
    "a softcap of zero": ({"dflash": {"final_logit_softcapping": 0}}, [FULL, FULL]),
    "biases": ({"top": {"attention_bias": True}}, [FULL, FULL]),
    "sliding layers without a window": ({"top": SWA | {"use_sliding_window": False}}, [CAUSAL, CAUSAL]),
    "heads of 128": ({"top": {"head_dim": 128}, "layout": without_head_dim}, [FULL, FULL]),
    "other heads and theta": (
        {"top": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10, "rope_theta": 300.0}},
        [FULL, FULL],
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_block_logits_are_those_of_the_reference(make, variant):
    files, kinds = VARIANTS[variant]
    *folders, reference = make(**files)
    drafting, features = Drafting(folders), random_features()
    columns = drafting.drafter.num_columns
    expected = [reference(f, 3 + row, masks(columns, *kinds)) for row, f in enumerate(features)]
    assert expected[0].shape == (drafting.drafter.block - 1, VOCAB)
    for page_size in (1, 5):
        drafting.page_size = page_size
        actual = drafting.logits(features, random_chunks(seed=page_size))
        torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("block", [2, 3, 9, 16])
def test_every_block_size_and_window_agrees_with_the_reference(make, block):
    window = block // 2 + 1
    top = USED | {"block_size": block, "layer_types": MIXED, "sliding_window": window}
    *folders, reference = make(top=top)
    drafting = Drafting(folders, num_rows=1)
    features = random_features((11,), seed=block)
    actual = drafting.logits(features, random_chunks((11,), seed=block))[0]
    expected = reference(features[0], 3, masks(block, sliding(window, causal=True), FULL))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("speculators", [None, {"draft_vocab_size": 10}])
def test_reduced_vocabulary_lands_on_the_targets_ids(make, speculators):
    ids = torch.tensor([0, 2, 3, 11, 12, 30, 31, 50, 60, 63])
    top = {"draft_vocab_size": 10} if speculators is None else {}
    *folders, reference = make(top=top, speculators=speculators, own_head=ids)
    drafting = Drafting(folders)
    features = random_features()
    actual = drafting.logits(features, random_chunks())
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    assert torch.isneginf(actual[..., others]).all()
    for row, context in enumerate(features):
        expected = reference(context, 3 + row)
        torch.testing.assert_close(actual[row][:, ids], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "ids",
    [[0, 5, 64], [0, 5, 5], [-1, 5, 6]],
    ids=["outside", "twice", "negative"],
)
def test_reduced_vocabulary_that_is_no_map_is_refused(make, ids):
    *folders, _ = make(top={"draft_vocab_size": 3}, own_head=torch.tensor(ids))
    with pytest.raises(ModelError, match="d2t does not map onto the target's vocabulary"):
        Drafting(folders)


def test_a_reverse_map_of_another_vocabulary_is_refused(make):
    *folders, _ = make(top={"draft_vocab_size": 3}, own_head=torch.tensor([0, 5, 63]))
    weights = load_file(folders[1] / "model.safetensors")
    for t2d in (weights["t2d"][:40], torch.zeros_like(weights["t2d"])):
        save_file(weights | {"t2d": t2d.clone()}, folders[1] / "model.safetensors")
        with pytest.raises(ModelError, match="d2t does not map onto the target's vocabulary"):
            Drafting(folders)


def test_reduced_vocabulary_without_its_map_is_refused(make):
    *folders, _ = make(top={"draft_vocab_size": 10})
    with pytest.raises(ModelError, match="vocabulary of 10 of the target's 64 tokens, but no"):
        Drafting(folders)


@pytest.mark.parametrize("variant", ["full", "z-lab windows are causal", "speculators non-causal"])
def test_features_at_or_past_the_anchor_change_nothing(make, variant):
    *folders, _ = make(**VARIANTS[variant][0])
    drafting, features = Drafting(folders), random_features()
    before = drafting.logits(features, random_chunks())
    bench = drafting.absorb(features, random_chunks())
    block = drafting.drafter.block
    # As after a verify: the features of every column were absorbed, and none was committed.
    scratch = torch.full((len(LENGTHS) * block, features[0].shape[1]), float("nan"), dtype=torch.float64)
    drafting.drafter.absorb(scratch, bench.cache.view(bench.rows, block))
    assert torch.equal(block_logits_of(drafting.drafter, bench.rows, bench.cache), before)


@pytest.mark.parametrize(
    ("variant", "reach"),
    [
        ("full", 19),
        ("z-lab windows are causal", 5),  # the anchor sees itself and five more
        ("is_causal false", 5),
        ("speculators non-causal", 6),  # keys from anchor - window on
        ("speculators causal", 19),  # its second layer sees everything
    ],
)
def test_exactly_the_features_within_reach_matter(make, variant, reach):
    *folders, _ = make(**VARIANTS[variant][0])
    drafting, length = Drafting(folders, num_rows=1), LENGTHS[0]
    features = random_features((length,))[0]
    before = drafting.logits([features], [[length]])
    for position in range(length):
        changed = features.clone()
        changed[position] = -changed[position]
        after = drafting.logits([changed], [[length]])
        assert torch.equal(after, before) == (position < length - reach), position


RANDOM_ROW = RowSampling(temperature=1.0, output_start=5)


@pytest.mark.parametrize("width", slow_but([2, 5, 8], 5))
def test_context_left_by_real_steps_is_what_transformers_would_give(width):
    """Whatever was accepted or rejected on the way, the next block sees the features of [0, length)."""
    models, num_rows = tiny.load("float64"), 2
    bench = bench_of(models, num_rows, 100, page_size=3)
    rows, tables = bench.rows, bench.rows.page_table.clone()
    texts = [[3, 5, 7, 9, 11], [40, 41, 42, 43, 44]]
    for row, ids in enumerate(texts):
        rows.place(row, ids, 0, RANDOM_ROW)
    rows.page_table.copy_(tables)
    rows.activate(range(num_rows))
    parts = {"target": models.target, "drafter": models.drafter, "cache": bench.cache, "rows": rows}
    prompts = torch.tensor([ids[:-1] for ids in texts]).flatten()
    prefill_step(**parts, token_ids=prompts, next_ids=prompts, counts=(4, 4))
    hf = LlamaForCausalLM.from_pretrained(tiny.TARGET, attn_implementation="eager").double()
    embedding = hf.get_input_embeddings().weight.detach()
    weights = {name: tensor.double() for name, tensor in load_file(f"{tiny.DRAFT}/model.safetensors").items()}
    counts = set()
    for _ in range(8):
        actual = block_logits_of(models.drafter, rows, bench.cache)
        for row, ids in enumerate(texts):
            with torch.no_grad():
                hidden = hf(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
            features = torch.cat([hidden[tap + 1][0] for tap in make_pair.TAPS], -1)
            config = make_pair.draft_config()
            expected = block_logits(weights, config, embedding, embedding, features, ids[-1])
            torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-4)
        verdict = run_all_parts(decode_parts(**parts, width=width))
        for row, count in enumerate(verdict.num_committed.tolist()):
            texts[row] += verdict.token_ids[row, :count].tolist()
            counts.add(count)
    assert len(counts) > 1  # blocks were accepted in part
    assert rows.length[:num_rows].tolist() == [len(ids) - 1 for ids in texts]
