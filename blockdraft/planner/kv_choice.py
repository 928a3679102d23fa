"""Chooses how keys and values are stored for --kv-dtype, or refuses the format for this pair of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.cache.spec import LayerSpec, Paged, Windowed, compressed, is_compressible
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.kv_formats import (
    BITS,
    CARD,
    EXACT,
    ROTATED,
    WIDEST_BLOCK,
    check_format,
    exact_tokens,
)
from blockdraft.machine.machine import Machine
from blockdraft.models.config import ModelConfig
from blockdraft.models.mtp_config import AnyDraftConfig

# Other programs' names for the formats.
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8"}
EIGHT_BITS_ONLY = {
    "gpt_oss": "gpt-oss attends to sink logits, which keys that are stored less a constant would not meet",
    "gemma4": "Gemma 4's layers share keys of few heads, and nobody has measured what 4 bits do to them",
}
TAIL_SHARE = 4  # for this many rows, one more window is kept for prefixes that no sequence uses


@dataclass(frozen=True, slots=True)
class KvRequest:
    """The settings with these names, as the user gave them."""

    kv_dtype: str
    draft_kv_dtype: str
    kv_window: int
    page_size: int


@dataclass(frozen=True, slots=True)
class KvChoice:
    """The formats of both models' keys and values, EXACT if they are not compressed."""

    asked: KvRequest
    target: str
    draft: str
    reasons: Mapping[str, str]

    def specs(self, model: ModelConfig, draft: AnyDraftConfig | None) -> tuple[LayerSpec, ...]:
        specs = compressed(model.layer_specs(), self.target)
        return specs + (compressed(draft.layer_specs(), self.draft) if draft is not None else ())

    @property
    def is_compressed(self) -> bool:
        return self.target != EXACT or self.draft != EXACT

    def row_tokens(self, block: int) -> int:
        """Return how many tokens a row keeps exact."""
        return exact_tokens(self.asked.kv_window, self.asked.page_size, block) if self.is_compressed else 0

    def num_exact_pages(self, max_num_seqs: int, block: int, chunk: int) -> int:
        """Return the number of exact pages for all rows, the prompt tokens in flight and cached prefixes."""
        if not self.is_compressed:
            return 0
        size = self.asked.page_size
        windows = max_num_seqs + max(1, max_num_seqs // TAIL_SHARE)
        return windows * (self.row_tokens(block) // size) + -(-chunk // size) + windows


def kv_choice(
    asked: KvRequest, dtype: str, model: ModelConfig, draft: AnyDraftConfig | None, block: int
) -> KvChoice:
    """Choose both formats. Raise SettingsError or ModelError if one is unknown or does not fit the model."""
    reasons = {}
    target, reasons["kv_dtype"] = _format("kv_dtype", asked.kv_dtype, dtype)
    if target != EXACT:
        if target in ROTATED and model.family in EIGHT_BITS_ONLY:
            raise SettingsError(
                f"kv_dtype = {target}, but {EIGHT_BITS_ONLY[model.family]}: use --kv-dtype int8."
            )
        _check(model.layer_specs(), "kv_dtype", target)
    drafted = EXACT
    if draft is not None:
        drafted, reasons["draft_kv_dtype"] = _format("draft_kv_dtype", asked.draft_kv_dtype, dtype)
        if drafted != EXACT:
            _check(draft.layer_specs(), "draft_kv_dtype", drafted)
    choice = KvChoice(asked, target, drafted, reasons)
    least = max(block, WIDEST_BLOCK)
    if choice.is_compressed and asked.kv_window < least:
        raise SettingsError(
            f"kv_window = {asked.kv_window}, but a block has {least} tokens, which must not be compressed "
            f"before they are verified: use --kv-window {least} or more."
        )
    return choice


def check_on_card(
    kv: KvChoice, dtype: str, model: ModelConfig, draft: AnyDraftConfig | None, machine: Machine
) -> None:
    """Raise SettingsError for compressed keys and values that a start would refuse on this card."""
    capability = machine.gpus[0].capability if machine.gpus else None
    if capability is not None:
        layers = model.layer_specs(), () if draft is None else draft.layer_specs()
        check_card_layers((kv.target, kv.draft), layers, dtype, kv.asked.page_size, capability)


def check_card_layers(
    formats: tuple[str, str],
    layers: tuple[tuple[LayerSpec, ...], tuple[LayerSpec, ...]],
    dtype: str,
    page_size: int,
    capability: tuple[int, int],
) -> None:
    """Raise SettingsError if engines were not tested with the target's and the drafter's layers on a card."""
    both = zip(formats, layers, strict=True)
    found = [one for format, specs in both if format != EXACT for one in specs if isinstance(one, Paged)]
    served = all(
        one.head_dim in CARD.head_dims and (CARD.has_windows or not isinstance(one, Windowed))
        for one in found
    )
    is_tested = dtype == "bfloat16" and page_size % CARD.page == 0 and capability >= CARD.capability
    if found and not (served and is_tested and (formats[1] == EXACT or CARD.has_drafter)):
        raise SettingsError(f"kv_dtype = {formats[0]}, draft_kv_dtype = {formats[1]}: {CARD.why_not()}.")


def _format(name: str, asked: str, dtype: str) -> tuple[str, str]:
    """Return the format that the setting `name` requests, and the reason."""
    asked = SHORT_NAMES.get(asked, asked)
    if asked == "auto":
        return EXACT, f"{dtype}, the model's own" if name == "kv_dtype" else f"{dtype}: it is small"
    if asked == dtype:
        return EXACT, "asked for"
    if asked == "fp8":
        raise SettingsError(
            f"{name} = fp8, which our engine does not have: use int8, of equal bytes and less error."
        )
    if asked in BITS:
        return asked, "asked for"
    raise SettingsError(
        f"{name} = {asked}, which our engine does not know: use auto or {dtype} (not compressed), "
        f"or one of {', '.join(BITS)}."
    )


def _check(specs: tuple[LayerSpec, ...], name: str, format: str) -> None:
    for spec in specs:
        if is_compressible(spec):
            try:
                check_format(format, spec.head_dim)
            except ModelError as error:
                raise ModelError(f"{name} = {format}: {error}") from None
