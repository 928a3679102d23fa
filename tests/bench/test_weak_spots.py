"""A report names the kind of drafter, and the classes and positions where its drafts fail."""

import pytest

from blockdraft.bench.html_page import render
from blockdraft.bench.layout import acceptance, draft_lines, markdown, summary
from blockdraft.bench.records import Speculation
from blockdraft.bench.report import build, load_report, to_json
from blockdraft.bench.speculation import reached_by, read_chunk, total_of
from blockdraft.cli.bench import WITHOUT_DRAFTER
from blockdraft.planner.resolver import asked_otherwise
from blockdraft.settings.settings import Settings
from tests.bench.answers import answer, facts, group, prompt


def cell(workload, *classes):
    """A group of answers, one for each (class, speculation)."""
    answers = [
        answer(prompt(f"{name}{number}", category=name), sent_s=float(number), speculation=speculation)
        for number, (name, speculation) in enumerate(classes)
    ]
    return group(answers, workload=workload)


def even(steps, *accepted):
    return Speculation(steps=steps, drafted=steps * len(accepted), accepted=accepted)


GOOD, BAD = even(100, 90, 80, 70), even(100, 50, 20, 5)


def test_classes_and_drafts_that_are_weak_are_named():
    report = build([cell("mine", ("code", GOOD), ("qa", BAD))], **facts())
    weak = [line for line in draft_lines(report) if line.startswith("Weak")]
    assert weak == [
        "Weak: mine / qa: 1.75 per step, 2.58 overall; draft 1 is right in 50% of the steps, a later one in "
        "36% where it is reached."
    ]
    assert weak[0] in markdown(report).replace("\\", "")
    assert "mine / qa: 1.75 per step" in render(report)
    positions = [row[0] for row in acceptance(report).rows]
    assert positions == ["mine at 1", "mine / code at 1", "mine / qa at 1"]


def test_workloads_without_classes_are_compared_with_each_other():
    parts = [("code", GOOD), ("qa", even(100, 40, 15, 4))]
    report = build([cell(name, (name, one)) for name, one in parts], **facts())
    weak = [line for line in draft_lines(report) if line.startswith("Weak")]
    assert [line.partition(" per step")[0] for line in weak] == ["Weak: qa: 1.59"]
    alone = build([cell("qa", ("qa", BAD))], **facts())
    assert [line for line in draft_lines(alone) if line.startswith("Weak")] == [
        "Weak: from draft 2 on, fewer than half of the drafts that are reached are right."
    ]


def test_drafts_that_steps_did_not_have_are_not_taken_for_wrong_ones():
    """Half of the steps have one draft, the others three, and all of them are right."""
    uneven = Speculation(steps=100, drafted=200, accepted=(100, 50, 50))
    assert reached_by(uneven) is None
    counted = Speculation(steps=100, drafted=200, accepted=(100, 50, 50), reached=(100, 50, 50))
    assert reached_by(counted) == (100, 50, 50)
    assert total_of([counted, counted]).reached == (200, 100, 100)
    assert total_of([counted, uneven]).reached is None
    figures = [
        build([cell("mine", ("code", one))], **facts())["cells"][0]["speculation"]
        for one in (uneven, counted)
    ]
    assert figures[0]["acceptance_where_reached"] is figures[0]["reached_by_position"] is None
    assert figures[1]["acceptance_where_reached"] == [1.0, 1.0, 1.0]
    assert figures[1]["reached_by_position"] == [1.0, 0.5, 0.5]
    assert figures[1]["acceptance_by_position"] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("drafted", "accepted", "reached"),
    [
        (300, (90, 45, 9), (100, 90, 45)),
        (298, (90, 45, 9), (100, 90, 45)),  # a few are missing at the end of answers
        (200, (90, 45, 0), (100, 90)),  # a block of three of which two are drafted
        (250, (90, 45, 9), None),
        (0, (90, 45, 9), None),
    ],
)
def test_steps_of_one_width_tell_what_was_reached(drafted, accepted, reached):
    assert reached_by(Speculation(steps=100, drafted=drafted, accepted=accepted)) == reached


def test_an_answer_of_ours_says_what_its_steps_reached():
    drafts = {"num_spec_steps": 4, "num_draft_tokens": 8, "acceptance_histogram": [1, 1, 2]}
    chunk = {"metrics": {"speculative_decoding": drafts | {"reached_by_position": [4, 2]}}}
    assert read_chunk(chunk) == Speculation(steps=4, drafted=8, accepted=(3, 2), reached=(4, 2))
    assert read_chunk({"metrics": {"speculative_decoding": drafts}}).reached is None


def test_the_kind_of_the_drafter_is_part_of_the_report(tmp_path):
    known = facts()
    known["endpoint"]["drafter_kind"] = "DFlash2 and n-grams of 12"
    report = build([cell("mine", ("code", GOOD))], **known)
    assert summary(report).startswith(
        "a/model with drafter a/drafter (DFlash2 and n-grams of 12), blockdraft"
    )
    assert build([cell("mine", ("code", GOOD))], **facts())["endpoint"]["drafter_kind"] is None
    path = (
        tmp_path / "old.json"
    )  # a report from before it was known, and before drafts were counted where reached
    del report["endpoint"]["drafter_kind"]
    for name in ("acceptance_where_reached", "reached_by_position"):
        del report["cells"][0]["speculation"][name]
    path.write_text(to_json(report))
    old = load_report(path)
    assert summary(old).startswith("a/model with drafter a/drafter, blockdraft")
    assert not [line for line in draft_lines(old) if line.startswith("Drafts right")]


def test_a_drafter_with_n_grams_beside_it_is_compared_with_neither():
    plain = asked_otherwise(Settings(model="m", draft="d", draft_ngram=4), **WITHOUT_DRAFTER)
    assert (plain.draft, plain.draft_ngram) == ("none", "auto")
