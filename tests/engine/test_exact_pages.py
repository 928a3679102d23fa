"""Exact pages beside compressed layers: who holds them, and which prefixes can be continued."""

import random

import pytest

from blockdraft.engine.exact_pages import NO_PAGE, ExactPages
from blockdraft.engine.page_allocator import OutOfPages
from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.kv_positions import PositionRule
from tests import tiny
from tests.matrix import slow_but

PAGE = 16
RULE = PositionRule(window=32)
PROMPT = [(5 * i + i * i // 7) % 60 for i in range(330)]
COLD = {"kv_dtype": "int8", "kv_window": 32, "max_model_len": 400}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def exact_pages(num_pages=40):
    return ExactPages(num_pages=num_pages, first=2, page_size=PAGE, compressed_end_at=RULE.compressed_end_at)


def answer(engine, prompt):
    (answer,) = tiny.run(engine, [(prompt, GREEDY)])
    return answer[0][0]


def cached(engine, prompt):
    """Return how many tokens of the prompt were found."""
    engine.add(prompt, GREEDY)
    return tiny.drain(engine)[-1].metrics.num_cached_tokens


# ---- the pages


def test_a_prefix_needs_its_first_tile_and_what_its_next_query_reads_exact():
    pages = exact_pages()
    assert pages.needed(3) == [0, 1, 2]  # nothing is compressed yet
    # 12 pages are 192 tokens: the query there reads [64, 128) compressed.
    assert pages.needed(12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_tail_is_found_for_the_longest_prefix_that_has_one():
    pages = exact_pages()
    nodes = list(range(100, 120))
    held = pages.allocate(20)
    for index in pages.needed(12):
        pages.keep(nodes[index], held[index])
    pages.release(held)
    found = pages.find(nodes)
    assert len(found) == 12
    assert [index for index, page in enumerate(found) if page != NO_PAGE] == pages.needed(12)
    pages.release(found)
    pages.forget(nodes[9])
    # Without one of its pages no tail is whole, but the first pages alone are one.
    assert len(pages.find(nodes)) == 4


def test_tails_make_room_for_whoever_runs():
    pages = exact_pages(num_pages=10)
    held = pages.allocate(4)
    for node, page in enumerate(held):
        pages.keep(node, page)
    pages.release(held)
    assert pages.num_free == 8
    taken = pages.allocate(8)
    assert pages.num_kept == 0
    with pytest.raises(OutOfPages):
        pages.allocate(1)
    pages.check([taken])


def test_nothing_is_lost_whatever_happens():
    rng, pages, held = random.Random(1), exact_pages(), []
    for _ in range(2_000):
        if held and rng.random() < 0.5:
            pages.release(held.pop(rng.randrange(len(held))))
        elif pages.num_free >= 6:
            held.append(pages.allocate(rng.randint(1, 6)))
        if held and rng.random() < 0.4:
            pages.keep(rng.randrange(30), rng.choice(rng.choice(held)))
        if rng.random() < 0.1:
            pages.forget(rng.randrange(30))
        if rng.random() < 0.1 and (found := pages.find([rng.randrange(30) for _ in range(3)])):
            held.append(found)
        pages.check(held)


# ---- in the engine


def test_a_row_gives_back_what_lies_behind():
    engine = tiny.engine(**COLD)
    engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            held = sum(page != NO_PAGE for page in sequence.exact_pages)
            assert held * PAGE <= 64 + 32 + 64 + PAGE + 64 + 3 * tiny.BLOCK + 2 * PAGE  # and a chunk of 64
    engine.check()


@pytest.mark.parametrize("length", slow_but(range(300, 330, 3), 300, 309, 318, 327))
def test_an_answer_is_gone_on_from_wherever_it_ended(length):
    engine = tiny.engine(**COLD)
    first = answer(engine, PROMPT[:length])
    longer = [*PROMPT[:length], *first, 3, 4, 5]
    assert cached(engine, longer) >= (length + len(first) - 1) // PAGE * PAGE - PAGE
    engine.check()


def test_the_same_prompt_again_is_found_up_to_its_end():
    engine = tiny.engine(**COLD)
    cached(engine, PROMPT)
    assert cached(engine, PROMPT) == (len(PROMPT) - 1) // PAGE * PAGE


def test_a_branch_is_learnt_by_the_second_prompt_that_takes_it():
    engine = tiny.engine(**COLD)
    prompts = [[*PROMPT[:200], *((number + i) % 60 for i in range(100))] for number in range(1, 4)]
    found = [cached(engine, prompt) for prompt in prompts]
    assert found[0] == 0
    assert found[1] < 192  # the beginning alone is there: nobody knew that it would be asked for
    assert found[2] == 192
    engine.check()


def test_what_is_found_answers_as_if_nothing_were():
    plain = tiny.engine("none", width=1, prefix_cache=False, **COLD)
    engine = tiny.engine(**COLD)
    for number in (1, 2, 3, 1):
        prompt = [*PROMPT[:200], *((number + i) % 60 for i in range(60))]
        assert answer(engine, prompt) == answer(plain, prompt)
