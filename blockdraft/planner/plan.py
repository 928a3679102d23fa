"""Plan: all values that an engine works with, and the reason for each. planner/resolver.py makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockdraft.cache.spec import NUM_RESERVED_SLOTS
from blockdraft.kernels.packed_speeds import Code
from blockdraft.kernels.tree_size import MAX_ROWS, tree_size
from blockdraft.models.config import Storage
from blockdraft.settings.settings import TREES

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NGRAM_BLOCK = 16  # the most tokens of a step that drafts from n-grams, as for most drafters
LOGIT_BYTES = 8  # for each logit of the largest step: the target's, the drafter's, and copies for sampling
MIN_CONTEXT = 256  # tokens; a start that would have to shrink the context below this fails
MARGIN_BYTES = 256 << 20  # of a GPU, for smaller graphs, and for libraries that meet an odd shape
ASKED = "asked for"
CACHE_HOLDS = "what the cache holds: less than the model knows"
LEFT_OVER = "what weights and steps leave"
STATES_SHARE = 4  # this part of the cache is for saved states of recurrent layers
NO_STATE = "the cache has no room for the recurrent states that it needs"


@dataclass(frozen=True, slots=True)
class Weights:
    """The number of a checkpoint's values, and how they are quantised."""

    num_values: int
    method: str | None = None  # how the file is quantised; None: not quantised
    code: Code | None = None  # the 4-bit code that its configuration names


@dataclass(frozen=True, slots=True)
class StartRules:
    """The settings of a start itself."""

    graphs: bool = True  # capture steps if possible
    verify: str = "auto"  # checks against references: "auto", "full" or "off"
    memory_share: float = 1.0  # the share of a GPU's memory that may be in use
    max_stall_ms: int | None = None  # the most time of one prefill step; None: no limit


@dataclass(frozen=True, slots=True)
class Plan:
    """All values that an engine works with, and the reason for each."""

    dtype: str
    quantization: Storage  # of the target's weights
    draft_quantization: Storage
    width: int
    block: int  # tokens a row may write in one step: drafter or verify
    draft_ngram: int  # tokens that must have occurred before, to draft their continuation; 0: no n-grams
    tree: int  # the most tokens of a tree of drafts; 0: drafts are chains
    max_model_len: int
    max_positions: int  # rows of the rope and page tables, scratch included
    max_num_seqs: int
    max_queue: int
    page_size: int
    num_pages: int  # for sequences; the cache adds reserved pages
    kv_dtype: str  # of the target's keys and values: EXACT, or how they are compressed
    draft_kv_dtype: str
    kv_window: int
    num_exact_pages: int  # for tokens that compressing layers keep exact; the cache adds reserved pages
    num_states: (
        int  # slots for recurrent states that later prompts continue from; the cache adds a scratch slot
    )
    state_grid: int  # they are saved after multiples of so many tokens
    max_prefill_tokens: int
    prefix_cache: bool
    overlap: bool
    seed: int
    same_bits: bool  # a token's bits depend neither on the rest of the batch nor on how prompts are chunked
    start: StartRules = StartRules()
    step_costs: Mapping[tuple[int, int], float] = field(default_factory=dict)  # s by rows and width, if known
    is_sure_of_costs: bool = True  # False: the machine was busy while the costs were measured
    chosen_share: float = 1.0  # of a mixture's experts, by each token
    draft_chances: tuple[float, ...] = ()  # by place: that a draft is right if all before it are
    reasons: Mapping[str, str] = field(default_factory=dict)  # for each value, by the name of its setting

    def is_asked(self, name: str) -> bool:
        """Return whether the user set this value."""
        return self.reasons.get(name) == ASKED

    def changed(self, reasons: Mapping[str, str], **values: object) -> Plan:
        """Return the plan with other values and their reasons."""
        return replace(self, reasons={**self.reasons, **reasons}, **values)  # type: ignore[arg-type]

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def trees(self) -> tuple[int, ...]:
        """Return the sizes of trees that steps may have, the smallest first."""
        return tuple(size for size in TREES if size <= self.tree)

    @property
    def tree_rows(self) -> range:
        """Return the numbers of rows that steps with trees may have."""
        return range(1, min(self.max_num_seqs, MAX_ROWS) + 1 if self.tree else 1)

    @property
    def num_tree_pages(self) -> int:
        """Return the number of pages for the branches of trees."""
        if not self.tree:
            return 0
        return tree_size(self.tree, self.block).num_pages(len(self.tree_rows), self.page_size)

    @property
    def tree_table_entries(self) -> int:
        """Return the entries of the branches' page tables, which each step with trees makes.

        Layers that compress have two more: of exact pages, and of the rows' own.
        """
        if not self.tree:
            return 0
        num_branches = len(self.tree_rows) * tree_size(self.tree, self.block).branches
        return (3 if self.num_exact_pages else 1) * num_branches * self.pages_of(self.max_positions)

    @property
    def step_tokens(self) -> int:
        """Return the most tokens of a decoding step."""
        return max(self.max_num_seqs * self.block, len(self.tree_rows) * self.tree)

    @property
    def scratch(self) -> int:
        """Return how many tokens a row may write past its context: the blocks of this step and the next."""
        return 2 * self.block

    @property
    def pages_of_one(self) -> int:
        """Return the number of pages of one sequence of full length."""
        return self.pages_of(self.max_model_len + self.scratch)

    def states_bytes(self, each: int) -> int:
        """Return the bytes of the slots for saved states of `each` bytes."""
        return (self.num_states + NUM_RESERVED_SLOTS) * each if self.num_states else 0

    def divided(self, room: int, *, page_bytes: int, state_bytes: int, shrinks: bool) -> tuple[Plan, bool]:
        """Return the plan whose pages and saved states fit in `room` bytes, and whether the pages suffice.

        `shrinks`: the context may shrink to fit. If it may not, it comes before saved states.
        """
        plan = self
        if self.num_states and not self.is_asked("prefix_state_bytes"):
            most = room // STATES_SHARE
            if not shrinks:
                most = min(most, room - self.pages_of_one * page_bytes)
            num_states = max(0, min(self.num_states, most // state_bytes - NUM_RESERVED_SLOTS))
            plan = replace(plan, num_states=num_states)
        if self.num_states and not plan.num_states:
            plan = plan.changed({"prefix_cache": NO_STATE}, prefix_cache=False)
        return plan.within((room - plan.states_bytes(state_bytes)) // page_bytes, shrinks=shrinks)

    def within(self, num_pages: int, *, shrinks: bool) -> tuple[Plan, bool]:
        """Return the plan with at most `num_pages`, and whether they suffice.

        `shrinks`: the context may shrink to fit.
        """
        num_pages = max(0, min(self.num_pages, num_pages))
        reasons, max_model_len = {}, self.max_model_len
        if shrinks:
            max_model_len = min(max_model_len, num_pages * self.page_size - self.scratch - self.page_size)
        is_enough = max_model_len >= min(MIN_CONTEXT, self.max_model_len)
        is_enough = is_enough and (shrinks or num_pages >= self.pages_of_one)
        if max_model_len < self.max_model_len:
            reasons["max_model_len"] = CACHE_HOLDS
        plan = self.changed(reasons, num_pages=num_pages, max_model_len=max(max_model_len, 0))
        if num_pages < self.num_pages and num_pages < plan.max_num_seqs * plan.pages_of_one:
            plan = plan.changed({"cache_bytes": LEFT_OVER})
        return plan, is_enough
