"""Verifies kernels, checkpoint, model and drafter at the start, each against a simpler computation.

A fault that would make answers wrong stops the start with a ModelError. A drafter that does not fit only
costs time, so it is dropped: `Verification.keeps_drafter` is False, and `without_drafter` returns the pair to
serve.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.check.batch_invariance import check_bits
from blockdraft.check.drafts import check_captured, check_drafter, draft_name, keeps_bits
from blockdraft.check.layers import LayerError, LayerResult, check_layers
from blockdraft.check.operations import check_kernels
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import BlockdraftError, ModelError
from blockdraft.planner.plan import Plan
from blockdraft.step.drafter import NoDrafter
from blockdraft.step.ngram import NgramDrafter

# Least tokens per step. A drafter that fits commits 3 to 6, a drafter for another target 1.0 to 1.1. Drafting
# and verifying a block add a fifth of a plain step or more, so below this value speculation is slower.
MIN_TOKENS_PER_STEP = 1.2

PROMPTS = (
    "Write a Python function that returns the first n prime numbers.",
    "Count from one to thirty in words.",
    "Explain in three sentences why the sky is blue.",
)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, with its numbers."""

    name: str
    detail: str
    is_passed: bool = True


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of all checks. A failed check in `checks` only costs the drafter; other failures raise."""

    checks: tuple[Check, ...]
    tokens_per_step: float | None = None  # None: no drafter, or acceptance is synthetic
    keeps_drafter: bool = True  # False: serve without_drafter(models)
    reason: str | None = None  # why the drafter is dropped
    accepted: tuple[float, ...] = ()  # [i]: share of the steps that accepted draft i + 1; empty: not checked
    same_bits: bool | None = None  # bits do not depend on the batch; None: not checked
    bits: str = ""  # the evidence for `same_bits`
    taken: str | None = None  # the record with these results; None: checked now


def verify_engine(
    engine: Engine,
    note: Note,
    *,
    min_tokens_per_step: float = MIN_TOKENS_PER_STEP,
    kernels_are: str | None = None,
) -> Verification:
    """Check an idle engine, and restore its state. Raise ModelError if its answers would be wrong.

    `kernels_are` describes the record of the kernels; if it is given, kernels are not compared again.
    """
    found = _verify_pair(engine, note, min_tokens_per_step, kernels_are)
    if not engine.plan.same_bits or engine.models.labels.synthetic_acceptance is not None:
        return found
    check, same_bits = _bits(engine)
    note(f"{check.name}: {check.detail}")
    return replace(found, checks=(*found.checks, check), same_bits=same_bits, bits=check.detail)


def _verify_pair(
    engine: Engine, note: Note, min_tokens_per_step: float, kernels_are: str | None
) -> Verification:
    checks = []
    for check in _checks_of_target(engine, kernels_are):
        checks.append(check)
        note(f"{check.name}: {check.detail}")
        if not check.is_passed:  # the drafter's layers, which can only change the speed
            return Verification(tuple(checks), keeps_drafter=False, reason=check.detail)
    models = engine.models
    if isinstance(models.drafter, NoDrafter):
        return Verification(tuple(checks))
    if models.labels.synthetic_acceptance is not None:  # its answers are wrong on purpose
        note("drafter: not checked, since acceptance is synthetic")
        return Verification(tuple(checks))
    # Dummy weights and n-grams cannot predict these prompts, but they still must not change a token.
    if models.labels.is_dummy or isinstance(models.drafter, NgramDrafter):
        min_tokens_per_step = 0.0
    found = check_drafter(engine, prompts_of(models))
    is_passed = found.tokens_per_step >= min_tokens_per_step
    detail = (
        f"{found.tokens_per_step:.2f} tokens committed per step at width {found.width} over "
        f"{found.num_prompts} prompts (at least {min_tokens_per_step} asked), equal tokens without it in "
        f"{found.num_equal} of {found.num_compared}"
    )
    note(f"drafter: {detail}")
    checks.append(Check("drafter", detail, is_passed))
    reason = None if is_passed else _misfit(engine, found.tokens_per_step, min_tokens_per_step)
    return Verification(tuple(checks), found.tokens_per_step, is_passed, reason, found.accepted)


def _checks_of_target(engine: Engine, kernels_are: str | None) -> Iterator[Check]:
    yield _weights(engine)
    if kernels_are is None:
        yield from _kernels(engine)
    else:
        yield Check("kernels", kernels_are)
    yield from _layers(engine)
    if engine.graphs is not None:
        yield captured(engine)


def without_drafter(models: LoadedPair, plan: Plan) -> tuple[LoadedPair, Plan]:
    """Return the target without a drafter, and its plan. The planned cache keeps its size."""
    target = copy.copy(models.target)  # shares the weights; only the taps differ
    target.taps = ()
    plan = plan.changed({"width": "the drafter is not used"}, width=1, block=1, draft_ngram=0)
    return replace(models, target=target, draft_config=None, drafter=NoDrafter()), plan


# ---- weights


@torch.inference_mode()
def _weights(engine: Engine) -> Check:
    """Check that every weight is finite; the check of layers may miss a broken expert that no token uses."""
    num_values = 0
    names = [f"'{engine.models.config.name}'"]
    if engine.models.draft_config is not None:
        names.append(f"draft '{engine.models.draft_config.name}'")
    for model, name in zip(engine.models.models(), names, strict=False):
        for where, tensor in (*model.named_parameters(), *model.named_buffers()):
            num_values += tensor.numel()
            num_broken = _num_broken(tensor)
            if num_broken:
                raise ModelError(
                    f"{name} holds {num_broken} values in {where} that are infinite or undefined: the "
                    "checkpoint is damaged. Fetch it again."
                )
    return Check("weights", f"{num_values:,} values, all finite")


def _num_broken(tensor: Tensor) -> int:
    if tensor.dtype == torch.float8_e4m3fn:  # NaN is all ones after the sign; there is no infinity
        return int((tensor.view(torch.uint8).bitwise_and(0x7F) == 0x7F).sum())
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return 0
    # The sum needs one pass and no copy. It may overflow although all values are finite, so then count.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return 0 if bool(total.isfinite()) else int((~tensor.isfinite()).sum())


# ---- kernels


def _kernels(engine: Engine) -> Iterator[Check]:
    models = engine.models
    for found in check_kernels(engine):
        if not found.is_passed:
            raise ModelError(
                f"{found.operation} is wrong on this machine: at {found.where} in {models.dtype} on "
                f"{models.device} it is off by {found.error:.1e} from its reference, where "
                f"{found.tolerance:.0e} is rounding. Nothing is served, since the answers would be wrong: "
                "please report this line."
            )
        detail = (
            f"{found.num_comparisons} comparisons, off by {found.error:.1e} at most "
            f"({found.tolerance:.0e} allowed; {found.where})"
        )
        yield Check(f"kernel {found.operation}", detail)


# ---- the model


def _layers(engine: Engine) -> Iterator[Check]:
    """Check every layer of both models (check/layers.py). If a drafter's layer is wrong, drop the drafter."""
    models = engine.models
    ids = list(itertools.chain.from_iterable(prompts_of(models)))
    try:
        found = check_layers(engine, lambda count: (ids * (count // len(ids) + 1))[:count])
    except LayerError as error:
        raise ModelError(_unusable(models, error)) from None
    worst = max((finding for finding in found if not finding.is_draft), key=lambda finding: finding.off)
    if not worst.is_passed:
        raise ModelError(
            f"{_off(models, worst)}. Nothing is served, since the answers would be wrong: please report "
            "this line."
        )
    detail = f"{len(found)} parts, off by {worst.off:.2f} of what rounding explains at most ({worst.part})"
    yield Check("model", detail)
    drafted = max((finding for finding in found if finding.is_draft), key=lambda f: f.off, default=None)
    if drafted is not None and not drafted.is_passed:
        reason = f"draft '{draft_name(models)}' is dropped: {_off(models, drafted)}. Please report this line."
        yield Check("draft model", reason, is_passed=False)


def _off(models: LoadedPair, finding: LayerResult) -> str:
    return (
        f"{finding.part} of '{models.config.name}' is off by {finding.off:.1f} times what rounding explains, "
        f"{finding.where} ({models.dtype} on {models.device})"
    )


def captured(engine: Engine) -> Check:
    """Check the captured graphs. Raise ModelError if their tokens differ from those of eager steps."""
    count = check_captured(engine, prompts_of(engine.models)[0])
    return Check("graphs", f"{count} tokens as kernel by kernel")


def _unusable(models: LoadedPair, error: LayerError) -> str:
    where = f"{error.part} of '{models.config.name}'"
    if error.why == "flat":
        return (
            f"'{models.config.name}' gives every token the same logit: its head or its embedding is empty. "
            "The checkpoint is damaged: fetch it again."
        )
    if error.why == "unsure":
        return (
            f"{where} has a router that cannot tell its experts apart: their scores differ by less than "
            "rounding. The checkpoint is damaged: fetch it again."
        )
    if error.why == "coarse":
        return f"{where} loses more than half of what it computes to {models.dtype}. Use --dtype float32."
    found = f"what {where} computes is infinite or undefined"
    if models.dtype == "float16":
        return f"{found}: float16 holds numbers up to 65,504. Use --dtype bfloat16 or float32."
    return f"{found}: the checkpoint is damaged, or is not what its config says. Fetch it again."


# ---- the drafter


def _misfit(engine: Engine, tokens_per_step: float, floor: float) -> str:
    models = engine.models
    why = "It was probably trained for another target: see docs/models.md for pairs that fit."
    if models.has_mtp:
        why = "The head was probably left as it was when the model was trained further."
    return (
        f"draft '{draft_name(models)}' is dropped: it commits {tokens_per_step:.2f} tokens per step with "
        f"'{models.config.name}', where a drafter that fits commits 3 to 6 and less than {floor} is slower "
        f"than none. {why}"
    )


# ---- the bits


def _bits(engine: Engine) -> tuple[Check, bool]:
    """Return whether a token's bits are independent of the batch. If not, the start continues."""
    models = engine.models
    if models.device.type == "cpu":  # holds by construction; a check would take long
        same_bits = keeps_bits(models, engine.plan.block)
        detail = "our kernels add in one order" if same_bits else "PyTorch's kernels promise no order of sums"
    else:
        found = check_bits(engine, list(itertools.chain.from_iterable(prompts_of(models))))
        same_bits, detail = found.is_same, found.detail
    return Check("bits", detail), same_bits


# ---- prompts


def prompts_of(models: LoadedPair) -> list[list[int]]:
    """Return the built-in prompts for this model: as a chat, as plain text, or as made-up ids."""
    found = []
    for number, text in enumerate(PROMPTS):
        ids = [token for token in _encode(models, text) if token < models.config.vocab_size]
        if len(set(ids)) < 4:  # a tokenizer that knows little of the text
            ids = [(3 * index + 5 * number + 1) % models.config.vocab_size for index in range(12)]
        found.append(ids)
    return found


def _encode(models: LoadedPair, text: str) -> list[int]:
    tokenizer = models.tokenizer
    if tokenizer.has_chat_template:
        try:
            return tokenizer.encode_chat([{"role": "user", "content": text}])
        except BlockdraftError:  # the template refuses; users get the error later
            pass
    return tokenizer.encode(text)
