"""Loads a pair: makes a target, a drafter, a tokenizer and a plan from checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from blockdraft.checkpoints.checkpoint import Checkpoint
from blockdraft.checkpoints.dummy import byte_tokenizer, fill, vocab_map
from blockdraft.checkpoints.fit_file import Acceptance, read_fit
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.checkpoints.model_folder import GENERATION_FILE
from blockdraft.checkpoints.opening import open_checkpoint, stored_form, stored_head
from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_target
from blockdraft.checkpoints.read_mtp_config import expects_mtp, read_mtp_config
from blockdraft.checkpoints.weights import load_checkpoint, match_tensors
from blockdraft.engine.loaded_pair import Labels, LoadedPair
from blockdraft.engine.sampling_defaults import sampling_defaults
from blockdraft.errors import CapacityError, FetchError, ModelError
from blockdraft.kernels.choice import has_triton
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.packed_speeds import code_of
from blockdraft.machine.machine import read_machine
from blockdraft.models.config import ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash2, body_type
from blockdraft.models.draft_config import DraftConfig, check_pair
from blockdraft.models.kernel_module import bind
from blockdraft.models.mtp import MtpHead
from blockdraft.models.mtp_config import AnyDraftConfig, MtpConfig
from blockdraft.models.registry import build_decoder
from blockdraft.planner.known_pairs import KnownDrafter, KnownPair, pairs_of
from blockdraft.planner.plan import Plan, Weights
from blockdraft.planner.resolver import device_for, known_drafter_for, resolve, with_drafter
from blockdraft.planner.values import Values, draft_values, mtp_values, target_values
from blockdraft.settings.acceptance_profile import acceptance_rates
from blockdraft.settings.settings import MTP, NGRAM, Settings, check_device
from blockdraft.start.card_errors import unusable, usage
from blockdraft.start.gguf_choices import gguf_choices
from blockdraft.start.preflight import read_chat_template
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.drafter import Drafter, NoDrafter
from blockdraft.step.mtp import MtpDrafter
from blockdraft.step.ngram import NGRAM_ACCEPTANCE, NgramDrafter
from blockdraft.step.pairs import drafter_type
from blockdraft.text.tokenizer import Tokenizer

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class OpenedTarget:
    """A target that was found and checked; its weights are not read yet."""

    checkpoint: Checkpoint
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    has_tokenizer: bool  # False: `tokenizer` makes a token of each byte
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A drafter that was found and matches its target; its weights are not read yet."""

    checkpoint: Checkpoint  # of an MTP head: the target's
    config: AnyDraftConfig
    weights: Weights
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class Opened:
    """A pair that was found, checked and planned for."""

    target: OpenedTarget
    draft: OpenedDrafter | None
    plan: Plan
    device: torch.device
    rates: tuple[float, ...] | None
    labels: Labels


def load_pair(
    report: Callable[[str], None] = lambda line: None, **settings: object
) -> tuple[LoadedPair, Plan]:
    """Load a pair, given the values of its settings."""
    return load_models(Settings(**settings), report)  # type: ignore[arg-type]


def load_models(settings: Settings, report: Callable[[str], None]) -> tuple[LoadedPair, Plan]:
    """Open, check, plan, then read the weights: every cheap check comes before the expensive part."""
    opened = open_models(settings, report)
    return read_weights(opened, report), opened.plan


def open_models(settings: Settings, report: Callable[[str], None]) -> Opened:
    """Find or download both checkpoints, check that they belong together, and make the plan."""
    device, profile = _device(resolve_device(settings.device)), settings.synthetic_acceptance
    source = with_drafter(settings, report, on_card=device.type != "cpu").draft
    target = _open_target(settings, report)
    draft, why_none = None, ""
    if source == MTP:
        draft = _open_mtp(target, settings)
    elif source not in (None, "none", NGRAM):
        needs_weights = settings.load_format != "dummy"
        draft = _open_drafter(source, target, report, needs_weights=needs_weights)
    elif isinstance(target.checkpoint, GgufCheckpoint):
        known = known_drafter_for(settings, target.checkpoint.published_names)
        draft, why_none = _open_known(known, target, report)
    elif settings.draft == "auto" and expects_mtp(target.config):
        draft = _open_own(target, settings, report)
    plan = _plan(settings, device, target, draft)
    rates = None if profile is None else acceptance_rates(profile, width=plan.width, block=plan.block)
    methods = [one.weights.method for one in (target, draft) if one is not None]
    notices = timing_notices(settings, methods, has_tokenizer=target.has_tokenizer)
    draft_name = None if draft is None else draft.config.name
    told = target.sampling if settings.sampling_defaults == "model" else None
    chosen = gguf_choices(settings.model, target.checkpoint, plan, told, draft_name, why_none)
    labels = Labels(settings.load_format == "dummy", profile, notices, chosen)
    return Opened(target, draft, plan, device, rates, labels)


def _open_target(settings: Settings, report: Callable[[str], None]) -> OpenedTarget:
    report(f"opening {settings.model}")
    is_dummy = settings.load_format == "dummy"
    checkpoint = open_checkpoint(settings.model, report=report, needs_weights=not is_dummy)
    config = read_target(checkpoint.config, None if is_dummy else checkpoint.tensors(), name=checkpoint.name)
    if config.left_out:
        report(f"text only: the {' and '.join(config.left_out)} part of {settings.model} is not loaded")
    has_tokenizer = checkpoint.has_tokenizer or not is_dummy
    parts = checkpoint.tokenizer_parts() if has_tokenizer else byte_tokenizer(config.vocab_size)
    if settings.chat_template is not None:
        parts = replace(parts, chat_template=read_chat_template(settings.chat_template))
    sampling: Mapping[str, float] = {}
    if settings.sampling_defaults == "model":
        file = "its metadata" if isinstance(checkpoint, GgufCheckpoint) else GENERATION_FILE
        sampling = sampling_defaults(checkpoint.generation_file, name=checkpoint.name, file=file)
    weights = _weights(checkpoint, target_values(config))
    return OpenedTarget(checkpoint, config, weights, Tokenizer(parts), has_tokenizer, sampling)


def _open_drafter(
    source: str, target: OpenedTarget, report: Callable[[str], None], *, needs_weights: bool = True
) -> OpenedDrafter:
    report(f"opening {source}")
    checkpoint = open_checkpoint(source, report=report, needs_weights=needs_weights, what="drafter")
    config = read_draft_config(checkpoint.config, name=checkpoint.name)
    check_pair(config, target.config, target.tokenizer.eos_ids)
    acceptance = read_fit(checkpoint.fit_file, name=checkpoint.name)
    values = draft_values(config, has_head=_has_head(checkpoint if needs_weights else None, config))
    return OpenedDrafter(checkpoint, config, _weights(checkpoint, values), acceptance)


def _open_mtp(target: OpenedTarget, settings: Settings) -> OpenedDrafter:
    """Open the MTP head in the target's checkpoint. Raise ModelError if it is missing or does not fit."""
    checkpoint = target.checkpoint
    tensors = None if settings.load_format == "dummy" else checkpoint.tensors()
    config = read_mtp_config(checkpoint.config, target.config, tensors, width=settings.width)
    weights = Weights(mtp_values(config).total)
    if tensors is not None:
        head = _empty(checkpoint.name, functools.partial(MtpHead, config), "float32")
        slots = match_tensors(head, checkpoint, tensors)
        if any(piece.scheme is not None for slot in slots for piece in slot.pieces):
            weights = replace(target.weights, num_values=weights.num_values)
    return OpenedDrafter(checkpoint, config, weights, {})


def _open_own(
    target: OpenedTarget, settings: Settings, report: Callable[[str], None]
) -> OpenedDrafter | None:
    """Return the target's opened MTP head, or None if it cannot be used; then say why."""
    try:
        found = _open_mtp(target, settings)
        report(_own_used(pairs_of([settings.model])))
        return found
    except ModelError as error:
        report(f"the model's own MTP head does not draft: {error}")
        return None


def _own_used(known: tuple[KnownPair, ...]) -> str:
    """Return a line about the MTP head that "auto" takes, and about the drafters `known` for the model."""
    others = " or ".join(f"--draft {pair.drafter}" for pair in known)
    better = f"; a drafter was trained for this model, too: {others}" if others else ""
    return f"the model's own MTP head drafts{better}"


def _open_known(
    known: KnownDrafter | None, target: OpenedTarget, report: Callable[[str], None]
) -> tuple[OpenedDrafter | None, str]:
    """Return the opened drafter that "auto" finds, or None and the reason."""
    if known is None:
        return None, ""
    if not known.is_here:
        return None, (
            f"{known.name} was made for {known.target} and is not on this disk: `blockdraft fetch "
            f"{known.name}` brings it, and the next start takes it"
        )
    try:
        return _open_drafter(known.name, target, report), ""
    except (ModelError, FetchError) as error:
        return None, f"{known.name} cannot be used ({error})"


def _plan(
    settings: Settings, device: torch.device, target: OpenedTarget, draft: OpenedDrafter | None
) -> Plan:
    """Return the plan for this machine as it is now. A CapacityError also names processes on the GPU."""
    free, total = gpu_memory(device) if device.type == "cuda" else (0, 0)
    machine = replace(read_machine(), gpu_bytes=total, gpu_free_bytes=free)
    weights, draft_weights = target.weights, None if draft is None else draft.weights
    has_int8 = device.type != "cpu" or why_no_llvm(torch.float32, device) is None
    draft_config = None if draft is None else draft.config
    try:
        return resolve(
            settings,
            machine,
            target.config,
            draft_config,
            weights=weights,
            draft_weights=draft_weights,
            has_int8=has_int8,
        )
    except CapacityError as error:
        if device.type != "cuda":
            raise
        raise CapacityError(f"{error} Of the card's memory, {usage(device)}.") from error


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a GPU.

    CUDA counts the page cache as used. In unified memory, the page cache may be most of the memory after a
    model was read, so the free bytes come from Linux there.
    """
    free, total = torch.cuda.mem_get_info(device)
    gpus, index = read_machine().gpus, device.index or 0
    if index < len(gpus) and gpus[index].is_unified:
        free = min(gpus[index].free_bytes, total)
    return free, total


def resolve_device(name: str) -> str:
    """Return torch's name for the device `name`. Raise SettingsError if we do not support the device."""
    found = device_for(name, has_gpu=torch.cuda.is_available())
    check_device(found)
    return found


def timing_notices(
    settings: Settings, methods: Sequence[str | None], *, has_tokenizer: bool
) -> tuple[str, ...]:
    """Return the warnings for an engine that is good for timing only.

    `methods`: how the checkpoints are quantised.
    """
    notices = []
    if settings.load_format == "dummy":
        notices.append("weights are random: every answer is nonsense; for timing only")
        packed = [method for method in methods if method]
        if packed:
            stored = " and ".join(dict.fromkeys(packed))
            notices.append(f"the checkpoint is quantised ({stored}), its dummy weights are not: times differ")
    if not has_tokenizer:
        notices.append("there is no tokenizer: each byte of a text is a token, so counts of tokens differ")
    if settings.synthetic_acceptance is not None:
        notices.append(
            f"acceptance is synthetic ({settings.synthetic_acceptance}): drafts are kept by chance, so "
            "answers are not the model's; for timing only"
        )
    return tuple(notices)


def read_weights(
    opened: Opened,
    report: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedPair:
    """Read the weights of target and drafter. Call `progress` for every parameter of the target."""
    plan, device, draft, is_dummy = opened.plan, opened.device, opened.draft, opened.labels.is_dummy
    if device.type == "cuda" and has_triton():
        from blockdraft.kernels.triton.cache_keys import settle_cache_keys

        settle_cache_keys()
    checkpoint, config = opened.target.checkpoint, opened.target.config
    draft_config = None if draft is None else draft.config
    report(f"{'drawing' if is_dummy else 'loading'} weights as {plan.dtype}{_how(plan.quantization)}")
    source = None if is_dummy else checkpoint
    stored = stored_form(source, checkpoint.name, opened.target.weights.method)
    target = load_target(source, config, draft_config, plan, device, progress)
    drafter: Drafter = NoDrafter(plan.width)
    if plan.draft_ngram:
        drafter = NgramDrafter(plan.block, plan.draft_ngram)
    draft_stored = None
    if draft is not None:
        draft_source = None if is_dummy else draft.checkpoint
        if isinstance(draft.config, MtpConfig):
            draft_stored = stored_head(draft_source, draft.checkpoint.name, draft.weights.method)
            drafter = load_mtp(draft_source, draft.config, target, plan, device)
        else:
            draft_stored = stored_form(draft_source, draft.checkpoint.name, draft.weights.method)
            drafter = load_dflash(draft_source, draft.config, target, plan, device)
        draft.checkpoint.close()
    checkpoint.close()
    return LoadedPair(
        config=config,
        draft_config=draft_config,
        target=target,
        drafter=drafter,
        tokenizer=opened.target.tokenizer,
        device=device,
        dtype=plan.dtype,
        rates=opened.rates,
        labels=opened.labels,
        acceptance=_acceptance(drafter, draft),
        sampling=opened.target.sampling,
        stored=stored,
        draft_stored=draft_stored,
    )


def _acceptance(drafter: Drafter, draft: OpenedDrafter | None) -> Acceptance:
    if draft is not None:
        return draft.acceptance
    return NGRAM_ACCEPTANCE if isinstance(drafter, NgramDrafter) else {}


def _weights(checkpoint: Checkpoint, values: Values) -> Weights:
    """Return the size of a checkpoint's model, and how the checkpoint is quantised."""
    quantization = read_quantization(checkpoint.config, checkpoint.quant_file, name=checkpoint.name)
    if quantization is not None:
        config = {**checkpoint.config, "hf_quant_config": checkpoint.quant_file}
        return Weights(values.total, quantization.name, code_of(quantization.name, config))
    if not any(checkpoint.ggml_type(name) is not None for name in checkpoint.tensors()):
        return Weights(values.total)
    assert isinstance(checkpoint, GgufCheckpoint)
    return Weights(values.total, "GGUF", code_of("GGUF", {}, ggml_type=checkpoint.main_type))


def _has_head(checkpoint: Checkpoint | None, config: DraftConfig) -> bool:
    """Return whether a drafter has its own head; without a checkpoint, only if its vocabulary requires it."""
    if checkpoint is None:
        return config.draft_vocab_size != config.vocab_size
    return config.has_own_head(is_stored="lm_head.weight" in checkpoint.tensors())


def _how(quantization: str) -> str:
    return {"none": "", "keep": ", packed as stored", "both": ", packed and unpacked"}.get(
        quantization, f", quantised to {quantization}"
    )


def load_target(
    checkpoint: Checkpoint | None,
    config: ModelConfig,
    draft: AnyDraftConfig | None,
    plan: Plan,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Load the target with the weights of `checkpoint`, or with random weights if it is None."""
    taps = draft.taps if draft is not None else ()
    build = functools.partial(
        build_decoder, config, taps=taps, max_positions=plan.max_positions, device=device
    )
    target = _empty(config.name, build, plan.dtype)
    if checkpoint is None:
        fill(target, storage=plan.quantization, device=device, progress=progress)
    else:
        load_checkpoint(target, checkpoint, storage=plan.quantization, device=device, progress=progress)
    kernels = kernels_for(getattr(torch, plan.dtype), device, is_fast=not plan.same_bits)
    return bind(target.requires_grad_(False).eval(), kernels)


def load_dflash(
    checkpoint: Checkpoint | None,
    config: DraftConfig,
    target: Decoder,
    plan: Plan,
    device: torch.device,
) -> DFlashDrafter:
    """Load the drafter with the weights of `checkpoint`, or with random weights if it is None."""
    has_head = _has_head(checkpoint, config)
    build = functools.partial(
        body_type(config),
        config,
        first_layer=target.config.num_layers,
        max_positions=plan.max_positions,
        has_head=has_head,
        device=device,
    )
    model = _empty(config.name, build, plan.dtype)
    if checkpoint is None:
        fill(model, storage=plan.draft_quantization, device=device)
        ids = vocab_map(config.draft_vocab_size, config.vocab_size, device)
    else:
        load_checkpoint(model, checkpoint, storage=plan.draft_quantization, device=device)
        ids = _vocab_map(checkpoint, config, has_head, device)
        if isinstance(model, DFlash2):
            model.leave_out_idle_convs()
    model = bind(model.requires_grad_(False).eval(), target.kernels)
    return drafter_type(config)(model, target, ids, draft_ngram=plan.draft_ngram)


def load_mtp(
    checkpoint: Checkpoint | None, config: MtpConfig, target: Decoder, plan: Plan, device: torch.device
) -> MtpDrafter:
    """Load the target's MTP head with the weights of `checkpoint`, or with random weights if it is None."""
    model = _empty(target.config.name, functools.partial(MtpHead, config), plan.dtype)
    if checkpoint is None:
        fill(model, storage=plan.draft_quantization, device=device)
    else:
        load_checkpoint(model, checkpoint, storage=plan.draft_quantization, device=device)
    model = bind(model.requires_grad_(False).eval(), target.kernels)
    return MtpDrafter(model, target, draft_ngram=plan.draft_ngram)


def _empty(name: str, build: Callable[[], Module], dtype: str) -> Module:
    """Build a model of `dtype` without memory for its parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ModelError(
            f"'{name}': config.json describes an impossibly large model ({error}). Fetch it again."
        ) from None
    finally:
        torch.set_default_dtype(before)


def _vocab_map(
    checkpoint: Checkpoint, config: DraftConfig, has_head: bool, device: torch.device
) -> Tensor | None:
    """Return the target's token id for each row of a reduced head, or None for a full head.

    The checkpoint's `d2t` holds the differences between token ids and row numbers.
    """
    if config.draft_vocab_size == config.vocab_size:
        return None
    shapes = {name: info.shape for name, info in checkpoint.tensors().items()}
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
        torch.empty(1, device=device)  # makes CUDA create its context now
    except (RuntimeError, AssertionError) as error:
        raise unusable(name, error) from error
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # for this thread, which is the engine's
    return device
