"""OfflineBatch against LLM.generate: equal tokens for equal questions, whatever shares rows and rounds."""

import functools
from dataclasses import replace

import pytest

from blockdraft import LLM, CapacityError, RequestError, SamplingParams
from blockdraft.cache.spec import NUM_RESERVED_PAGES
from blockdraft.training import offline_batch as module
from blockdraft.training.offline_batch import ROUND, Question, make_offline_batch
from tests.matrix import slow_but
from tests.training import pairs

CONTEXT = 100
ENDS = (0, 41)  # the target's greedy answers pass them every few tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pairs.write_ending_target(tmp_path_factory.mktemp("ending"), *ENDS)


@pytest.fixture(scope="module")
def models(folder):
    return pairs.load_target(
        folder, max_num_seqs=3, max_model_len=CONTEXT, max_prefill_tokens=24, page_size=16
    )


@pytest.fixture(scope="module")
def expected(folder):
    llm = LLM(str(folder), "none", device="cpu", dtype="float64", max_model_len=300, width=1)

    @functools.cache
    def answer(question):
        params = SamplingParams(
            temperature=question.temperature,
            top_p=question.top_p,
            seed=question.seed,
            max_tokens=question.max_tokens,
        )
        result = llm.generate([list(question.prompt_ids)], params)[0]
        return result.token_ids, result.finish_reason == "stop"

    return answer


def questions():
    """More than there are rows: greedy and sampled, prompts and answers of one token, early ends."""
    wishes = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}]
    prompts = [
        (5,),
        (2, 4, 6, 8),
        (7,),
        tuple(range(1, 41, 2)),
        (9, 8),
        (3, 6, 9, 12, 15),
        (11,),
        (50, 51, 52),
    ]
    limits = [1, ROUND, ROUND + 1, 2 * ROUND, 3, 40, ROUND - 1]
    return [
        Question(
            key=100 + number,
            prompt_ids=prompts[number % len(prompts)],
            max_tokens=limits[number % len(limits)],
            seed=number,
            **wishes[number % len(wishes)],
        )
        for number in range(17)
    ]


def check(answers, asked, expected):
    assert sorted(answer.question.key for answer in answers) == sorted(one.key for one in asked)
    for answer in answers:
        assert (answer.token_ids, answer.is_whole) == expected(answer.question), answer.question


def test_answers_are_those_of_generate(models, expected):
    asked = questions()
    answers = list(make_offline_batch(*models).answer(asked))
    check(answers, asked, expected)
    sizes = [len(answer.token_ids) for answer in answers if answer.is_whole]
    assert any(size % ROUND for size in sizes), "some end inside a round"
    assert any(size > ROUND for size in sizes), "some take several rounds"
    assert any(not answer.is_whole for answer in answers)
    assert {answer.token_ids[-1] for answer in answers if answer.is_whole} <= set(ENDS)


def test_two_halves_give_the_same_answers(models, expected):
    """As on a GPU, where one half is looked after while the other runs."""
    bulk = make_offline_batch(*models)
    bulk._halves = [module._Half(range(1)), module._Half(range(1, 3))]
    asked = questions()[:8]
    check(list(bulk.answer(asked)), asked, expected)


@pytest.fixture(scope="module")
def circles(tmp_path_factory):
    """LoadedPair, questions whose greedy answers run in circles, and their whole answers."""
    folder = pairs.write_ending_target(tmp_path_factory.mktemp("circles"), 63)  # an end that is rare
    models = pairs.load_target(folder, max_num_seqs=4, max_model_len=200, max_prefill_tokens=24, page_size=16)
    asked = [
        Question(key=number, prompt_ids=(number, 7), max_tokens=3 * ROUND + 3, temperature=0.8 * (number % 2))
        for number in range(4)
    ]
    return (
        models,
        asked,
        {answer.question.key: answer for answer in make_offline_batch(*models).answer(asked)},
    )


@pytest.mark.parametrize("count", slow_but([1, 3, ROUND, 2 * ROUND], 3))
def test_an_answer_that_runs_in_circles_is_cut_where_it_has_repeated_enough(circles, count):
    models, asked, whole = circles
    cuts = 0
    for answer in make_offline_batch(*models).answer([replace(one, max_repeat=count) for one in asked]):
        alone = whole[answer.question.key]
        assert answer.token_ids == pairs.cut_circles(alone.token_ids, count)
        assert answer.is_whole == (alone.is_whole and answer.token_ids == alone.token_ids)
        cuts += len(answer.token_ids) < len(alone.token_ids)
    assert cuts > 0


def test_one_bulk_answers_again_and_again(models, expected):
    bulk = make_offline_batch(*models)
    asked = questions()
    for part in (asked[:3], [], asked[3:5]):
        check(list(bulk.answer(part)), part, expected)


def test_questions_may_depend_on_answers_that_came_before(models, expected):
    first, second = questions()[1], questions()[3]

    class Waiting:
        def __init__(self):
            self.listed = [first]

        def __iter__(self):
            return self

        def __next__(self):
            if not self.listed:
                raise StopIteration
            return self.listed.pop()

    waiting, answers = Waiting(), []
    for answer in make_offline_batch(*models).answer(waiting):
        answers.append(answer)
        if answer.question == first:
            waiting.listed.append(second)
    check(answers, [first, second], expected)


@pytest.mark.parametrize("max_tokens", [1, ROUND, ROUND + 1])
def test_a_row_holds_the_whole_context_and_the_rest_of_its_last_round(models, expected, max_tokens):
    """Rows that have ended run on in vain: past their answer, but never past what rows and tables hold."""
    bulk = make_offline_batch(*models)
    prompt = tuple((3 * place) % 60 for place in range(bulk.max_model_len - max_tokens))
    asked = [Question(0, prompt, max_tokens)]
    check(list(bulk.answer(asked)), asked, expected)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_there_are_as_many_rows_as_asked_for(folder, page_size):
    models = pairs.load_target(folder, max_num_seqs=3, max_model_len=CONTEXT, page_size=page_size)
    bulk = make_offline_batch(*models)
    assert [row for half in bulk._halves for row in half.places] == [0, 1, 2]
    pages = bulk._engine.rows.page_table[:3]
    assert len(set(pages.flatten().tolist())) == pages.numel(), "no page has two owners"
    assert pages.max() < bulk._engine.cache.num_pages
    assert pages.min() >= NUM_RESERVED_PAGES


def test_a_context_of_nearly_what_was_asked_for_can_be_answered(models):
    assert CONTEXT - ROUND <= make_offline_batch(*models).max_model_len <= CONTEXT


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 5), ((1,) * CONTEXT, 20), ((1,), 2 * CONTEXT)])
def test_what_no_row_holds_is_refused(models, prompt, max_tokens):
    with pytest.raises(RequestError, match="a row holds"):
        list(make_offline_batch(*models).answer([Question(0, prompt, max_tokens)]))


def test_a_cache_too_small_for_one_row_is_refused(folder):
    models = pairs.load_target(folder, max_num_seqs=3, max_model_len=CONTEXT, page_size=4)
    models = models[0], replace(models[1], num_pages=20)
    with pytest.raises(CapacityError, match="20 pages"):
        make_offline_batch(*models)
