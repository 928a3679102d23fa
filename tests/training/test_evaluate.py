"""What a drafter is said to commit against what the engine commits with it; and that training gets there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.training import features as features_module
from blockdraft.training import probe
from blockdraft.training import trainer as trainer_module
from blockdraft.training.answers import Document
from blockdraft.training.drafter import draft_json, new_drafter
from blockdraft.training.evaluate import DrafterFit, fit_in_engine
from blockdraft.training.features import FeatureReader
from blockdraft.training.job import DrafterShape, Objective, TrainingRecipe
from blockdraft.training.packing import pack
from blockdraft.training.probe import simulate
from blockdraft.training.trainer import Trainer
from tests import tiny
from tests.lossless import families
from tests.matrix import slow_but
from tests.models.checkpoints import Bench
from tests.training import pairs
from tests.training.pairs import CPU

PAIR_JSON = json.loads((tiny.PAIR / "draft" / "config.json").read_text())


@pytest.fixture(scope="module")
def trained():
    """The fixture's own drafter, as training loads one to go on from."""
    return DFlashDrafter(pairs.new_one(PAIR_JSON, weights=tiny.DRAFT).double(), pairs.target())


def prompts(count, seed=0):
    """The beginnings of runs, as the target knows them, and some that are no runs."""
    generator = torch.Generator().manual_seed(seed)
    listed = []
    for number in range(count):
        start, step, size, wild = torch.randint(0, 60, (4,), generator=generator).tolist()
        run = [(start + (step % 3 + 1) * place) % 60 for place in range(1 + size % 6)]
        listed.append(run if number % 3 else [wild, *run])
    return listed


def answered(llm, asked, max_tokens, **params):
    results = llm.generate(asked, SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}))
    return [
        Document(tuple(prompt), result.token_ids, f"of {len(prompt) % 2}", is_greedy=True)
        for prompt, result in zip(asked, results, strict=True)
    ]


def test_simulation_does_not_depend_on_batches_and_adds_up_by_category(trained, monkeypatch):
    llm = LLM(tiny.TARGET, "none", device="cpu", dtype="float64", max_model_len=200)
    documents = answered(llm, prompts(5, seed=1), 20)
    first = simulate(trained, documents, length=128)
    monkeypatch.setattr(probe, "AT_ONCE", 2)
    assert simulate(trained, documents, length=64) == first
    assert set(first) == {"all", "of 0", "of 1"}
    parts = [first["of 0"], first["of 1"]]
    assert first["all"] == DrafterFit(
        num_documents=sum(part.num_documents for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_steps=sum(part.num_steps for part in parts),
        accepted=tuple(map(sum, zip(*(part.accepted for part in parts), strict=True))),
    )
    assert first["all"].committed == 5 * 20 / first["all"].num_steps


def test_a_document_is_simulated_up_to_where_its_row_cuts_it(trained):
    llm = LLM(tiny.TARGET, "none", device="cpu", dtype="float64", max_model_len=200)
    (whole,) = answered(llm, [[2, 4, 6, 8]], 90)
    cut = Document(whole.prompt_ids, whole.answer_ids[:60], whole.category, is_greedy=True)
    assert simulate(trained, [whole], length=64) == simulate(trained, [cut], length=96)


# ---- features


@pytest.mark.parametrize("name", ["qwen3-slides", "qwen3_next-whole", "gemma4-mixture"])
def test_features_are_those_of_the_prefill_that_serves(name, monkeypatch):
    """Windows, recurrent states, experts: each document alone, and nothing of the batch before it."""
    monkeypatch.setattr(features_module, "MAX_STATES", 3)  # several forwards
    monkeypatch.setattr(features_module, "MAX_DOCUMENTS", 3)
    models = families.models(name)
    documents = pairs.random_documents([(5, 14), (1, 9), (7, 20), (3, 8), (9, 4)])
    rows, places = pack(documents, 48)
    reader = FeatureReader(models.target, num_rows=len(rows), length=48)
    reader.read(rows, range(len(rows)))
    hidden, features = reader.read(rows, range(len(rows)))
    taken = torch.zeros(len(hidden), dtype=torch.bool)
    for place in places:
        one = documents[place.document]
        ids = torch.tensor([*one.prompt_ids, *one.answer_ids])
        bench = Bench(
            models.config.layer_specs(),
            num_rows=1,
            max_length=64,
            vocab_size=models.config.vocab_size,
            page_size=5,
            dtype=torch.float64,
        )
        ((logits,), (expected,)) = bench.prefill(models.target, [ids], [[len(ids)]])
        span = slice(place.row * 48 + place.begin, place.row * 48 + place.begin + len(ids))
        torch.testing.assert_close(features[span], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(models.target.logits(hidden[span]), logits, rtol=0, atol=1e-10)
        taken[span] = True
    assert not features[~taken].any()
    assert not hidden[~taken].any()


# ---- a trainer


def make_trainer(documents, recipe, *, length=64, dtype=torch.float64, **files):
    model = pairs.random_drafter(pairs.draft_json(**files), dtype=dtype)
    rows, _ = pack(documents, length)
    return Trainer(model, pairs.target(), rows, recipe)


def test_the_teacher_of_a_column_is_the_target_one_place_before_it():
    """With the target's own head, whatever the drafter's logits are scaled by."""
    dflash = {"output_multiplier": 1.7, "final_logit_softcapping": 3.0}
    recipe = TrainingRecipe(rows_per_step=2, num_anchors=9, objective=Objective(distill=1.0))
    documents = pairs.random_documents([(5, 14), (1, 9), (7, 20), (3, 8)])
    trainer = make_trainer(documents, recipe, length=40, dflash=dflash)
    chosen = trainer._chosen()
    batch = trainer._batch(chosen, trainer.forward.block)
    hidden, _ = trainer.features.read(chosen)
    teacher = trainer._teacher(batch, hidden)
    logits = pairs.target().logits(hidden)
    said = teacher.logits[teacher.rows].view(*batch.labels.shape, -1)
    for row, number, column in (batch.labels >= 0).nonzero().tolist():
        place = row * 40 + int(batch.anchors[row, number]) + column
        torch.testing.assert_close(said[row, number, column], logits[place])


def test_every_row_is_read_once_per_epoch_and_steps_repeat_exactly():
    documents = pairs.random_documents([(9, 50)] * 6)
    trainer = make_trainer(documents, TrainingRecipe(rows_per_step=2, num_anchors=9, seed=4))

    def batch(step):
        trainer.step_number = step
        return trainer._batch(trainer._chosen(), 4)

    for epoch in range(3):
        seen = torch.cat([batch(3 * epoch + step).tokens for step in range(3)])
        assert torch.equal(seen.unique(dim=0), trainer.rows.tokens.long().unique(dim=0))
    assert torch.equal(batch(4).anchors, batch(4).anchors)
    assert not torch.equal(batch(4).anchors, batch(7).anchors)
    other = make_trainer(documents, TrainingRecipe(rows_per_step=2, num_anchors=9, seed=5))
    assert not torch.equal(batch(0).anchors, other._batch(other._chosen(), 4).anchors)


@pytest.fixture
def read(monkeypatch):
    """The rows whose features are read, one after the other."""
    rows_read: list[int] = []
    reading = FeatureReader.read

    def noted(reader, rows, chosen):
        rows_read.extend(chosen)
        return reading(reader, rows, chosen)

    monkeypatch.setattr(FeatureReader, "read", noted)
    return rows_read


@pytest.mark.parametrize(
    ("distill", "num_rows_kept"),
    slow_but([(distill, count) for distill in (0.0, 0.5) for count in (0, 2, 3)], (0.0, 3), (0.5, 2)),
)
def test_kept_features_change_nothing_and_are_read_once(monkeypatch, read, distill, num_rows_kept):
    documents = pairs.random_documents([(9, 50)] * 3)
    objective = Objective(distill=distill)
    # Without a clip, what is left of the rehearsal's gradient shows.
    recipe = TrainingRecipe(rows_per_step=2, num_anchors=9, rate=1e-2, clip=1e9, objective=objective)
    row_bytes = 64 * (len(pairs.TAPS) + (distill > 0)) * pairs.HIDDEN * 8
    monkeypatch.setattr(features_module, "_room_bytes", lambda _: num_rows_kept * row_bytes + 1)
    trainer, plain = make_trainer(documents, recipe), make_trainer(documents, recipe)
    found = [progress.loss.item() for progress in trainer.run(steps=6)]
    assert trainer.features.num_kept == num_rows_kept
    reads = read[3:]  # after two for the rehearsal, and one to see its size
    assert sum(reads.count(row) == 1 for row in range(3)) == num_rows_kept
    assert sum(reads.count(row) > 1 for row in range(3)) == 3 - num_rows_kept
    assert found == [plain.step(step / 6).loss.item() for step in range(6)]
    trainer.features.forget()
    assert trainer.features.num_kept == 0
    assert trainer.step(0.5).loss.item() == plain.step(0.5).loss.item()


def test_phases_take_parts_of_the_rows_one_after_the_other_and_read_each_row_once(read):
    documents = pairs.random_documents([(9, 50)] * 6)
    recipe = TrainingRecipe(rows_per_step=1, num_anchors=9, phases=3)
    trainer = make_trainer(documents, recipe)
    list(trainer.run(steps=1))  # the rehearsal; it takes the first part of the rows
    trainer.step_number = 0
    read.clear()
    seen = []
    for step in range(12):
        trainer.step(step / 12)
        trainer.step_number = step + 1
        seen.append(sorted(set(read)))
    assert trainer.features.num_kept == 2
    assert seen[3] == [0, 3] or {*seen[3]} < {0, 3}  # one of them was kept before
    assert {*seen[7]} - {*seen[3]} == {1, 4}
    assert {*seen[11]} - {*seen[7]} == {2, 5}
    assert len(read) == len(set(read))


def test_deep_anchors_are_drawn_more_often():
    documents = pairs.random_documents([(4, 58)] * 2)
    recipe = TrainingRecipe(rows_per_step=2, num_anchors=6, deep_from=40, deep_weight=5.0)
    trainer = make_trainer(documents, recipe)
    anchors = []
    for step in range(80):
        trainer.step_number = step
        anchors.append(trainer._batch([0, 1], 4).anchors)
    deep = (torch.stack(anchors) >= 40).float().mean().item()
    # 21 places from 40 on weigh 5 each, 37 before them weigh 1; drawing without repeating evens it a little.
    assert 0.62 < deep < 21 * 5 / (21 * 5 + 37)
    even = make_trainer(documents, TrainingRecipe(rows_per_step=2, num_anchors=6))
    assert even._weights([0, 1]) is None


def test_short_blocks_are_the_beginnings_of_whole_ones():
    documents = pairs.random_documents([(9, 50)] * 2)
    recipe = TrainingRecipe(rows_per_step=2, num_anchors=9, short_blocks=0.5)
    trainer = make_trainer(documents, recipe, top={"is_causal": True})
    chosen, block = trainer._chosen(), trainer.forward.block
    _, features = trainer.features.read(chosen)
    whole, short = (
        trainer.forward(trainer._batch(chosen, size), features) for size in (block, trainer._block(0.49))
    )
    assert short.shape[1] == block // 2 - 1
    torch.testing.assert_close(short, whole[:, : short.shape[1]], rtol=0, atol=1e-12)
    sizes = [progress.matches.shape[1] + 1 for progress in trainer.run(steps=4)]
    assert sizes == [block // 2, block // 2, block, block]


def test_time_for_compiling_is_part_of_a_run_but_not_of_its_schedule(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: clock[0])
    trainer = make_trainer(pairs.random_documents([(9, 50)]), TrainingRecipe(rows_per_step=1, num_anchors=4))
    rehearse, step = trainer._rehearse, trainer.step
    shares = []

    def slow_rehearsal():
        rehearse()
        clock[0] += 6.0

    def slow_step(share):
        clock[0] += 1.0
        shares.append(share)
        return step(share)

    monkeypatch.setattr(trainer, "_rehearse", slow_rehearsal)
    monkeypatch.setattr(trainer, "step", slow_step)
    assert len(list(trainer.run(seconds=10))) == 4
    assert shares == [0.0, 0.25, 0.5, 0.75]
    assert list(trainer.run(seconds=5)) == []  # over while it was compiled


def test_averaged_weights_follow_and_are_there_only_inside():
    documents = pairs.random_documents([(9, 50)] * 2)
    recipe = TrainingRecipe(
        rows_per_step=2, num_anchors=9, average=0.5, optimizer="adamw", rate=1e-2, warm_up=0.0
    )
    trainer = make_trainer(documents, recipe)
    weights = trainer.model.fc.weight
    average = weights.detach().clone()
    for step in range(3):
        trainer.step(0.1)
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * weights.detach()
    before = weights.detach().clone()
    with trainer.averaged():
        torch.testing.assert_close(weights.detach(), average)
        assert not torch.equal(weights, before)
    assert torch.equal(weights, before)


@pytest.mark.slow
def test_64_memorised_answers_are_accepted_in_full_blocks(tmp_path):
    """What SpecForge calls its gate: simulated and in the engine, every draft is accepted."""
    llm = LLM(tiny.TARGET, "none", device="cpu", dtype="float32", max_model_len=200)
    asked = prompts(64, seed=2)
    documents = answered(llm, asked, tiny.BLOCK)
    target = pairs.load_target(dtype="float32")[0].target
    target.taps = pairs.TAPS
    raw = pairs.draft_json(top={"intermediate_size": 128})
    config = read_draft_config(raw, name="memorised")
    model = new_drafter(config, target, max_positions=128, device=CPU, init="random", seed=0)
    rows, _ = pack(documents, 64)
    recipe = TrainingRecipe(rows_per_step=4, num_anchors=24, rate=2e-2, objective=Objective("uniform"))
    trainer = Trainer(model, target, rows, recipe)
    assert simulate(trainer.forward.drafter, documents, length=64)["all"].num_steps > 5 * 64
    for _ in trainer.run(steps=240):
        pass
    fit = simulate(trainer.forward.drafter, documents, length=64)["all"]
    assert fit == DrafterFit(64, 64 * tiny.BLOCK, 64, (64,) * (tiny.BLOCK - 1))
    folder = pairs.write_drafter(tmp_path, raw, model)
    llm = LLM(tiny.TARGET, str(folder), device="cpu", dtype="float32", max_model_len=200, width=tiny.BLOCK)
    assert [one.answer_ids for one in answered(llm, asked, tiny.BLOCK)] == [
        one.answer_ids for one in documents
    ]
    assert llm.engine.snapshot().num_blocks == 64


def test_the_exported_drafter_in_the_engine_commits_what_was_simulated(trained):
    engine = tiny.engine("trained", max_num_seqs=4)
    documents, _ = pairs.engine_steps(engine, prompts(3), max_tokens=40, temperature=0.0, width=1)
    like, config = pairs.load_target()[0], trained.model.config
    found = fit_in_engine(Path(tiny.DRAFT), documents, model=tiny.TARGET, config=config, like=like)
    expected = simulate(trained, documents, length=96)["all"]
    assert (found.num_steps, found.num_tokens) == (expected.num_steps, expected.num_tokens)
    assert found.committed > 2


def test_a_shallow_target_is_tapped_at_different_layers():
    config = pairs.load_target()[0].config
    raw = draft_json(DrafterShape(), config, {}, mask_id=63)
    taps = raw["dflash_config"]["target_layer_ids"]
    assert len(set(taps)) == len(taps)
    assert set(taps) <= set(range(config.num_layers))


def test_a_new_drafter_says_what_its_target_scales_and_caps():
    config = pairs.load_target()[0].config
    gemma = replace(config, embedding_scale=5.6, logit_softcap=30.0)
    for target, scale, cap in ((config, None, None), (gemma, 5.6, 30.0)):
        read = read_draft_config(draft_json(DrafterShape(), target, {}, mask_id=63), name="new")
        assert (read.embedding_scale, read.logit_softcap, read.unread_keys) == (scale, cap, ())
