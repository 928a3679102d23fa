"""Allocates what an engine works on, as its plan says: the cache, the rows, and the scheduler's pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from blockdraft.cache.cache import SCRATCH_PAGE, Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import NUM_RESERVED_PAGES, NUM_RESERVED_SLOTS
from blockdraft.engine.exact_pages import ExactPages
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.page_allocator import PageAllocator
from blockdraft.engine.saved_states import SavedStates
from blockdraft.engine.scheduler import Scheduler
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.planner.plan import Plan
from blockdraft.step.step_sizes import means_on


def make_cache(models: LoadedPair, plan: Plan) -> Cache:
    return Cache(
        models.cache_specs(plan.kv_dtype, plan.draft_kv_dtype),
        num_pages=plan.num_pages + NUM_RESERVED_PAGES,
        num_rows=plan.max_num_seqs + 1,  # and the scratch row
        page_size=plan.page_size,
        dtype=getattr(torch, plan.dtype),
        device=models.device,
        kernels=models.target.kernels,
        rule=_rule(plan),
        num_exact_pages=plan.num_exact_pages + NUM_RESERVED_PAGES if plan.num_exact_pages else 0,
        num_slots=plan.num_states + NUM_RESERVED_SLOTS if plan.num_states else 0,
        num_tree_pages=plan.num_tree_pages,
        num_tree_layers=models.config.num_layers if plan.tree else 0,
    )


def make_rows(models: LoadedPair, plan: Plan) -> Rows:
    return Rows(
        max_rows=plan.max_num_seqs,
        max_pages=plan.pages_of(plan.max_positions),
        vocab_size=models.config.vocab_size,
        scratch_page=SCRATCH_PAGE,
        device=models.device,
        kernels=models.target.kernels,
        has_exact=bool(plan.num_exact_pages),
        history_size=plan.max_positions if plan.draft_ngram else 0,
        hidden_size=models.config.hidden_size if models.has_mtp else 0,
        dtype=getattr(torch, plan.dtype),
        save_grid=plan.state_grid,
        max_saves=plan.max_positions // plan.state_grid if plan.num_states else 0,
    )


def make_scheduler(models: LoadedPair, plan: Plan, clock: Callable[[], float]) -> Scheduler:
    pages = PageAllocator(
        num_pages=plan.num_pages + NUM_RESERVED_PAGES,
        first=NUM_RESERVED_PAGES,
        page_size=plan.page_size,
        num_later=int(models.has_mtp),
    )
    exact = states = None
    if plan.num_exact_pages:
        exact = ExactPages(
            num_pages=plan.num_exact_pages + NUM_RESERVED_PAGES,
            first=NUM_RESERVED_PAGES,
            page_size=plan.page_size,
            compressed_end_at=_rule(plan).compressed_end_at,
        )
    if plan.num_states:  # their slots come after the rows
        states = SavedStates(count=plan.num_states, first=plan.max_num_seqs + 1, grid=plan.state_grid)
    pages.on_forget = partial(_forget, exact, states)
    means = means_on(models.device) if deals_widths(models) else None
    return Scheduler(plan, pages, clock, exact, states, means=means)


def deals_widths(models: LoadedPair) -> bool:
    """Say if rows get widths of their own.

    On a CPU such a step takes up to a tenth longer, more than it gains.
    """
    return models.device.type == "cuda" and models.drafter.drafts_alone


def _rule(plan: Plan) -> PositionRule:
    return PositionRule(window=plan.kv_window, block=plan.block)


def _forget(exact: ExactPages | None, states: SavedStates | None, node: int) -> None:
    """Forget what is kept for a prefix whose page is reused."""
    if exact is not None:
        exact.forget(node)
    if states is not None:
        states.forget(node)
