"""A whole run: its stages, what an interruption leaves behind, what it exports, and what it refuses."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from blockdraft import LLM, SamplingParams
from blockdraft.cli.main import main
from blockdraft.errors import ModelError, SettingsError
from blockdraft.settings import shipped
from blockdraft.training import regenerate, run
from blockdraft.training.answers import read_shard
from blockdraft.training.drafter import load_weights
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.job import AnswerOptions, DrafterShape, Job, Objective, TrainingRecipe
from blockdraft.training.packing import MIN_ANSWER
from blockdraft.training.run import Listener, train
from blockdraft.training.run_messages import left, plan_lines, verdict_lines
from blockdraft.training.trainer import Trainer
from tests import tiny
from tests.matrix import slow_but
from tests.training import pairs

STEPS = 6
SHAPE = DrafterShape(block=4, num_layers=2, taps=(0, 2))
OBJECTIVE = Objective(distill=0.3, hardness=1.0)
RECIPE = TrainingRecipe(
    rows_per_step=2, num_anchors=8, short_blocks=0.5, anchoring="walk", average=0.5, objective=OBJECTIVE
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"category": "even" if n % 2 else "odd", "prompt": f"t{n} t{n + 1 + n % 3} t{n + 2 + 2 * (n % 3)}"}
        for n in range(40)
    ]
    turns = [("t2 t4", "t6 t8"), ("t3 t6", "t9 t12"), ("t5 t6", "t7 t8")]
    lines += [{"messages": [{"role": "user", "content": text} for text in texts]} for texts in turns]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Its answers have many lengths, so they do not end in the order of the questions."""
    return str(pairs.write_ending_target(tmp_path_factory.mktemp("ending"), 20, 41, 62))


def make_job(prompts, target, out):
    return Job(
        out=out,
        prompts=(prompts,),
        model=target,
        device="cpu",
        dtype="float32",
        steps=STEPS,
        length=64,
        bulk_rows=8,
        shape=SHAPE,
        answers=AnswerOptions(max_tokens=12, sampled=0.4, temperature=(0.5, 1.0)),
        recipe=RECIPE,
        command="blockdraft train …",
    )


@pytest.fixture
def job(prompts, target, tmp_path):
    return make_job(prompts, target, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(prompts, target, tmp_path_factory):
    """The folders of runs that nobody interrupted, one per kind of recipe; `make.told` is their story."""
    told = []

    @functools.cache
    def make(optimizer):
        out = tmp_path_factory.mktemp("whole") / optimizer
        job = make_job(prompts, target, out)
        ask = run.regenerate

        def asking(*arguments, **options):
            told.append(arguments[4])
            return ask(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "regenerate", asking)
            patch.setattr(run, "SHOW_S", 0.0)
            patch.setattr(run, "SAY_S", 0.0)
            train(replace(job, recipe=replace(RECIPE, optimizer=optimizer)), listening(told, told))
        return out

    make.told = told
    return make


def listening(told, shown):
    """A listener whose lines and bars are kept, in their order."""
    return Listener(tell=told.append, show=lambda stage, share, detail: shown.append((stage, share, detail)))


def assert_same_run(out, expected):
    mine, theirs = (torch.load(one / "checkpoint.pt", weights_only=True) for one in (out, expected))
    assert mine["step"] == theirs["step"] == STEPS
    flat, other = (list(leaves(state)) for state in (mine, theirs))
    assert len(flat) == len(other) > 50
    for (path, one), (also, two) in zip(flat, other, strict=True):
        assert path == also
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, path
    weights, others = (load_file(one / "drafter" / "model.safetensors") for one in (out, expected))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert (out / "drafter" / "fit.json").read_text() == (expected / "drafter" / "fit.json").read_text()


def leaves(value, path=()):
    if isinstance(value, dict):
        for name in value:
            yield from leaves(value[name], (*path, name))
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from leaves(one, (*path, place))
    else:
        yield path, value


# ---- answers


def test_held_out_answers_are_those_of_a_server(whole):
    """Greedy, and not cut where they run in circles."""
    whole("muon")
    held_out, trained_on = (one for one in whole.told if isinstance(one, AnswerOptions))
    assert (trained_on.sampled, trained_on.max_repeat) == (0.4, 64)
    assert held_out == replace(trained_on, sampled=0.0, max_repeat=None)


@pytest.mark.slow
def test_answers_of_other_runs_are_trained_on_too(job, whole, prompts):
    folder = whole("muon") / "answers"
    num_there = sum(len(read_shard(path)) for path in folder.glob("*.npz"))
    with pytest.raises(SettingsError, match="add --held-out"):
        replace(job, prompts=(), more_answers=(folder,))
    recipe = replace(RECIPE, phases=2, deep_from=8, deep_weight=2.0)
    alone = replace(job, prompts=(), more_answers=(folder,), held_out=((None, prompts),), recipe=recipe)
    train(alone, Listener())
    assert f"\n{num_there} answers of the target itself" in (job.out / "drafter" / "README.md").read_text()
    both = replace(job, out=job.out / "both", more_answers=(folder,))
    train(both, Listener())
    own = sum(len(read_shard(path)) for path in (both.out / "answers").glob("*.npz"))
    assert f"\n{own + num_there} answers of the target" in (both.out / "drafter" / "README.md").read_text()


# ---- interrupted and resumed


@pytest.mark.parametrize("optimizer", slow_but(["muon", "adamw"], "muon"))
def test_a_run_killed_between_checkpoints_ends_with_the_same_weights(job, whole, monkeypatch, optimizer):
    job = replace(job, recipe=replace(RECIPE, optimizer=optimizer))
    save, step = run._save_checkpoint, Trainer.step

    def save_at_2(job, trainer):
        if trainer.step_number == 2:
            save(job, trainer)

    def die_in_5(trainer, share):
        if trainer.step_number == 4:
            raise KeyboardInterrupt
        return step(trainer, share)

    with monkeypatch.context() as patch:
        patch.setattr(run, "CHECKPOINT_S", 0.0)
        patch.setattr(run, "_save_checkpoint", save_at_2)
        patch.setattr(Trainer, "step", die_in_5)
        with pytest.raises(KeyboardInterrupt):
            train(job, Listener())
    left_behind = sorted(path.name for path in (job.out / "drafter").iterdir())
    assert left_behind == ["README.md", "config.json", "model.safetensors"], "a drafter, not measured yet"
    LLM(job.model, str(job.out / "drafter"), device="cpu", dtype="float32", max_model_len=64)
    lines = []
    train(job, Listener(say=lines.append), resume=True)
    assert "continuing at step 2" in lines
    assert_same_run(job.out, whole(optimizer))


def test_a_run_killed_while_the_target_answers_ends_with_the_same_weights(job, whole, monkeypatch):
    monkeypatch.setattr(regenerate, "SHARD", 5)
    write, count = regenerate.write_shard, iter(range(100))

    def die(path, documents):
        write(path, documents)
        if path.parent.name == "answers" and next(count) == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "write_shard", die)
        with pytest.raises(KeyboardInterrupt):
            train(job, Listener())
    assert len(list((job.out / "answers").iterdir())) == 1
    assert not (job.out / "checkpoint.pt").exists()
    train(job, Listener(), resume=True)
    assert_same_run(job.out, whole("muon"))


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_without_prompts_changes_nothing(job, whole, tmp_path):
    shutil.copytree(whole("muon"), job.out)
    train(replace(job, prompts=()), Listener(), resume=True)
    assert_same_run(job.out, whole("muon"))


def test_a_run_that_is_over_before_it_begins_says_so(job):
    with pytest.raises(SettingsError, match="over before training began"):
        train(replace(job, steps=None, minutes=0.01), Listener())


# ---- what comes out


def test_the_exported_drafter_drafts_what_was_trained(whole):
    """bfloat16 is what an export rounds to; from there nothing changes on the way through files."""
    folder = whole("muon") / "drafter"
    exported = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["block_size"] == 4
    assert raw["dflash_config"] == {"mask_token_id": 63, "target_layer_ids": [0, 2]}
    llm = LLM(tiny.TARGET, str(folder), device="cpu", dtype="float32", max_model_len=100, width=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = LLM(tiny.TARGET, "none", device="cpu", dtype="float32", max_model_len=100)
    asked = [[2, 4, 6, 8], [5], [1, 4, 7]]
    assert [one.token_ids for one in llm.generate(asked, greedy)] == [
        one.token_ids for one in plain.generate(asked, greedy)
    ]
    for name in ("k_norm.weight", "q_norm.weight"):  # norms over keys are not trained
        is_one = [bool((one == 1).all()) for key, one in exported.items() if key.endswith(name)]
        assert is_one == [name == "k_norm.weight"] * 2, name
    model = llm.engine.models.drafter.model
    named = pairs.named_weights(model, torch.bfloat16)
    assert named.keys() == exported.keys()
    assert all(torch.equal(named[name], exported[name]) for name in named)


def test_weights_that_bfloat16_holds_come_back_bit_by_bit_and_draft_alike(tmp_path):
    raw = pairs.draft_json(top={"is_causal": True})
    model = pairs.random_drafter(raw, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    card = run.DrafterCard(target="pair", command="", data="", recipe={})
    run.export(tmp_path / "drafter", model, raw, {}, card)
    again = pairs.random_drafter(raw, dtype=torch.float32, seed=7)
    load_weights(again, str(tmp_path / "drafter"), pairs.CPU)
    mine, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [one.requires_grad for one in again.parameters()] == [
        one.requires_grad for one in model.parameters()
    ]


def test_a_run_tells_its_story(whole):
    folder = whole("muon") / "drafter"
    fits = json.loads((folder / "fit.json").read_text())
    assert set(fits) == {"all", "even", "odd"}
    held_out = [one for path in (whole("muon") / "held-out").iterdir() for one in read_shard(path)]
    held_out = [one for one in held_out if len(one.answer_ids) >= MIN_ANSWER]
    assert fits["all"]["documents"] == len(held_out) > fits["even"]["documents"] + fits["odd"]["documents"]
    assert fits["all"]["tokens"] == sum(len(one.answer_ids) for one in held_out)
    assert len(fits["all"]["accepted_by_position"]) == 3
    trained_on = [one for path in (whole("muon") / "answers").iterdir() for one in read_shard(path)]
    assert {one.prompt_ids for one in trained_on}.isdisjoint({one.prompt_ids for one in held_out})
    assert {one.is_greedy for one in trained_on} == {True, False}
    assert {one.is_greedy for one in held_out} == {True}
    card = (folder / "README.md").read_text()
    assert "blocks of 4 tokens" in card
    assert f"| all | {fits['all']['documents']} | **{fits['all']['committed_per_step']:.2f}** |" in card
    assert f"| steps | {STEPS} |" in card


def test_training_goes_on_from_a_drafter(job, whole):
    source = whole("muon") / "drafter"
    recipe = replace(RECIPE, rate=0.0, average=0.0, weight_decay=0.0)
    job = replace(job, start_from=str(source), recipe=recipe)
    told, shown = [], []
    train(job, listening(told, shown))
    assert told[-1].startswith("warning: no better than the drafter it began with")
    assert "start" in [stage for stage, *_ in shown]
    before, after = (load_file(one / "model.safetensors") for one in (source, job.out / "drafter"))
    assert all(torch.equal(before[name], after[name]) for name in before), "at a rate of zero it stays"


# ---- what is told


def test_the_plan_comes_first_and_the_next_command_last(job, whole):
    out = whole("muon")
    assert all(isinstance(one, str) for one in whole.told[:4]), "something was shown before the plan"
    plan = " ".join(whole.told[:4])
    assert plan.startswith(f"plan: train a drafter for '{job.model}' in {out}")
    for part in ("prompts for training and ", "6 steps", f"{out / 'drafter'} for", "--resume"):
        assert part in plan, part
    told = [one for one in whole.told if isinstance(one, str)]
    assert f" {out / 'drafter'}" in told[-1]
    assert told[-1].startswith("next")


def test_the_plan_says_how_long(job):
    lines = {"num_training": 9, "num_held_out": 1, "is_resumed": False}
    timed = replace(job, steps=None, minutes=30.0)
    assert "  time: about 30 minutes, up to 6 of them for answers" in plan_lines(
        timed, **lines, answer_s=360.0
    )
    (going_on, *_) = plan_lines(job, **lines | {"is_resumed": True}, answer_s=None)
    assert going_on.endswith(", resumed")


def test_every_phase_shows_how_far_it_is(whole):
    whole("muon")
    shown = [one for one in whole.told if isinstance(one, tuple)]
    stages = list(dict.fromkeys(stage for stage, *_ in shown))
    assert stages == ["load", "held out", "regenerate", "train", "evaluate", "check"]
    for stage in stages[1:]:
        shares = [share for name, share, _ in shown if name == stage and share is not None]
        assert shares == sorted(shares), stage
        assert 0 < shares[-1] <= 1, f"{stage} does not move"
        assert len(set(shares)) > 1 or stage == "evaluate"  # all of its answers are in one row


def test_what_is_left_is_told_once_it_can_be_known():
    assert [left(0.0, 9.0), left(0.5, 0.5), left(0.25, 10.0), left(0.1, 60.0), left(1.0, 60.0)] == [
        "",
        "",
        ", 30 s left",
        ", 9 min left",
        ", 0 s left",
    ]


def fit(committed):
    return DrafterFit(num_documents=1, num_tokens=int(1000 * committed), num_steps=1000, accepted=())


@pytest.mark.parametrize(
    ("found", "before", "first", "second"),
    [
        (
            1.05,
            None,
            "warning: no better than no drafter: 1.050 tokens per step",
            "next, to train it further",
        ),
        (2.5, None, "2.500 tokens per step on held-out prompts; plain", "next: blockdraft serve "),
        (2.5, 2.4, "2.500 tokens per step on held-out prompts, 2.400 before", "next: blockdraft serve "),
        (2.4, 2.4, "warning: no better than the drafter it began with: 2.400", None),
        (1.1, 1.0, "warning: no better than no drafter", "next, to train it further"),
    ],
)
def test_a_drafter_that_is_no_better_than_nothing_is_told(job, found, before, first, second):
    lines = list(verdict_lines(job, {"all": fit(found)}, None if before is None else fit(before)))
    assert lines[0].startswith(first)
    assert [line.startswith(second) for line in lines[1:]] == ([] if second is None else [True])


@pytest.mark.parametrize(("num_steps", "is_told"), [(9, False), (11, True)])
def test_who_drafts_the_same_answers_too_often_is_told_to_bring_more(num_steps, is_told):
    said, told = [], []
    rows = SimpleNamespace(is_anchor=torch.ones(2, 100, dtype=torch.bool))
    recipe = replace(RECIPE, rows_per_step=2, num_anchors=15)
    trainer = SimpleNamespace(recipe=recipe, rows=rows, step_number=num_steps)
    run._say_blocks(trainer, Listener(say=said.append, tell=told.append))
    assert [len(said), len(told)] == [1 - is_told, is_told]
    assert ("more answers" in (said + told)[0]) == is_told


def test_the_default_target_needs_no_name(job):
    (_, line) = verdict_lines(replace(job, model="default"), {"all": fit(3.0)}, None)
    assert line == f"next: blockdraft serve --draft {job.out / 'drafter'}"


@pytest.mark.parametrize("is_begun", [True, False])
def test_after_an_interrupt_resume_is_named(job, capsys, monkeypatch, is_begun):
    def die(job, *_, **__):
        if is_begun:
            (job.out / "run.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", die)
    monkeypatch.setattr("sys.argv", ["blockdraft", "train", "--out", "run"])
    assert command(job, *TAPS, *STEPS_FLAG) == 130
    error = capsys.readouterr().err
    assert error.endswith(
        "blockdraft train --out run --resume\n" if is_begun else "interrupted before the run began\n"
    )
    assert error.startswith("interrupted")


# ---- what is refused


def command(job, *more, prompts=True):
    flags = ["--out", str(job.out), "--device", "cpu", "--dtype", "float32", "--length", "64", "--rows", "4"]
    flags += ["--block", "4", "--layers", "2", "--max-answer", "12", "--rows-per-step", "2", "--anchors", "8"]
    flags += ["--prompts", str(job.prompts[0])] if prompts else []
    return main(["train", job.model, *flags, *more])


TAPS = ("--taps", "0,2")
STEPS_FLAG = ("--steps", "2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*TAPS,), "either --steps or --minutes"),
        (("--held-out", "x=/nowhere.jsonl", "--length", "1"), "--held-out /nowhere.jsonl does not exist"),
        (("--prompts", "/tmp"), "--prompts /tmp is a folder"),
        ((*TAPS, *STEPS_FLAG, "--minutes", "3"), "either --steps or --minutes"),
        ((*TAPS, "--steps", "0"), "--steps 0"),
        ((*TAPS, "--minutes", "-1"), "--minutes -1"),
        ((*TAPS, *STEPS_FLAG, "--length", "32768"), "--length 32768 is outside 64 to 32767"),
        ((*TAPS, *STEPS_FLAG, "--max-answer", "64"), "--max-answer 64"),
        ((*TAPS, *STEPS_FLAG, "--max-repeat", "-1"), "--max-repeat -1 is outside 1 or more"),
        ((*TAPS, *STEPS_FLAG, "--sampled", "1.5"), "--sampled 1.5"),
        ((*TAPS, *STEPS_FLAG, "--temperature", "1,0.5"), "--temperature 1.0 is outside 0 to 0.5"),
        ((*TAPS, *STEPS_FLAG, "--answers", "/nowhere"), "--answers /nowhere has no shard-*.npz"),
        ((*TAPS, *STEPS_FLAG, "--hardness", "-1"), "--hardness -1.0 is outside 0 or more"),
        *(
            ((*TAPS, *STEPS_FLAG, flag, str(value)), f"{flag} {value}")
            for flag, value in (
                *(("--length", 63), ("--max-answer", 0), ("--phases", 0), ("--rows-per-step", 0)),
                *(("--anchors", 0), ("--deep-weight", 0.0)),
            )
        ),
        ((*TAPS, *STEPS_FLAG, "--hardness", "1", "--weighting", "decay"), "needs --weighting dpace"),
        ((*TAPS, *STEPS_FLAG, "--short-blocks", "1.5"), "--short-blocks 1.5 is outside 0 to 1"),
        ((*TAPS, *STEPS_FLAG, "--short-blocks", "0.5", "--bidirectional"), "only for causal drafters"),
        (
            (*TAPS, *STEPS_FLAG, "--short-blocks", "0.5", "--block", "3"),
            "only for causal drafters with blocks of 4",
        ),
        ((*TAPS, *STEPS_FLAG, "--block", "1"), "a block is an anchor and at least one draft"),
        ((*TAPS, *STEPS_FLAG, "--layers", "0"), "num_hidden_layers"),
        (("--taps", "0,4", *STEPS_FLAG), "taps [0, 4] are not layers 0 to 3"),
        (("--taps=-1", *STEPS_FLAG), "taps [-1] are not layers 0 to 3"),
        (("--taps", "1,1", *STEPS_FLAG), "taps [1, 1] are not"),
        ((*TAPS, *STEPS_FLAG, "--mask-token", "64"), "masks with token 64"),
        ((*TAPS, *STEPS_FLAG, "--mask-token", "62"), "which ends the target's text"),
        ((*TAPS, *STEPS_FLAG, "--resume"), "cannot resume"),
        ((*TAPS, *STEPS_FLAG, "--prompts", "/nowhere.jsonl"), "--prompts /nowhere.jsonl does not exist"),
        ((*TAPS, *STEPS_FLAG, "--from", "/nowhere"), "/nowhere"),
        ((*TAPS, *STEPS_FLAG, "--from", "dflash2"), "no DFlash2 head ships for"),
        ((*TAPS, *STEPS_FLAG, "--from", "auto"), "no drafter ships for"),
    ],
)
def test_the_command_line_refuses_in_one_line(job, capsys, flags, message):
    assert command(job, *flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("blockdraft: error:")
    assert message in error
    assert not (job.out / "drafter").exists()


@pytest.fixture
def asked(monkeypatch):
    """The jobs that the command line makes, which do not run."""
    jobs = []
    monkeypatch.setattr(run, "train", lambda job, *_, **__: jobs.append(job) or {})
    return jobs


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ((), "max_repeat", 64),
        (("--max-repeat", "0"), "max_repeat", None),
        (("--sampled", "0.5", "--temperature", "0.5"), "temperature", (0.5, 0.5)),
        (("--sampled", "0.5", "--temperature", "0.2,1"), "temperature", (0.2, 1.0)),
    ],
)
def test_flags_say_how_the_target_answers(job, asked, flags, name, expected):
    command(job, *TAPS, *STEPS_FLAG, *flags)
    assert [getattr(one.answers, name) for one in asked] == [expected]


def test_a_run_begins_with_a_drafter_that_ships_by_its_word(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "shipped_drafter", lambda model, part="": Path("/drafters", model, part))
    for word in ("auto", "dflash2", "org/name"):
        flags = ["--prompts", __file__, "--out", str(tmp_path), "--steps", "1"]
        assert main(["train", "x", "--from", word, *flags]) == 0
    assert [one.start_from for one in asked] == ["/drafters/x", "/drafters/x/dflash2", "org/name"]
    assert [one.kind for one in asked] == [None] * 3


def test_answers_fit_into_the_length_unless_the_command_line_says(asked, tmp_path):
    flags = ["--prompts", __file__, "--out", str(tmp_path), "--steps", "1", "--kind", "dspark"]
    for length in ("64", "1024"):
        assert main(["train", "x", *flags, "--length", length]) == 0
    assert [one.answers.max_tokens for one in asked] == [32, 400]
    assert [one.kind for one in asked] == ["dspark"] * 2


@pytest.mark.parametrize("wrong", ["warm", "0,0.5,1", "0.5,"])
def test_a_temperature_that_is_no_range_is_refused(job, wrong):
    with pytest.raises(SystemExit):
        command(job, *TAPS, *STEPS_FLAG, "--temperature", wrong)


def test_no_prompts_are_refused(job, capsys):
    assert command(job, *TAPS, *STEPS_FLAG, prompts=False) == 2
    assert "no prompts: give --prompts FILE" in capsys.readouterr().err


@pytest.mark.parametrize("taps", ["", "1,", "1.5"])
def test_taps_that_are_no_numbers_are_refused(job, capsys, taps):
    with pytest.raises(SystemExit):
        command(job, "--taps", taps, *STEPS_FLAG)
    assert "is not a list of layers" in capsys.readouterr().err


def test_the_command_trains_logs_and_will_not_train_over_it(job, capsys):
    assert command(job, *TAPS, *STEPS_FLAG) == 0
    assert (job.out / "drafter" / "model.safetensors").exists()
    log = (job.out / "log.txt").read_text()
    for text in (capsys.readouterr().err, log):
        lines = text.splitlines()
        assert "plan: train a drafter for" in lines[0]
        assert "next" in lines[-1]
    assert "exported to" in log
    assert "all: " in log
    assert command(job, *TAPS, *STEPS_FLAG) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err
    assert command(job, *TAPS, "--steps", "2", "--rate", "0.5", "--resume") == 2
    assert "with another recipe" in capsys.readouterr().err
    assert command(job, *TAPS, "--steps", "2", "--resume", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_answers_of_another_run_are_never_taken_for_this_ones(job, whole):
    """Interrupted while the target answered, then started anew with other wishes in the same folder."""
    shutil.copytree(whole("muon"), job.out, ignore=shutil.ignore_patterns("checkpoint.pt", "drafter"))
    other = replace(job, answers=replace(job.answers, temperature=(0.2, 1.0)))
    with pytest.raises(SettingsError, match="holds a run already"):
        train(other, Listener())


@pytest.mark.parametrize(
    ("top", "message"),
    [({"num_hidden_layers": 5}, "4 layers, the drafter 5"), ({"intermediate_size": 48}, "differ in shape")],
)
def test_layers_that_cannot_be_copied_are_refused(top, message):
    with pytest.raises(SettingsError, match=f"--init target: .*{message}"):
        pairs.new_one(pairs.draft_json(top=top), init="target")


def test_a_drafter_of_another_target_is_refused(job, tmp_path):
    other = json.loads(Path(tiny.DRAFT, "config.json").read_text())
    for name, value, message in (
        ("vocab_size", 65, "vocabulary 65"),
        ("hidden_size", 64, "hidden size 64"),
        ("num_target_layers", 5, "for a target of 5 layers"),
    ):
        folder = tmp_path / name
        shutil.copytree(tiny.DRAFT, folder)
        (folder / "config.json").write_text(json.dumps(other | {name: value}))
        with pytest.raises(ModelError, match=message):
            train(replace(job, out=tmp_path / f"out-{name}", start_from=str(folder)), Listener())


@pytest.mark.parametrize("flag", ["prompts", "held_out"])
def test_a_run_is_not_resumed_with_other_prompts(job, whole, prompts, tmp_path, flag):
    """Their answers would be filed under the numbers of the first ones'."""
    shutil.copytree(whole("muon"), job.out)
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("t2 t4", "t2 t5"))
    asked = replace(job, **{flag: (other,) if flag == "prompts" else ((None, other),)})
    with pytest.raises(SettingsError, match="with another prompts"):
        train(asked, Listener(), resume=True)


def test_prompts_that_moved_are_the_same(job, whole, prompts, tmp_path):
    shutil.copytree(whole("muon"), job.out)
    moved = shutil.copy(prompts, tmp_path / "moved.jsonl")
    train(replace(job, prompts=(Path(moved),)), Listener(), resume=True)
    assert_same_run(job.out, whole("muon"))
