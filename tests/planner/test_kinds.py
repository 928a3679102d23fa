"""Plans for drafters of every kind: what they are called, what they weigh, and what is expected of them."""

import json
import re
from pathlib import Path

import pytest

from blockdraft.cli.plan import lines
from blockdraft.errors import SettingsError
from blockdraft.machine.cards import card_by_key
from blockdraft.planner.acceptance import published_acceptance
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.report import as_json, make_report
from blockdraft.settings.settings import Settings
from tests import tiny
from tests.planner.shapes import folders, on


def report_of(draft, model=tiny.TARGET, card="h200", **settings):
    settings = Settings(model=str(model), draft=str(draft), **settings)
    return make_report(Case(settings, on(card), open_pair(settings), card_by_key(card)))


def text_of(report):
    return "\n".join(lines(report, [], [], explains=False))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tree": 24}, "tree = 24: use one of 0, 16, 32, 64, 128."),
        ({"draft": "ngram"}, "tree = 32, but draft 'ngram' makes chains: leave out --tree."),
        ({"draft_ngram": 4}, "drafts of n-grams are chains: draft_ngram must be 0"),
        ({"width": 1}, "width = 1 switches drafts off"),
        ({"engine": "vllm"}, "vllm verifies chains only"),
        ({"synthetic_acceptance": "code"}, "a synthetic acceptance is one of chains"),
    ],
)
def test_settings_refuse_trees_that_nothing_grows(settings, why):
    with pytest.raises(SettingsError, match=re.escape(why)):
        Settings(**{"draft": tiny.DRAFT, "tree": 32} | settings)


def test_plans_refuse_trees_that_nothing_grows(tmp_path):
    made = tiny.write_kind(tmp_path / "draft", "Domino")
    target, draft = folders("qwen3.5-35b-a3b")
    for pair, why in (
        (
            (made, tiny.TARGET),
            f"tree = 16, but draft '{made}' makes chains: DFlash, DFlash2 and DSpark drafters",
        ),
        ((draft, target), "has recurrent layers, whose states belong to one path: leave out --tree."),
    ):
        with pytest.raises(SettingsError, match=re.escape(why)):
            report_of(*pair, load_format="dummy", tree=16)


def test_the_pages_of_trees_are_planned():
    target, draft = folders("qwen3-8b")
    chains, trees = (report_of(draft, target, load_format="dummy", tree=tree).fit for tree in (0, 64))
    assert trees.plan.num_tree_pages == 4 * 15 * 2
    branches = next(item for item in trees.items if item.name == "branches")
    tables = 4 * 16 * trees.plan.pages_of(trees.plan.max_positions) * 8
    per_token = trees.footprint.per_token
    assert branches.num_bytes == 4 * 15 * 2 * trees.plan.page_size * per_token + tables
    assert trees.plan.num_pages < chains.plan.num_pages
    assert trees.num_bytes == pytest.approx(chains.num_bytes, rel=1e-3), "no more than the budget"


def test_speeds_are_estimated_with_trees():
    """Where they are faster, which is said; and always with a fixed width, but not for many rows."""
    target, draft = folders("qwen3-8b")
    reports = [report_of(draft, target, load_format="dummy", tree=tree) for tree in (0, 32)]
    (one, many), (chain, same) = ([speed for _, speed in report.speeds] for report in reversed(reports))
    assert (one.step.tree, many.step.tree, chain.step.tree) == (32, 0, 0)
    assert one.step.seconds > chain.step.seconds
    assert one.step.flops > 1.5 * chain.step.flops, "32 tokens are verified instead of at most 16"
    assert 1.05 * chain.chat < one.chat < 1.27 * chain.chat
    assert many == same
    text = text_of(reports[1])
    assert "32 tokens for 1 user, 1.27 times a chain's" in text
    assert "no step with trees was timed on a card" in text
    assert "trees:" not in text_of(reports[0])
    fixed = report_of(draft, target, load_format="dummy", tree=128, width=4).speeds
    assert [speed.step.tree for _, speed in fixed] == [128, 0]
    assert as_json(reports[1])["estimate"]["speeds"][0]["tree"] == 32


@pytest.mark.parametrize("name", tiny.KINDS)
def test_a_drafter_is_named_by_its_kind(tmp_path, name):
    made = tiny.write_kind(tmp_path / "draft", name)
    report = report_of(made)
    kind, title = tiny.TITLES[name]
    assert text_of(report).startswith(f"{tiny.TARGET} + {made} ({title}), native on H200\n")
    found = as_json(report)
    assert (found["draft_kind"], found["drafts_with"]) == (kind, title)
    both = report_of(made, draft_ngram=12)  # what would free memory is tried without either
    assert both.title == f"{title} and n-grams of 12"
    assert both.fit.num_bytes > report.fit.num_bytes, "the tokens of every row"
    assert as_json(report_of(made, engine="vllm"))["drafts_with"] == title


def test_n_grams_are_planned_with_what_was_measured_of_them():
    report = report_of("ngram")
    text = text_of(report)
    assert text.startswith(f"{tiny.TARGET} + n-grams, native on H200\n")
    assert "acceptance: n-grams with SmolLM2-135M" in text
    found = as_json(report)
    assert (found["draft"], found["draft_kind"], found["drafts_with"]) == ("ngram", "ngram", "n-grams")
    measured = json.loads(Path("benchmarks/results/ngram-neoverse-n1.json").read_text())["width 16"][
        "ngram 1"
    ]
    tokens = (measured["humaneval"], measured["gsm8k"], measured["mt-bench"])
    assert (report.acceptance.code, report.acceptance.maths, report.acceptance.chat) == pytest.approx(
        tokens, abs=0.005
    )
    speed = found["estimate"]["speeds"][0]
    assert (
        speed["plain_tokens_per_s"] < speed["tokens_per_s"]["chat"] < 1.36 * speed["plain_tokens_per_s"] + 1
    )
    assert as_json(report_of("none"))["draft_kind"] is None


@pytest.mark.parametrize(("is_alone", "flags"), [(True, "--draft none"), (False, "--draft-ngram 0")])
def test_engines_that_do_not_know_n_grams_are_advised_without_them(is_alone, flags):
    target, draft = folders("qwen3-8b")
    ngram = "auto" if is_alone else 12
    options = {"card": "rtx-5090", "load_format": "dummy", "max_model_len": 40960, "max_num_seqs": 8}
    report = report_of("ngram" if is_alone else draft, target, draft_ngram=ngram, **options)
    assert report.verdict != "fits"
    named = [fix.flags for fix in report.fixes if "--engine vllm" in fix.flags]
    assert named
    assert all(one.startswith(f"--engine vllm {flags} --") for one in named)


# ---- what is expected


@pytest.mark.parametrize(
    ("target", "draft", "kind", "tokens"),
    [
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", "dflash2", (4.39, 5.28, 4.1)),
        ("Qwen/Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", "dspark", (3.3, 3.92, 3.01)),
    ],
)
def test_a_drafter_of_a_kind_has_its_own_published_numbers(target, draft, kind, tokens):
    found = published_acceptance(target, draft, kind)
    assert (found.code, found.maths, found.chat) == tokens
    assert found.is_of_pair
    assert found.kind_note == ""


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("dflash2", "1.21 times"),
        ("dspark", "1.12 times"),
        ("xpress", "1.25 times"),
        ("domino", "1.14 times"),
        ("lilicorr", "1.15 to 1.19 times"),
    ],
)
def test_a_drafter_of_a_newer_kind_is_not_promised_what_dflash_reached_as_its_own(kind, times):
    found = published_acceptance("Qwen/Qwen3-8B", "a-folder", kind)
    assert (found.code, found.is_of_pair) == (6.5, False)
    assert times in found.kind_note
    assert "not counted" in found.kind_note
    plain = published_acceptance("Qwen/Qwen3-8B", "a-folder", "dflash")
    assert (plain.is_of_pair, plain.kind_note) == (True, "")
    assert not published_acceptance("Qwen/Qwen3-8B", "deepseek-ai/dflash_qwen3_8b_block7").is_of_pair


def test_what_a_block_of_16_reached_is_not_expected_of_a_shorter_one(tmp_path):
    """Of a drafter whose own numbers nobody published: 7.87 of 16 tokens are not 7.87 of 8."""
    target, draft = folders("qwen3-8b")
    raw = json.loads((Path(draft) / "config.json").read_text())
    raw |= {"block_size": 7, "dflash_config": raw["dflash_config"] | {"sample_from_anchor": True}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole = report_of(draft, target, load_format="dummy", width=8)
    short = report_of(tmp_path, target, load_format="dummy")
    assert (short.case.pair.block, short.fit.width) == (8, 8)
    rates = [report.speeds[0][1].by_kind["maths"] for report in (whole, short)]
    assert rates[0] == pytest.approx(rates[1], rel=0.01)
    assert rates[1] * short.speeds[0][1].step.seconds < 7


def test_the_weakest_category_is_named(tmp_path):
    made = tiny.write_kind(tmp_path / "draft", "causal")
    assert "the fewest in" not in text_of(report_of(made))
    shares = {"code": [0.9, 0.8], "summarise": [0.5, 0.1], "all": [0.7, 0.45]}
    fit = {name: {"accepted_by_position": listed} for name, listed in shares.items()}
    (made / "fit.json").write_text(json.dumps(fit))
    report = report_of(made)
    assert "acceptance: the fewest in summarise, 1.60 tokens a step" in text_of(report)
    categories = as_json(report)["estimate"]["acceptance"]["by_category"]
    assert [(name, round(tokens, 2)) for name, tokens in categories] == [("summarise", 1.6), ("code", 2.7)]


# ---- what it weighs


def test_tables_of_pairs_are_held_and_hardly_read(tmp_path):
    """A step looks rows of them up: they take memory, not time."""
    target, draft = folders("qwen3-8b")
    raw = json.loads((Path(draft) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["DFlash2DraftModel"]}))
    plain, pairs = (report_of(one, target, load_format="dummy") for one in (draft, tmp_path))
    held = [report.fit.parts[1].layers for report in (plain, pairs)]
    tables = 2 * 2 * 151936 * 256
    assert held[1] - held[0] > tables
    read = [report.speeds[0][1].step.weight_bytes for report in (plain, pairs)]
    assert read[1] - read[0] == held[1] - held[0] - tables
    how = next(item.how for item in pairs.fit.items if item.name == "drafter weights")
    assert how.endswith(f", {2 * 151936 * 256:,} values of them for pairs of tokens")
