"""Pages are never leaked, never shared wrongly, and a remembered prefix is found exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.engine.page_allocator import OutOfPages, PageAllocator


def allocator(num_pages=10, page_size=2, num_later=0):
    return PageAllocator(num_pages=num_pages, first=2, page_size=page_size, num_later=num_later)


def test_reserved_pages_are_never_handed_out():
    pages = allocator().allocate(8)
    assert sorted(pages) == list(range(2, 10))


def test_asking_for_too_many_takes_none():
    pages = allocator()
    with pytest.raises(OutOfPages):
        pages.allocate(9)
    pages.check([])
    assert pages.num_free == 8


def test_a_prefix_is_found_page_by_page_and_only_whole_pages():
    pages = allocator()
    held = pages.allocate(3)
    assert pages.remember([1, 2, 3, 4, 5], held, 0) == 2
    assert pages.match([1, 2, 3, 9]) == held[:1]
    assert pages.match([1, 2, 3, 4, 5, 6]) == held[:2]
    assert pages.match([2, 1]) == []
    pages.check([held, held[:1], held[:2]])


def test_a_salt_shares_with_its_own_only():
    pages = allocator()
    plain, salted = pages.allocate(2), pages.allocate(2)
    pages.remember([1, 2, 3, 4], plain, 0)
    assert pages.remember([1, 2], salted, 0, "a") == 1
    assert pages.remember([1, 2, 3, 4], salted, 1, "a") == 2
    assert pages.match([1, 2, 3, 4], "b") == []
    assert pages.match([1, 2, 3, 4], "a") == salted
    assert pages.match([1, 2, 3, 4]) == plain
    pages.check([plain, salted, salted, plain])


def test_the_same_tokens_after_another_beginning_are_another_prefix():
    pages = allocator()
    held = pages.allocate(2)
    pages.remember([1, 2, 3, 4], held, 0)
    assert pages.match([3, 4]) == []


def test_a_page_that_depends_on_the_next_token_is_found_before_that_token_only():
    pages = allocator(num_later=1)
    held = pages.allocate(2)
    assert pages.remember([1, 2, 3, 4, 5], held, 0) == 2
    assert pages.match([1, 2, 3, 4, 6], length=4) == held[:1]
    assert pages.match([1, 2, 3, 4, 5], length=4) == held
    assert pages.match([1, 2, 3, 4, 5], length=3) == held[:1]
    assert len(pages.nodes_of([1, 2, 3, 4, 5], 4)) == 2


def test_a_freed_prefix_can_be_claimed_again_until_its_pages_are_needed():
    pages = allocator()
    held = pages.allocate(3)
    pages.remember([1, 2, 3, 4, 5, 6], held, 0)
    pages.release(held)
    assert pages.num_free == 8
    again = pages.match([1, 2, 3, 4, 5, 6])
    assert again == held
    pages.release(again)
    other = pages.allocate(6)
    assert pages.match([1, 2, 3, 4, 5, 6]) == held[:2]  # the tail went first
    pages.check([other, held[:2]])


def test_a_prefix_that_another_page_holds_already_stays_private():
    pages = allocator()
    first, second = pages.allocate(2), pages.allocate(2)
    assert pages.remember([1, 2, 3, 4], first, 0) == 2
    assert pages.remember([1, 2, 3, 4], second, 0) == 0
    pages.release(second)
    pages.check([first])
    assert pages.match([1, 2]) == first[:1]


def test_check_notices_a_leak_and_a_double_use():
    pages = allocator()
    held = pages.allocate(2)
    with pytest.raises(AssertionError, match="leak"):
        pages.check([])
    with pytest.raises(AssertionError, match="leak"):
        pages.check([held, held])
    pages.release(held)
    with pytest.raises(AssertionError, match="twice"):
        pages.release(held)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "drop"]), st.integers(0, 5), st.integers(1, 9))))
def test_any_order_of_events_keeps_the_books(events):
    pages, live = allocator(num_pages=14), []
    for kind, which, length in events:
        if kind == "drop" and live:
            pages.release(live.pop(which % len(live)))
        elif kind == "add":
            tokens = [which % 2] * length
            shared = pages.match(tokens)
            try:
                held = shared + pages.allocate(-(-length // 2) - len(shared))
            except OutOfPages:
                pages.release(shared)
            else:
                pages.remember(tokens, held, len(shared))
                live.append(held)
        pages.check(live)
    for held in live:
        pages.release(held)
    assert pages.num_free == pages.num_pages
