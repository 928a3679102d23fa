"""LoadedPair: everything that an engine runs; `start/loading.py` loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from blockdraft.cache.spec import LayerSpec, compressed
from blockdraft.checkpoints.fit_file import Acceptance
from blockdraft.checkpoints.opening import StoredForm
from blockdraft.kernels.choice import HOST_BOUND, has_triton
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import Kernels
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.models.config import ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.layers import Embedding, Linear
from blockdraft.models.moe import Experts
from blockdraft.models.mtp_config import AnyDraftConfig, MtpConfig
from blockdraft.models.packed import Packed, Scaled
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.models.packed_words import Words
from blockdraft.planner.plan import ASKED, Plan
from blockdraft.settings.settings import NGRAM
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.drafter import Drafter
from blockdraft.step.ngram import NgramDrafter
from blockdraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of an engine that is good for timing only. Print the notices with all of its output."""

    is_dummy: bool = False  # the weights are random
    synthetic_acceptance: str | None = None  # the profile by which drafts are accepted
    notices: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()  # for a GGUF file given by its path: what "auto" means for it, and why


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Everything that an engine runs."""

    config: ModelConfig
    draft_config: AnyDraftConfig | None
    target: Decoder
    drafter: Drafter
    tokenizer: Tokenizer
    device: torch.device
    dtype: str  # that both compute in
    stored: StoredForm  # what the target was read from
    draft_stored: StoredForm | None = None
    rates: tuple[float, ...] | None = None  # synthetic acceptance, for timing only; None: real
    labels: Labels = Labels()
    acceptance: Acceptance = field(default_factory=dict)  # of its drafts, by category; empty: not known
    sampling: Mapping[str, float] = field(default_factory=dict)  # the defaults of requests

    @property
    def draft_name(self) -> str | None:
        """Return the name of the drafter's configuration, NGRAM for n-grams only, or None for no drafter."""
        if self.draft_config is not None:
            return self.draft_config.name
        return NGRAM if isinstance(self.drafter, NgramDrafter) else None

    def most_context(self, plan: Plan) -> int:
        """Return the highest value for --max-model-len; "auto" uses it."""
        is_asked = plan.reasons.get("max_model_len") == ASKED
        return max(self.config.max_positions, plan.max_model_len) if is_asked else plan.max_model_len

    def cache_specs(self, kv_dtype: str = EXACT, draft_kv_dtype: str = EXACT) -> tuple[LayerSpec, ...]:
        """Return the cache spec of each layer of the target, then of the drafter."""
        specs = compressed(self.config.layer_specs(), kv_dtype)
        if self.draft_config is None:
            return specs
        return specs + compressed(self.draft_config.layer_specs(), draft_kv_dtype)

    @property
    def has_mtp(self) -> bool:
        """Return whether the target's own MTP head drafts: its keys also depend on the token after theirs."""
        return isinstance(self.draft_config, MtpConfig)

    def with_kernels(self, kernels: Kernels) -> LoadedPair:
        """Return the same models, with shared weights, that compute with `kernels`."""
        target = with_kernels(self.target, kernels)
        return replace(self, target=target, drafter=self.drafter.beside(target))

    def models(self) -> list[nn.Module]:
        """Return the target, and the drafter's model if it has one."""
        return [self.target, *([] if self.drafter.model is None else [self.drafter.model])]

    @property
    def block_drafter(self) -> DFlashDrafter | None:
        """Return the drafter if it drafts a block with one forward, else None."""
        return self.drafter if isinstance(self.drafter, DFlashDrafter) else None

    def why_not_captured(self) -> str | None:
        """Return why decode steps cannot be captured, or None if they can."""
        reasons = (self._why_not(module) for part in self.models() for module in part.modules())
        return self._why_no_graph() or next((reason for reason in reasons if reason is not None), None)

    def _why_no_graph(self) -> str | None:
        """Return why no step can be captured on this device, or None if steps can be."""
        if self.device.type != "cuda":
            reason = why_no_llvm(getattr(torch, self.dtype), self.device)
            is_native = self.target.kernels.available.path == "llvm"
            return reason or (None if is_native else "only the CPU's own kernels are recorded")
        if self.dtype == "float64":
            return "the GPU's kernels do not compute in float64"
        if not has_triton():
            return "Triton is not installed"
        slow = [operation for operation in self.target.kernels.off if operation in HOST_BOUND]
        if slow:
            return f"the kernel of {slow[0]} does not compile on this card; a graph cannot hold its reference"
        return None

    def _why_not(self, module: nn.Module) -> str | None:
        """Return why steps with this module cannot be captured, or None if they can."""
        if isinstance(module, Experts):
            return module.why_not_captured() if self.device.type == "cuda" else "the host finds the experts"
        if not isinstance(module, Linear | Embedding) or not isinstance(module.weight, Packed):
            return None
        weight = module.weight
        has_kernel = isinstance(weight, Words) or (isinstance(weight, Scaled) and weight.has_row_scales)
        if isinstance(weight, Int8Matrix) or (has_kernel and self.device.type == "cuda"):
            return None
        return f"{type(weight).__name__} weights have no kernel of their own: see --quantization"
