"""Models: everything an engine runs, loaded; where it comes from is the business of `start/loading.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from blockdraft.checkpoints.fit_file import Acceptance
from blockdraft.kernels.choice import HOST_BOUND, has_triton
from blockdraft.kernels.kernels import Kernels
from blockdraft.models.config import ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.layers import Embedding, Linear
from blockdraft.models.moe import Experts
from blockdraft.models.packed import Packed, Scaled
from blockdraft.planner.plan import Plan
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.drafter import Drafter
from blockdraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Labels:
    """What makes an engine good for timing only; each notice belongs beside everything it puts out."""

    is_dummy: bool = False  # the weights are random
    synthetic_acceptance: str | None = None  # the profile by which drafts are accepted
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Models:
    """Everything an engine runs."""

    config: ModelConfig
    draft_config: DraftConfig | None
    target: Decoder
    drafter: Drafter
    tokenizer: Tokenizer
    plan: Plan
    device: torch.device
    rates: tuple[float, ...] | None = None  # synthetic acceptance, for timing alone; None: real
    labels: Labels = Labels()
    acceptance: Acceptance = field(default_factory=dict)  # of its drafts, by category; empty: not known
    sampling: Mapping[str, float] = field(default_factory=dict)  # of requests that do not say

    def __post_init__(self) -> None:
        assert self.rates is None or len(self.rates) >= self.plan.block - 1, "a rate for each draft"

    def with_kernels(self, kernels: Kernels) -> Models:
        """The same models, weights shared, that compute by `kernels`."""
        target, drafter = with_kernels(self.target, kernels), self.drafter
        if isinstance(drafter, DFlashDrafter):
            drafter = drafter.beside(target)
        return replace(self, target=target, drafter=drafter)

    def why_not_captured(self) -> str | None:
        """What keeps a decode step out of a CUDA graph; None: nothing."""
        if self.device.type != "cuda":
            return "there is no GPU"
        if self.plan.dtype == "float64":
            return "the GPU's kernels do not compute in float64"
        if not has_triton():
            return "Triton is not installed"
        slow = [operation for operation in self.target.kernels.off if operation in HOST_BOUND]
        if slow:
            return f"the kernel of {slow[0]} does not compile on this card; a graph cannot hold its reference"
        parts = [self.target, *([self.drafter.model] if isinstance(self.drafter, DFlashDrafter) else [])]
        for module in (module for part in parts for module in part.modules()):
            if isinstance(module, Experts):
                reason = module.why_not_captured()
                if reason is not None:
                    return reason
            elif isinstance(module, Linear | Embedding) and isinstance(module.weight, Packed):
                weight = module.weight
                if not isinstance(weight, Scaled) or not weight.has_row_scales:
                    return f"{type(weight).__name__} weights have no kernel of their own: see --quantization"
        return None
