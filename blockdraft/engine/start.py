"""From settings to an engine that is warm and verified: the phases of a start, in order."""

from __future__ import annotations

from collections.abc import Callable

from blockdraft.engine.engine import Engine
from blockdraft.engine.loading import Models, open_models, read_weights
from blockdraft.engine.memory import fit_pages, memory_explained, release, why_no_graphs
from blockdraft.engine.selfcheck import verify, without_drafter
from blockdraft.engine.stall import bound_chunk
from blockdraft.engine.startup import Startup
from blockdraft.engine.warm import warm
from blockdraft.runtime.graphs import row_sizes
from blockdraft.settings import Settings


def start_engine(settings: Settings, startup: Startup) -> Engine:
    """Raises what loading raises, and ModelError for a model or a kernel that computes nonsense."""
    with startup.phase("fetch"):
        opened = open_models(settings, startup.note)
    with memory_explained(settings, opened.device):
        with startup.phase("load"):
            models = read_weights(opened, startup.note, startup.progress)
        for notice in models.labels.notices:
            startup.warn(notice)
        return _prepared(models, settings, startup)


def plain_engine(settings: Settings, note: Callable[[str], None]) -> Engine:
    """The same without warm-up and checks, for one who waits for the first answer alone."""
    opened = open_models(settings, note)
    with memory_explained(settings, opened.device):
        models = read_weights(opened, note)
        for notice in models.labels.notices:
            note(notice)
        engine = Engine(fit_pages(models, settings, note))
        if why_no_graphs(engine.models, settings) is None:
            _capture(engine, note)
    return engine


def _prepared(models: Models, settings: Settings, startup: Startup) -> Engine:
    with startup.phase("allocate"):
        models = fit_pages(models, settings, startup.note)
        engine = Engine(models)
        startup.note(f"{engine.cache.num_bytes / 1e9:.2f} GB of cache, {models.plan.num_pages} pages")
    reason = why_no_graphs(models, settings)
    if reason is None:
        with startup.phase("capture"):
            _capture(engine, startup.note)
    else:
        startup.skip("capture", reason)
    with startup.phase("warm"):
        warm(engine, startup.note)
        _bound(engine, settings, startup)
    if not settings.verify:
        startup.skip("verify", "switched off")
        return engine
    with startup.phase("verify"):
        verification = verify(engine, startup.note)
        if not verification.keeps_drafter:
            startup.warn(f"the drafter is not used: {verification.reason}")
            engine.graphs = None  # they hold the engine, and with it the cache
            del engine
            release()  # before another cache is made
            engine = Engine(without_drafter(models))
            if reason is None:
                _capture(engine, startup.note)
            warm(engine, startup.note)
            _bound(engine, settings, startup)
        found = verification.tokens_per_step
        fit = "" if found is None else f", {found:.2f} tokens committed per step"
        startup.note(f"{len(verification.checks)} checks{fit}")
    return engine


def _bound(engine: Engine, settings: Settings, startup: Startup) -> None:
    if settings.max_stall_ms is not None:
        bound_chunk(engine, settings.max_stall_ms, startup.note)


def _capture(engine: Engine, note: Callable[[str], None]) -> None:
    plan = engine.models.plan
    sizes, widths = row_sizes(plan.max_rows), sorted({1, plan.width})
    engine.capture(sizes, widths)
    note(f"{len(sizes) * len(widths)} graphs: 1 to {plan.max_rows} rows of width {widths}")
