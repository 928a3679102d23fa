"""Ranges over time and between runs, of answers whose times are known."""

import pytest

from blockdraft.bench.layout import draft_lines
from blockdraft.bench.over_time import over_time
from blockdraft.bench.published import spread_text
from blockdraft.bench.records import Block, Speculation
from blockdraft.bench.report import build
from tests.bench.answers import answer, arms, facts, group, prompt, prompts


def at(start_s, seconds, tokens, accepted):
    """An answer that writes from its start on, with 100 drafts."""
    drafts = Speculation(steps=10, drafted=100, accepted=(accepted,))
    return answer(
        prompt(f"p{start_s}"),
        sent_s=start_s,
        ttft_s=0.0,
        latency_s=seconds,
        tokens=tokens,
        speculation=drafts,
    )


def test_the_slowest_and_the_fastest_window_are_the_range():
    answers = [at(0.0, 10.0, 100, 20), at(10.0, 10.0, 300, 60), at(20.0, 10.0, 200, 40)]
    one = group(answers, busy_s=30.0)
    one.blocks = [Block(0.0, 30.0)]
    assert over_time(one) == {
        "window_s": 10.0,
        "num_windows": 3,
        "tokens_per_s": pytest.approx([10.0, 30.0]),
        "draft_acceptance_rate": pytest.approx([0.2, 0.6]),
    }


def test_an_answer_counts_in_every_window_it_was_written_in():
    one = group([at(0.0, 30.0, 300, 50)], busy_s=35.0)
    one.blocks = [Block(0.0, 35.0)]  # the last five seconds are in no window
    assert over_time(one)["tokens_per_s"] == pytest.approx([10.0, 10.0])


def test_time_between_blocks_is_no_window():
    one = group([at(0.0, 20.0, 200, 10), at(100.0, 20.0, 400, 10)], busy_s=40.0)
    one.blocks = [Block(0.0, 20.0), Block(100.0, 120.0)]
    found = over_time(one)
    assert (found["num_windows"], found["tokens_per_s"]) == (4, pytest.approx([10.0, 20.0]))


def test_short_cells_have_shorter_windows_or_none():
    one = group([at(0.0, 4.0, 40, 10)], busy_s=4.0)
    one.blocks = [Block(0.0, 4.0)]
    assert over_time(one)["window_s"] == 1.0
    one.blocks = [Block(0.0, 2.5)]
    assert over_time(one) is None


def test_where_only_counters_say_it_acceptance_ranges_over_blocks():
    answers = [
        answer(one, sent_s=20.0 * i, latency_s=20.0, speculation=None) for i, one in enumerate(prompts(2))
    ]
    one = group(answers, busy_s=40.0)
    one.blocks = [
        Block(0.0, 20.0, Speculation(steps=10, drafted=100, accepted=(15,))),
        Block(20.0, 40.0, Speculation(steps=10, drafted=100, accepted=(62,))),
    ]
    assert over_time(one)["draft_acceptance_rate"] == [0.15, 0.62]


def test_the_report_says_positions_and_ranges_in_lines():
    one, plain = arms(8)
    one.blocks = [Block(0.0, 100.0)]
    lines = draft_lines(build([one, plain], **facts()))
    assert lines[0] == "Drafts accepted by position, in %, code at 1: 100 50 0"
    assert lines[1] == "Drafts right where reached, in %, code at 1: 100 50 0"
    assert lines[2].startswith("Over time, code at 1: ")
    assert lines[2].endswith(" of the drafts accepted (10 windows of 10 s).")


def test_runs_are_one_cell_with_the_figures_of_each():
    runs = [arms(4, gain=gain)[1] for gain in (1.0, 2.0)]  # plain arms
    report = build(runs, **facts())
    (cell,) = report["cells"]
    assert (cell["num_requests"], cell["num_prompts"]) == (8, 4)
    assert cell["busy_s"] == pytest.approx(sum(run.busy_s for run in runs))
    first, second = (run["tokens_per_s"] for run in cell["runs"])
    assert first == pytest.approx(44 / runs[0].busy_s)
    assert spread_text(cell) == f"{(first - second) / ((first + second) / 2):.1%}"
    assert build(runs[:1], **facts())["cells"][0]["runs"] == []
