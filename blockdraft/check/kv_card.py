"""Which compressed keys and values an engine serves on a card: those that one has served there."""

from __future__ import annotations

import torch

from blockdraft.cache.spec import Paged, Windowed
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.planner.plan import Plan


def check_served_on_card(models: LoadedPair, plan: Plan) -> None:
    """Raises for what no engine has run on a card yet: kernels pass their checks, and one did crash."""
    if not plan.num_exact_pages or models.device.type != "cuda":
        return
    paged = [spec for spec in models.config.layer_specs() if isinstance(spec, Paged)]
    if plan.draft_kv_dtype != EXACT or not all(_is_served(models, plan, spec) for spec in paged):
        raise SettingsError(
            f"kv_dtype = {plan.kv_dtype}, draft_kv_dtype = {plan.draft_kv_dtype}: on a card, compressed keys "
            "and values are served in bfloat16 so far, for heads of 64 or 128 values without a sliding "
            "window, on Hopper or later, with the drafter's own exact. Use --kv-dtype auto, or --device cpu."
        )


def _is_served(models: LoadedPair, plan: Plan, spec: Paged) -> bool:
    from blockdraft.kernels.triton.kv_mma import has_shape

    dtype = getattr(torch, plan.dtype)
    return not isinstance(spec, Windowed) and has_shape(spec.head_dim, dtype, plan.page_size, models.device)
