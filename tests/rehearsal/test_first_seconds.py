"""What `benchmarks.first_seconds` makes of answers."""

import pytest

from benchmarks.first_seconds import Load, row
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, Prompt

ASK = Ask(Prompt("p", "code", ("Hello",)), SPECULATIVE, 100)


def answer(sent_s, first_s, gaps_s, tokens):
    return Answer(ASK, 0, sent_s, sent_s, first_s=first_s, gaps_s=gaps_s, completion_tokens=tokens)


def test_tokens_count_where_their_events_are():
    load = Load([answer(10.0, 10.5, [1.0, 1.0], 30)], begun_s=10.0, seconds=4.0)
    assert [load.speed(at, at + 1.0) for at in (0.0, 1.0, 2.0, 3.0)] == [10.0, 10.0, 10.0, 0.0]
    assert load.speed(0.0, 4.0) == 7.5


def test_a_load_is_steady_after_the_first_second_that_is_nearly_as_fast_as_the_later_ones():
    slow = [answer(0.0, 0.5 + number, [], 5) for number in range(2)]
    fast = [answer(2.0, 2.5 + number, [], 10) for number in range(4)]
    load = Load(slow + fast, begun_s=0.0, seconds=6.0)
    assert load.steady_s(10.0) == pytest.approx(2.6), "the window that first holds a fast answer"
    assert load.steady_s(100.0) is None


def test_requests_belong_to_the_time_when_they_were_sent():
    answers = [
        answer(0.1 * number, 0.1 * number + (0.04 if number < 20 else 0.006), [], 5) for number in range(40)
    ]
    load = Load(answers, begun_s=0.0, seconds=4.0)
    assert load.ttft_ms(0.0, 2.0) == pytest.approx((40.0, 40.0))
    assert load.ttft_ms(2.0, 4.0) == pytest.approx((6.0, 6.0))


def test_a_row_has_all_columns_even_if_nothing_was_answered():
    nothing = Load([], begun_s=0.0, seconds=2.0)
    found = {
        "streams": 1,
        "start_s": 3.0,
        "early_tokens_per_s": nothing.speed(0.0, 1.0),
        "later_tokens_per_s": nothing.speed(1.0, 2.0),
        "early_ttft_ms": nothing.ttft_ms(0.0, 1.0),
        "later_ttft_ms": nothing.ttft_ms(1.0, 2.0),
        "steady_s": None,
    }
    assert len(row(found)) == 10
