"""A second engine over the first one's rows, cache and pages: what it serves leaves no trace in the first."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Delta
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.stats import Stats
from blockdraft.planner.plan import Plan
from blockdraft.step.drafter import Drafter

_MAX_QUEUE = 4096  # room for any batch: the engine's own limit is the user's


def trial_engine(engine: Engine, drafter: Drafter | None = None, plan: Plan | None = None) -> Engine:
    """Return an engine with its own counters, request numbers and queues, and this plan or drafter if given.

    Prefixes are neither looked up nor remembered: another drafter would leave pages without its context.
    Pages come from the engine's own allocator and are all back when the trial engine has nothing left to do.
    """
    assert not engine.has_work, "a busy engine cannot lend its rows"
    plan = plan or engine.plan
    plan = replace(plan, max_queue=_MAX_QUEUE, prefix_cache=False, step_costs={})
    other = copy.copy(engine)
    other.plan = plan
    other.models = replace(engine.models, drafter=drafter or engine.models.drafter)
    other.scheduler = Scheduler(plan, engine.scheduler.pages, engine.clock, engine.scheduler.exact)
    if drafter is not None:
        other.drop_graphs()  # they run the engine's own drafter
    other.stats = Stats()
    other._ids = itertools.count()
    return other


def serve(engine: Engine) -> list[Delta]:
    """Step until nothing is left to do."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def max_tokens(engine: Engine) -> int:
    """Return the longest sequence, prompt and answer, that surely fits beside a block in flight."""
    plan = engine.plan
    return min(plan.max_model_len, plan.num_pages * plan.page_size - plan.scratch)
