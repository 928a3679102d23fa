"""The list of known models: what it says is consistent, and the command prints it."""

import json
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest

import blockdraft
from blockdraft.checkpoints import read_model_config as model_config
from blockdraft.cli.main import main
from blockdraft.cli.models import WIDTH
from blockdraft.machine.cards import card_by_key
from blockdraft.planner.acceptance import published_acceptance
from blockdraft.planner.known_pairs import (
    FILE,
    TABLES,
    KnownPair,
    find_models,
    pairs_of,
    published_runs,
    read_file,
)
from blockdraft.settings.recipe import load_recipe, recipe_names

KNOWN = find_models()
FAMILIES, PAIRS = KNOWN.families, KNOWN.pairs
KIND_OF = {"code": "code", "reasoning": "maths", "dialogue": "chat"}  # a run's workload, as acceptance has it


def pair(**changes):
    values = {"target": "a/b", "drafter": "c/d", "layout": "z-lab", "family": "qwen3"}
    return KnownPair(**values | changes)


def printed(capsys, *argv):
    assert main(["models", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


# ---- the list


@pytest.mark.parametrize(
    ("names", "target"),
    [
        (["Qwen3 8B"], "Qwen/Qwen3-8B"),
        (["Qwen/Qwen3-8B"], "Qwen/Qwen3-8B"),
        (["someone/QWEN3_8B"], "Qwen/Qwen3-8B"),
        (["Meta Llama 3.1 8B Instruct"], "meta-llama/Llama-3.1-8B-Instruct"),
        (["My Tune", "Qwen/Qwen3-4B"], "Qwen/Qwen3-4B"),
        (["Qwen3 8B Base"], None),
        (["Qwen3.8B"], None),
        ([""], None),
        ([], None),
    ],
)
def test_a_model_is_found_by_the_names_that_files_give_it(names, target):
    found = pairs_of(names)
    assert {one.target for one in found} == ({target} if target else set())
    assert all(one.runs for one in found)


def test_every_family_that_config_reads_is_listed_with_its_architectures():
    listed = {architecture: family.name for family in FAMILIES for architecture in family.architectures}
    for architecture, family in model_config.FAMILIES.items():
        assert listed[architecture] == family
    assert listed.keys() == model_config.FAMILIES.keys()


def test_no_name_is_listed_twice():
    for names in (
        [family.name for family in FAMILIES],
        [architecture for family in FAMILIES for architecture in family.architectures],
        [(known_pair.target, known_pair.drafter) for known_pair in PAIRS],
    ):
        assert len(names) == len(set(names))


def test_a_pair_runs_only_if_its_family_is_computed():
    names = {family.name for family in FAMILIES}
    for known_pair in PAIRS:
        assert known_pair.family in {*names, None}
        if known_pair.runs:
            assert known_pair.family is not None, known_pair.drafter
            assert known_pair.layout != "other", known_pair.drafter


def test_names_are_hub_ids_and_numbers_are_plausible():
    for known_pair in PAIRS:
        for name in (known_pair.target, known_pair.drafter):
            assert name.count("/") == 1
            assert name == name.strip()
        assert known_pair.block is None or 2 <= known_pair.block <= 16
        assert known_pair.draft_layers is None or 1 <= known_pair.draft_layers <= 8
        if known_pair.target_billions is not None and known_pair.draft_billions is not None:
            assert known_pair.draft_billions < known_pair.target_billions / 3


def test_pairs_of_one_target_stand_together_so_that_the_command_groups_them():
    for runs in (True, False):
        targets = [known_pair.target for known_pair in PAIRS if known_pair.runs == runs]
        assert len(list(groupby(targets))) == len(set(targets))


def test_memory_is_two_bytes_per_parameter_and_unknown_stays_unknown():
    assert pair(target_billions=8.2, draft_billions=1.05).target_gb == 16.4
    assert pair(target_billions=8.2, draft_billions=1.05).draft_gb == 2.1
    assert pair().target_gb is None
    assert pair().draft_gb is None


# ---- published numbers


@pytest.mark.parametrize("entry", read_file()["published"], ids=lambda entry: entry["drafter"])
def test_published_runs_are_of_a_listed_drafter_and_agree_with_each_other(entry):
    listed, *_ = (known_pair for known_pair in PAIRS if known_pair.drafter == entry["drafter"])
    for run in published_runs(entry["target"], entry["drafter"]):
        assert run.card is None or card_by_key(run.card).key == run.card
        if run.tokens_per_second and run.baseline_tokens_per_second and run.speedup:
            ratio = run.tokens_per_second / run.baseline_tokens_per_second
            assert ratio == pytest.approx(run.speedup, rel=0.03), run
        if run.tokens_per_step is not None:
            assert 1 <= run.tokens_per_step <= (listed.block or 16), run
        assert run.drafts_accepted is None or 0 < run.drafts_accepted < 1


def test_a_run_and_an_acceptance_of_the_same_table_have_the_same_number():
    compared = 0
    for entry in read_file()["published"]:
        acceptance = published_acceptance(entry["target"], entry["drafter"])
        for run in published_runs(entry["target"], entry["drafter"]):
            table = run.source.partition("table ")[2].partition(",")[0]
            is_same = f"table {table}" in acceptance.source if table else "card of" in acceptance.source
            # A card's acceptance is of one request at a time.
            is_of_card = run.concurrency == 1 and run.task in ("Math500", "HumanEval", "MT-Bench")
            is_compared = run.concurrency in (1, 8) if table else is_of_card
            is_compared = is_compared and run.task not in ("MBPP", "LiveCodeBench")  # of no acceptance
            if is_same and is_compared and run.tokens_per_step is not None:
                assert run.tokens_per_step == acceptance.committed(KIND_OF[run.workload]), run
                compared += 1
    assert compared >= 46


def runs_of(target, drafter, card):
    return [one for one in published_runs(target, drafter) if one.card == card]


def test_document_000_is_recorded():
    (one,) = runs_of("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash", "gb10")
    assert (one.baseline_tokens_per_second, one.tokens_per_second, one.speedup) == (5.53, 15.44, 2.79)
    assert one.drafts_accepted == 0.2882
    assert one.tokens_per_step == pytest.approx(1 + 8 * one.drafts_accepted, abs=0.01)


def test_document_001_is_recorded():
    found = runs_of("Intel/Qwen3.5-35B-A3B-int4-AutoRound", "z-lab/Qwen3.5-35B-A3B-DFlash", "gb10")
    classes = {one.workload: one.tokens_per_second for one in found if one.workload}
    assert classes == {
        "prose": 31,
        "qa": 119.6,
        "code": 158.8,
        "json": 129.9,
        "reasoning": 148.8,
        "long_code": 175.4,
    }
    coder = runs_of("saricles/Qwen3-Coder-Next-NVFP4-GB10", "z-lab/Qwen3-Coder-Next-DFlash", "gb10")
    assert [one.tokens_per_second for one in coder] == [88, 36]


# What TurboQuant changes, in % of the speed, as the document says.
TURBOQUANT_BY_DEPTH = [(4000, 4.85), (16000, 1.18), (32000, -11.38)]
TURBOQUANT_BY_LOAD = {
    **{("code", load): percent for load, percent in ((1, -3.61), (4, -3.13), (8, -3.8), (16, -2.91))},
    **{("prose", load): percent for load, percent in ((1, -3.29), (4, -3.36), (8, -2.65), (16, -1.98))},
}


@pytest.mark.parametrize(
    "target", ["rdtand/Qwen3.5-27B-NVFP4-DeltaNet-Included", "AEON-7/DFlash-Qwen3.5-27B-Uncensored-NVFP4"]
)
def test_document_002_is_recorded(target):
    found = runs_of(target, "z-lab/Qwen3.5-27B-DFlash", "gb10")
    speeds = [one for one in found if one.tokens_per_second is not None]
    usual = [one for one in speeds if one.kv is None and one.depth is None]
    table = {
        (one.workload, one.concurrency): (one.tokens_per_second, one.ttft_ms, one.tpot_ms) for one in usual
    }
    assert table == {
        ("code", 1): (64.0, 239, 15.2),
        ("code", 4): (181.5, 408, 21.2),
        ("code", 8): (262.8, 564, 29.4),
        ("code", 16): (327.9, 884, 47.1),
        ("reasoning", 1): (54.0, None, 18.4),
        ("dialogue", 1): (38.4, None, 26.0),
        ("prose", 1): (29.5, 225, 33.6),
        ("prose", 4): (83.5, 432, 46.8),
        ("prose", 8): (122.4, 557, 64.4),
        ("prose", 16): (151.8, 860, 104),
    }
    expected = {one.workload: (one.tokens_per_step, one.speedup) for one in found if one.speedup}
    assert expected == {"code": (6, 2.1), "dialogue": (4, 1.5), "prose": (3, 1.3), "random": (2.5, 1.0)}
    plain, compressed = (
        {
            (one.workload, one.concurrency, one.depth): one.tokens_per_second
            for one in speeds
            if (one.kv is None) == is_plain
        }
        for is_plain in (True, False)
    )
    cost = {key: 100 * (speed / plain[key] - 1) for key, speed in compressed.items()}
    by_depth = {depth: percent for (_, _, depth), percent in cost.items() if depth is not None}
    assert by_depth == {depth: pytest.approx(percent, abs=0.01) for depth, percent in TURBOQUANT_BY_DEPTH}
    by_load = {key[:2]: percent for key, percent in cost.items() if key[2] is None}
    assert by_load == {key: pytest.approx(percent, abs=0.2) for key, percent in TURBOQUANT_BY_LOAD.items()}
    acceptance = published_acceptance(target, "z-lab/Qwen3.5-27B-DFlash")
    assert (acceptance.code, acceptance.by_position) == (6.5, ((1, 0.78), (9, 0.03)))


def test_document_003_is_recorded():
    one, *_ = runs_of("google/gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash", "h100")
    assert (one.tokens_per_second, one.speedup, one.tokens_per_step) == (222.3, 3.4, 7.8)


def test_document_004_is_recorded():
    found = runs_of("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", "b300")
    table = {}
    for one in found:
        row = (one.baseline_tokens_per_second, one.tokens_per_second, one.tokens_per_step)
        table.setdefault(one.task, {})[one.concurrency] = row
    assert table == {
        "Math500": {1: (77, 447, 8.59), 8: (511, 2650, 8.59), 32: (1308, 4962, 8.62)},
        "GSM8K": {1: (78, 408, 7.53), 8: (520, 2321, 7.5), 32: (1382, 4447, 7.52)},
        "HumanEval": {1: (76, 420, 8.0), 8: (494, 2389, 7.89), 32: (1145, 4139, 7.96)},
        "MBPP": {1: (79, 343, 6.13), 8: (535, 2036, 6.13), 32: (1389, 3636, 6.14)},
        "MT-Bench": {1: (79, 236, 4.23), 8: (503, 1334, 4.19), 32: (1177, 2257, 4.19)},
    }


def test_an_estimate_takes_the_pairs_own_acceptance_before_a_typical_one():
    redhat = published_acceptance("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash")
    assert (redhat.chat, redhat.is_of_pair) == (3.31, True)
    other = published_acceptance("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash2")
    assert (other.chat, other.is_of_pair) == (4.23, False)
    assert published_acceptance("google/gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash").code == 7.8
    assert published_acceptance("a/b", "c/d").source.startswith("typical")


def test_each_published_run_is_of_the_pair_of_a_recipe_or_in_a_table():
    pairs = [load_recipe(name).settings for name in recipe_names()]
    for entry in tomllib.loads(FILE.read_text())["published"]:
        assert (entry["target"], entry["drafter"]) in [(pair["model"], pair.get("draft")) for pair in pairs]
        assert entry["run"]
    assert published_runs("Qwen/Qwen3-8B", "mine") == ()


def test_a_table_of_published_runs_gives_a_run_for_each_cell():
    found = runs_of("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "b200")
    cells = {(one.task, one.width, one.concurrency): one for one in found}
    assert len(cells) == len(found) == 2 * 5 * 4
    one = cells["HumanEval", None, 16]
    assert (one.workload, one.engine, one.tokens_per_step, one.speedup) == ("code", "sglang", 9.18, 2.67)
    assert (one.baseline_tokens_per_second, one.tokens_per_second) == (1031, 2748)
    assert cells["HumanEval", 8, 16].baseline_tokens_per_second is None
    # The table has tok/s with the drafter and the speedup, or tok/s without and the speedup.
    nine = runs_of("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", "b200")
    assert speeds_of_one_user(nine, "Math500") == [(212.2, 849, 4.0)]
    llama = "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"
    assert speeds_of_one_user(runs_of(*llama, "b200"), "GSM8K") == [(249, 597.6, 2.4)]


def speeds_of_one_user(runs, task):
    return [
        (one.baseline_tokens_per_second, one.tokens_per_second, one.speedup)
        for one in runs
        if (one.task, one.concurrency) == (task, 1)
    ]


@pytest.mark.parametrize("table", tomllib.loads(TABLES.read_text())["table"], ids=lambda one: one["drafter"])
def test_every_list_of_a_table_has_a_number_for_each_load(table):
    tasks = [cells for cells in table.values() if isinstance(cells, dict)]
    assert tasks
    for cells in tasks:
        lists = [value for value in cells.values() if isinstance(value, list)]
        assert {len(one) for one in lists} == {len(table["concurrency"])}
        assert cells.keys() <= {"tokens_per_step", "plain", "drafted", "speedup"}


def test_the_data_files_travel_in_the_package():
    project = tomllib.loads((Path(blockdraft.__file__).parents[1] / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    for room in ("planner", "doctor", "launch", "machine"):
        folder = Path(blockdraft.__file__).parent / room
        taken = {path for pattern in data[f"blockdraft.{room}"] for path in folder.glob(pattern)}
        assert taken == {path for path in folder.iterdir() if path.suffix not in (".py", "")}


# ---- what a query finds


def test_no_query_finds_everything():
    file = read_file()
    assert (len(FAMILIES), len(PAIRS)) == (len(file["family"]), len(file["pair"]))


@pytest.mark.parametrize(
    ("query", "families", "drafter"),
    [
        ("gpt_oss", ["gpt_oss"], "z-lab/gpt-oss-20b-DFlash"),  # by family
        ("GptOssForCausalLM", ["gpt_oss"], None),  # by architecture
        ("qwen3-CODER-next", ["qwen3_next"], "z-lab/Qwen3-Coder-Next-DFlash"),  # by target, in any case
        ("ultrachat", [], "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),  # by drafter
        ("aeon", [], "z-lab/Qwen3.5-27B-DFlash"),  # by the checkpoint's maker
        ("no such model", [], None),
    ],
)
def test_a_query_is_part_of_a_name(query, families, drafter):
    found = find_models(query)
    assert [family.name for family in found.families] == families
    drafters = [known_pair.drafter for known_pair in found.pairs]
    assert (drafter in drafters) if drafter else not drafters


# ---- the command


def test_the_text_has_every_family_and_pair_and_fits_the_terminal(capsys):
    text = printed(capsys, "--known")
    for family in FAMILIES:
        assert f"  {family.name} " in text
        assert all(architecture in text for architecture in family.architectures)
    for known_pair in PAIRS:
        assert f"    {known_pair.drafter} " in text
        assert f"  {known_pair.target}" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 110
    assert all(line == line.rstrip() for line in lines)


def test_columns_are_aligned(capsys):
    lines = printed(capsys, "qwen3-8b").splitlines()
    header = lines[1]
    rows = [
        line for line in lines if line.startswith(("    z-lab/", "    RedHatAI/Qwen3-8B-speculator.dflash "))
    ]
    assert [row[header.index("layout") :].split() for row in rows] == [
        ["z-lab", "16", "5", "2.1"],
        ["speculators", "8", "-", "-"],
    ]
    assert all(row[header.index("block") + len("block") - 1] in "68" for row in rows)


def test_a_query_narrows_the_text_and_leaves_empty_parts_out(capsys):
    text = printed(capsys, "Llama-3.1")
    assert "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat" in text
    assert "Qwen" not in text
    assert "Families" not in text
    assert "do not run" not in text


def test_a_pair_names_its_recipes(capsys):
    text = printed(capsys, "Qwen3.5-27B-DFlash")
    assert text.count("      Recipes: qwen3.5-27b-nvfp4, qwen3.5-27b-nvfp4-5090.") == 2  # of both targets
    assert "      Recipes, for another engine: laguna-xs-2.1." in printed(capsys, "Laguna-XS-2.1")
    assert "Recipes" not in printed(capsys, "GLM-5.1")


def test_a_refused_pair_says_why(capsys):
    text = printed(capsys, "Muse-Glimmer-30B-DFlash2")
    assert "Refused: the target's family" in text
    assert "Pairs that run" not in text


def test_json_has_the_whole_record(capsys):
    answer = json.loads(printed(capsys, "Qwen3-8B-DFlash", "--json"))
    assert answer["date"] == KNOWN.date
    assert answer["families"] == []
    assert answer["pairs"] == [
        {
            "target": "Qwen/Qwen3-8B",
            "drafter": "z-lab/Qwen3-8B-DFlash-b16",
            "layout": "z-lab",
            "family": "qwen3",
            "block": 16,
            "draft_layers": 5,
            "target_billions": 8.2,
            "draft_billions": 1.05,
            "refused": "",
            "notes": answer["pairs"][0]["notes"],
            "runs": True,
            "target_gb": 16.4,
            "draft_gb": 2.1,
            "recipes": ["qwen3-8b"],
        }
    ]
    assert "thinking" in answer["pairs"][0]["notes"]


def test_an_unknown_name_is_one_line_and_exit_code_2(capsys):
    assert main(["models", "nonsense"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no known one contains 'nonsense'" in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_loads_no_torch():
    code = (
        "import sys\nfrom blockdraft.cli.main import main\nmain(['models', '--known'])\n"
        "print([n for n in ('torch', 'numpy', 'pydantic') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "z-lab/Qwen3-8B-DFlash-b16" in done.stdout
    assert done.stderr == "[]\n"
