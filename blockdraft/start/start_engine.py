"""Makes a warm and verified engine from settings: the phases of a start, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blockdraft.check.fingerprint import fingerprint
from blockdraft.check.kv_served import check_served_on_card, served_centres
from blockdraft.check.selfcheck import Verification, captured, without_drafter
from blockdraft.check.verified import verify_changes
from blockdraft.engine.describe import kv_text
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.width_controller import widths_for
from blockdraft.errors import SettingsError
from blockdraft.kernels.choice import Operation
from blockdraft.kernels.llvm.jit import NotRecordable
from blockdraft.models.draft_config import DraftConfig
from blockdraft.phases import StartProgress
from blockdraft.planner.plan import Plan
from blockdraft.settings.settings import Settings
from blockdraft.start.block_width import known_acceptance, may_choose_width
from blockdraft.start.card_errors import unused_gpu
from blockdraft.start.compile_ahead import CompileAhead, compile_steps, compiling_for
from blockdraft.start.fallback import with_kernels_that_compile
from blockdraft.start.loading import Opened, open_models, read_weights, resolve_device
from blockdraft.start.measure import measure, measure_chunk
from blockdraft.start.memory import fit_pages, is_measured, memory_explained, release, why_no_graphs
from blockdraft.start.slower_parts import slower_parts
from blockdraft.start.stored_prefixes import restore_prefixes
from blockdraft.start.warm import Rounds, few_rounds, rounds_for, small_rounds, warm
from blockdraft.step.row_sizes import row_sizes
from blockdraft.step.step_sizes import means_on, uneven_places
from blockdraft.text.tokenizer import Tokenizer


def start_engine(
    settings: Settings, startup: StartProgress, on_tokenizer: Callable[[Tokenizer], object] = lambda _: None
) -> Engine:
    """Start an engine. Raise loading's errors, and ModelError if a model or a kernel computes nonsense.

    `on_tokenizer` gets the tokenizer long before the engine is ready.
    """
    _check_native(settings)
    _check_gpu(settings, startup.warn)
    with startup.phase("fetch"):
        opened = open_models(settings, startup.note)
    on_tokenizer(opened.target.tokenizer)
    with compiling_for(opened) as ahead:
        engine = _started(opened, startup, ahead)
    engine.fingerprint = fingerprint(engine)
    if settings.prefix_disk != "off":
        restore_prefixes(engine, settings.prefix_disk, settings.prefix_disk_bytes, startup)
    return engine


def _started(opened: Opened, startup: StartProgress, ahead: CompileAhead) -> Engine:
    with memory_explained(opened.plan, opened.device, is_loading=True), startup.phase("load"):
        models = read_weights(opened, startup.note, startup.progress)
    for line in models.labels.chosen:
        startup.tell_chosen(line)
    for line in (*models.labels.notices, *_unread(models), *slower_parts(models, opened.plan)):
        startup.warn(line)

    def tell(operation: Operation, why: str) -> None:
        startup.warn(_slower(operation, why))
        startup.rewind("allocate")

    def prepared(models: LoadedPair) -> Engine:
        return _prepared(models, opened.plan, startup, ahead)

    with memory_explained(opened.plan, models.device):
        return with_kernels_that_compile(models, prepared, tell)


def _unread(models: LoadedPair) -> tuple[str, ...]:
    """Return a line about keys of the drafter's config.json that may change drafts and are not known here."""
    config = models.draft_config
    if not isinstance(config, DraftConfig) or not config.unread_keys:
        return ()
    keys = ", ".join(config.unread_keys)
    return (f"the drafter's config.json has keys that are not known here and change nothing: {keys}.",)


def plain_engine(
    settings: Settings, note: Callable[[str], None], warn: Callable[[str], None] | None = None
) -> Engine:
    """Start an engine without checks and with little warm-up, for the fastest first answer.

    `warn` gets the messages that a user must see; `note` gets them if `warn` is None.
    """
    tell = warn if warn is not None else lambda text: note(f"warning: {text}")
    _check_native(settings)
    if settings.prefix_disk != "off":
        raise SettingsError(f"prefix_disk = {settings.prefix_disk}: only `blockdraft serve` keeps prefixes.")
    _check_gpu(settings, tell)
    opened = open_models(settings, note)
    with memory_explained(opened.plan, opened.device, is_loading=True):
        models = read_weights(opened, note)
    for notice in models.labels.notices:
        note(notice)
    for line in (*_unread(models), *slower_parts(models, opened.plan)):
        tell(line)
    with memory_explained(opened.plan, models.device):
        return with_kernels_that_compile(
            models,
            lambda models: _plain(models, opened.plan, note, tell),
            lambda operation, why: tell(_slower(operation, why)),
        )


def _plain(
    models: LoadedPair, plan: Plan, note: Callable[[str], None], warn: Callable[[str], None]
) -> Engine:
    engine = _new_engine(models, fit_pages(models, plan, note))
    if models.device.type == "cuda":
        warm(engine, note, _rounds(models, plan))  # a kernel that does not compile fails now
    with _captured_or_not(engine, warn):
        if why_no_graphs(engine.models, plan) is None:
            _capture(engine, note, is_awaited=True)
        measured = measure(engine, uses_stored=True, warn=warn)
        if measured is not engine.plan:
            engine.replan(measured)
            note(_shown_width(engine))
        if engine.graphs is not None:
            engine.graphs.capture_next([(1, engine.plan.width)])
    engine.replan(measure_chunk(engine, note))
    return engine


def _new_engine(models: LoadedPair, plan: Plan) -> Engine:
    """Make an engine. If its keys are rotated, it stores them with their mean subtracted."""
    check_served_on_card(models, plan)
    engine = Engine(models, plan)
    if any(group.pages.format.is_rotated for group in engine.cache.compressed):
        engine.cache.centre_keys(served_centres(models, plan.max_model_len))
    return engine


def _rounds(models: LoadedPair, plan: Plan) -> Callable[[Plan], Rounds]:
    """Return the warm-up rounds that have not run yet when an engine is made."""
    return small_rounds if is_measured(models, plan) else rounds_for(models.device)


def _slower(operation: Operation, why: str) -> str:
    return (
        f"the kernel of {operation} does not compile on this card ({why}): its reference serves, which is "
        "slower; answers stay exact. `blockdraft doctor` says more."
    )


def _check_native(settings: Settings) -> None:
    if settings.engine != "native":
        raise SettingsError(
            f"engine = '{settings.engine}' does not run in this process: `blockdraft serve` starts it."
        )
    if settings.replicas != 1:
        raise SettingsError(f"replicas = {settings.replicas}: only `blockdraft serve` runs several engines.")


def _check_gpu(settings: Settings, warn: Callable[[str], None]) -> None:
    """Warn of an unused GPU if "auto" means the CPU."""
    if settings.device == "auto" and resolve_device("auto") == "cpu":
        line = unused_gpu()
        if line is not None:
            warn(line)


def _prepared(models: LoadedPair, plan: Plan, startup: StartProgress, ahead: CompileAhead) -> Engine:
    engine = _warmed(models, plan, startup, ahead)
    if plan.start.verify == "off":
        startup.skip("verify", "switched off")
    else:
        with startup.phase("verify"):
            verification = verify_changes(engine, startup.note, is_full=plan.start.verify == "full")
            if not verification.keeps_drafter:
                startup.warn(f"the drafter is not used: {verification.reason}")
                engine.drop_graphs()
                del engine
                engine = _without_drafter(models, plan, startup)
            elif not known_acceptance(models):
                _measure_without_fit(engine, verification.accepted, startup.note)
            if verification.same_bits is not None:
                _tell_bits(engine, verification, startup)
            startup.tell_speculation(_shown_width(engine))
            startup.note(f"{_shown(verification)}; {_shown_width(engine)}")
    # This comes after the checks: they depend on the chunk, and the measured chunk may differ between starts.
    engine.replan(measure_chunk(engine, startup.note))
    return engine


def _measure_without_fit(engine: Engine, accepted: tuple[float, ...], note: Callable[[str], None]) -> None:
    before = engine.plan.width
    engine.replan(measure(engine, accepted))
    if engine.plan.width != before:
        warm(engine, note, rounds_for(engine.models.device))


def _warmed(models: LoadedPair, plan: Plan, startup: StartProgress, ahead: CompileAhead) -> Engine:
    """Return a new engine after all phases of a start but the checks."""
    with startup.phase("allocate"):
        compile_steps(ahead, models, plan, startup)
        plan = fit_pages(models, plan, startup.note)
        engine = _new_engine(models, plan)
        problem = f"; kernels were not all compiled ahead ({ahead.problem})" if ahead.problem else ""
        most = "at most " if models.device.type == "cpu" else ""  # a CPU's memory is taken as it is used
        size = f"{most}{engine.cache.num_bytes / 1e9:.2f} GB of cache, {plan.num_pages} pages"
        startup.note(", ".join(part for part in (size, kv_text(models, plan)) if part) + problem)
    reason = why_no_graphs(models, plan)
    if reason is None:
        with startup.phase("capture"), _captured_or_not(engine, startup.warn):
            _capture(engine, startup.note)
    else:
        startup.skip("capture", reason)
    with startup.phase("warm"):
        if may_choose_width(engine):
            startup.note("measuring steps of different widths")
        engine.replan(measure(engine, uses_stored=plan.start.verify != "full", warn=startup.warn))
        warm(engine, startup.note, few_rounds if ahead.has_run else _rounds(models, plan))
        startup.note(_shown_width(engine))
        startup.tell_speculation(_shown_width(engine))
    return engine


def _without_drafter(models: LoadedPair, plan: Plan, startup: StartProgress) -> Engine:
    release()  # free the old cache before another is made
    engine = _new_engine(*without_drafter(models, plan))
    if why_no_graphs(models, plan) is None:
        _capture(engine, startup.note)
    warm(engine, startup.note, rounds_for(models.device))
    if engine.graphs is not None:
        captured(engine)
    return engine


def _tell_bits(engine: Engine, found: Verification, startup: StartProgress) -> None:
    """Report batch invariance: put it in the plan, for the live page, and in a warning, for /ready."""
    changed = engine.plan.changed({"same_bits": found.bits}, same_bits=found.same_bits)
    engine.replan(changed)
    if not found.same_bits and engine.models.device.type == "cuda":
        startup.warn(f"answers may depend on who else is served: {found.bits}")


def _shown(verification: Verification) -> str:
    found = verification.tokens_per_step
    fit = "" if found is None else f", {found:.2f} tokens committed per step"
    return (verification.taken or f"{len(verification.checks)} checks") + fit


def _shown_width(engine: Engine) -> str:
    plan = engine.plan
    if plan.width == 1:
        return f"speculation: off{' to begin with' if plan.step_costs else ''}; {plan.reasons['width']}"
    return f"speculation: on, {plan.width} tokens tried per step to begin with; {plan.reasons['width']}"


def _capture(engine: Engine, note: Callable[[str], None], *, is_awaited: bool = False) -> None:
    """Capture the steps that the first requests need, and on a GPU those that take most memory.

    `is_awaited`: a user waits for the first token, so a CPU captures nothing yet, and a GPU no prefills.
    """
    plan, is_on_card = engine.plan, engine.models.device.type == "cuda"
    sizes = row_sizes(plan.max_num_seqs, is_exact=not is_on_card)
    widths = widths_for(plan.block) if may_choose_width(engine) else sorted({1, plan.width})
    many = plan.max_num_seqs if is_on_card else 1  # a GPU's memory is claimed now
    rows_now = [] if is_awaited and not is_on_card else sorted({1, many})
    now = {(rows, width) for rows in rows_now for width in (1, plan.width)}
    if may_choose_width(engine) and engine.scheduler.means is not None:
        widths = sorted({1, plan.block})
        now |= set() if is_awaited else {(1, width) for width in engine.scheduler.means(1, plan.block)}
    means = means_on(engine.models.device)
    engine.capture(sizes, widths, sorted(now), uneven=uneven_places(sizes, plan.block, means))
    if engine.prefill_graphs is not None and not is_awaited:
        engine.prefill_graphs.capture_first()
    most = 0 if engine.graphs is None else len(engine.graphs)
    note(f"{len(now)} of at most {most} kinds of decoding steps captured; others when they are first needed")


@contextmanager
def _captured_or_not(engine: Engine, warn: Callable[[str], None]) -> Iterator[None]:
    """Let steps run kernel by kernel, slower but as exact, if the CPU cannot record the model's steps."""
    try:
        yield
    except NotRecordable as reason:
        engine.drop_graphs()
        warn(f"steps run kernel by kernel, which is slower: {reason}.")
