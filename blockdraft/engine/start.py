"""From settings to an engine that is warm and verified: the phases of a start, in order."""

from __future__ import annotations

from blockdraft.engine.engine import Engine
from blockdraft.engine.loading import open_models, read_weights
from blockdraft.engine.selfcheck import verify, without_drafter
from blockdraft.engine.startup import Startup
from blockdraft.engine.warm import warm
from blockdraft.settings import Settings


def start_engine(settings: Settings, startup: Startup) -> Engine:
    """Raises what loading raises, and ModelError for a model or a kernel that computes nonsense."""
    with startup.phase("fetch"):
        opened = open_models(settings, startup.note)
    with startup.phase("load"):
        models = read_weights(opened, startup.note, startup.progress)
    with startup.phase("allocate"):
        engine = Engine(models)
        startup.note(f"{engine.cache.num_bytes / 1e9:.2f} GB of cache")
    startup.skip("capture", "no CUDA graphs in this version")
    with startup.phase("warm"):
        warm(engine, startup.note)
    if not settings.verify:
        startup.skip("verify", "switched off")
        return engine
    with startup.phase("verify"):
        verification = verify(engine, startup.note)
        if not verification.keeps_drafter:
            startup.warn(f"the drafter is not used: {verification.reason}")
            del engine  # its cache goes before another is made
            engine = Engine(without_drafter(models))
            warm(engine, startup.note)
        found = verification.tokens_per_step
        fit = "" if found is None else f", {found:.2f} tokens committed per step"
        startup.note(f"{len(verification.checks)} checks{fit}")
    return engine
