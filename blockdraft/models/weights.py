"""From a checkpoint's tensors to parameters: one table of names, every shape checked, nothing left over.

The table maps each of our parameters to the checkpoint tensors it stacks along its first axis. Training
reads the same table the other way to export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from blockdraft.errors import ModelError
from blockdraft.models.checkpoint import Checkpoint
from blockdraft.models.layers import Linear

_LAYER = {
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_DRAFT_LAYER = {
    **{name: sources for name, sources in _LAYER.items() if not name.startswith("attention.")},
    "q": ("self_attn.q_proj",),
    "kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
}
_TOP = {"embedding": ("model.embed_tokens.weight",), "head.weight": ("lm_head.weight",)}
_DRAFT_TOP = {"head.weight": ("lm_head.weight",)}

# Stored by some exporters, derived or borrowed by us.
_SKIPPED = (r".*rotary_emb\.inv_freq",)
_SKIPPED_TIED = (*_SKIPPED, r"lm_head\.weight")
_DRAFT_SKIPPED = (*_SKIPPED, r"embed_tokens\.weight", r"d2t", r"t2d", r"verifier_.*")


def decoder_sources(parameter: str) -> tuple[str, ...]:
    """Checkpoint names for a parameter of a Decoder."""
    return _sources(parameter, top=_TOP, layer=_LAYER, prefix="model.")


def drafter_sources(parameter: str) -> tuple[str, ...]:
    """Checkpoint names for a parameter of a DFlash drafter, the same in both layouts."""
    return _sources(parameter, top=_DRAFT_TOP, layer=_DRAFT_LAYER, prefix="")


def load_decoder(model: nn.Module, checkpoint: Checkpoint, *, is_tied: bool) -> None:
    skipped = _SKIPPED_TIED if is_tied else _SKIPPED
    _load(model, checkpoint, decoder_sources, skipped)


def load_drafter(model: nn.Module, checkpoint: Checkpoint) -> None:
    _load(model, checkpoint, drafter_sources, _DRAFT_SKIPPED)


def _sources(
    parameter: str,
    *,
    top: Mapping[str, tuple[str, ...]],
    layer: Mapping[str, tuple[str, ...]],
    prefix: str,
) -> tuple[str, ...]:
    if parameter in top:
        return top[parameter]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", parameter)
    if match is None:
        return (prefix + parameter,)
    index, name, kind = match.groups()
    return tuple(f"{prefix}layers.{index}.{source}.{kind}" for source in layer[name])


def _load(
    model: nn.Module,
    checkpoint: Checkpoint,
    sources: Callable[[str], tuple[str, ...]],
    skipped: Iterable[str],
) -> None:
    shapes = checkpoint.shapes()
    parts = {
        f"{path}.{kind}": module.parts
        for path, module in model.named_modules()
        if isinstance(module, Linear)
        for kind in ("weight", "bias")
    }
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        names = sources(name)
        rows = parts.get(name, (parameter.shape[0],))
        used.update(names)
        begin = 0
        for source, count in zip(names, rows, strict=True):
            expected = (count, *parameter.shape[1:])
            _check(checkpoint, shapes, source, expected)
            with torch.no_grad():
                parameter[begin : begin + count].copy_(checkpoint.read(source))
            begin += count
    _refuse_leftovers(checkpoint, set(shapes) - used, skipped)


def _check(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    expected: tuple[int, ...],
) -> None:
    if name not in shapes:
        raise ModelError(
            f"'{checkpoint.name}' has no tensor '{name}': the files and config.json do not belong "
            "together, or the download is incomplete. Fetch the checkpoint again."
        )
    if tuple(shapes[name]) != expected:
        raise ModelError(
            f"'{checkpoint.name}': tensor '{name}' has shape {list(shapes[name])}, but config.json "
            f"asks for {list(expected)}. Check that the files belong together."
        )


def _refuse_leftovers(checkpoint: Checkpoint, names: set[str], skipped: Iterable[str]) -> None:
    patterns = [re.compile(pattern) for pattern in skipped]
    unknown = sorted(name for name in names if not any(p.fullmatch(name) for p in patterns))
    if unknown:
        raise ModelError(
            f"'{checkpoint.name}': {len(unknown)} tensors that this architecture does not use, "
            f"'{unknown[0]}' first: running without them would be another model. See docs/models.md."
        )
