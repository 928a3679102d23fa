"""Answers in benchmarks.cpu_ours: which round counts, and which answers are the same."""

from benchmarks.cpu_ours import Answer, Arm, answers_of, cells, figures


def arm_of(answers, plain):
    """An arm that gives these answers in turn, the first of them twice: it is asked once to warm up."""
    left = iter([answers[0], *answers])
    return Arm(lambda ids: next(left), plain)


def test_the_best_round_of_each_question_counts():
    slow, fast = Answer([5, 6, 7], 2.0, 2, 2), Answer([5, 6, 7], 1.0, 2, 1)
    drafted = [slow, fast, fast, slow]  # two questions, two rounds
    plain = [Answer([5, 6, 7], 4.0, 2, 2)] * 2 + [Answer([5, 6, 8], 4.0, 2, 2)] * 2
    arms = {"drafts": arm_of(drafted, "plain"), "plain": arm_of(plain, "plain")}
    best = answers_of(arms, [[1], [2]], 2)
    assert best["drafts"] == [fast, fast]
    found = figures(arms, best, "plain")
    assert found["drafts"] == {
        "tokens_per_s": 2.0,
        "tokens_per_step": 2.0,
        "tokens": 6,
        "answers": 2,
        "same_as_plain": 1,
        "same_as_float32": 1,
    }
    assert cells({"code": found}, "plain") == ["plain", "0.5 (1.00)", "2/2", "2/2"]


def test_an_answer_of_one_step_has_no_speed_of_its_own():
    arms = {"plain": arm_of([Answer([2], 0.0, 0, 0), Answer([5, 2], 1.0, 1, 1)], "plain")}
    found = figures(arms, answers_of(arms, [[1], [2]], 1), "plain")
    assert found["plain"]["tokens_per_s"] == 1.0
