"""Which states are saved, which are given up, and that no slot is lost."""

import itertools
import random

import pytest

from blockdraft.engine.saved_states import SavedState, SavedStates


class Bench:
    """Prompts that follow each other; a node's number stands for (conversation, length)."""

    def __init__(self, count, grid=64):
        self.states = SavedStates(count=count, first=9, grid=grid)
        self.nodes = {}

    def prompt(self, conversation, length, *, start=0):
        """Serve a prompt of `length` tokens; return from which length it continues."""
        states = self.states
        states.count_prompt()
        path = [self.node(conversation, at) for at in states.multiples(start, length)]
        found = states.find(path)
        begin = 0 if found is None else found.length
        last = found
        for at in states.on_the_way(begin, length, length):
            slot = states.reserve()
            if slot is None:
                break
            last = states.save(slot, self.node(conversation, at), at, last)
        if found is not None:
            states.release(found)
        states.check([], [])
        return begin

    def node(self, conversation, length):
        return self.nodes.setdefault((conversation, length), len(self.nodes))

    def lengths(self, conversation):
        """Return the lengths of the conversation's saved states."""
        return sorted(
            length
            for (owner, length), node in self.nodes.items()
            if owner == conversation and node in self.states._saved
        )


@pytest.mark.parametrize(("length", "num_states"), [(63, 0), (64, 1), (2000, 6), (16_000, 27), (131_072, 51)])
def test_a_prompt_saves_few_states_that_are_dense_near_its_end(length, num_states):
    states = SavedStates(count=1, first=0, grid=64)
    lengths = states.on_the_way(0, length, length)
    assert len(lengths) == num_states
    assert all(at % 64 == 0 for at in lengths)
    for one, other in zip([0, *lengths], lengths, strict=False):
        assert other - one <= max(384, (length - one) / 4)
    assert length - max(lengths, default=0) < 64
    pieces = itertools.pairwise(sorted({0, 1, 64, length // 2, length}))
    cut = [at for a, b in pieces for at in states.on_the_way(a, b, length)]
    assert cut == lengths, "chunks do not change what is saved"


def test_a_prompt_saves_the_state_where_it_parts_from_another():
    states = SavedStates(count=1, first=0, grid=64)
    assert set(states.on_the_way(0, 1000, 1000, 600)) - set(states.on_the_way(0, 1000, 1000)) == {576}


def test_two_prompts_that_share_a_head_share_nearly_all_of_it():
    bench = Bench(100)
    bench.prompt("first", 12_000)
    assert max(at for at in bench.lengths("first") if at <= 8000) >= 0.95 * 8000


@pytest.mark.parametrize("num_conversations", [8, 16, 32])
def test_conversations_keep_their_last_states_in_190_slots(num_conversations):
    bench = Bench(190)
    for length in (16_000, 16_500, 17_000):
        for conversation in range(num_conversations):
            found = bench.prompt(conversation, length)
            assert found >= length - 500 - 64 or length == 16_000
    assert bench.states.num_saved == 190


def test_old_conversations_make_room_for_new_ones():
    bench = Bench(20)
    for conversation in range(200):
        bench.prompt(conversation, 4000)
    assert all(max(bench.lengths(one)) == 3968 for one in range(196, 200))
    assert not bench.lengths(0)


def test_an_answer_leaves_its_last_state_and_one_in_a_while():
    states = SavedStates(count=40, first=1, grid=64)
    last = states.save(states.reserve(), node=0, length=128, parent=None)
    for number, length in enumerate(range(192, 2049, 64), 1):
        before = last
        last = states.save(states.reserve(), node=number, length=length, parent=before)
        if before.length >= 192:
            states.thin(before, last)
    kept = sorted(one.length for one in states._saved.values())
    assert kept == [128, 512, 896, 1280, 1664, 2048]
    assert last.parent.parent.length == 1280, "states that are gone are not kept alive"
    states.check([], [])


def test_a_state_from_which_another_prompt_continued_is_not_thinned():
    states = SavedStates(count=40, first=1, grid=64)
    root = states.save(states.reserve(), node=0, length=64, parent=None)
    states.save(states.reserve(), node=1, length=128, parent=root)
    states.thin(root, states.save(states.reserve(), node=2, length=128, parent=root))
    assert states.find([0]) is root


def test_what_is_held_is_neither_evicted_nor_thinned():
    states = SavedStates(count=2, first=1, grid=64)
    held = states.save(states.reserve(), node=0, length=64, parent=None)
    assert states.find([7, 0]) is held
    new = states.save(states.reserve(), node=1, length=128, parent=held)
    states.thin(held, new)
    slot = states.reserve()
    assert slot == new.slot
    assert states.reserve() is None
    states.check([slot], [held])
    states.release(held)
    assert states.reserve() == held.slot


def test_a_state_that_another_row_has_saved_is_not_saved_twice():
    states = SavedStates(count=3, first=1, grid=64)
    one, other = states.reserve(), states.reserve()
    first = states.save(one, node=5, length=64, parent=None)
    assert states.save(other, node=5, length=64, parent=None) is first
    states.check([], [])
    assert states.num_saved == 1


def test_an_interrupt_loses_no_slot():
    states = SavedStates(count=4, first=1, grid=64)
    kept = states.save(states.reserve(), node=5, length=64, parent=None)
    states.find([5])
    states.reserve()
    states.recover()
    states.check([], [])
    assert states.find([5]) is kept


@pytest.mark.parametrize("seed", range(3))
def test_slots_are_neither_lost_nor_used_twice(seed):
    """Random prompts, answers, forgotten pages and preemptions, with few slots."""
    draw, bench = random.Random(seed), Bench(5)
    states, reserved, held = bench.states, [], []
    saved: list[SavedState] = []
    for node in range(400):
        action = draw.choice(["reserve", "save", "free", "find", "release", "forget"])
        if action == "reserve" and (slot := states.reserve()) is not None:
            reserved.append(slot)
        elif action == "save" and reserved:
            parent = draw.choice([None, *saved[-5:]])
            length = 64 if parent is None else parent.length + 64
            saved.append(states.save(reserved.pop(), node, length, parent))
        elif action == "free" and reserved:
            states.free([reserved.pop()])
        elif action == "find" and (found := states.find(range(node - 9, node))) is not None:
            held.append(found)
        elif action == "release" and held:
            states.release(held.pop())
        elif action == "forget" and not held:
            states.forget(draw.randrange(node + 1))
        states.check(reserved, held)
