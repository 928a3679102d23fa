"""DFlash2 in training: begun as DFlash, its selector's loss, what is left alone, whole runs with exports."""

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.drafter_draws import draws
from blockdraft import LLM
from blockdraft.cache.rows import RowSampling
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.cli.main import main
from blockdraft.errors import SettingsError
from blockdraft.models.dflash import CandidateSelector
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.training.drafter import as_kind, dflash2_json, train_only
from blockdraft.training.evaluate import fit_of_steps
from blockdraft.training.job import DrafterShape, Objective, TrainingRecipe
from blockdraft.training.objective import Head, Teacher, best_ids, column_weights, selector_loss
from blockdraft.training.packing import pack, with_anchors
from blockdraft.training.probe import AcceptanceProbe, simulate
from blockdraft.training.run import Listener, train
from blockdraft.training.trainer import BlockForward, Trainer
from tests import tiny
from tests.fixtures import make_pair
from tests.matrix import slow_but
from tests.training import pairs
from tests.training.test_evaluate import answered
from tests.training.test_evaluate import prompts as some_prompts
from tests.training.test_run import make_job, prompts, target

__all__ = ["prompts", "target"]  # fixtures
SHAPE = DrafterShape(rank=6, num_candidates=5)
PAIR_JSON = json.loads((tiny.PAIR / "draft" / "config.json").read_text())


def upgraded(**shape):
    """The fixture's drafter as a DFlash2 one, in float64."""
    return pairs.new_one(dflash2_json(PAIR_JSON, replace(SHAPE, **shape)), weights=tiny.DRAFT).double()


def test_a_drafter_that_goes_on_as_dflash2_drafts_as_before():
    """The same hidden states to the last bit, and the same walk."""
    plain = pairs.new_one(PAIR_JSON, weights=tiny.DRAFT)
    rows, _ = pack(pairs.random_documents([(4, 30), (9, 20)]), 64)
    batch = with_anchors(rows, [0], torch.tensor([[5, 12, 40]]), 8)
    features = pairs.random_features(batch)
    models = [BlockForward(model, pairs.target()) for model in (plain.double(), upgraded())]
    first, second = (forward(batch, features) for forward in models)
    assert torch.equal(first, second)
    documents = answered_documents()
    fits = [simulate(one.drafter, documents, length=96) for one in models]
    assert fits[0] == fits[1]
    assert fits[0]["all"].committed > 2


@functools.cache
def answered_documents():
    llm = LLM(tiny.TARGET, tiny.DRAFT, device="cpu", dtype="float32", max_model_len=120)
    return answered(llm, some_prompts(5), 20)


@pytest.mark.parametrize(
    ("name", "temperature", "top_p", "width"),
    slow_but(
        [
            (name, *how)
            for name in ("trained", *tiny.KINDS)
            for how in ((0.0, 1.0, 8), (0.0, 1.0, 3), (0.8, 1.0, 8), (0.8, 0.9, 8))
        ],
        ("trained", 0.0, 1.0, 8),
        ("trained", 0.8, 0.9, 8),
        ("DFlash2", 0.0, 1.0, 3),
        ("DFlash2", 0.8, 0.9, 8),
        ("DSpark", 0.0, 1.0, 3),
        ("DSpark", 0.8, 1.0, 8),
        ("causal", 0.0, 1.0, 3),
        ("from the anchor", 0.0, 1.0, 8),
    ),
)
def test_simulated_steps_are_those_of_the_engine(name, temperature, top_p, width):
    """With pairs, and with the request's own noise: accepted drafts by position, exactly."""
    engine = tiny.engine(name, max_num_seqs=4)
    params = {"temperature": temperature, "top_p": top_p}
    documents, found = pairs.engine_steps(engine, some_prompts(8), max_tokens=33, width=width, **params)
    drafter, config = engine.models.drafter, engine.models.drafter.model.config
    drawn = [RowSampling(**params, seed=number) for number in range(len(documents))]
    # More layers are read than are tapped, as for trials of other taps.
    probe = AcceptanceProbe(drafter, documents, range(4))
    if temperature == 0:
        assert probe.walk(config, width) == found
    if width == tiny.BLOCK:
        sampled = probe.steps(config, width, draws(drafter, drawn))
        assert fit_of_steps(sampled, config.block) == found
    assert 0 < found.accepted[0] < found.num_steps, "some of everything"


@pytest.mark.parametrize(
    ("weighting", "skips_first", "distill", "chunk_bytes"),
    [
        ("dpace", False, 0.0, 1),
        ("dpace", True, 0.3, 1),
        ("dpace", True, 0.3, 1 << 20),
        ("decay", False, 0.0, 1),
    ],
)
def test_the_selectors_loss_is_the_cross_entropy_of_the_walk(
    monkeypatch, weighting, skips_first, distill, chunk_bytes
):
    """Column by column, behind the true token; where that is no candidate nothing counts.

    A share of it is the divergence from what the target thought of the candidates.
    """
    monkeypatch.setattr("blockdraft.training.objective.CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(3)
    config = read_draft_config(make_pair.dflash2_config(selector_skips_first=skips_first), name="any")
    selector = CandidateSelector(config).double()
    for one in selector.parameters():
        one.data = torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.5
    head = Head(torch.randn(64, 32, generator=generator, dtype=torch.float64) * 0.3)
    hidden = torch.randn(4, 7, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    logits = (hidden @ head.weight.T).detach()
    labels = torch.randint(0, 64, (4, 7), generator=generator)
    labels[0] = logits[0].argmax(dim=-1)  # candidates, which few of the others are
    labels[1, 4:] = -1
    anchors = torch.tensor([3, 4, 5, 6])
    before = torch.cat((anchors[:, None], labels[:, :-1].clamp(min=0)), dim=1)
    objective = Objective(weighting=weighting, distill=distill)
    thought = torch.randn(9, 64, generator=generator, dtype=torch.float64)
    teacher = Teacher(thought, torch.randint(0, 9, (4, 7), generator=generator))
    got = selector_loss(hidden, labels, before, head, selector, objective, teacher)
    entropy, confidence = torch.zeros(4, 7, dtype=torch.float64), torch.zeros(4, 7, dtype=torch.float64)
    right = torch.zeros(4, 7, dtype=torch.bool)
    mixture = hidden @ selector.hidden_projection.weight.T
    for block in range(4):
        before = int(anchors[block])
        for column in range(7):
            label = int(labels[block, column])
            if label < 0:
                break
            own = logits[block, column]
            ids = own.topk(5).indices.tolist()
            if label not in ids:
                before = label
                continue
            mixed = selector.predecessor_codebook[before] * mixture[block, column]
            scores = own[ids] + selector.successor_codebook[ids] @ mixed * (column > 0 or not skips_first)
            found = -scores.log_softmax(0)[ids.index(label)]
            confidence[block, column] = torch.exp(-found.detach())
            wanted = thought[teacher.rows[block, column], ids].softmax(0)
            apart = (wanted * (wanted.log() - scores.log_softmax(0))).sum()
            entropy[block, column] = (1 - distill) * found + distill * apart
            right[block, column] = int(scores.argmax()) == ids.index(label)
            before = label
    weights = column_weights(confidence, labels >= 0, objective) * (confidence > 0)
    expected = (weights * entropy).sum() / weights.sum()
    exact = 1e-12 if weighting == "dpace" else 1e-6  # the others' weights are float32
    torch.testing.assert_close(got.loss, expected, rtol=exact, atol=0)
    assert got.matches.tolist() == right.tolist()
    assert right[0].any()
    wanted = torch.autograd.grad(expected, [hidden, *selector.parameters()], retain_graph=True)
    found = torch.autograd.grad(got.loss, [hidden, *selector.parameters()])
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e3 * exact, atol=exact)


@pytest.mark.parametrize(
    ("part", "moved", "optimizer"),
    [
        ("selector", {"candidate_selector"}, "adamw"),
        ("added", {"candidate_selector", "attention_conv", "mlp_conv"}, "muon"),
    ],
)
def test_only_what_is_to_be_trained_moves(part, moved, optimizer):
    model = upgraded()
    train_only(model, part)
    rows, _ = pack(pairs.random_documents([(4, 30), (9, 20)]), 64)
    recipe = TrainingRecipe(rows_per_step=1, num_anchors=8, optimizer=optimizer, trained=part, warm_up=0.0)
    trainer = Trainer(model, pairs.target(), rows, recipe)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in trainer.run(steps=3):
        pass
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed
    assert changed == {name for name in before if moved & set(name.split("."))}


def test_a_selector_is_taught_what_the_target_thought_too():
    rows, _ = pack(pairs.random_documents([(4, 30), (9, 20)]), 64)
    losses = []
    for distill in (0.0, 0.5):
        model = upgraded()
        train_only(model, "selector")
        recipe = TrainingRecipe(rows_per_step=1, num_anchors=8, trained="selector")
        recipe = replace(recipe, objective=Objective(distill=distill))
        losses += [float(one.loss) for one in Trainer(model, pairs.target(), rows, recipe).run(steps=1)]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_training_teaches_pairs_and_more_is_committed():
    """The drafter's columns made worse on purpose: the walk repairs some of it."""
    documents = answered_documents()
    model = upgraded(rank=16, num_candidates=16)
    train_only(model, "selector")
    with torch.no_grad():
        model.norm.weight.mul_(0.5)
    rows, _ = pack(documents, 64)
    recipe = TrainingRecipe(rows_per_step=2, num_anchors=32, trained="selector", rate=2e-2)
    trainer = Trainer(model, pairs.target(), rows, recipe)
    losses = [float(progress.loss) for progress in trainer.run(steps=40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def dflash2_job(prompts, target, out, part):
    job = make_job(prompts, target, out)
    recipe = replace(job.recipe, short_blocks=0.0, trained=part)
    return replace(job, start_from=tiny.DRAFT, kind="dflash2", shape=SHAPE, recipe=recipe)


def test_a_run_makes_a_dflash2_drafter_of_a_dflash_one(prompts, target, tmp_path):
    """Only the selector is trained: the drafts leave out the convolutions, which change nothing."""
    job = dflash2_job(prompts, target, tmp_path / "run", "selector")
    fits = train(replace(job, steps=2), Listener())
    folder = job.out / "drafter"
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    weights, plain = load_file(folder / "model.safetensors"), load_file(f"{tiny.DRAFT}/model.safetensors")
    assert plain.keys() < weights.keys()
    assert weights["candidate_selector.predecessor_codebook"].shape == (64, 6)
    assert all(torch.equal(weights[name], plain[name].bfloat16()) for name in plain)
    assert "# A DFlash2 drafter for" in (folder / "README.md").read_text()
    assert fits["all"].num_documents
    settings = Settings(model=target, draft=str(folder), device="cpu", max_model_len=128)
    model = load_models(settings, lambda line: None)[0].drafter.model
    assert not model.is_convolved
    assert model.candidate_selector.successor_codebook.any()
    one = model.layers[1].mlp_conv
    for weight, place in ((one.base_kernel, (0, 0, 3)), (one.base_kernel, (1, 1, 0))):
        kept = weight[place].item()
        weight[place] = 0.5
        model.leave_out_idle_convs()
        assert model.is_convolved
        weight[place] = kept
    one.kernel_projection.weight[2, 1] = 1e-3
    model.leave_out_idle_convs()
    assert model.is_convolved


@pytest.mark.slow
def test_a_run_of_dflash2_goes_on(prompts, target, tmp_path):
    job = replace(dflash2_job(prompts, target, tmp_path / "run", "added"), steps=1)
    train(job, Listener())
    folder = job.out / "drafter"
    further = replace(job, out=tmp_path / "further", start_from=str(folder), kind=None)
    train(further, Listener())
    raw, again = (json.loads((one / "drafter" / "config.json").read_text()) for one in (job.out, further.out))
    assert raw == again


def test_a_new_dflash2_drafter_with_short_blocks():
    model = pairs.new_one(dflash2_json(pairs.draft_json(top={"is_causal": True}), SHAPE))
    rows, _ = pack(pairs.random_documents([(4, 30), (9, 20)]), 64)
    recipe = TrainingRecipe(rows_per_step=1, num_anchors=8, short_blocks=0.5)
    trainer = Trainer(model.double(), pairs.target(), rows, recipe)
    assert [step.matches.shape[1] for step in trainer.run(steps=4)] == [3, 3, 7, 7]
    assert model.layers[1].mlp_conv.kernel_projection.weight.any()


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_drafter_keeps_the_targets_embedding_scale_as_another_kind(kind):
    for own, scale in ((None, 5.6), (2.0, 2.0)):
        raw = pairs.draft_json(dflash={"input_embedding_scale": own})
        read = read_draft_config(as_kind(raw, kind, SHAPE, name="one", scale=5.6), name="one")
        assert (read.kind, read.embedding_scale, read.unread_keys) == (kind, scale, ())


def test_what_makes_no_sense_is_refused(prompts, target, tmp_path, capsys):
    job = make_job(prompts, target, tmp_path / "run")
    with pytest.raises(SettingsError, match="--from DRAFTER"):
        replace(job, recipe=replace(job.recipe, trained="selector"))
    with pytest.raises(SettingsError, match="add --kind dflash2"):
        train_only(pairs.random_drafter(PAIR_JSON), "selector")
    with pytest.raises(SettingsError, match="z-lab's layout"):
        dflash2_json({"speculators_model_type": "dflash"}, SHAPE)
    with pytest.raises(SettingsError, match="drafts from the anchor"):
        dflash2_json(tiny.to_deepspec(PAIR_JSON), SHAPE)
    with pytest.raises(SettingsError, match="is a DFlash2 drafter: leave --kind out"):
        as_kind(dflash2_json(PAIR_JSON, SHAPE), "dspark", SHAPE, name="one")
    flags = ["--steps", "1", "--prompts", str(prompts), "--out", str(tmp_path / "x"), "--candidates", "65"]
    assert main(["train", target, *flags]) == 2
    assert "--candidates 65 is outside 2 to 64" in capsys.readouterr().err


@pytest.mark.parametrize("vocab_size", [64, 100, 640, 4096])  # one group, none, fewer than candidates, many
def test_the_best_tokens_are_found_by_groups(vocab_size):
    logits = torch.randn(3, 5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert torch.equal(best_ids(logits, 16), logits.topk(16).indices)
