"""The tables of published documents, filled from answers whose figures are known."""

import io

import pytest
from rich.console import Console

from blockdraft.bench.published import published_tables
from blockdraft.bench.report import build
from blockdraft.bench.sheet import to_markdown, to_rich
from tests.bench.answers import arms, facts


def report(*groups, table=None):
    return build(list(groups), **facts(options={"seed": 1, "table": table}))


def speculative(factor=1.0, **of_group):
    """Four prompts of 11 tokens each, whose answers take between 2.5 and 2.8 s, times a factor."""
    one = arms(4, **of_group)[0]
    for given in one.answers:
        given.end_s = given.sent_s + factor * given.latency_s
    one.busy_s *= factor
    return one


def test_the_forums_table_has_a_row_per_class_and_a_column_per_run():
    classes = ("qa", "code", "json", "reasoning", "program")
    runs = [speculative(factor, workload=name) for factor in (1.0, 1.25) for name in classes]
    (sheet,) = published_tables(report(*runs, table="forum"))
    assert sheet.header == (
        "workload",
        "conc",
        "prompt\ntokens",
        "answer\ntokens",
        "run 1",
        "run 2",
        "spread",
    )
    assert [row[0] for row in sheet.rows] == list(classes)
    assert sheet.rows[0][1:] == ("1", "100", "11", "4.15", "3.32", "22.2%")


def test_the_containers_tables_are_by_style_and_by_class_and_concurrency():
    names, loads = ("code", "prose"), (1, 16)
    groups = [
        speculative(factor, workload=name, concurrency=load)
        for factor in (1.0, 1.01, 1.0)
        for name in names
        for load in loads
    ]
    styles, *classes = published_tables(report(*groups, table="spark"))
    assert styles.title == "By prompt style, one stream"
    assert [row[0] for row in styles.rows] == list(names)
    assert styles.rows[0][-1] == "1.0%"
    assert [sheet.title for sheet in classes] == list(names)
    for sheet in classes:
        assert sheet.header[:5] == (
            "concurrency",
            "tok/s",
            "median per request",
            "TTFT p50 ms",
            "TPOT p50 ms",
        )
        assert [row[0] for row in sheet.rows] == ["1", "16"]
    assert "| 16 |" in to_markdown(classes[0])


def test_without_a_table_several_runs_are_shown_and_one_is_not():
    assert published_tables(report(speculative())) == []
    (sheet,) = published_tables(report(*arms(4), *arms(4)))
    assert [row[0] for row in sheet.rows] == ["code, speculative", "code, plain"]


def test_a_server_without_graphs_is_set_beside_the_usual_one_warm():
    eager = [speculative(1.25), *arms(4, gain=1.0)[1:]]
    both = build(arms(4, gain=1.0), eager=eager, **facts(options={"seed": 1, "table": None}))
    (sheet,) = published_tables(both)
    assert [row[:2] for row in sheet.rows] == [("code at 1", "speculative"), ("code at 1", "plain")]
    gains = [one["gain"]["tokens_per_s"] for one in both["graph_gains"]]
    assert [gain["value"] for gain in gains] == [pytest.approx(1.25), pytest.approx(1.0)]
    assert all(low <= gain["value"] <= high for gain in gains for low, high in [gain["interval"]])
    assert sheet.rows[0][-1].startswith("1.25")
    assert [cell["arm"] for cell in both["cells"]] == ["speculative", "plain"]  # the eager ones are no cells


def test_published_tables_fit_eighty_columns():
    runs = [speculative(workload="reasoning", concurrency=32) for _ in range(3)]
    out = io.StringIO()
    for table in (None, "spark", "forum"):
        for sheet in published_tables(report(*runs, table=table)):
            Console(file=out, width=80, color_system=None).print(to_rich(sheet))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "…" not in out.getvalue()
