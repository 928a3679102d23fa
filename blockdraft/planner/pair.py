"""Finds, reads and checks the pair to serve, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from blockdraft.checkpoints.names import mtp_tensors
from blockdraft.checkpoints.read_draft_config import draft_block, read_draft_config
from blockdraft.checkpoints.read_model_config import read_target
from blockdraft.checkpoints.read_mtp_config import read_mtp_config
from blockdraft.errors import FetchError, ModelError
from blockdraft.kernels.packed_speeds import Code, code_of
from blockdraft.machine.cards import Card
from blockdraft.machine.machine import Machine
from blockdraft.models.config import ModelConfig
from blockdraft.models.draft_config import DraftConfig, check_pair
from blockdraft.models.mtp_config import AnyDraftConfig, MtpConfig
from blockdraft.planner.acceptance import (
    Acceptance,
    drafter_acceptance,
    own_acceptance,
    published_acceptance,
)
from blockdraft.planner.plan import NGRAM_BLOCK, Weights
from blockdraft.planner.resolver import (
    asked_otherwise,
    known_drafter_for,
    runs_on_cpu,
    with_drafter,
)
from blockdraft.planner.shape import Shape, draft_shape, mtp_shape, raw_shape, target_shape
from blockdraft.planner.stored import Stored, open_stored
from blockdraft.settings.settings import MTP, NGRAM, Settings


@dataclass(frozen=True, slots=True)
class Model:
    """A target or a drafter."""

    stored: Stored
    shape: Shape

    @property
    def weights(self) -> Weights:
        """Return the weights as `resolve` takes them. Without files they count as not quantised."""
        num_values = 0 if self.shape.values is None else self.shape.values.total
        if self.stored.tensors is None:
            return Weights(num_values)
        return Weights(num_values, self.stored.method, self.code)

    @property
    def code(self) -> Code | None:
        stored = self.stored
        return code_of(stored.method, stored.full_config, ggml_type=stored.ggml_type)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, and its drafter if it has one. A configuration is None if our engine does not support it."""

    target: Model
    draft: Model | None
    config: ModelConfig | None
    draft_config: AnyDraftConfig | None
    block: int  # 1: no drafter
    is_ngram: bool = False  # drafts come from n-grams of the text itself

    @property
    def draft_name(self) -> str:
        if self.draft is None:
            return NGRAM if self.is_ngram else "none"
        return self.draft.stored.name

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def acceptance(self) -> Acceptance:
        """Return the acceptance measured with the drafter, else the one in its files or published."""
        name = self.draft_name if self.draft is None else self.draft.shape.name
        if isinstance(self.draft_config, MtpConfig):
            return published_acceptance(self.target.shape.name, name, "mtp")
        measured = drafter_acceptance(name)
        if measured is not None:
            return measured
        if self.draft is not None and self.draft.stored.fit_file:
            return own_acceptance(self.draft.stored.fit_file, name=name)
        kind = "dflash" if self.draft_config is None else self.draft_config.kind
        return published_acceptance(self.target.shape.name, name, kind)


@dataclass(frozen=True, slots=True)
class Case:
    """A pair on a machine, with the user's settings."""

    settings: Settings
    machine: Machine
    pair: Pair
    card: Card | None = None  # None: its speed is not known, so nothing is estimated
    is_allowed: Callable[[Case], bool] = lambda case: True  # only allowed cases are advised

    def asking(self, **changes: object) -> Case:
        """Return the case with these settings changed."""
        return replace(self, settings=asked_otherwise(self.settings, **changes))

    @property
    def is_cpu(self) -> bool:
        return runs_on_cpu(self.settings, self.machine)


def open_pair(settings: Settings, *, on_card: bool = False) -> Pair:
    """Open a pair. Download only headers and small files. Raise ModelError or FetchError.

    `on_card`: as in `with_drafter`.
    """
    draft = with_drafter(settings, on_card=on_card).draft
    has_files, is_native = settings.load_format != "dummy", settings.engine == "native"
    stored = open_stored(settings.model, needs_weights=has_files)
    config, target = _target(stored, is_native=is_native)
    _check_size(target)
    alone = Pair(target, None, config, None, 1)
    if draft == NGRAM:
        return replace(alone, block=NGRAM_BLOCK, is_ngram=True)
    if draft == MTP:
        return _with_mtp(alone, settings)
    if draft not in (None, "none"):
        return _with_draft(alone, draft, has_files=has_files, is_native=is_native)
    known = known_drafter_for(settings, stored.published_names)
    try:
        if known is not None and known.is_here:
            return _with_draft(alone, known.name, has_files=has_files, is_native=is_native)
        if settings.draft == "auto" and is_native:
            return _with_mtp(alone, settings)
    except (ModelError, FetchError):  # the user did not request this drafter, so a start continues without it
        pass
    return alone


def drafts(settings: Settings) -> bool:
    """Return whether a start with these settings is known to draft; "auto" reads the target's headers."""
    if with_drafter(settings).draft not in (None, "none"):
        return True
    if settings.draft != "auto" or settings.engine != "native":
        return False
    try:
        return open_pair(settings).draft is not None
    except (ModelError, FetchError):
        return False


def _with_mtp(alone: Pair, settings: Settings) -> Pair:
    """Return the pair of a target and the MTP head in its checkpoint. Raise ModelError if there is none."""
    stored, target = alone.target.stored, alone.config
    assert target is not None, "our engine computes the target"
    config = read_mtp_config(stored.config, target, stored.tensors, width=settings.width)
    tensors = mtp_tensors(stored.sizes)
    is_packed = any(size.is_packed for size in tensors.values())
    head = replace(
        stored,
        name=MTP,
        config=stored.config if is_packed else {},
        quant_file=stored.quant_file if is_packed else None,
        tensors=None if stored.tensors is None else tensors,
    )
    shape = mtp_shape(config)
    num_values = sum(size.num_values for size in tensors.values())
    if tensors and not is_packed and shape.values is not None and num_values != shape.values.total:
        raise ModelError(
            f"'{stored.name}': the tensors of its MTP head, mtp.fc.weight and others, hold {num_values:,} "
            f"values, but config.json asks for {shape.values.total:,}. Use --draft none."
        )
    return replace(alone, draft=Model(head, shape), draft_config=config, block=config.block)


def _with_draft(alone: Pair, draft_source: str, *, has_files: bool, is_native: bool) -> Pair:
    draft_stored = open_stored(draft_source, needs_weights=has_files, what="drafter")
    draft_config, draft = _draft(draft_stored, is_native=is_native)
    _check_size(draft)
    block = draft_config.block if draft_config is not None else draft_block(draft_stored.config)
    pair = replace(alone, draft=draft, draft_config=draft_config, block=block)
    _check_match(pair)
    return pair


def _check_size(model: Model) -> None:
    """Raise ModelError if the size is unknown: only the files have it for models that we do not support."""
    if model.stored.tensors is None and model.shape.values is None:
        raise ModelError(
            f"'{model.stored.name}' is not computed by our engine, and config.json alone does not tell its "
            "size: leave out --load-format dummy."
        )


def check_stored(target: Stored, draft: Stored) -> None:
    """Raise ModelError if the two models do not match. Ignore unreadable configurations."""
    try:
        config, target_model = _target(target, is_native=False)
        draft_config, draft_model = _draft(draft, is_native=False)
    except ModelError:
        return
    _check_match(Pair(target_model, draft_model, config, draft_config, block=1))


def _check_match(pair: Pair) -> None:
    assert pair.draft is not None
    target, draft = pair.target, pair.draft
    if pair.config is not None and isinstance(pair.draft_config, DraftConfig):
        check_pair(pair.draft_config, pair.config, target.stored.eos_ids)
    elif draft.shape.hidden_size != target.shape.hidden_size:
        raise ModelError(
            f"draft '{draft.shape.name}' has hidden size {draft.shape.hidden_size}, but "
            f"'{target.shape.name}' has {target.shape.hidden_size}: the pair does not match. "
            "See docs/models.md."
        )


def _target(stored: Stored, *, is_native: bool) -> tuple[ModelConfig | None, Model]:
    try:
        config = read_target(stored.config, stored.tensors, name=stored.name)
    except ModelError as error:
        if is_native:
            raise ModelError(f"{error} vLLM and SGLang may run it: --engine vllm.") from None
        return None, Model(stored, raw_shape(stored.config, name=stored.name))
    return config, Model(stored, target_shape(config))


def _draft(stored: Stored, *, is_native: bool) -> tuple[DraftConfig | None, Model]:
    try:
        config = read_draft_config(stored.config, name=stored.name)
    except ModelError:
        if is_native:
            raise
        return None, Model(stored, raw_shape(stored.config, name=stored.name))
    has_head = config.has_own_head(is_stored="lm_head.weight" in stored.sizes) or (
        stored.tensors is None and config.draft_vocab_size != config.vocab_size
    )
    return config, Model(stored, draft_shape(config, has_head=has_head))
