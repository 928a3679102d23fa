"""Presets: the shapes of published tables, made of workloads that exist."""

import pytest

from blockdraft.bench.datasets import DATASETS
from blockdraft.bench.layout import FIGURES
from blockdraft.bench.options import PRESETS, Options, find_preset
from blockdraft.bench.published import TABLES
from blockdraft.bench.workloads import APART, CLASSES
from blockdraft.errors import BenchError


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_asks_for_workloads_that_exist_and_says_where_it_is_from(name):
    wanted = find_preset(name)
    assert set(wanted.workloads) <= {*CLASSES, *APART, *DATASETS}
    assert list(wanted.concurrencies) == sorted(set(wanted.concurrencies))
    assert wanted.num_prompts >= max(wanted.concurrencies)
    assert wanted.published
    assert wanted.figures or wanted.tables
    assert set(wanted.figures) <= set(FIGURES)
    assert set(wanted.tables) <= set(TABLES)


def test_the_forum_table_has_the_five_classes_their_lengths_and_two_runs():
    forum = PRESETS["forum"]
    assert forum.max_tokens == {"qa": 256, "code": 512, "json": 1024, "reasoning": 64, "program": 2048}
    assert (forum.workloads, forum.concurrencies, forum.runs) == (list(forum.max_tokens), [1], 2)
    asked = Options(table="forum").grid()
    assert (asked.max_tokens_of, asked.num_runs, asked.max_tokens) == (forum.max_tokens, 2, 256)
    given = Options(table="spark", workload=["qa"], concurrency="1", max_tokens="256").grid()
    assert ([load.concurrency for load in given.loads], given.max_tokens) == ([1], 256)  # as without it


@pytest.mark.parametrize(
    ("given", "limit", "limits"),
    [
        (None, 256, {"qa": 256, "json": 1024}),
        ("100", 100, {}),
        ("json=100", 256, {"qa": 256, "json": 100}),
        ("100,json=50", 100, {"json": 50}),
    ],
)
def test_limits_of_answers_are_the_flags_or_the_tables(given, limit, limits):
    asked = Options(table="forum", workload=["qa,json"], max_tokens=given).grid()
    assert (asked.max_tokens, asked.max_tokens_of) == (limit, limits)


def test_an_unknown_table_gets_a_suggestion():
    with pytest.raises(BenchError, match="unknown table 'zlab': did you mean 'z-lab'"):
        find_preset("zlab")
    with pytest.raises(BenchError, match="one of z-lab, spark, forum, mt-bench, page"):
        find_preset("xyzzy")
