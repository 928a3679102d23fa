"""Reads the shape of the multi-token prediction (MTP) head that a target's checkpoint may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.names import mtp_prefix
from blockdraft.errors import ModelError
from blockdraft.models.config import AttentionConfig, ModelConfig
from blockdraft.models.mtp_config import MtpConfig
from blockdraft.settings.settings import MTP

# A head has no trained block. Published servers draft 1 to 7 tokens with it.
MTP_BLOCK = 8
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_REMEDY = "Use --draft auto, or name a drafter."
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # of the head's layers, by family


def read_mtp_config(
    raw: Mapping[str, object],
    target: ModelConfig,
    tensors: Collection[str] | None,
    *,
    width: int | Literal["auto"] = "auto",
) -> MtpConfig:
    """Return the shape of the MTP head of `target`, whose config.json is `raw`.

    The file says nothing of the head's layer: it is an attention layer with the feed-forward part of the
    target's first layer. `tensors` has the tensor names in its files; None: not known. `width`: the tokens of
    a step, if the user sets them; they may be more than MTP_BLOCK. Raise ModelError if there is no head, or
    not one that we compute.
    """
    fields = _text(raw, target.name)
    attention = next((one.mixer for one in target.layers if isinstance(one.mixer, AttentionConfig)), None)
    if target.family not in FAMILIES or attention is None:
        raise ModelError(
            f"'{target.name}' has no MTP head that we know: only Qwen3-Next, Qwen3.5 and Qwen3.6 have one. "
            f"{_REMEDY}"
        )
    if tensors is not None and mtp_prefix(tensors) is None:
        raise ModelError(
            f"'{target.name}' has no MTP head: its files hold no tensor 'mtp.fc.weight'. {_REMEDY}"
        )
    for key in _COUNTS:
        fields.refuse(key, 1)
    fields.refuse("mtp_use_dedicated_embeddings", False)
    layer = replace(target.layers[0], mixer=attention)
    block = MTP_BLOCK if width == "auto" else max(width, MTP_BLOCK)
    return MtpConfig(MTP, block, replace(target, name=MTP, layers=(*target.layers, layer)))


def expects_mtp(target: ModelConfig) -> bool:
    """Return whether checkpoints of the target's family are published with a head."""
    return target.family in FAMILIES


def _text(raw: Mapping[str, object], name: str) -> Fields:
    whole = Fields(raw, owner=name)
    return whole.section("text_config") if "text_config" in raw else whole
