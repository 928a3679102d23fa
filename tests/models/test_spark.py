"""DSpark's heads against tests/reference.py, from checkpoints in every layout, in float64."""

import functools

import pytest
import torch

from blockdraft.errors import ModelError
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.pairs import SparkDrafter
from tests import tiny
from tests.fixtures import make_pair
from tests.fixtures.make_spark import head_weights
from tests.models.checkpoints import load, write_draft
from tests.models.test_dflash import (
    HIDDEN,
    VOCAB,
    Drafting,
    random_chunks,
    random_features,
    write_small_target,
)
from tests.reference import block_logits, markov_walk

RANK, DRAFTS = 8, 7
LAYOUTS = {
    "DeepSpec": tiny.to_deepspec,
    "SpecForge": tiny.to_specforge,
    "speculators": tiny.to_dspark_speculators,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return folder, write_small_target(folder)


HEADS = {
    "sample_from_anchor": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def write_spark(folder, *, layout="DeepSpec", more=(), drop=(), dflash=(), reduced=None):
    """A random DSpark drafter. Returns its configuration as the reference reads it, and its tensors."""
    config = make_pair.draft_config() | {"block_size": DRAFTS}
    config["dflash_config"] = config["dflash_config"] | HEADS | dict(dflash)
    generator = torch.Generator().manual_seed(8)
    weights = make_pair.draft_weights(config, generator) | head_weights(generator, scale=2.0)
    if reduced is not None:
        config["draft_vocab_size"] = len(reduced)
        weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][: len(reduced)]
        weights["lm_head.weight"] = torch.randn(len(reduced), HIDDEN, generator=generator) * 0.2
        weights["d2t"] = reduced - torch.arange(len(reduced))
    weights = {name: weight for name, weight in (weights | dict(more)).items() if name not in drop}
    written = LAYOUTS[layout](config)
    if reduced is not None and layout == "speculators":
        written["draft_vocab_size"] = len(reduced)
    write_draft(folder, written, weights)
    return config, {name: weight.double() for name, weight in weights.items()}


class Sparks(Drafting):
    """A loaded pair, beside the reference's idea of it."""

    def __init__(self, target, folder, config, weights, **options):
        super().__init__((target[0], folder), **options)
        self.drafter.num_candidates = self.drafter.model.config.draft_vocab_size
        embedding = target[1].get_input_embeddings().weight.detach().double()
        head = target[1].get_output_embeddings().weight.detach().double()
        self.head = weights["lm_head.weight"] if "d2t" in weights else head
        self.reference = functools.partial(block_logits, weights, config, embedding, self.head)
        self.weights = weights

    @torch.inference_mode()
    def drafts(self, features, width=DRAFTS + 1):
        """What is drafted behind the context of each row, all of which are greedy."""
        bench = self.absorb(features, random_chunks())
        view = bench.cache.view(bench.rows, width)
        return self.drafter.draft(bench.rows, bench.cache, view, width)


def sparks(target, folder, **files):
    return Sparks(target, folder, *write_spark(folder, **files))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_the_references_walk(target, tmp_path, layout):
    one = sparks(target, tmp_path, layout=layout)
    assert isinstance(one.drafter, SparkDrafter)
    features = random_features()
    for width in (2, 5, DRAFTS + 1):
        got = one.drafts(features, width)
        for row, context in enumerate(features):
            logits = one.reference(context, 3 + row)
            expected, _ = markov_walk(one.weights, logits, 3 + row)
            assert got[row].tolist() == [3 + row, *expected[: width - 1].tolist()]
            assert expected.tolist() != logits.argmax(-1).tolist(), "the head must matter"


def test_logits_with_the_tokens_before_are_those_that_the_walk_chose_by(target, tmp_path):
    one = sparks(target, tmp_path)
    features = random_features()
    bench = one.absorb(features, random_chunks())
    anchors = bench.rows.anchor[bench.rows.active][:, None]
    hidden = one.drafter.block_hidden(anchors, bench.cache.view(bench.rows, DRAFTS))
    for row, context in enumerate(features):
        drafts, expected = markov_walk(one.weights, one.reference(context, 3 + row), 3 + row)
        before = torch.cat((torch.tensor([3 + row]), drafts[:-1]))
        hints = one.drafter.hints(hidden[row : row + 1], before[None])
        got = one.drafter.logits(hidden[row], hints[0])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_draft_is_the_best_of_the_heads_own_candidates(target, tmp_path):
    one, num_candidates = sparks(target, tmp_path), 4
    one.drafter.num_candidates = num_candidates
    features = random_features()
    got = one.drafts(features)
    for row, context in enumerate(features):
        logits = one.reference(context, 3 + row)
        kept = torch.full_like(logits, float("-inf"))
        places = logits.topk(num_candidates).indices
        kept.scatter_(1, places, logits.gather(1, places))
        expected, _ = markov_walk(one.weights, kept, 3 + row)
        assert got[row, 1:].tolist() == expected.tolist()


@pytest.mark.parametrize("layout", ["DeepSpec", "speculators"])
def test_a_reduced_vocabulary_is_walked_in_the_targets_ids(target, tmp_path, layout):
    ids = torch.tensor([0, 2, 3, 11, 12, 30, 31, 50, 60, 63])
    one = sparks(target, tmp_path, layout=layout, reduced=ids)
    features = random_features()
    got = one.drafts(features)
    w2 = torch.zeros(VOCAB, RANK, dtype=torch.float64)
    w2[ids] = one.weights["markov_head.markov_w2.weight"]
    weights = one.weights | {"markov_head.markov_w2.weight": w2}
    for row, context in enumerate(features):
        logits = torch.full((DRAFTS, VOCAB), float("-inf"), dtype=torch.float64)
        logits[:, ids] = one.reference(context, 3 + row)
        expected, _ = markov_walk(weights, logits, 3 + row)
        assert got[row, 1:].tolist() == expected.tolist()


def test_copies_of_the_targets_embedding_and_head_are_not_read(target, tmp_path):
    wrong = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    with_copies = sparks(target, tmp_path / "with", more=wrong)
    without = sparks(target, tmp_path / "without")
    features = random_features()
    assert with_copies.drafter.model.head is None
    assert torch.equal(with_copies.drafts(features), without.drafts(features))


@pytest.mark.parametrize(
    ("more", "drop", "named"),
    [
        ({"embed_tokens.weight": torch.zeros(VOCAB + 1, HIDDEN)}, (), "'embed_tokens.weight' has shape"),
        ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN + 1)}, (), "'lm_head.weight' has shape"),
        (
            {"markov_head.markov_w1.weight": torch.zeros(VOCAB, RANK + 1)},
            (),
            "'markov_head.markov_w1.weight'",
        ),
        ({}, ("markov_head.markov_w2.weight",), "no tensor 'markov_head.markov_w2.weight'"),
        ({"markov_head.gate_proj.weight": torch.zeros(2, 2)}, (), "'markov_head.gate_proj.weight' first"),
    ],
)
def test_files_that_do_not_fit_their_configuration_are_refused_by_tensor(target, tmp_path, more, drop, named):
    write_spark(tmp_path, more=more, drop=drop)
    with pytest.raises(ModelError, match=named):
        load(target[0], tmp_path, dtype="float64", max_model_len=100)


def test_a_confidence_head_is_not_read(target, tmp_path):
    drop = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    with_head, without = sparks(target, tmp_path / "with"), sparks(target, tmp_path / "without", drop=drop)
    features = random_features()
    assert torch.equal(with_head.drafts(features), without.drafts(features))
    assert not [name for name, _ in with_head.drafter.model.named_parameters() if "confidence" in name]


def test_quantising_a_drafter_leaves_the_heads_as_they_are(target, tmp_path):
    _, stored = write_spark(tmp_path)
    models = load(target[0], tmp_path, dtype="float32", max_model_len=100, draft_quantization="int8")
    markov = models.drafter.model.markov
    for name, module in (("markov_w1", markov.before), ("markov_w2", markov.after)):
        assert torch.equal(module.weight, stored[f"markov_head.{name}.weight"].float())


def test_a_head_of_rank_0_is_dflash(target, tmp_path):
    drop = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    more = {"confidence_head.proj.weight": torch.randn(1, HIDDEN)}
    dflash = {"markov_rank": 0, "confidence_head_with_markov": False}
    write_spark(tmp_path, dflash=dflash, more=more, drop=drop)
    models = load(target[0], tmp_path, dtype="float64", max_model_len=100)
    assert type(models.drafter) is DFlashDrafter
    assert (models.drafter.block, models.drafter.num_columns) == (DRAFTS + 1, DRAFTS)
