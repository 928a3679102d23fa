"""blockdraft fit with drafters of every kind: what it calls them, and that simulation and engine agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.bench.weak_spots import weak_spots
from blockdraft.cli.fit import lines
from blockdraft.settings import shipped
from blockdraft.settings.shipped import shipped_drafter
from blockdraft.training import drafter_fit as fit_module
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.fit_report import prospect_of
from tests import tiny
from tests.matrix import slow_but
from tests.training.test_drafter_fit import DRAFT, TARGET, ask, command, drafter, read_config, write_prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """The last ones end in noise, so that steps of all lengths occur."""
    path = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", starts=range(0, 60, 30))
    rows = [{"prompt": f"t{5 * k % 60} t{11 * k % 60} t{7 * k % 60}", "category": "noise"} for k in range(3)]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def _little_work(monkeypatch):
    monkeypatch.setattr(fit_module._Session, "costs", lambda *_: ())
    monkeypatch.setattr(fit_module, "variations", lambda *_: [])
    monkeypatch.setitem(fit_module.PROBES, "cpu", (9, 64))


@pytest.mark.usefixtures("_little_work")
@pytest.mark.parametrize(
    ("name", "ngram"),
    slow_but(
        [(name, ngram) for name in tiny.KINDS for ngram in (None, 1)],
        ("DFlash2", None),
        ("from the anchor", None),
        (tiny.SELECTOR, 1),
        ("DSpark", 1),
        ("XPress", None),
        ("Domino", 1),
        ("LiLiCorr", None),
    ),
)
def test_a_drafter_of_any_kind_is_named_and_simulated_as_the_engine_drafts(tmp_path, prompts, name, ngram):
    made, options = tiny.write_kind(tmp_path / "draft", name), {"width": 6, "max_tokens": 32}
    report = ask(made, prompts, draft_ngram=ngram, **options)
    kind, title = tiny.TITLES[name]
    title += "" if ngram is None else " and n-grams of 1"
    assert (report.kind, report.title) == (kind, title)
    assert next(lines(report)).endswith(f": {title}, width 6, float64")
    assert report.to_json()["kind"] == kind
    assert report.to_json()["drafts_with"] == title
    agreement = report.agreement
    assert agreement.num_documents == 9
    assert agreement.simulated == agreement.engine
    assert 1 < agreement.engine < 6
    if ngram is not None and name != "DSpark":  # the trained one knows all that repeats
        assert ask(made, prompts, is_quick=True, **options).overall != report.overall, "n-grams have a say"


@pytest.mark.usefixtures("_little_work")
def test_n_grams_are_measured_and_nothing_else(prompts, capsys):
    assert command("ngram", prompts, "--width", "4", "--json") in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["drafts_with"], report["width"]) == ("ngram", "n-grams", 4)
    assert report["agreement"] is report["training"] is None
    assert report["tried"] == report["untried"] == []
    assert set(report["categories"]) == {"step 1", "step 2", "step 3", "noise"}
    assert len(report["overall"]["accepted_by_position"]) == 3
    assert command("ngram", prompts, "--draft-ngram", "3") in (0, 1)
    out = capsys.readouterr().out
    assert out.startswith(f"ngram for {TARGET}: n-grams, width 16, float64\n")
    assert "nor weights to train" in out
    assert "blockdraft train" not in out


def test_n_grams_that_are_nowhere_and_no_drafter_are_refused(prompts, capsys):
    assert command("ngram", prompts, "--draft-ngram", "0") == 2
    assert command("none", prompts) == 2
    assert command("auto", prompts) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "error" in line][-1].endswith(
        "no drafter ships for '" + str(TARGET) + "': give one, or 'ngram'."
    )


# ---- where it is weak


def fit(steps, *accepted):
    return DrafterFit(1, steps + sum(accepted), steps, accepted)


def test_a_draft_counts_only_where_it_is_reached():
    one = fit(100, 80, 60, 0, 0)
    assert one.where_reached == (0.8, 0.75, 0.0, None)
    assert one.counts.right(1, 2) == 140 / 180
    assert one.counts.right(4, 4) is None


@pytest.mark.parametrize(
    ("accepted", "line"),
    [
        ((90, 80, 70, 60), None),
        ((90, 40, 15, 5), "from draft 2 to 3,"),  # of the last one too few are reached to say
        ((900, 400, 150, 50), "from draft 2 on,"),
        ((30, 28, 26, 24), None),  # bad at first, and good where it is reached
        ((10, 8, 8, 8), "from draft 1 to 1,"),
    ],
)
def test_drafts_that_are_mostly_wrong_are_named(accepted, line):
    one = fit(1000 if accepted[0] > 100 else 100, *accepted)
    said = weak_spots(one.counts, {"all": one.counts}).lines()
    assert [text.partition(" fewer")[0] for text in said] == ([] if line is None else [line])


@pytest.mark.usefixtures("_little_work")
def test_the_report_says_where_it_is_weak(prompts, capsys):
    assert command(DRAFT, prompts, "--temperature", "1", "--quick") == 0
    text = capsys.readouterr().out
    assert "where reached" in text
    assert "\nWeak:\n  " in text
    assert command(DRAFT, prompts, "--temperature", "1", "--quick", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {"overall", "num_drafts", "categories", "from_draft", "to_draft"} == set(report["weak"])
    steps, *_ = report["overall"]["accepted_where_reached"]
    assert steps == report["overall"]["accepted_by_position"][0]


# ---- which kind to train


GOOD_BODY = fit(1000, 850, 680, 510, 357, 214, 107, 43)  # 85 % at first, 40 % at the end
EVEN = fit(1000, 850, 722, 614, 522, 443, 377, 320)


def advice(question, overall, config=None):
    return prospect_of(question, config or read_config(DRAFT), {"all": overall}, (), overall, None)


@pytest.fixture
def question(prompts):
    return fit_module.FitQuestion(target=str(TARGET), drafter=str(DRAFT), prompts=prompts)


def test_a_good_body_whose_later_columns_decay_is_sent_to_dflash2(question):
    found = advice(question, GOOD_BODY)
    assert f"blockdraft train {TARGET} --kind dflash2 --from {DRAFT} " in found.command
    assert found.reasons[0].startswith(
        "draft 1 is right in 85% of the steps, a later one in 70% where it is reached: --kind dflash2"
    )
    assert found.is_worth_it is None
    assert "--kind" not in advice(question, EVEN).command
    assert fit_module.has_prospect(read_config(DRAFT), {"all": GOOD_BODY}, GOOD_BODY)
    assert not fit_module.has_prospect(read_config(DRAFT), {"all": EVEN}, EVEN)


def test_the_drafter_that_ships_is_named_by_its_folder(question):
    found = advice(replace(question, target="default", drafter="auto"), GOOD_BODY)
    assert f"--from {shipped_drafter('default')} " in found.command


@pytest.mark.parametrize("word", ["dflash2", "auto"])
def test_the_head_that_ships_is_named_by_its_folder(tmp_path, monkeypatch, question, word):
    """Of `auto`, where a card has drafted with it."""
    config = read_config(tiny.write_kind(tmp_path / "draft", "DFlash2"))
    monkeypatch.setattr(shipped, "shipped_drafter", lambda model, part="": Path("/drafters", model, part))
    found = advice(replace(question, target="default", drafter=word), GOOD_BODY, config)
    assert " default --from /drafters/default/dflash2 " in found.command


@pytest.mark.parametrize("name", ["DFlash2", "from the anchor", "DSpark"])
def test_train_is_not_told_to_make_dflash2_of_what_it_refuses(tmp_path, question, name):
    config = read_config(tiny.write_kind(tmp_path / "draft", name))
    assert not fit_module.has_prospect(config, {"all": GOOD_BODY}, GOOD_BODY)
    low = fit(1000, 600, 60, 6, 0, 0, 0, 0)
    assert "--kind" not in advice(question, low, config).command


@pytest.mark.usefixtures("_little_work")
def test_the_advice_is_printed_though_nothing_is_low(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(fit_module, "_fit_of", lambda answers: GOOD_BODY)
    text = "\n".join(lines(ask(drafter(tmp_path / "draft"), prompts)))
    assert "Training further: unknown." in text
    assert "--kind dflash2 --from" in text
