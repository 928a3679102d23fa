"""make_plan: every "auto" becomes a number, in one pure function; whatever cannot work is refused here."""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.cache.spec import LayerSpec, bytes_per_token
from blockdraft.errors import CapacityError, SettingsError
from blockdraft.machine import Machine
from blockdraft.models.config import ModelConfig
from blockdraft.models.draft_config import DraftConfig
from blockdraft.settings import Settings

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CPU_WIDTH = 8  # widest verify that costs little more than a narrow one (docs/benchmarks.md)
CACHE_SHARE = 0.25  # of the free memory, on a machine that has other work too


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine will do."""

    dtype: str
    width: int
    block: int  # tokens a row may write in one step: drafter or verify
    max_context: int
    max_positions: int  # rows of the rope and page tables, scratch included
    max_rows: int
    max_queue: int
    page_size: int
    num_pages: int  # for sequences; the cache adds its reserved ones
    chunk: int
    prefix_cache: bool
    overlap: bool
    seed: int


def make_plan(settings: Settings, machine: Machine, model: ModelConfig, draft: DraftConfig | None) -> Plan:
    """Resolve `settings` for this machine and this pair of models."""
    is_cpu = settings.device.split(":")[0] == "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    width = _width(settings, draft, is_cpu=is_cpu)
    block = max(width, draft.block if draft else 1)
    max_rows = settings.max_rows if settings.max_rows != "auto" else (16 if is_cpu else 64)
    chunk = settings.chunk if settings.chunk != "auto" else (256 if is_cpu else 2048)
    specs = model.layer_specs() + (draft.layer_specs() if draft else ())
    scratch = 2 * block  # a step, and one more that ran before a stop was known
    room = _cache_tokens(settings, machine, specs, ELEMENT_BYTES[dtype])
    max_context = _max_context(settings, model, room - scratch - settings.page_size)
    wanted = max_rows * (max_context + scratch + settings.page_size)
    return Plan(
        dtype=dtype,
        width=width,
        block=block,
        max_context=max_context,
        max_positions=max_context + scratch,
        max_rows=max_rows,
        max_queue=settings.max_queue,
        page_size=settings.page_size,
        num_pages=min(room, wanted) // settings.page_size,
        chunk=chunk,
        prefix_cache=settings.prefix_cache,
        overlap=settings.overlap,
        seed=settings.seed,
    )


def _width(settings: Settings, draft: DraftConfig | None, *, is_cpu: bool) -> int:
    if settings.width == "auto":
        if draft is None:
            return 1
        return min(draft.block, CPU_WIDTH) if is_cpu else draft.block
    if draft is not None and settings.width > draft.block:
        raise SettingsError(
            f"width = {settings.width}, but draft '{draft.name}' was trained for blocks of {draft.block}: "
            f"use --width {draft.block} or less."
        )
    return settings.width


def _cache_tokens(
    settings: Settings, machine: Machine, specs: tuple[LayerSpec, ...], element_bytes: int
) -> int:
    cost = bytes_per_token(specs, element_bytes)
    if settings.cache_bytes != "auto":
        return settings.cache_bytes // cost
    return int(machine.memory_bytes * CACHE_SHARE) // cost


def _max_context(settings: Settings, model: ModelConfig, room: int) -> int:
    """The model's own limit, or less where the cache holds less; what was asked for, or an error."""
    asked = settings.max_context
    if asked == "auto":
        max_context = min(model.max_positions, room)
    elif asked > model.max_positions:
        raise SettingsError(
            f"max_context = {asked}, but '{model.name}' knows {model.max_positions} positions: "
            f"use --max-context {model.max_positions} or less."
        )
    else:
        max_context = asked
    if max_context < 2 or max_context > room:
        raise CapacityError(
            f"the cache holds {max(room, 0)} tokens beside its scratch space, "
            f"too few for a context of {max(max_context, 2)}: raise --cache-bytes or lower --max-context."
        )
    return max_context
