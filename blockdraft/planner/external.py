"""Fits a pair that vLLM or SGLang serves: weights as stored, several GPUs, their kinds of cache.

Both keep only the window of a sliding layer. While a block is verified, they keep a recurrent layer's state
for every token; our engine keeps a tape.
"""

from __future__ import annotations

from dataclasses import astuple, replace

from blockdraft.cache.spec import Paged, Recurrent, Windowed
from blockdraft.errors import SettingsError
from blockdraft.machine.machine import external_memory_share
from blockdraft.planner.kv_formats import token_bytes
from blockdraft.planner.memory import DRIVER_BYTES, Item, served_parts, step_items, weight_how
from blockdraft.planner.memory_fit import Choice, Fit, Footprint, budget_how, gpu_name
from blockdraft.planner.pair import Case, Pair
from blockdraft.planner.plan import ASKED, CACHE_HOLDS, MIN_CONTEXT
from blockdraft.planner.resolver import ALL_POSITIONS, share_reason, width_reason
from blockdraft.planner.shape import CacheSpec
from blockdraft.planner.stored import WeightParts

DEFAULT_ROWS = 256  # vLLM's max_num_seqs; SGLang finds its own
DEFAULT_CHUNK = 8192  # tokens of a prefill step, both
GRAPH_BYTES = 3 << 29  # captured steps; both engines leave the logits out of them
RESERVE_BYTES = 2 << 30  # kernels compiled at the start, smaller graphs, and temporary memory of loaders


def fit_external(case: Case) -> Fit:
    """Fit one GPU's part of the model. Raise SettingsError if there is no GPU."""
    settings, machine, pair = case.settings, case.machine, case.pair
    if not machine.gpu_bytes:
        raise SettingsError(
            f"engine = {settings.engine}, but this machine has no GPU: name one with --card, or use "
            "--engine native."
        )
    num_gpus = settings.tensor_parallel * settings.pipeline_parallel
    width = pair.block if settings.width == "auto" else settings.width
    max_num_seqs = DEFAULT_ROWS if settings.max_num_seqs == "auto" else settings.max_num_seqs
    chunk = DEFAULT_CHUNK if settings.max_prefill_tokens == "auto" else settings.max_prefill_tokens
    footprint = _footprint(case, width)
    parts = _parts(case, num_gpus)
    fixed = _items(pair, parts, chunk=chunk, logits=max_num_seqs * width * pair.target.shape.vocab_size)
    share = external_memory_share(settings.gpu_memory_utilization, machine)
    budget = int(machine.gpu_bytes * share) - (machine.gpu_bytes - machine.gpu_free_bytes)
    room = budget - sum(item.num_bytes for item in fixed)
    asked = pair.target.shape.max_positions if settings.max_model_len == "auto" else settings.max_model_len
    cache = Item("cache", max(room, 0), "what is left; both engines take all of it")
    fit = Fit(
        engine=settings.engine,
        device=gpu_name(machine) if num_gpus == 1 else f"each of {num_gpus} x {gpu_name(machine)}",
        plan=None,
        items=(*fixed, cache),
        budget=budget,
        budget_how=budget_how(share, machine),
        footprint=footprint,
        cache_bytes=max(room, 0),
        max_model_len=asked,
        max_num_seqs=max_num_seqs,
        width=width,
        chunk=chunk,
        parts=parts,
        choices=(),
        kv_dtype=settings.kv_dtype,
    )
    fit = _limited(fit, room, asked, shrinks=settings.max_model_len == "auto")
    return replace(fit, choices=_choices(case, fit, share))


def _choices(case: Case, fit: Fit, share: float) -> tuple[Choice, ...]:
    """List the settings with their values and reasons, as the user or the engine sets them."""
    settings, pair = case.settings, case.pair
    name = {"vllm": "vLLM", "sglang": "SGLang"}[settings.engine]
    is_whole = fit.max_model_len >= pair.target.shape.max_positions
    chosen: dict[str, tuple[object, str]] = {
        "draft": (pair.draft_name, "none ships for it" if pair.draft is None else "it ships for the model"),
        "device": (fit.device, "a GPU is there, or named by --card"),
        "width": (fit.width, width_reason(pair.block, pair.block)),
        "max_model_len": (fit.max_model_len, ALL_POSITIONS if is_whole else CACHE_HOLDS),
        "max_num_seqs": (fit.max_num_seqs, f"{name} admits as many ({DEFAULT_ROWS} assumed)"),
        "max_prefill_tokens": (fit.chunk, f"{name}'s own ({DEFAULT_CHUNK:,} assumed)"),
        "kv_dtype": (settings.kv_dtype, f"{name}'s own: 2 bytes"),
    }
    found = {
        setting: (value, ASKED if getattr(settings, setting) not in ("auto", None) else why)
        for setting, (value, why) in chosen.items()
    }
    found["gpu_memory_utilization"] = (share, share_reason(settings, share, "less is taken"))
    parallel = settings.tensor_parallel
    found["tensor_parallel"] = (parallel, ASKED if parallel > 1 else "one GPU")
    return tuple(Choice.of(setting, value, why) for setting, (value, why) in found.items())


def _limited(fit: Fit, room: int, asked: int, *, shrinks: bool) -> Fit:
    """Return the fit with the longest context that fits, or with the reason why none fits."""
    if fit.sequences(asked) > 0 and room > 0:
        return fit
    longest = fit.longest(1, asked)
    if shrinks and longest >= min(MIN_CONTEXT, asked):
        return replace(fit, max_model_len=longest)
    budget = f"{fit.budget / 1e9:.1f} GB ({fit.budget_how})"
    if room <= 0:
        taken = (fit.budget - room) / 1e9
        return replace(
            fit, problem=f"weights and working memory take {taken:.1f} GB, but the budget is {budget}."
        )
    needed = f"a context of {asked:,} tokens needs {fit.footprint.at(asked) / 1e9:.1f} GB of cache"
    return replace(fit, problem=f"{needed}, and {room / 1e9:.1f} GB are left of {budget}.")


def _parts(case: Case, num_gpus: int) -> tuple[WeightParts, ...]:
    is_fp8 = (case.settings.quantization == "fp8", case.settings.draft_quantization == "fp8")
    return tuple(
        _shared(served_parts(model, is_fp8=wanted), num_gpus)
        for model, wanted in zip(case.pair.models, is_fp8, strict=False)
    )


def _shared(parts: WeightParts, num_gpus: int) -> WeightParts:
    return WeightParts(*(size // num_gpus for size in astuple(parts)))


def _items(pair: Pair, parts: tuple[WeightParts, ...], *, chunk: int, logits: int) -> list[Item]:
    names, items = ("target weights", "drafter weights"), []
    for name, model, part in zip(names, pair.models, parts, strict=False):
        note = f"{model.stored.method or 'as stored'}, one GPU's part"
        whole = part.text + part.left_out
        items.append(Item(name, whole, weight_how(model.shape.values, part, note)))
    items += step_items(pair, tokens=chunk, logits=logits, element_bytes=2, has_graphs=False)
    items.append(Item("graphs", GRAPH_BYTES, "as a rule 1 to 2 GB", is_exact=False))
    items.append(Item("driver", DRIVER_BYTES, "a CUDA context and its libraries", is_exact=False))
    items.append(Item("reserve", RESERVE_BYTES, "compiled kernels, loaders", is_exact=False))
    return items


def _footprint(case: Case, width: int) -> Footprint:
    settings, pair = case.settings, case.pair
    tensor, stages = settings.tensor_parallel, settings.pipeline_parallel
    per_token, per_row, windows = 0, 0, []
    for shape in (model.shape for model in pair.models):
        specs = tuple(_split(spec, tensor) for spec in shape.specs)
        for spec, size in zip(shape.specs, token_bytes(specs, settings.kv_dtype), strict=True):
            if isinstance(spec, Windowed):
                windows.append((spec.window + width, size))
            elif isinstance(spec, Recurrent):
                per_row += spec.bytes_per_row(2, 0) * (width if pair.draft is not None else 1) // tensor
            else:
                per_token += size
    kept = tuple((window, size // stages) for window, size in _joined(windows))
    return Footprint(per_token // stages, per_row // stages, kept, scratch=width)


def _joined(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join the entries of all layers with the same window; add up their sizes."""
    return [
        (window, sum(size for other, size in windows if other == window))
        for window in dict.fromkeys(window for window, _ in windows)
    ]


def _split(spec: CacheSpec, num_gpus: int) -> CacheSpec:
    """Return the spec of one GPU's heads. A head is never split; each GPU keeps the whole latent vector."""
    if not isinstance(spec, Paged):
        return spec
    return Paged(num_kv_heads=-(-spec.num_kv_heads // num_gpus), head_dim=spec.head_dim)
