"""make_plan: every "auto" becomes a number, in one pure function; whatever cannot work is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from blockdraft.cache.spec import LayerSpec, bytes_per_row, bytes_per_token
from blockdraft.errors import CapacityError, SettingsError
from blockdraft.machine.machine import Machine
from blockdraft.models.config import ModelConfig, Storage
from blockdraft.models.draft_config import DraftConfig
from blockdraft.settings.settings import Settings

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CPU_WIDTH = 8  # widest verify that costs little more than a narrow one (docs/benchmarks.md)
CACHE_SHARE = 0.25  # of the free memory, on a machine that has other work too
WORK_BYTES = 1 << 30  # of a GPU, for activations and graphs; replaced by what is measured
MIN_CONTEXT = 256  # tokens; less is no service, so a start that would have to shrink to it fails
MARGIN_BYTES = 256 << 20  # of a GPU, for smaller graphs, and a library's plan for an odd shape
# Of unified memory: past it whole machines froze (vllm#46307), as the system's own programs live there too.
UNIFIED_SHARE = 0.85
UNPACK_SHARE = 0.5  # of the free memory: what unpacked weights may take before they stay packed


@dataclass(frozen=True, slots=True)
class Weights:
    """The size of a checkpoint."""

    num_values: int
    method: str | None = None  # how the file is quantised; None: not at all


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine will do."""

    dtype: str
    quantization: Storage  # of the target's weights
    draft_quantization: Storage
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
    width_reason: str = ""  # where the width was measured (start/width.py)


def make_plan(
    settings: Settings,
    machine: Machine,
    model: ModelConfig,
    draft: DraftConfig | None,
    *,
    weights: Weights,
    draft_weights: Weights | None = None,
) -> Plan:
    """Resolve `settings` for this machine and this pair of models."""
    is_cpu = settings.device.split(":")[0] == "cpu" or (settings.device == "auto" and not machine.gpu_bytes)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    width = _width(settings, draft, is_cpu=is_cpu)
    block = max(width, draft.block if draft else 1)
    max_rows = settings.max_rows if settings.max_rows != "auto" else (16 if is_cpu else 64)
    chunk = settings.chunk if settings.chunk != "auto" else (256 if is_cpu else 2048)
    specs = model.layer_specs() + (draft.layer_specs() if draft else ())
    scratch = 2 * block  # a step, and one more that ran before a stop was known
    element_bytes = ELEMENT_BYTES[dtype]
    states = (max_rows + 1) * bytes_per_row(specs, element_bytes, block)
    room_bytes = int(machine.memory_bytes * CACHE_SHARE)
    unpackable = int(machine.memory_bytes * UNPACK_SHARE) // element_bytes
    if not is_cpu:
        budget = gpu_budget(settings, machine)
        unpackable = int(budget * UNPACK_SHARE) // element_bytes
    quantization = _quantization("quantization", settings.quantization, weights, unpackable)
    draft_weights = draft_weights or Weights(0)
    draft_quantization = _quantization(
        "draft_quantization", settings.draft_quantization, draft_weights, unpackable
    )
    if not is_cpu:
        held = _weight_bytes(weights, quantization, element_bytes)
        held += _weight_bytes(draft_weights, draft_quantization, element_bytes)
        room_bytes = _gpu_room(settings, machine, held)
    room = _cache_tokens(settings, room_bytes, specs, element_bytes, states)
    max_context = _max_context(settings, model, room - scratch - settings.page_size)
    wanted = max_rows * (max_context + scratch + settings.page_size)
    return Plan(
        dtype=dtype,
        quantization=quantization,
        draft_quantization=draft_quantization,
        width=width,
        block=block,
        max_context=max_context,
        max_positions=max_context + scratch,
        max_rows=max_rows,
        max_queue=settings.max_queue,
        page_size=settings.page_size,
        num_pages=min(room, wanted) // settings.page_size,
        chunk=chunk,
        # A state holds everything before it: a page found again does not bring it back.
        prefix_cache=settings.prefix_cache and not model.is_hybrid,
        overlap=settings.overlap if settings.overlap != "auto" else not is_cpu,
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


def _quantization(name: str, asked: str, weights: Weights, unpackable: int) -> Storage:
    """How to hold a checkpoint's weights; `unpackable` values fit easily once unpacked.

    Most packed formats have no kernel of their own: each forward unpacks them again. So weights stay packed
    only where memory needs it.
    """
    if asked == "auto":
        return "keep" if weights.method is not None and weights.num_values > unpackable else "none"
    if asked in ("fp8", "int8") and weights.method is not None:
        raise SettingsError(
            f"{name} = {asked}, but the checkpoint is quantised already ({weights.method}): "
            "use keep or none, or give the unquantised checkpoint."
        )
    return cast(Storage, asked)  # Settings admit no other


def memory_share(settings: Settings, machine: Machine) -> float:
    """The share of the GPU's memory that may be in use; less where it is the CPU's memory too."""
    return min(settings.gpu_memory_utilization, UNIFIED_SHARE if machine.is_unified else 1.0)


def gpu_budget(settings: Settings, machine: Machine) -> int:
    """Bytes of the GPU that we may take: the share of the whole, less what others have."""
    return int(machine.gpu_bytes * memory_share(settings, machine)) - (
        machine.gpu_bytes - machine.gpu_free_bytes
    )


def _weight_bytes(weights: Weights, storage: Storage, element_bytes: int) -> int:
    """Of formats that stay packed, at the least half a byte a value."""
    each = {"none": float(element_bytes), "fp8": 1.0, "int8": 1.0, "keep": 0.5}[storage]
    return int(weights.num_values * each)


def _gpu_room(settings: Settings, machine: Machine, weight_bytes: int) -> int:
    """For the cache, before anything is measured (start/memory.py does that once the weights are there)."""
    budget = gpu_budget(settings, machine)
    room = budget - weight_bytes - WORK_BYTES
    if room <= 0 and settings.cache_bytes == "auto":
        share = f"--gpu-memory-utilization {settings.gpu_memory_utilization}"
        raise CapacityError(
            f"weights of {weight_bytes / 1e9:.1f} GB and about {WORK_BYTES / 1e9:.1f} GB for a step: the "
            f"budget is {budget / 1e9:.1f} GB ({share} of {machine.gpu_bytes / 1e9:.1f} GB, less what others "
            "use): use --quantization fp8 or a smaller model, or raise it."
        )
    return room


def _cache_tokens(
    settings: Settings,
    room_bytes: int,
    specs: tuple[LayerSpec, ...],
    element_bytes: int,
    state_bytes: int,
) -> int:
    """How many tokens the cache holds beside the recurrent states, which every row has from the start."""
    total = room_bytes if settings.cache_bytes == "auto" else settings.cache_bytes
    if state_bytes and state_bytes >= total:
        raise CapacityError(
            f"the recurrent states of all rows take {state_bytes:,} bytes, but the cache has {total:,}: "
            "raise --cache-bytes or lower --max-rows."
        )
    return (total - state_bytes) // max(bytes_per_token(specs, element_bytes), 1)


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
