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


def test_the_z_lab_table_has_the_settings_of_the_card():
    card = PRESETS["z-lab"]
    assert card.workloads == ["math500", "gsm8k", "humaneval", "mbpp", "mt_bench"]
    assert card.concurrencies == [1, 8, 32]
    assert (card.max_tokens, card.temperature, card.thinking, card.max_turns) == (4096, 0.0, True, 1)
    assert card.figures[0] == "card"


def test_the_spark_table_has_the_settings_of_the_container():
    spark = PRESETS["spark"]
    assert spark.workloads == ["code", "reasoning", "dialogue", "prose"]
    assert spark.concurrencies == [1, 4, 8, 16]
    assert (spark.max_tokens, spark.temperature, spark.num_prompts, spark.num_warmups) == (512, 0.0, 16, 3)
    assert (spark.runs, spark.tables) == (3, ["styles", "classes"])


def test_the_forum_table_has_the_five_classes_their_lengths_and_two_runs():
    forum = PRESETS["forum"]
    assert forum.max_tokens == {"qa": 256, "code": 512, "json": 1024, "reasoning": 64, "program": 2048}
    assert (forum.workloads, forum.concurrencies, forum.runs) == (list(forum.max_tokens), [1], 2)
    asked = Options(table="forum").grid()
    assert (asked.max_tokens_of, asked.num_runs, asked.max_tokens) == (forum.max_tokens, 2, 256)


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


def test_the_mt_bench_table_is_eighty_prompts_one_at_a_time():
    mt_bench = PRESETS["mt-bench"]
    assert mt_bench.workloads == ["mt_bench"]
    assert mt_bench.concurrencies == [1]
    assert (mt_bench.max_tokens, mt_bench.num_prompts, mt_bench.num_warmups) == (2048, 80, 1)


def test_an_unknown_table_gets_a_suggestion():
    with pytest.raises(BenchError, match="unknown table 'zlab': did you mean 'z-lab'"):
        find_preset("zlab")
    with pytest.raises(BenchError, match="one of z-lab, spark, forum, mt-bench"):
        find_preset("xyzzy")
