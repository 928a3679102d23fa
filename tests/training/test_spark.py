"""Training a DSpark drafter: its loss, what it starts from, and that what is exported is what was trained."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.errors import SettingsError
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.step.pairs import SparkDrafter
from blockdraft.training import objective as objective_module
from blockdraft.training import run
from blockdraft.training.drafter import as_kind, spark_json, without_confidence
from blockdraft.training.job import DrafterShape, Objective, TrainingRecipe
from blockdraft.training.objective import Head, Teacher, spark_loss
from blockdraft.training.packing import pack
from blockdraft.training.run import Listener, train
from blockdraft.training.trainer import Trainer
from tests import tiny
from tests.fixtures import make_pair
from tests.training import pairs
from tests.training.test_run import make_job, prompts, target  # noqa: F401

BLOCKS, DRAFTS, SIZE, RANK, VOCAB = 9, 5, 8, 3, 20


def drawn(*shape, seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


def scene():
    given = [drawn(BLOCKS, DRAFTS, SIZE), drawn(BLOCKS, DRAFTS, RANK, seed=1), drawn(VOCAB, RANK, seed=2)]
    labels = torch.randint(0, VOCAB, (BLOCKS, DRAFTS), generator=torch.Generator().manual_seed(4))
    labels[2, 3:] = labels[5, :] = -1
    rows = torch.randint(0, 30, (BLOCKS, DRAFTS), generator=torch.Generator().manual_seed(5))
    teacher = Teacher(3 * drawn(30, VOCAB, seed=6).detach(), rows)
    return given, labels, Head(drawn(VOCAB, SIZE, seed=7).detach(), cap=4.0), teacher


def expected_loss(given, labels, head, teacher):
    """DSpark's loss: 0.1 CE + 0.9 TV."""
    hidden, latents, after = given
    base = 4.0 * torch.tanh(hidden @ head.weight.T / 4.0)
    chances = (base + latents @ after.T).softmax(-1)
    apart = (chances - teacher.logits[teacher.rows].softmax(-1)).abs().sum(-1) / 2
    entropy = -chances.gather(2, labels.clamp(min=0)[..., None])[..., 0].log()
    loss = 0.1 * entropy + 0.9 * apart
    weights = torch.exp(-torch.arange(DRAFTS) / 4.0) * (labels >= 0)
    return (weights * loss).sum() / weights.sum()


@pytest.mark.parametrize("chunk_bytes", [1, 1200, 1 << 28])
def test_loss_and_gradients_are_those_of_autograd(monkeypatch, chunk_bytes):
    monkeypatch.setattr(objective_module, "SPARK_CHUNK_BYTES", chunk_bytes)
    given, labels, head, teacher = scene()
    objective = Objective(weighting="decay", gamma=4.0)
    scores = spark_loss(*given, labels, head=head, objective=objective, teacher=teacher)
    got = torch.autograd.grad(2 * scores.loss, given)
    expected = expected_loss(given, labels, head, teacher)
    torch.testing.assert_close(scores.loss, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
    for one, other in zip(got, torch.autograd.grad(2 * expected, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "raw",
    [
        pairs.draft_json(top={"is_causal": True}),
        pairs.draft_json(dflash={"causal_head": True, "output_multiplier": 2.0, "block_size": 6}),
        pairs.draft_json(speculators={"sliding_window_non_causal": True}),
    ],
)
def test_a_drafter_keeps_all_but_its_heads_when_it_becomes_dspark(raw):
    before, after = read_draft_config(raw, name="one"), read_draft_config(spark_json(raw, 256), name="one")
    assert (after.markov_rank, after.drafts_from_anchor) == (256, True)
    heads = {"markov_rank": 0, "drafts_from_anchor": False, "copies_head": False}
    assert replace(after, **heads, embedding_scale=before.embedding_scale) == before
    assert after.embedding_scale == 1.0  # not said: see as_kind
    assert spark_json(spark_json(raw, 256), 256) == spark_json(raw, 256)


@pytest.mark.parametrize("layout", [tiny.to_deepspec, tiny.to_specforge, tiny.to_dspark_speculators])
def test_training_further_drops_the_confidence_head(layout):
    """The exported config.json must not promise a head whose weights nobody wrote."""
    head = {"enable_confidence_head": True, "confidence_head_alpha": 1.0, "markov_rank": 8}
    raw = pairs.draft_json()
    raw = layout(raw | {"dflash_config": raw["dflash_config"] | head})
    found = without_confidence(raw)
    for place in (found, found.get("dflash_config", {})):
        assert not any(place.get(key) for key in head if key != "markov_rank")
    assert read_draft_config(found, name="one") == read_draft_config(raw, name="one")


def test_the_layout_is_the_one_that_vllm_reads():
    raw = spark_json(pairs.draft_json(), 256)
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert (raw["block_size"], raw["mask_token_id"], raw["target_layer_ids"]) == (7, 63, [0, 1, 2])
    assert raw["markov_head_type"] == "vanilla"
    assert raw["enable_confidence_head"] is raw["confidence_head_with_markov"] is False


@pytest.fixture
def job(prompts, target, tmp_path):  # noqa: F811
    return replace(make_job(prompts, target, tmp_path / "run"), kind="dspark")


def loaded(job):
    settings = Settings(model=job.model, draft=str(job.out / "drafter"), device="cpu", dtype="float32")
    return load_models(settings, lambda _: None)[0]


def test_a_new_drafter_is_trained_exported_and_drafts_in_the_engine_as_simulated(job):
    said = []
    fits = train(job, Listener(say=said.append))
    models = loaded(job)
    assert isinstance(models.drafter, SparkDrafter)
    assert (models.drafter.block, models.drafter.num_columns) == (4, 3)
    line = next(one for one in said if "in the engine" in one)
    assert "warning" not in line
    words = line.replace(",", "").split()
    assert abs(float(words[0]) - float(words[words.index("simulated") - 1])) < 0.01
    moved = load_file(job.out / "drafter" / "model.safetensors")
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} < moved.keys()
    assert not any("confidence" in name for name in moved)
    assert moved["markov_head.markov_w2.weight"].abs().sum() > 0
    assert fits["all"].num_documents > 0


def test_it_starts_from_a_dflash_drafter_and_goes_on_from_itself(job, monkeypatch, tmp_path):
    """That one is measured as it drafts by itself: in another layout any result would look like a gain."""
    before = []
    monkeypatch.setattr(run, "verdict_lines", lambda job, fits, fit: before.append(fit.committed) or ())
    first = replace(job, start_from=tiny.DRAFT, shape=replace(job.shape, taps=(0, 1, 2)), steps=1)
    first = replace(first, recipe=replace(first.recipe, short_blocks=0.0))
    train(first, Listener())
    assert before[0] > 2
    raw = json.loads((first.out / "drafter" / "config.json").read_text())
    assert raw["block_size"] == 7
    again = replace(first, start_from=str(first.out / "drafter"), kind=None, out=tmp_path / "again")
    train(again, Listener())
    assert isinstance(loaded(again).drafter, SparkDrafter)


def test_what_it_starts_from_is_the_dflash_drafters_body():
    model = pairs.new_one(spark_json(pairs.draft_json(), 256), weights=tiny.DRAFT)
    stored = load_file(tiny.PAIR / "draft" / "model.safetensors")
    assert torch.equal(model.fc.weight, stored["fc.weight"].float())
    assert model.markov.after.weight.abs().sum() == 0
    assert all(one.requires_grad for one in model.markov.parameters())
    raw = json.loads((tiny.PAIR / "spark" / "config.json").read_text())
    model = pairs.new_one(raw, weights=tiny.SPARK)
    kept = load_file(tiny.PAIR / "spark" / "model.safetensors")
    assert torch.equal(model.markov.after.weight, kept["markov_head.markov_w2.weight"].float())


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_dspark_drafter_is_not_made_one_of_another_kind(kind):
    with pytest.raises(SettingsError, match="is a DSpark drafter: leave --kind out"):
        as_kind(spark_json(pairs.draft_json(), 8), kind, DrafterShape(), name="one")


def test_a_drafter_of_a_kind_that_is_not_trained_is_refused():
    for kind in (None, "dflash", "dspark"):
        with pytest.raises(SettingsError, match="is of kind XPress, which can be served, but not trained"):
            as_kind(make_pair.xpress_config(), kind, DrafterShape(), name="one")
    for raw in (make_pair.domino_config(), make_pair.lilicorr_config()):
        with pytest.raises(SettingsError, match="which can be served, but not trained"):
            as_kind(raw, None, DrafterShape(), name="one")


@pytest.mark.parametrize("layout", [tiny.to_deepspec, tiny.to_specforge])
def test_a_drafter_that_drafts_from_the_anchor_gets_heads(layout):
    raw = layout(pairs.draft_json())
    before, after = read_draft_config(raw, name="one"), read_draft_config(spark_json(raw, 4), name="one")
    assert (before.kind, after.kind, after.markov_rank) == ("dflash", "dspark", 4)
    assert replace(after, markov_rank=0) == before


def test_losses_fall():
    model = pairs.new_one(spark_json(pairs.draft_json(), 16)).double()
    rows, _ = pack(pairs.random_documents(((5, 30), (3, 40))), 48)
    recipe = TrainingRecipe(rows_per_step=1, num_anchors=8, rate=1e-2)
    losses = [one.loss.item() for one in Trainer(model, pairs.target(), rows, recipe).run(steps=20)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
