"""Every "auto" with the value it became and the reason, beside the Plan that says the same in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.machine.machine import Machine, told_share
from blockdraft.planner.external import DEFAULT_CHUNK, DEFAULT_ROWS
from blockdraft.planner.fit import Fit
from blockdraft.planner.pair import Model, Pair
from blockdraft.planner.plan import CACHE_SHARE, CPU_WIDTH, UNIFIED_SHARE, UNPACK_SHARE, memory_share
from blockdraft.settings.settings import DEFAULTS, Settings

ASKED = "asked for"


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting as it will be."""

    name: str
    value: str
    reason: str


def choices(settings: Settings, machine: Machine, pair: Pair, fit: Fit) -> tuple[Choice, ...]:
    """What was left to us, and what was asked for in its place."""
    found = [_draft(settings, pair), _device(settings, machine, fit)]
    if not fit.is_cpu:
        found.append(_share(settings, machine))
    found += _native(settings, pair, fit) if fit.plan is not None else _external(settings, pair, fit)
    return tuple(found)


def _chosen(settings: Settings, name: str, value: object, why: str) -> Choice:
    """`why` holds where nobody asked."""
    is_asked = getattr(settings, name) not in ("auto", None)
    return Choice(name, _shown(value), ASKED if is_asked else why)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _draft(settings: Settings, pair: Pair) -> Choice:
    name = "none" if pair.draft is None else pair.draft.stored.name
    if settings.draft != "auto":
        return Choice("draft", name, ASKED)
    return Choice("draft", name, "none ships for it" if pair.draft is None else "it ships for the model")


def _device(settings: Settings, machine: Machine, fit: Fit) -> Choice:
    why = "the driver finds no GPU" if fit.is_cpu else "a GPU is there, or named by --card"
    if machine.gpu_error is not None and fit.is_cpu:
        why = f"the driver does not answer ({machine.gpu_error})"
    return Choice("device", fit.device, ASKED if settings.device != "auto" else why)


def _share(settings: Settings, machine: Machine) -> Choice:
    is_native, name = settings.engine == "native", "gpu_memory_utilization"
    share = memory_share(settings, machine) if is_native else told_share(settings, machine)
    if share < settings.gpu_memory_utilization:
        limit = f", so never above {UNIFIED_SHARE}" if is_native else ""
        return Choice(name, f"{share:g}", f"unified memory: the system lives in it too{limit}")
    is_default = settings.gpu_memory_utilization == DEFAULTS[name]
    return Choice(name, f"{share:g}", "the default" if is_default else ASKED)


def _native(settings: Settings, pair: Pair, fit: Fit) -> list[Choice]:
    plan = fit.plan
    assert plan is not None
    cpu = fit.is_cpu
    found = [
        _chosen(
            settings, "dtype", plan.dtype, "the CPU's kernels are fastest so" if cpu else "what GPUs multiply"
        ),
        _storage(settings, "quantization", plan.quantization, pair.target),
    ]
    if pair.draft is not None:
        found.append(_storage(settings, "draft_quantization", plan.draft_quantization, pair.draft))
    found += [
        _chosen(settings, "width", plan.width, _why_width(pair, plan.width, is_cpu=cpu)),
        _chosen(settings, "max_context", plan.max_context, _why_context(pair, fit)),
        _chosen(settings, "max_rows", plan.max_rows, f"the default on a {'CPU' if cpu else 'GPU'}"),
        _chosen(settings, "chunk", plan.chunk, f"the default on a {'CPU' if cpu else 'GPU'}"),
        _chosen(settings, "cache_bytes", fit.cache_bytes, _why_cache(fit)),
        _chosen(settings, "overlap", plan.overlap, "a CPU computes while it waits" if cpu else "on a GPU"),
    ]
    if settings.prefix_cache and not plan.prefix_cache:
        found.append(Choice("prefix_cache", "off", "layers with a state cannot take up a found prefix"))
    return found


def _storage(settings: Settings, name: str, storage: str, model: Model) -> Choice:
    method, where = model.stored.method, f"the file is {model.stored.method}"
    why = "the file is not quantised"
    if model.stored.tensors is None:
        why = "no files are read"
    elif method is not None and storage == "keep":
        why = f"{where}, and unpacked it would take over {UNPACK_SHARE:.0%} of the memory"
    elif method is not None:
        why = f"{where}; unpacked it fits easily and is faster"
    return _chosen(settings, name, storage, why)


def _why_width(pair: Pair, width: int, *, is_cpu: bool) -> str:
    if pair.draft is None:
        return "no drafter: plain decoding"
    if is_cpu and width < pair.block:
        return f"wider than {CPU_WIDTH} costs more than it commits on a CPU; a start measures it"
    return f"the block that the drafter was trained for ({pair.block})"


def _why_context(pair: Pair, fit: Fit) -> str:
    if fit.max_context >= pair.target.shape.max_positions:
        return "all the positions that the model knows"
    return f"what the cache holds; the model knows {pair.target.shape.max_positions:,}"


def _why_cache(fit: Fit) -> str:
    if fit.is_cpu:
        return f"at most {CACHE_SHARE:.0%} of the free memory, taken as it is used"
    full = fit.max_rows * fit.footprint.at(fit.max_context)
    return "every row at full context" if fit.cache_bytes >= full else "what weights and steps leave"


def _external(settings: Settings, pair: Pair, fit: Fit) -> list[Choice]:
    name = {"vllm": "vLLM", "sglang": "SGLang"}[fit.engine]
    return [
        _chosen(settings, "width", fit.width, _why_width(pair, fit.width, is_cpu=False)),
        _chosen(settings, "max_context", fit.max_context, _why_context(pair, fit)),
        _chosen(settings, "max_rows", fit.max_rows, f"{name} admits as many ({DEFAULT_ROWS} assumed)"),
        _chosen(settings, "chunk", fit.chunk, f"{name}'s own ({DEFAULT_CHUNK:,} assumed)"),
        Choice(
            "kv_dtype", settings.kv_dtype, f"{name}'s own: 2 bytes" if settings.kv_dtype == "auto" else ASKED
        ),
        Choice(
            "tensor_parallel",
            str(settings.tensor_parallel),
            ASKED if settings.tensor_parallel > 1 else "one GPU",
        ),
    ]
