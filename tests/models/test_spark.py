"""DSpark's heads against tests/reference.py, from checkpoints in every layout, in float64."""

import functools

import pytest
import torch
from transformers import LlamaConfig

from blockdraft.errors import ModelError
from blockdraft.planner.values import draft_values
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.spark import SparkDrafter
from tests import tiny
from tests.fixtures import make_pair
from tests.fixtures.make_spark import head_weights
from tests.models.checkpoints import load, write_draft, write_target
from tests.models.test_dflash import HIDDEN, LAYERS, VOCAB, Drafting, random_chunks, random_features
from tests.reference import block_hidden, block_logits, confidences, markov_walk

RANK, DRAFTS = 8, 7
KINDS = ["vanilla", "gated", "rnn"]
LAYOUTS = {
    "DeepSpec": tiny.to_deepspec,
    "SpecForge": tiny.to_specforge,
    "speculators": tiny.to_dspark_speculators,
    "z-lab": lambda config: config,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return folder, write_target(folder, config, seed=5)


def heads(kind="vanilla", **more):
    own = {"markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True}
    return {"sample_from_anchor": True, **own, "confidence_head_with_markov": True, **more}


def write_spark(folder, kind, *, layout="DeepSpec", more=(), drop=(), dflash=(), reduced=None):
    """A random DSpark drafter. Returns its configuration as the reference reads it, and its tensors."""
    config = make_pair.draft_config() | {"block_size": DRAFTS}
    config["dflash_config"] = config["dflash_config"] | heads(kind) | dict(dflash)
    generator = torch.Generator().manual_seed(8)
    weights = make_pair.draft_weights(config, generator) | head_weights(generator, kind, scale=2.0)
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
        self.hidden = functools.partial(block_hidden, weights, config, embedding)
        self.weights = weights

    @torch.inference_mode()
    def drafted(self, features, width=DRAFTS + 1):
        """What is drafted behind the context of each row, all of which are greedy."""
        bench = self.absorb(features, random_chunks())
        view = bench.cache.view(bench.rows, width)
        return self.drafter.draft(bench.rows, bench.cache, view, width)

    def drafts(self, *asked):
        return self.drafted(*asked).block


def sparks(target, folder, kind, **files):
    return Sparks(target, folder, *write_spark(folder, kind, **files))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_references_walk(target, tmp_path, kind, layout):
    one = sparks(target, tmp_path, kind, layout=layout)
    assert isinstance(one.drafter, SparkDrafter)
    features = random_features()
    for width in (2, 5, DRAFTS + 1):
        got = one.drafts(features, width)
        for row, context in enumerate(features):
            logits, hidden = one.reference(context, 3 + row), one.hidden(context, 3 + row)
            expected, _ = markov_walk(one.weights, kind, logits, hidden, 3 + row)
            assert got[row].tolist() == [3 + row, *expected[: width - 1].tolist()]
            assert expected.tolist() != logits.argmax(-1).tolist(), "the head must matter"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_the_tokens_before_are_those_that_the_walk_chose_by(target, tmp_path, kind):
    one = sparks(target, tmp_path, kind)
    features = random_features()
    bench = one.absorb(features, random_chunks())
    anchors = bench.rows.anchor[bench.rows.active][:, None]
    hidden = one.drafter.block_hidden(anchors, bench.cache.view(bench.rows, DRAFTS))
    for row, context in enumerate(features):
        own = one.reference(context, 3 + row), one.hidden(context, 3 + row)
        drafts, expected = markov_walk(one.weights, kind, *own, 3 + row)
        before = torch.cat((torch.tensor([3 + row]), drafts[:-1]))
        hints = one.drafter.hints(hidden[row : row + 1], before[None])
        got = one.drafter.logits(hidden[row], hints[0])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_candidates", [1, 4])
def test_a_draft_is_the_best_of_the_heads_own_candidates(target, tmp_path, kind, num_candidates):
    one = sparks(target, tmp_path, kind)
    one.drafter.num_candidates = num_candidates
    features = random_features()
    got = one.drafts(features)
    for row, context in enumerate(features):
        logits, hidden = one.reference(context, 3 + row), one.hidden(context, 3 + row)
        kept = torch.full_like(logits, float("-inf"))
        places = logits.topk(num_candidates).indices
        kept.scatter_(1, places, logits.gather(1, places))
        expected, _ = markov_walk(one.weights, kind, kept, hidden, 3 + row)
        assert got[row, 1:].tolist() == expected.tolist()


@pytest.mark.parametrize("layout", ["DeepSpec", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_is_walked_in_the_targets_ids(target, tmp_path, kind, layout):
    ids = torch.tensor([0, 2, 3, 11, 12, 30, 31, 50, 60, 63])
    one = sparks(target, tmp_path, kind, layout=layout, reduced=ids)
    features = random_features()
    got = one.drafts(features)
    w2 = torch.zeros(VOCAB, RANK, dtype=torch.float64)
    w2[ids] = one.weights["markov_head.markov_w2.weight"]
    weights = one.weights | {"markov_head.markov_w2.weight": w2}
    for row, context in enumerate(features):
        logits = torch.full((DRAFTS, VOCAB), float("-inf"), dtype=torch.float64)
        logits[:, ids] = one.reference(context, 3 + row)
        expected, _ = markov_walk(weights, kind, logits, one.hidden(context, 3 + row), 3 + row)
        assert got[row, 1:].tolist() == expected.tolist()


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_the_references(target, tmp_path, with_markov):
    more = {} if with_markov else {"confidence_head.proj.weight": torch.randn(1, HIDDEN)}
    dflash = {"confidence_head_with_markov": with_markov}
    one = sparks(target, tmp_path, "vanilla", more=more, dflash=dflash)
    hidden, before = torch.randn(5, HIDDEN, dtype=torch.float64), torch.tensor([3, 1, 4, 1, 5])
    expected = confidences(one.weights, hidden, before, with_markov=with_markov)
    rows = one.drafter.markov.before.weight[before]
    torch.testing.assert_close(one.drafter.model.confidence(hidden, rows), expected, rtol=0, atol=1e-12)
    odds = one.drafter.model.confidences(hidden, before)
    torch.testing.assert_close(odds, expected.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_comes_with_the_confidence_of_each_draft(target, tmp_path, kind, with_markov):
    """A linear map of [h_k ; W1 e], where e is the token before the draft: a draft, or the anchor."""
    more = {} if with_markov else {"confidence_head.proj.weight": torch.randn(1, HIDDEN)}
    one = sparks(target, tmp_path, kind, more=more, dflash={"confidence_head_with_markov": with_markov})
    features = random_features()
    for width in (2, 5, DRAFTS + 1):
        drafted = one.drafted(features, width)
        assert drafted.confidence.shape == (len(features), width - 1)
        for row, context in enumerate(features):
            logits, hidden = one.reference(context, 3 + row), one.hidden(context, 3 + row)
            drafts, _ = markov_walk(one.weights, kind, logits, hidden, 3 + row)
            before = torch.cat((torch.tensor([3 + row]), drafts[:-1]))
            expected = confidences(one.weights, hidden, before, with_markov=with_markov)[: width - 1]
            torch.testing.assert_close(drafted.confidence[row], expected.float(), rtol=0, atol=1e-5)


def test_a_head_without_pairs_speaks_too(target, tmp_path):
    drop = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    more = {"confidence_head.proj.weight": torch.randn(1, HIDDEN)}
    dflash = {"markov_rank": 0, "confidence_head_with_markov": False}
    config, weights = write_spark(tmp_path, "vanilla", dflash=dflash, more=more, drop=drop)
    one, features = Sparks(target, tmp_path, config, weights), random_features()
    assert type(one.drafter) is DFlashDrafter
    for row, context in enumerate(features):
        hidden = one.hidden(context, 3 + row)
        expected = confidences(weights, hidden, None, with_markov=False).float()
        torch.testing.assert_close(one.drafted(features).confidence[row], expected, rtol=0, atol=1e-5)


def test_a_drafter_without_the_head_has_no_confidence(target, tmp_path):
    drop = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    one = sparks(target, tmp_path, "vanilla", drop=drop, dflash={"enable_confidence_head": False})
    assert one.drafted(random_features()).confidence is None


def test_copies_of_the_targets_embedding_and_head_are_not_read(target, tmp_path):
    wrong = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    with_copies = sparks(target, tmp_path / "with", "vanilla", more=wrong)
    without = sparks(target, tmp_path / "without", "vanilla")
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
        ({}, ("confidence_head.proj.bias",), "no tensor 'confidence_head.proj.bias'"),
        ({"markov_head.gate_proj.weight": torch.zeros(2, 2)}, (), "'markov_head.gate_proj.weight' first"),
    ],
)
def test_files_that_do_not_fit_their_configuration_are_refused_by_tensor(target, tmp_path, more, drop, named):
    write_spark(tmp_path, "vanilla", more=more, drop=drop)
    with pytest.raises(ModelError, match=named):
        load(target[0], tmp_path, dtype="float64", max_model_len=100)


def test_heads_that_the_configuration_leaves_out_are_refused(target, tmp_path):
    write_spark(tmp_path, "vanilla", dflash={"enable_confidence_head": False})
    with pytest.raises(ModelError, match=r"'confidence_head.proj.bias' first"):
        load(target[0], tmp_path, dtype="float64", max_model_len=100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_heads(target, tmp_path, kind):
    one = sparks(target, tmp_path, kind)
    model = one.drafter.model
    counted = draft_values(model.config, has_head=False).total
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_random_weights_stand_in_for_a_checkpoints(tmp_path, target):
    write_spark(tmp_path, "rnn")
    models = load(target[0], tmp_path, dtype="float32", max_model_len=100, load_format="dummy")
    assert models.drafter.markov.joint is not None


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantising_a_drafter_leaves_the_heads_as_they_are(target, tmp_path, weights):
    _, stored = write_spark(tmp_path, "gated")
    models = load(target[0], tmp_path, dtype="float32", max_model_len=100, draft_quantization=weights)
    markov = models.drafter.markov
    for name, module in (
        ("markov_w1", markov.before),
        ("markov_w2", markov.after),
        ("gate_proj", markov.gate),
    ):
        assert torch.equal(module.weight, stored[f"markov_head.{name}.weight"].float())


def test_a_head_of_rank_0_is_dflash(target, tmp_path):
    drop = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    more = {"confidence_head.proj.weight": torch.randn(1, HIDDEN)}
    dflash = {"markov_rank": 0, "confidence_head_with_markov": False}
    write_spark(tmp_path, "vanilla", dflash=dflash, more=more, drop=drop)
    models = load(target[0], tmp_path, dtype="float64", max_model_len=100)
    assert type(models.drafter) is DFlashDrafter
    assert models.drafter.model.confidence is not None
    assert (models.drafter.block, models.drafter.num_columns) == (DRAFTS + 1, DRAFTS)
