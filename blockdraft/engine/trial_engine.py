"""Trial engine: a second engine that uses the first one's rows, cache and pages, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

from blockdraft.engine.engine import Engine, ignore
from blockdraft.engine.request import Delta
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.stats import Stats
from blockdraft.planner.plan import Plan
from blockdraft.step.drafter import Drafter

_MAX_QUEUE = 4096  # enough for any batch; the engine's own limit is the user's setting


def trial_engine(engine: Engine, drafter: Drafter | None = None, plan: Plan | None = None) -> Engine:
    """Return an engine with its own counters, request numbers and queues, and with this drafter and plan.

    By default it has the engine's drafter and plan. It neither looks up nor remembers prefixes: its drafter
    would leave pages without the context of the engine's drafter. It takes pages from the engine's allocator,
    and has returned all of them once it has no work left.
    """
    assert not engine.has_work, "a busy engine cannot lend its rows"
    plan = plan or engine.plan
    plan = replace(plan, max_queue=_MAX_QUEUE, prefix_cache=False, num_states=0, step_costs={})
    if drafter is not None:
        plan = replace(plan, tree=0)
    other = copy.copy(engine)
    other.plan = plan
    other.models = replace(engine.models, drafter=drafter or engine.models.drafter)
    other.scheduler = Scheduler(
        plan, engine.scheduler.pages, engine.clock, engine.scheduler.exact, means=engine.scheduler.means
    )
    if drafter is not None:
        other.drop_graphs()  # they run the engine's own drafter
    other.stats = Stats()
    other.on_end = ignore
    other._ids = itertools.count()
    return other


def serve(engine: Engine) -> list[Delta]:
    """Step until the engine has no work left, and return all deltas."""
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def max_tokens(engine: Engine) -> int:
    """Return the most tokens of a prompt and its answer that fit for certain, with a block in flight."""
    plan = engine.plan
    return min(plan.max_model_len, plan.num_pages * plan.page_size - plan.scratch)
