"""Loading a pair: checkpoints in, a target, a drafter, a tokenizer and a plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.drafter import Drafter, NoDrafter
from blockdraft.engine.tokenizer import Tokenizer
from blockdraft.errors import ModelError
from blockdraft.machine import read_machine
from blockdraft.models.checkpoint import Checkpoint, open_checkpoint
from blockdraft.models.config import ModelConfig, read_model_config
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_config import DraftConfig, check_pair, read_draft_config
from blockdraft.models.registry import build_decoder
from blockdraft.models.weights import load_decoder, load_drafter
from blockdraft.plan import Plan, make_plan
from blockdraft.settings import Settings

Module = TypeVar("Module", bound=nn.Module)


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


def load_models(settings: Settings, report: Callable[[str], None]) -> Models:
    """Open, check, plan, then read the weights: every cheap check comes before the expensive part."""
    device = _device(settings.device)
    report(f"opening {settings.model}")
    checkpoint = open_checkpoint(settings.model, report=report)
    config = read_model_config(checkpoint.config, name=checkpoint.name)
    tokenizer = Tokenizer(checkpoint.tokenizer_parts())
    draft_checkpoint = None
    draft_config = None
    if settings.draft not in (None, "none"):
        report(f"opening {settings.draft}")
        draft_checkpoint = open_checkpoint(settings.draft, report=report)
        draft_config = read_draft_config(draft_checkpoint.config, name=draft_checkpoint.name)
        check_pair(draft_config, config, tokenizer.eos_ids)
    plan = make_plan(settings, read_machine(), config, draft_config)
    report(f"loading weights as {plan.dtype}")
    target = load_target(checkpoint, config, draft_config, plan, device)
    drafter: Drafter = NoDrafter(plan.width)
    if draft_checkpoint is not None and draft_config is not None:
        drafter = load_dflash(draft_checkpoint, draft_config, target, plan, device)
        draft_checkpoint.close()
    checkpoint.close()
    return Models(config, draft_config, target, drafter, tokenizer, plan, device)


def load_target(
    checkpoint: Checkpoint,
    config: ModelConfig,
    draft: DraftConfig | None,
    plan: Plan,
    device: torch.device,
) -> Decoder:
    taps = draft.taps if draft is not None else ()
    target = _empty(
        lambda: build_decoder(config, taps=taps, max_positions=plan.max_positions),
        plan.dtype,
        device,
    )
    load_decoder(target, checkpoint, is_tied=config.ties_embeddings)
    return target


def load_dflash(
    checkpoint: Checkpoint,
    config: DraftConfig,
    target: Decoder,
    plan: Plan,
    device: torch.device,
) -> DFlashDrafter:
    shapes = checkpoint.shapes()
    has_head = "lm_head.weight" in shapes
    model = _empty(
        lambda: DFlash(
            config,
            first_layer=target.config.num_layers,
            max_positions=plan.max_positions,
            has_head=has_head,
        ),
        plan.dtype,
        device,
    )
    load_drafter(model, checkpoint)
    return DFlashDrafter(model, target, _vocab_map(checkpoint, config, has_head, device))


def _empty(build: Callable[[], Module], dtype: str, device: torch.device) -> Module:
    """A module with uninitialised parameters of `dtype`, frozen, for inference."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            module = build()
    finally:
        torch.set_default_dtype(before)
    return module.requires_grad_(False).eval()


def _vocab_map(
    checkpoint: Checkpoint, config: DraftConfig, has_head: bool, device: torch.device
) -> Tensor | None:
    """Target token id of each row of a reduced head: `d2t` stores the difference to the row number."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    shapes = checkpoint.shapes()
    if not has_head or shapes.get("d2t") != (config.draft_vocab_size,):
        raise ModelError(
            f"draft '{config.name}' has a vocabulary of {config.draft_vocab_size} of the target's "
            f"{config.vocab_size} tokens, but no lm_head.weight and d2t of that size. See docs/models.md."
        )
    offsets = checkpoint.read("d2t").to(torch.int64)
    ids = torch.arange(len(offsets)) + offsets
    is_valid = bool((ids >= 0).all() and (ids < config.vocab_size).all())
    if is_valid and "t2d" in shapes:
        is_whole = shapes["t2d"] == (config.vocab_size,)
        is_valid = is_whole and bool(checkpoint.read("t2d").bool()[ids].all())
    if not is_valid or len(set(ids.tolist())) != len(ids):
        raise ModelError(
            f"draft '{config.name}': d2t does not map onto the target's vocabulary. Fetch it again."
        )
    return ids.to(device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from error
    return device
