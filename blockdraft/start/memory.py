"""Measures how many pages fit on a GPU, before the real cache is allocated.

An engine with a small cache runs and captures its largest steps. The memory that is then left within the
budget becomes pages, so no step runs out of memory later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from blockdraft.cache.spec import bytes_per_token, state_bytes
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import CapacityError
from blockdraft.planner.plan import ELEMENT_BYTES, MARGIN_BYTES, Plan
from blockdraft.start.card_errors import first_line, is_out_of_memory, memory_of, usage
from blockdraft.start.loading import gpu_memory
from blockdraft.start.warm import largest_rounds, warm


def fit_pages(models: LoadedPair, plan: Plan, note: Callable[[str], None]) -> Plan:
    """Return `plan` with as many pages as fit, or unchanged if the user set the size or there is no GPU."""
    if not is_measured(models, plan):
        return plan
    note("measuring what the largest steps need")
    overhead = _overhead(models, plan, note)
    room = _budget(plan.start.memory_share, models.device) - overhead - MARGIN_BYTES
    page_bytes, each_state = _page_bytes(models, plan), _state_bytes(models, plan)
    fitting, is_enough = plan.divided(
        room + plan.states_bytes(each_state),  # the overhead includes them
        page_bytes=page_bytes,
        state_bytes=each_state,
        shrinks=not plan.is_asked("max_model_len"),
    )
    if not is_enough:
        needed = plan.pages_of_one * page_bytes
        raise CapacityError(
            f"a context of {plan.max_model_len} tokens needs {needed / 1e9:.1f} GB of cache, but "
            f"{max(room, 0) / 1e9:.1f} GB are left beside weights and {overhead / 1e9:.1f} GB of working "
            f"memory. The budget is {_shown_budget(plan.start.memory_share, models.device)}: raise it, lower "
            "--max-model-len, --max-num-seqs or --max-prefill-tokens, or use --quantization fp8. "
            f"Of the card's memory, {usage(models.device)}."
        )
    return fitting


def is_measured(models: LoadedPair, plan: Plan) -> bool:
    """Return whether the pages are measured by running the largest steps: on a GPU, if the size is "auto"."""
    return models.device.type == "cuda" and not plan.is_asked("cache_bytes")


def _overhead(models: LoadedPair, plan: Plan, note: Callable[[str], None]) -> int:
    """Return the bytes besides weights and pages: rows, states, the largest steps and the largest graph."""
    device = models.device
    before = _free(device)
    torch.cuda.reset_peak_memory_stats(device)
    probe = Engine(models, replace(plan, num_pages=pages_to_probe(plan)))
    held = torch.cuda.memory_reserved(device)
    warm(probe, note, largest_rounds)
    # A capture frees this memory; the next prefill takes it again.
    working = torch.cuda.max_memory_reserved(device) - held
    if why_no_graphs(models, plan) is None:
        probe.capture([plan.max_num_seqs], sorted({1, plan.width}))
    kept = before - _free(device)
    kept -= probe.cache.num_pages * _page_bytes(models, plan)
    probe.drop_graphs()
    return kept + working


@contextmanager
def memory_explained(plan: Plan, device: torch.device, *, is_loading: bool = False) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a CapacityError with advice.

    `is_loading`: weights are being read, so a smaller cache or smaller steps would not help.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        state = usage(device)
        if is_loading:
            raise CapacityError(
                f"the GPU ran out of memory while the weights were read ({first_line(error)}); {state}. End "
                "what else uses the card, use --quantization fp8, or take a smaller model."
            ) from error
        raise CapacityError(
            f"the GPU ran out of memory ({first_line(error)}); {state}. "
            f"The budget is {_shown_budget(plan.start.memory_share, device)}: lower it if other programs "
            "take memory meanwhile, lower --max-num-seqs, --max-model-len or --max-prefill-tokens, or use "
            "--quantization fp8."
        ) from error


def why_no_graphs(models: LoadedPair, plan: Plan) -> str | None:
    """Return why decode steps cannot be captured, or None if they can."""
    if not plan.start.graphs:
        return "switched off"
    return models.why_not_captured()


def pages_to_probe(plan: Plan) -> int:
    """Return enough pages for every round of the warm-up."""
    longest = plan.pages_of(plan.max_prefill_tokens + 1 + 3 * plan.block) + 1
    short = plan.pages_of(8 + 4 * plan.block) + 1
    return min(plan.num_pages, longest + plan.max_num_seqs * short)


def _page_bytes(models: LoadedPair, plan: Plan) -> int:
    per_token = bytes_per_token(
        models.cache_specs(plan.kv_dtype, plan.draft_kv_dtype), ELEMENT_BYTES[plan.dtype]
    )
    return plan.page_size * per_token


def _state_bytes(models: LoadedPair, plan: Plan) -> int:
    """Return the bytes of one saved state."""
    specs = models.cache_specs(plan.kv_dtype, plan.draft_kv_dtype)
    return state_bytes(specs, ELEMENT_BYTES[plan.dtype])


def release() -> None:
    """Free all unused memory of Python and of the GPU's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _free(device: torch.device) -> int:
    """Return a GPU's free bytes, after freeing all unused memory."""
    torch.cuda.synchronize(device)
    release()
    return gpu_memory(device)[0]


def _budget(share: float, device: torch.device) -> int:
    """Return the bytes that we may still take: our share of the card minus the memory in use."""
    free, total = _free(device), torch.cuda.mem_get_info(device)[1]
    return int(total * share) - (total - free)


def _shown_budget(share: float, device: torch.device) -> str:
    total = memory_of(device)[1] / 1e9
    return f"--gpu-memory-utilization {share} of {total:.1f} GB = {share * total:.1f} GB"
