"""From `--draft ngram` to an engine: settings, plan, start, widths that follow the text, the same tokens."""

from dataclasses import replace

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.cache.spec import row_table_bytes
from blockdraft.cli.main import main
from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.width_controller import DraftChances, DraftRecord, StepCosts, WidthController
from blockdraft.errors import SettingsError
from blockdraft.launch.container import read_container
from blockdraft.machine.machine import Machine
from blockdraft.phases import StartProgress
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.plan import NGRAM_BLOCK
from blockdraft.settings.recipe import read_recipe
from blockdraft.settings.settings import MAX_NGRAM, Settings
from blockdraft.start import block_width, loading
from blockdraft.start.block_width import Costs, chances_of
from blockdraft.start.start_engine import start_engine
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.ngram import NGRAM_ACCEPTANCE, NgramDrafter
from tests import tiny
from tests.lossless import families
from tests.models.families import CASES

SMALL = {"model": tiny.TARGET, "device": "cpu", "dtype": "float64", "max_model_len": 128, "max_num_seqs": 2}
LOOP = [3, 5, 7, 9] * 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


# ---- settings


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"draft": "ngram", "engine": "vllm"},
            "vllm cannot draft from n-grams, only our native engine can: leave out --draft ngram",
        ),
        (
            {"draft": "a/b", "draft_ngram": 3, "engine": "sglang"},
            "sglang cannot draft from n-grams, only our native engine can: leave out --draft-ngram",
        ),
        ({"draft": "none", "draft_ngram": 3}, "draft_ngram = 3 needs a drafter: use --draft ngram"),
        ({"draft": "ngram", "draft_ngram": 0}, "leaves --draft ngram nothing to draft"),
        ({"draft": "ngram", "draft_ngram": MAX_NGRAM + 1}, f"{MAX_NGRAM} tokens can be compared: use fewer"),
        ({"draft": "ngram", "draft_ngram": -1}, "draft_ngram = -1 is not a whole number of at least 0"),
    ],
)
def test_what_cannot_be_is_refused(asked, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**asked)


def test_another_engine_may_be_told_to_leave_it():
    assert Settings(engine="vllm", draft="a/b", draft_ngram=0).draft_ngram == 0


def test_it_is_named_in_a_recipe_and_by_the_container():
    recipe = read_recipe('title = "x"\nmodel = "a/b"\n[draft]\nmodel = "ngram"\nngram = 3\n', name="x")
    assert (recipe.settings["draft"], recipe.settings["draft_ngram"]) == ("ngram", 3)
    assert read_container({"DFLASH_DRAFTER": "ngram"}).settings["draft"] == "ngram"


# ---- the plan


def planned(**asked):
    settings = Settings(**SMALL | asked)
    return fit_native(Case(settings, Machine(memory_bytes=8 << 30), open_pair(settings)))


def test_the_plan_has_a_block_and_says_how_much_must_agree():
    plan = planned(draft="ngram").plan
    assert (plan.block, plan.draft_ngram) == (NGRAM_BLOCK, 1)
    assert planned(draft="ngram", draft_ngram=5).plan.draft_ngram == 5
    assert planned(draft="ngram", width=24).plan.block == 24, "nobody was trained for less"
    assert planned(draft="none").plan.draft_ngram == 0
    assert planned(draft=tiny.DRAFT, draft_ngram=3).plan.draft_ngram == 3


def test_the_tokens_of_rows_are_planned_to_the_byte():
    for asked in ({"draft": "ngram"}, {"draft": tiny.DRAFT, "draft_ngram": 3}, {"draft": "none"}):
        fit = planned(**asked)
        models, _ = loading.load_models(Settings(**SMALL | asked), lambda line: None)
        rows = Engine(models, fit.plan).rows
        history = 0 if rows.history is None else rows.history.shape[1]
        per_row = row_table_bytes(models.config.vocab_size, rows.page_table.shape[1], history)
        [item] = [item for item in fit.items if item.name == "row tables"]
        assert item.num_bytes == (fit.plan.max_num_seqs + 1) * per_row
        assert (history > 0) == (asked["draft"] != "none")


# ---- a start


def test_a_start_keeps_it_whatever_its_prompts_repeat():
    startup = StartProgress()
    engine = start_engine(Settings(**SMALL, draft="ngram", draft_ngram=MAX_NGRAM, verify="full"), startup)
    assert isinstance(engine.models.drafter, NgramDrafter)
    assert engine_info(engine).draft == "ngram"
    assert engine.plan.step_costs, "widths follow the text"
    assert not [one for one in startup.warnings if "busy" not in one]


def test_where_drafts_do_not_pay_at_first_they_are_still_tried(monkeypatch, tmp_path):
    """Unlike a drafter's, what they are worth is not known before the text is there."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    costs = Costs(0.01, {2: 0.05, 16: 0.09})
    monkeypatch.setattr(block_width, "measure_costs", lambda *args, **options: costs)
    monkeypatch.setattr(block_width, "measure_several", lambda *args, **options: {})
    plan = LLM(tiny.TARGET, "ngram", **{k: v for k, v in SMALL.items() if k != "model"}).engine.plan
    assert plan.width == 1
    assert plan.step_costs


def controller():
    times = {(1, width): 0.010 + 0.0006 * (width - 1) for width in (1, 2, 4, 8, 16)}
    chances = DraftChances(chances_of(NGRAM_ACCEPTANCE, NGRAM_BLOCK))
    return WidthController(StepCosts(times, [1]), chances, first=4, block=NGRAM_BLOCK)


def test_width_follows_the_text():
    """Plain where nothing repeats, with a try now and then; wide where all is said again."""
    found, record = controller(), DraftRecord()

    def run(num_steps, right):
        widths = []
        for _ in range(num_steps):
            width = found.next_width([record])
            num_right = min(right, width - 1)
            seconds = 0.010 + 0.0006 * (width - 1)
            found.observe([width], [num_right], seconds)
            if width > 1:
                record.count(width, num_right)
            widths.append(width)
        return widths

    fresh = run(300, right=0)
    assert fresh[-100:].count(1) > 90
    again = run(300, right=15)
    assert again[-50:].count(16) > 45
    assert run(300, right=0)[-100:].count(1) > 90


# ---- answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_without_it(temperature):
    small = {name: value for name, value in SMALL.items() if name != "model"}
    params = replace(GREEDY, temperature=temperature, seed=3)
    plain = LLM(tiny.TARGET, "none", **small).generate([LOOP, [4, 6]], params)
    drafted = LLM(tiny.TARGET, "ngram", width=8, **small).generate([LOOP, [4, 6]], params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(sum(one.metrics.accepted) for one in drafted) > 0


def test_beside_a_drafter_the_drafter_has_a_history():
    models, _ = loading.load_models(Settings(**SMALL, draft=tiny.DRAFT, draft_ngram=4), lambda line: None)
    assert isinstance(models.drafter, DFlashDrafter)
    assert models.drafter.draft_ngram == 4
    assert models.with_kernels(models.target.kernels.references()).drafter.draft_ngram == 4


def test_a_target_with_states_takes_it_too():
    """Whose tapes are as long as the block."""
    models, plan = families.make_pair(*CASES["qwen3_5-whole"], seed=1, max_model_len=64, max_num_seqs=2)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True, logit_bias={7: 6.0})
    requests = [([3, 4, 5, 3, 4], params), ([7, 7, 7], params)]
    plain = Engine(models, replace(plan, width=1))
    drafted = Engine(replace(models, drafter=NgramDrafter(plan.block, 1)), replace(plan, draft_ngram=1))
    assert tiny.run(drafted, requests) == tiny.run(plain, requests)
    assert drafted.stats.num_blocks < plain.stats.num_blocks


def test_the_command_line_takes_it(capsys):
    words = ["t1 t2 t3 t1 t2 t3", "--model", tiny.TARGET, "--device", "cpu", "--dtype", "float64"]
    words += ["--max-model-len", "128", "--temperature", "0", "--max-tokens", "30"]
    assert main(["generate", *words, "--draft", "none"]) == 0
    plain = capsys.readouterr()
    assert main(["generate", *words, "--draft", "ngram", "--width", "8"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "no drafter" in plain.err
    assert "no drafter" not in drafted.err
    assert main(["generate", *words, "--draft", "none", "--draft-ngram", "3"]) == 2
    assert "use --draft ngram" in capsys.readouterr().err
    assert main(["plan", *words[1:7], "--draft", "ngram", "--explain"]) == 0
    assert "ngram" in capsys.readouterr().out
