"""SavedStates: tracks the slots of recurrent states that later prompts can continue from.

A model with recurrent layers can continue a cached prefix only where its state was saved. Rows reserve slots
for the states that they are about to pass. What they have saved belongs to a prefix's node
(page_allocator.py), until another row needs the slot. Then the state goes that should spare the least work.
A slot is in exactly one state: blank, reserved by a row, or saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

SPACING = 384  # tokens between saved states near the end of a prompt
SHARE = 8  # further back, states are apart by at most this part of the distance to the end
NEAR = 2000  # tokens: a later prompt leaves a conversation half as often at this distance from its end


@dataclass(slots=True, eq=False)
class SavedState:
    """The state after `length` tokens of a prefix."""

    slot: int
    node: int
    length: int
    parent: SavedState | None  # a state of a shorter part of the prefix
    used: int  # when a prompt last contained this prefix
    num_holders: int = 0  # rows that are about to copy it


class SavedStates:
    """Hands out slots `first` … `first + count - 1` for states at multiples of `grid` tokens."""

    def __init__(self, *, count: int, first: int, grid: int) -> None:
        self.grid = grid
        self.spacing = -(-SPACING // grid) * grid
        self._all = range(first, first + count)
        self._blank = list(reversed(self._all))
        self._saved: dict[int, SavedState] = {}  # by node
        self._now = 0  # counts prompts
        self.num_evicted = 0

    @property
    def num_slots(self) -> int:
        return len(self._all)

    @property
    def num_saved(self) -> int:
        return len(self._saved)

    # ---- what to save

    def on_the_way(self, start: int, end: int, length: int, branch: int | None = None) -> list[int]:
        """Return the lengths in (start, end] at which to save states of a prompt of `length` tokens.

        One is as near to the prompt's end as possible, and one to its `branch`, up to which another prompt
        has the same tokens. The others are at multiples of the spacing, or, further from the end, of the
        spacing times a power of two.
        """
        first = (start // self.spacing + 1) * self.spacing
        regular = range(first, end + 1, self.spacing)
        lengths = {at for at in regular if at % self._spacing_at(length - at) == 0}
        ends = (length, length if branch is None else branch)
        lengths |= {last for at in ends if start < (last := at // self.grid * self.grid) <= end}
        return sorted(lengths)

    def _spacing_at(self, distance: int) -> int:
        spacing = self.spacing
        while 2 * spacing <= distance // SHARE:
            spacing *= 2
        return spacing

    def multiples(self, start: int, end: int) -> range:
        """Return all multiples of the grid in (start, end]."""
        return range((start // self.grid + 1) * self.grid, end + 1, self.grid)

    # ---- slots

    def reserve(self) -> int | None:
        """Return a slot, after evicting a saved state if none is blank; None if all are in use."""
        if not self._blank:
            self._evict_least()
        return self._blank.pop() if self._blank else None

    def free(self, slots: Iterable[int]) -> None:
        """Give back slots that were reserved."""
        self._blank.extend(slots)

    def save(self, slot: int, node: int, length: int, parent: SavedState | None) -> SavedState:
        """Record that the reserved slot has the state of the prefix `node`; free it if another slot does."""
        known = self._saved.get(node)
        if known is not None:
            self.free([slot])
            self._touch(known)
            return known
        state = SavedState(slot, node, length, self._kept(parent), self._now)
        self._saved[node] = state
        self._touch(state)
        return state

    def thin(self, before: SavedState, new: SavedState) -> None:
        """Evict the state `before` the new one, unless another follows it or the gap gets too wide."""
        earlier = self._parent(before)
        gap = new.length - (0 if earlier is None else earlier.length)
        is_saved = self._kept(before) is before and not before.num_holders
        following = [one for one in self._saved.values() if self._parent(one) is before]
        if is_saved and following == [new] and gap <= self.spacing:
            self.forget(before.node)
            new.parent = earlier

    def count_prompt(self) -> None:
        """Let all states age."""
        self._now += 1

    def find(self, nodes: Items[int]) -> SavedState | None:
        """Hold and return the state of the longest of these prefixes that has one."""
        state = next((self._saved[node] for node in reversed(nodes) if node in self._saved), None)
        if state is not None:
            state.num_holders += 1
            self._touch(state)
        return state

    def state_of(self, node: int) -> SavedState | None:
        """Return the state of this prefix, if it was saved."""
        return self._saved.get(node)

    def release(self, state: SavedState) -> None:
        state.num_holders -= 1
        assert state.num_holders >= 0, f"the state in slot {state.slot} released twice"

    def forget(self, node: int) -> None:
        """Free the slot of this node's state, if it has one."""
        state = self._saved.pop(node, None)
        if state is not None:
            self._blank.append(state.slot)

    def recover(self) -> None:
        """Free the slots that are not saved, after an interrupt at any line, when no row is left."""
        saved = {state.slot for state in self._saved.values()}
        self._blank = [slot for slot in reversed(self._all) if slot not in saved]
        for state in self._saved.values():
            state.num_holders = 0

    # ---- the states of prefixes of each other

    def _kept(self, state: SavedState | None) -> SavedState | None:
        """Return the state, or, if it was evicted, the longest one before it that was not."""
        while state is not None and self._saved.get(state.node) is not state:
            state = state.parent
        return state

    def _parent(self, state: SavedState) -> SavedState | None:
        """Return the longest saved state before this one; drop the links to evicted ones."""
        state.parent = self._kept(state.parent)
        return state.parent

    def _touch(self, state: SavedState | None) -> None:
        while state is not None:
            state.used = self._now
            state = self._parent(state)

    def _evict_least(self) -> None:
        """Evict the state that spares the least work, if any is not held.

        A state spares the tokens since the state before it, times the chance that a prompt takes it up. That
        falls with the prompts since its last use, and with the distance to the end of its conversation. The
        last state of a conversation counts all tokens before it, so it goes last.
        """
        ends: dict[int, int] = {}  # by node: the length of the longest state that follows
        for state in sorted(self._saved.values(), key=lambda one: -one.length):
            end, parent = ends.setdefault(state.node, state.length), self._parent(state)
            if parent is not None:
                ends[parent.node] = max(ends.get(parent.node, 0), end)

        def worth(state: SavedState) -> float:
            age, distance = 1 + self._now - state.used, ends[state.node] - state.length
            if distance == 0:
                return state.length / age
            spared = state.length - (0 if state.parent is None else state.parent.length)
            return spared * NEAR / (NEAR + distance) / age

        least = min((one for one in self._saved.values() if not one.num_holders), key=worth, default=None)
        if least is not None:
            self.forget(least.node)
            self.num_evicted += 1

    def check(self, reserved: Iterable[int], held: Iterable[SavedState]) -> None:
        """Assert that nothing is leaked, given what all live sequences reserve and hold."""
        taken = [*self._blank, *reserved, *(state.slot for state in self._saved.values())]
        assert sorted(taken) == list(self._all), "a slot is lost or used twice"
        counts = {state.slot: state.num_holders for state in self._saved.values() if state.num_holders}
        expected = {slot: len(list(same)) for slot, same in itertools.groupby(sorted(s.slot for s in held))}
        assert counts == expected, "holders differ from the live sequences"
