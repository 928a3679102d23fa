"""blockdraft fit: numbers of the engine, suspects tried one by one, and what it advises."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.bench.workloads import CLASSES, load
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.cli import progress
from blockdraft.cli.fit import lines
from blockdraft.cli.main import main
from blockdraft.engine.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.training import drafter_fit as fit_module
from blockdraft.training.answers import read_conversations
from blockdraft.training.drafter_fit import fit
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.fit_report import LOW, Cost, FitQuestion, describe_depth, prospect_of, training_pays
from blockdraft.training.variations import variations
from tests.training import pairs

PAIR = Path(__file__).parents[1] / "fixtures" / "pair"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
MAX_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def _little_work():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "TIMED_STEPS", 4)
        patch.setitem(fit_module.PROBES, "cpu", (3, 64))
        yield


@pytest.fixture
def _nothing_timed(monkeypatch):
    monkeypatch.setattr(fit_module._Session, "costs", lambda *_: ())


@pytest.fixture
def _no_variations(monkeypatch):
    monkeypatch.setattr(fit_module, "variations", lambda *_: [])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def shown():
    """The stages of the report `good`."""
    return []


@pytest.fixture(scope="module")
def good(prompts, shown, _little_work):
    """The report of the drafter as it is."""
    return ask(DRAFT, prompts, show=lambda *stage: shown.append(stage))


def write_prompts(path, steps=(1, 2, 3), starts=range(0, 60, 20)):
    """Runs of the kind the target has learnt to continue, a category per step."""
    rows = [
        {"prompt": " ".join(f"t{(start + step * k) % 60}" for k in range(4)), "category": f"step {step}"}
        for step in steps
        for start in starts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drafter(folder, weights=None, **changes):
    """The fixture's drafter with other values in config.json, and other weights."""
    shutil.copytree(DRAFT, folder)
    change(folder, **changes)
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config["dflash_config"] if key in DFLASH_KEYS else config
        place[key] = value
        if value is None:
            del place[key]
    (folder / "config.json").write_text(json.dumps(config))


DFLASH_KEYS = ("target_layer_ids", "mask_token_id", "input_embedding_scale")


def ask(draft, prompts, target=TARGET, show=lambda *_: None, **options):
    options = {"max_tokens": MAX_TOKENS, "dtype": "float64"} | options
    question = FitQuestion(target=str(target), drafter=str(draft), prompts=prompts, **options)
    return fit(question, read_conversations(prompts), show)


def command(draft, prompts, *flags, target=TARGET):
    """Without prompts, the built-in ones are asked."""
    given = () if prompts is None else ("--prompts", str(prompts))
    fixed = ("--max-tokens", str(MAX_TOKENS), "--dtype", "float64")
    return main(["fit", str(target), str(draft), *given, *fixed, *flags])


# ---- numbers


def test_a_good_drafter_fits_and_nothing_is_found_wrong(good):
    assert good.fits
    assert good.cause is None
    text = "\n".join(lines(good))
    assert "FITS: 6." in text
    assert "DOES NOT" not in text
    assert "Likely cause" not in text
    assert "blockdraft train" not in text
    assert "WARNING" not in text
    for name in ("step 1", "step 2", "step 3", "all"):
        assert any(line.strip().startswith(name) for line in text.splitlines())


def test_the_numbers_are_those_of_the_engine(prompts):
    report = ask(DRAFT, prompts, is_quick=True, limit=2, width=4, temperature=0.5)
    llm = LLM(str(TARGET), str(DRAFT), dtype="float64", width=4, prefix_cache=False)
    texts = [json.loads(line) for line in prompts.read_text().splitlines()]
    for step in (1, 2, 3):
        # The first two of each category, in the order of the file: noise is drawn by request number.
        mine = [row for row in texts if row["category"] == f"step {step}"][:2]
        assert report.categories[f"step {step}"].num_documents == len(mine)
    chosen = [row["prompt"] for index, row in enumerate(texts) if index % 3 < 2]
    params = SamplingParams(temperature=0.5, max_tokens=MAX_TOKENS, width=4)
    metrics = [one.metrics for one in llm.generate(chosen, params)]
    assert report.overall.num_tokens == sum(one.num_tokens for one in metrics)
    assert report.overall.num_steps == sum(one.steps for one in metrics)
    accepted = [one.accepted for one in metrics]
    assert list(report.overall.accepted) == [sum(each) for each in zip(*accepted, strict=True)]
    for name in ("num_tokens", "num_steps", "num_documents"):
        parts = report.categories.values()
        assert sum(getattr(one, name) for one in parts) == getattr(report.overall, name)


def own_head():
    """A head of its own over three quarters of the tokens: the others are never drafted."""
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.tensor([one for one in range(60) if one % 4])
    return load_file(DRAFT / "model.safetensors") | {
        "lm_head.weight": embedding[ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
    }


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"target_layer_ids": [2, 0, 1], "input_embedding_scale": 0.5}, None),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 5,
                "use_sliding_window": True,
            },
            None,
        ),
        ({"draft_vocab_size": 45}, own_head),
    ],
    ids=["taps and scale", "window", "own head"],
)
@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
def test_simulation_and_engine_agree(tmp_path, prompts, changes, weights):
    made = drafter(tmp_path / "draft", None if weights is None else weights(), **changes)
    agreement = ask(made, prompts, width=6).agreement
    assert agreement.num_documents == 3
    assert agreement.engine > 1
    assert agreement.simulated == pytest.approx(agreement.engine, rel=1e-12)


def test_a_disagreement_is_part_of_the_report(good):
    assert good.agreement.agrees
    wrong = replace(good, agreement=replace(good.agreement, simulated=1.02 * good.agreement.engine))
    assert wrong.to_json()["agreement"]["agrees"] is False
    (line,) = (line for line in lines(wrong) if line.startswith("WARNING"))
    assert f"{wrong.agreement.engine:.3f}" in line
    assert f"simulation {wrong.agreement.simulated:.3f}" in line


@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_probes_are_the_first_tokens_of_greedy_answers(prompts, monkeypatch, temperature):
    """Those that were measured, where they are greedy; else they are asked for."""
    monkeypatch.setitem(fit_module.PROBES, "cpu", (3, 10))
    asked = []
    answer = fit_module._Session.answer
    monkeypatch.setattr(
        fit_module._Session, "answer", lambda *args: (asked.append(args[1]), answer(*args))[1]
    )
    report = ask(DRAFT, prompts, width=5, temperature=temperature)
    assert asked == (["answer"] if temperature == 0 else ["answer", "probe"])
    llm = LLM(str(TARGET), str(DRAFT), dtype="float64", width=5)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    params = SamplingParams(temperature=0.0, max_tokens=10, width=5)
    metrics = [one.metrics for one in llm.generate([texts[0], texts[3], texts[6]], params)]
    assert report.agreement.engine == sum(m.num_tokens for m in metrics) / sum(m.steps for m in metrics)
    assert report.agreement.simulated == report.agreement.engine


# ---- built-in prompts


@pytest.fixture
def asked_texts(monkeypatch):
    """The first turns that are encoded, in order: the fixture's target knows no words, so they stand in."""
    texts = []

    def encode(tokenizer, one):
        texts.append((one.category, one.turns[0]))
        return [5, 10, 15]

    monkeypatch.setattr(fit_module, "encode_conversation", encode)
    return texts


@pytest.mark.usefixtures("_nothing_timed")
def test_without_prompts_those_of_the_benchmark_are_asked(asked_texts, capsys):
    assert command(DRAFT, None, "--quick", "--json", "--limit", "2", "--max-tokens", "4") == 0
    expected = [(name, one.turns[0]) for name in CLASSES for one in load(name).prompts[:2]]
    assert asked_texts == expected
    report = json.loads(capsys.readouterr().out)
    assert set(report["categories"]) == set(CLASSES)
    assert {one["prompts"] for one in report["categories"].values()} == {2}
    assert report["question"]["prompts"].startswith("built in, blockdraft ")


def test_the_report_says_which_prompts_were_asked(good, prompts):
    assert f"prompts: {prompts}" in lines(good)
    built_in = replace(good, question=replace(good.question, prompts=None))
    assert any(line.startswith("prompts: built in, blockdraft ") for line in lines(built_in))


# ---- how far it is


def test_every_stage_says_how_far_it_is(good, shown):
    assert list(dict.fromkeys(stage for stage, _, _ in shown)) == ["load", "answer", "time", "read", "try"]
    for stage in ("answer", "time", "try"):
        shares = [share for name, share, _ in shown if name == stage]
        assert shares == sorted(shares)
        assert len(set(shares)) > 3
    assert [share for name, share, _ in shown if name == "answer"][-1] == 1
    tried = [detail for name, _, detail in shown if name == "try"]
    assert any(detail.startswith("tap offset +1: reads layers") for detail in tried)


def test_an_answer_that_ends_early_counts_as_done(prompts, monkeypatch):
    shown = []
    session = fit_module._Session(
        FitQuestion(target=str(TARGET), drafter=str(DRAFT), prompts=prompts), lambda *args: shown.append(args)
    )
    end = session._llm.generate([[5, 10]], SamplingParams(temperature=0.0, max_tokens=4))[0].token_ids[-1]
    monkeypatch.setattr(
        fit_module, "SamplingParams", lambda **fields: SamplingParams(**fields, stop_token_ids=(end,))
    )
    (answer,) = session.answer("answer", [fit_module._FirstTurn(None, [5, 10])], 50, 0.0)
    assert answer.metrics.num_tokens < 10
    assert shown[-1] == ("answer", 1.0, "1 of 1 prompts answered")


def test_lines_of_a_stage_are_seconds_apart_where_they_could_be_many(monkeypatch, capsys):
    clock = iter((100.0, 100.0, 100.1, 100.2, 100.3, 106.0, 106.1))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    show = progress.stage_shower(progress.stage_bars(is_quiet=False), is_quiet=False)
    for stage, share in (
        ("load", None),
        ("load", None),
        ("answer", 0.0),
        ("answer", 0.1),
        ("answer", 0.5),
        ("try", 0.0),
    ):
        show(stage, share, "x")
    assert capsys.readouterr().err.splitlines() == [
        "    0.0 s  load  x",
        "    0.1 s  load  x",
        "    0.2 s  answer   0%  x",
        "    6.0 s  answer  50%  x",
        "    6.1 s  try   0%  x",
    ]


# ---- what is wrong


@pytest.mark.parametrize(
    ("wrong", "name", "key", "value"),
    [
        ({"target_layer_ids": [1, 2, 3]}, "tap offset -1", "target_layer_ids", [0, 1, 2]),
        ({"mask_token_id": 5}, "mask token", "mask_token_id", 63),
        ({"is_causal": True}, "in-block causality", "is_causal", False),
        ({"input_embedding_scale": 5.6}, "embedding scale", "input_embedding_scale", None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.usefixtures("_nothing_timed")
def test_a_wrong_key_is_named_and_the_advice_repairs_it(tmp_path, prompts, good, wrong, name, key, value):
    made = drafter(tmp_path / "draft", **wrong)
    report = ask(made, prompts)
    cause = report.cause
    assert (cause.name, cause.key.rpartition(".")[2], cause.value) == (name, key, value)
    assert cause.before == pytest.approx(report.agreement.engine)
    assert cause.after == pytest.approx(good.agreement.engine)
    assert report.prospect is None  # the repair comes before any training
    text = "\n".join(lines(report))
    assert f"Likely cause: {name}" in text
    assert f'"{cause.key}"' in text
    change(made, **{key: value})
    assert read_config(made) == read_config(DRAFT)


def read_config(folder):
    return read_draft_config(json.loads((folder / "config.json").read_text()), name="draft")


def scrambled():
    """Another drafter of the same shape."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        for name, weight in load_file(DRAFT / "model.safetensors").items()
    }


@pytest.mark.usefixtures("_nothing_timed")
def test_a_drafter_that_knows_nothing_is_sent_to_training(tmp_path, prompts, capsys):
    made = drafter(tmp_path / "draft", scrambled())
    assert command(made, prompts) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "Likely cause" not in text
    assert "No change of the configuration helps." in text
    assert "every category is low" in text
    assert f"blockdraft train {TARGET} --from {made} --prompts {prompts} --out " in text


@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
def test_train_is_not_told_to_continue_what_it_refuses(tmp_path, prompts):
    weights = scrambled() | {name: own_head()[name] for name in ("lm_head.weight", "d2t")}
    made = drafter(tmp_path / "draft", weights, draft_vocab_size=45)
    prospect = ask(made, prompts).prospect
    assert "--from" not in prospect.command
    assert any("head" in reason for reason in prospect.reasons)


LOW_FIT = DrafterFit(1, 180, 100, (50, 30))


def advised(good, overall, categories=None, *, costs=(), greedy=None, **question):
    question = replace(good.question, **question)
    return prospect_of(question, read_config(DRAFT), categories or {"all": overall}, costs, overall, greedy)


def test_built_in_prompts_are_not_what_to_train_with(good):
    prospect = advised(good, LOW_FIT, prompts=None)
    assert "--prompts prompts.jsonl" in prospect.command
    assert any("prompts.jsonl" in reason for reason in prospect.reasons)


def test_low_categories_are_named(good):
    low = {"easy": DrafterFit(1, 300, 100, (100, 100)), "hard": LOW_FIT}
    reasons = advised(good, good.overall, low).reasons
    assert "1 of 2 categories are low, and the drafter does not predict these: hard" in reasons


@pytest.mark.parametrize(("greedy", "is_worth_it"), [(None, True), (1.8, True), (5.0, False)])
def test_what_the_temperature_costs_is_not_blamed_on_the_drafter(good, greedy, is_worth_it):
    costs = [Cost(8, 10.0, 1.5, 1.8, 1.2)]
    assert advised(good, LOW_FIT, costs=costs, greedy=greedy).is_worth_it is is_worth_it


@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
@pytest.mark.filterwarnings("ignore:the target's weights are unpacked")  # a CPU has no kernel for them
def test_an_int8_target_is_compared_with_the_plain_one(prompts, good, monkeypatch):
    load, loaded = fit_module._load, []

    def recorded(question, quantization, say):
        loaded.append(quantization)
        return load(question, quantization, say)

    monkeypatch.setattr(fit_module, "_load", recorded)
    tried = ask(DRAFT, prompts, quantization="int8").tried
    assert loaded == ["int8", "none"]
    assert [one.name for one in tried] == ["quantised target"]
    assert tried[0].after == good.agreement.engine
    assert "int8" in tried[0].advice


def target_with(folder, template):
    shutil.copytree(TARGET, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
def test_other_prompts_are_tried_where_they_differ_and_it_is_low(tmp_path, prompts):
    template = (
        "{% for m in messages %}t1 {{ m.content }} {% endfor %}{% if enable_thinking is false %}t5{% endif %}"
    )
    other = target_with(tmp_path / "target", template)
    made = drafter(tmp_path / "draft", scrambled())
    names = [one.name for one in ask(made, prompts, target=other).tried]
    assert names == ["chat template", "thinking off"]  # on is what it is without a word
    assert ask(DRAFT, prompts, target=other).tried == ()  # not low


@pytest.mark.usefixtures("_no_variations", "_nothing_timed")
def test_a_template_that_the_drafter_never_saw_is_named(tmp_path, prompts, good):
    numbers = torch.randint(60, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    noise = " ".join(f"t{number}" for number in numbers)
    template = "{% for m in messages %}{{ m.content }} " + noise + "{% endfor %}"
    report = ask(DRAFT, prompts, target=target_with(tmp_path / "target", template))
    assert report.overall.committed < LOW
    assert report.cause.name == "chat template"
    assert report.cause.after == good.agreement.engine  # the fixture's own template adds nothing


# ---- layouts of config.json


def found_variations(raw):
    target = read_model_config(json.loads((TARGET / "config.json").read_text()), name="target")
    config = read_draft_config(raw, name="draft")
    return list(variations(config, target, LLM(str(TARGET)).tokenizer, []))


def test_speculators_are_advised_in_their_own_words():
    top = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    raw = pairs.draft_json(top=top, dflash={"mask_token_id": 5}, speculators={})
    found = {one.name: one for one in found_variations(raw)}
    taps = found["tap offset +1"]
    assert (taps.key, taps.value) == ("aux_hidden_state_layer_ids", [2, 3, 4])
    assert taps.config.taps == (1, 2, 3)
    assert found["mask token"].key == "mask_token_id"
    causality = found["in-block causality"]
    assert (causality.key, causality.value) == ("sliding_window_non_causal", True)
    assert causality.config.is_causal == (False, False)


@pytest.mark.parametrize(("architecture", "value"), [("DFlashDraftModel", None), ("Qwen3XPressModel", 1.0)])
def test_only_dflash_is_advised_to_leave_out_the_targets_embedding_scale(architecture, value):
    """Any other kind without the key is read as if it said 1, whatever the target's."""
    raw = pairs.draft_json(top={"architectures": [architecture]}, dflash={"input_embedding_scale": 5.6})
    found = next(one for one in found_variations(raw) if one.what.startswith("scales embeddings by 1,"))
    assert (found.value, found.config.embedding_scale) == (value, 1.0)


def test_taps_outside_the_target_are_not_tried():
    names = [one.name for one in found_variations(pairs.draft_json(dflash={"target_layer_ids": [0, 3]}))]
    assert not any(name.startswith("tap offset") for name in names)
    assert "taps at z-lab's default layers" not in names  # four layers have only one of those


def test_the_end_token_is_never_tried_as_a_mask():
    tried = [one.value for one in found_variations(pairs.draft_json(dflash={"mask_token_id": 5}))]
    assert 63 in tried
    assert 62 not in tried


# ---- whether training pays


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([], None),
        ([Cost(8, 10.0, 2.0, 1.1, 0.55)], True),
        ([Cost(8, 10.0, 3.5, 1.1, 0.3)], False),
        # A narrow step may pay where a wide one does not: two tokens for 1.5 steps.
        ([Cost(2, 1.0, 1.5, 1.1, 0.7), Cost(8, 10.0, 3.5, 1.1, 0.3)], True),
    ],
)
def test_training_pays_only_where_a_good_drafter_would_be_faster(costs, expected):
    assert training_pays(costs)[0] is expected


def test_a_block_that_fails_after_its_first_draft_is_told_from_one_that_fails_at_it():
    assert "does not know this target" in describe_depth(DrafterFit(1, 110, 100, (10, 5, 2)))
    assert "not the block" in describe_depth(DrafterFit(1, 190, 100, (80, 10, 0)))


# ---- input


def test_a_drafter_of_another_target_is_refused(tmp_path, prompts, capsys):
    made = drafter(tmp_path / "draft", num_target_layers=36)
    assert command(made, prompts) == 2
    assert "does not match" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "prompts.jsonl does not exist"),
        ("", "holds no prompts"),
        ("{]", "line 1: not JSON"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
        (json.dumps({"prompt": "t1 " * 600}), "longer than the context"),
    ],
)
def test_bad_prompts_are_refused(tmp_path, capsys, text, message):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    assert command(DRAFT, path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--limit", "0"), ("--max-tokens", "0"), ("--width", "1"), ("--width", "9")]
)
def test_impossible_flags_are_refused(prompts, capsys, flags):
    assert command(DRAFT, prompts, *flags) == 2
    assert flags[1] in capsys.readouterr().err


def test_prompts_that_are_too_long_are_counted(tmp_path, capsys):
    path = write_prompts(tmp_path / "prompts.jsonl", steps=(1,))
    path.write_text(path.read_text() + json.dumps({"prompt": "t1 " * 600}) + "\n")
    assert command(DRAFT, path, "--quick") == 0
    assert "1 prompts were left out: they are longer" in capsys.readouterr().out


# ---- JSON


@pytest.mark.usefixtures("_nothing_timed")
def test_json_goes_to_stdout_and_lines_to_stderr_unless_it_is_quiet(prompts, capsys):
    assert command(DRAFT, prompts, "--json", "--limit", "1") == 0
    out, err = capsys.readouterr()
    json.loads(out)
    for word in ("load", "answer", "read", "try"):
        assert f" s  {word} " in err
    assert command(DRAFT, prompts, "--json", "--limit", "1", "--quiet", "--quick") == 0
    assert capsys.readouterr().err == ""


def test_json_has_everything(good):
    report = json.loads(json.dumps(good.to_json()))
    parts = "question kind drafts_with width dtype quantization verdict overall categories weak speed tried"
    parts += " prompts_left_out agreement untried cause training"
    assert set(report) == set(parts.split())
    assert report["verdict"] == "fits"
    assert report["cause"] is report["training"] is None
    assert set(report["categories"]) == {"step 1", "step 2", "step 3"}
    overall = report["overall"]
    assert overall["prompts"] == 9
    assert overall["committed_per_step"] == overall["tokens"] / overall["steps"]
    assert len(overall["accepted_by_position"]) == 7
    assert [cost["width"] for cost in report["speed"]] == [2, 4, 8]
    for cost in report["speed"]:
        assert set(cost) == {"width", "step_ms", "break_even", "committed", "speed_up"}
        assert cost["speed_up"] == pytest.approx(cost["committed"] / cost["break_even"])
    assert report["agreement"]["agrees"] is True
    fields = {"name", "what", "before", "after", "advice", "key", "value", "needed", "is_cause"}
    assert all(set(one) == fields for one in report["tried"])
    assert {one["name"] for one in report["tried"]} >= {"tap offset +1", "in-block causality"}
