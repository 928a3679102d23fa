"""Describes what "auto" means for a GGUF file that is given by its path, for stderr and /ready.

Such a file comes without a configuration that says how to serve it, so a start reports its choices.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.checkpoints.checkpoint import Checkpoint
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.planner.plan import Plan
from blockdraft.settings.model_source import known_name
from blockdraft.settings.shipped import model_title


def gguf_choices(
    model: str,
    checkpoint: Checkpoint,
    plan: Plan,
    sampling: Mapping[str, float] | None,
    draft: str | None,
    why_none: str,
) -> tuple[str, ...]:
    """Return a sentence for each choice that the user left to us, or () for other files and for "default".

    `draft`: the opened drafter. `why_none`: why a known drafter was not opened. `sampling`: None if the
    request defaults do not come from the model.
    """
    if not isinstance(checkpoint, GgufCheckpoint) or model == "default":
        return ()
    found = []
    if known_name(model) == "default":
        found.append(f"file: '{model}' is the default model's: served as --model default is")
    if not plan.is_asked("draft"):
        found.append(_drafter(draft, why_none))
    if not plan.is_asked("quantization"):
        found.append(_weights(checkpoint, plan))
    if sampling is not None:
        found.append(_sampling(checkpoint, sampling))
    return tuple(found)


def _drafter(draft: str | None, why_none: str) -> str:
    if draft is not None:
        return f"drafter: {model_title(draft)}, which was made for this model"
    return f"drafter: none, so decoding is plain: {why_none or 'none is known for this model'}"


def _weights(checkpoint: GgufCheckpoint, plan: Plan) -> str:
    computed = "int8" if plan.quantization == "int8" else plan.dtype
    return f"weights: {checkpoint.main_type}, computed in {computed}: {plan.reasons['quantization']}"


def _sampling(checkpoint: GgufCheckpoint, sampling: Mapping[str, float]) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    if known_name(checkpoint.name) == "default":
        source = "as its model card says"
    elif not checkpoint.own_sampling:
        source = "llama.cpp's defaults, as the file has none of its own"
    else:
        own = ", ".join(name for name in sampling if name in checkpoint.own_sampling)
        source = f"{own} from the file, the rest llama.cpp's defaults"
    return f"sampling where a request does not say: {values} ({source})"
