"""Verification at the start: kernels, checkpoint, model and drafter, each against something simpler.

Whatever would make answers wrong stops the start with a ModelError. A drafter that does not fit only costs
time, so it is dropped: `Verification.keeps_drafter` is false, and `without_drafter` gives what to serve.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from blockdraft.cache.rows import RowSampling
from blockdraft.drafters.drafter import NoDrafter
from blockdraft.engine.engine import Engine
from blockdraft.engine.kernelcheck import check_kernels, models_of
from blockdraft.engine.loading import Models
from blockdraft.engine.request import Metrics, SamplingParams, TokenLogprobs
from blockdraft.engine.twin import max_tokens, serve, twin
from blockdraft.errors import BlockdraftError, ModelError
from blockdraft.kernels.choice import use

# Tokens committed per step. A drafter that fits commits 3 to 6, one for another target 1.0 to 1.1; drafting
# and verifying a block cost a fifth of a plain step or more, so below this speculation only slows down.
MIN_TOKENS_PER_STEP = 1.2
# Norm of the logits' difference over the norm of their spread, for the worst position.
LOGIT_TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
# Log-probabilities this close may change places in half precision, where a mixture's products depend on how
# many tokens chose an expert. float32 and float64 have no such room: equal means equal.
TIES = {"float16": 0.1, "bfloat16": 0.5}
# Nats by which a token's log-probability may differ where the token is the same. Dense models compute both by
# the same shapes: a difference is a cache that the drafter touched, long before it changes a token.
LOGPROB_TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
PLAIN_SECONDS = 2.0  # plain decoding of the built-in prompts: no further prompt is begun after this
ANSWER_TOKENS = 24  # of each prompt, with the drafter
PLAIN_TOKENS = 12  # and without it, a step each
PROMPT_TOKENS = 8  # of the logits' check, before its two blocks

PROMPTS = (
    "Write a Python function that returns the first n prime numbers.",
    "Count from one to thirty in words.",
    "Explain in three sentences why the sky is blue.",
)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked; `detail` holds its numbers."""

    name: str
    is_passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. A failed check that is here, and was not raised, costs the drafter only."""

    checks: tuple[Check, ...]
    tokens_per_step: float | None  # None: no drafter, or one whose acceptance is synthetic
    keeps_drafter: bool  # False: serve without_drafter(models)
    reason: str | None  # why the drafter is dropped
    accepted: tuple[
        float, ...
    ] = ()  # [i]: share of the steps that accepted draft i + 1, where it was looked at


def verify(engine: Engine, note: Note, *, min_tokens_per_step: float = MIN_TOKENS_PER_STEP) -> Verification:
    """Check an idle engine and leave it as it was. ModelError: its answers would be wrong."""
    checks = []
    for check in _checks_of_target(engine):
        checks.append(check)
        note(f"{check.name}: {check.detail}")
    if isinstance(engine.models.drafter, NoDrafter):
        return Verification(tuple(checks), tokens_per_step=None, keeps_drafter=True, reason=None)
    labels = engine.models.labels
    if labels.synthetic_acceptance is not None:  # its answers are wrong on purpose
        note("drafter: not checked, since acceptance is synthetic")
        return Verification(tuple(checks), tokens_per_step=None, keeps_drafter=True, reason=None)
    if labels.is_dummy:  # it knows nothing; that it changes no token holds all the same
        min_tokens_per_step = 0.0
    check, accepted = _drafter(engine, min_tokens_per_step)
    note(f"{check.name}: {check.detail}")
    tokens_per_step = 1 + sum(accepted)
    reason = None if check.is_passed else _misfit(engine, tokens_per_step, min_tokens_per_step)
    return Verification((*checks, check), tokens_per_step, check.is_passed, reason, accepted)


def _checks_of_target(engine: Engine) -> Iterator[Check]:
    yield _weights(engine)
    yield from _kernels(engine)
    yield _model(engine)


def without_drafter(models: Models) -> Models:
    """The same target, decoding plainly. The cache can stay as large as it was planned."""
    target = copy.copy(models.target)  # shares the weights; only the taps differ
    target.taps = ()
    plan = replace(models.plan, width=1, block=1)
    return replace(models, target=target, draft_config=None, drafter=NoDrafter(), plan=plan)


def _check(name: str, detail: str, begun_s: float, *, is_passed: bool = True) -> Check:
    return Check(name, is_passed, detail, time.monotonic() - begun_s)


# ---- weights


@torch.inference_mode()
def _weights(engine: Engine) -> Check:
    """Every stored number is finite: a router may never choose the broken expert while we look."""
    begun_s, num_values = time.monotonic(), 0
    names = [f"'{engine.models.config.name}'"]
    if engine.models.draft_config is not None:
        names.append(f"draft '{engine.models.draft_config.name}'")
    for model, name in zip(models_of(engine), names, strict=False):
        for where, tensor in (*model.named_parameters(), *model.named_buffers()):
            num_values += tensor.numel()
            num_broken = _num_broken(tensor)
            if num_broken:
                raise ModelError(
                    f"{name} holds {num_broken} values in {where} that are infinite or undefined: the "
                    "checkpoint is damaged. Fetch it again."
                )
    return _check("weights", f"{num_values:,} values, all finite", begun_s)


def _num_broken(tensor: Tensor) -> int:
    if tensor.dtype == torch.float8_e4m3fn:  # NaN is all ones behind the sign; no infinity
        return int((tensor.view(torch.uint8).bitwise_and(0x7F) == 0x7F).sum())
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return 0
    # One pass without a copy. A sum may overflow where no value does, so it only clears, never accuses.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return 0 if bool(total.isfinite()) else int((~tensor.isfinite()).sum())


# ---- kernels


def _kernels(engine: Engine) -> Iterator[Check]:
    models, begun_s = engine.models, time.monotonic()
    for found in check_kernels(engine):
        if not found.is_passed:
            raise ModelError(
                f"{found.operation} is wrong on this machine: at {found.where} in {models.plan.dtype} on "
                f"{models.device} it is off by {found.error:.1e} from its reference, where "
                f"{found.tolerance:.0e} is rounding. Nothing is served, since the answers would be wrong: "
                "please report this line."
            )
        detail = (
            f"{found.num_comparisons} comparisons, off by {found.error:.1e} at most "
            f"({found.tolerance:.0e} allowed; {found.where})"
        )
        yield _check(f"kernel {found.operation}", detail, begun_s)
        begun_s = time.monotonic()


# ---- the model


def _model(engine: Engine) -> Check:
    """Logits of a prompt in chunks and blocks by the kernels, and in one piece by the references."""
    begun_s, models = time.monotonic(), engine.models
    prompt, pieces = _logit_prompt(engine)
    got = _logits(engine, prompt, pieces)
    with use("reference"):
        expected = _logits(engine, prompt, [(len(prompt), True)])
    for logits, is_reference in ((expected, True), (got, False)):
        if not bool(logits.isfinite().all()):
            raise ModelError(_not_finite(engine, prompt, is_reference=is_reference))
    if bool((expected.amax(dim=1) == expected.amin(dim=1)).any()):
        raise ModelError(
            f"'{models.config.name}' gives every token the same logit: its head or its embedding is empty. "
            "The checkpoint is damaged: fetch it again."
        )
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    errors = ((got - expected).norm(dim=1) / spread).sort(descending=True).values
    # Where two experts are as good as equal, rounding decides between them: a few positions may differ.
    error = float(errors[len(prompt) // 4 if _has_experts(models) else 0])
    tolerance = LOGIT_TOLERANCES[models.plan.dtype]
    if not error <= tolerance:
        raise ModelError(
            f"the logits of '{models.config.name}' are off by {error:.1e} of their spread from the reference "
            f"path, where {tolerance:.0e} is rounding ({models.plan.dtype} on {models.device}). Nothing is "
            "served, since the answers would be wrong: please report this line."
        )
    detail = f"logits of {len(prompt)} tokens, off by {error:.1e} of their spread ({tolerance:.0e} allowed)"
    return _check("model", detail, begun_s)


def _has_experts(models: Models) -> bool:
    return any(layer.moe is not None for layer in models.config.layers)


def _logit_prompt(engine: Engine) -> tuple[list[int], list[tuple[int, bool]]]:
    """Token ids, and (count, is_known) pieces of them: a prefill chunk, then blocks as verify has them."""
    room = max(1, min(max_tokens(engine), engine.models.plan.max_context - 1))
    pieces, at = [], 0
    for count, is_known in ((PROMPT_TOKENS, True), *[(max(engine.models.plan.width, 2), False)] * 2):
        count = min(count, room - at)
        if count > 0:
            pieces.append((count, is_known))
            at += count
    ids = _prompts(engine.models)[0]
    return (ids * (at // len(ids) + 1))[:at], pieces


@torch.inference_mode()
def _logits(engine: Engine, prompt: list[int], pieces: list[tuple[int, bool]]) -> Tensor:
    """[N, V] in float32 or wider, through the engine's own cache, on row 0."""
    target, cache, rows = engine.models.target, engine.cache, engine.rows
    allocator = engine.scheduler.pages
    pages = allocator.allocate(-(-len(prompt) // allocator.page_size))
    token_ids = torch.tensor(prompt, device=engine.models.device)
    parts, at = [], 0
    try:
        rows.place(0, prompt, 0, RowSampling())
        rows.set_pages([(0, 0, pages)])
        rows.activate([0])
        for count, is_known in pieces:
            view = cache.view(rows, count, is_known=is_known)
            hidden, _ = target(token_ids[at : at + count], view)
            parts.append(target.logits(hidden))
            if not is_known:
                cache.commit(rows, view.starts, torch.tensor([count], device=engine.models.device))
            rows.extend((count,))
            at += count
    finally:
        allocator.release(pages)
    logits = torch.cat(parts)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _not_finite(engine: Engine, prompt: list[int], *, is_reference: bool) -> str:
    models = engine.models
    where = _first_broken(engine, prompt, is_reference=is_reference)
    found = f"the logits of '{models.config.name}' are infinite or undefined, first in the output of {where}"
    if not is_reference:
        return (
            f"{found}, while the reference path's are not: a kernel is wrong on this machine "
            f"({models.plan.dtype} on {models.device}). Nothing is served: please report this line."
        )
    if models.plan.dtype == "float16":
        return f"{found}: float16 holds numbers up to 65,504. Use --dtype bfloat16 or float32."
    return f"{found}: the checkpoint is damaged, or is not what its config says. Fetch it again."


def _first_broken(engine: Engine, prompt: list[int], *, is_reference: bool) -> str:
    """The first part of the target, in the order they run, whose output is not finite."""
    target = engine.models.target
    parts: dict[str, nn.Module] = {"the embedding": target.embedding}
    parts |= {f"layer {index}": layer for index, layer in enumerate(target.layers)}
    parts["the last norm"] = target.norm
    broken: list[str] = []

    def look(name: str, output: Tensor) -> None:
        if not bool(output.isfinite().all()):
            broken.append(name)

    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output, name=name: look(name, output))
        for name, part in parts.items()
    ]
    try:
        if is_reference:
            with use("reference"):
                _logits(engine, prompt, [(len(prompt), True)])
        else:
            _logits(engine, prompt, [(len(prompt), True)])
    finally:
        for hook in hooks:
            hook.remove()
    return broken[0] if broken else "the head"


# ---- the drafter


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one prompt was answered with."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    metrics: Metrics


def _drafter(engine: Engine, min_tokens_per_step: float) -> tuple[Check, tuple[float, ...]]:
    """Built-in prompts, one at a time and greedily, with and without the drafter at equal width.

    One row and one width give both the same shapes, so that the bits can be compared and not only the text.
    Beside the check: the share of the steps that accepted each draft.
    """
    begun_s, models = time.monotonic(), engine.models
    width = models.plan.width if models.plan.width > 1 else models.plan.block
    prompts = [ids[-max(1, max_tokens(engine) // 2) :] for ids in _prompts(models)]
    drafted = [_answer(twin(engine), ids, width, ANSWER_TOKENS) for ids in prompts]
    accepted = _accepted(drafted)
    tokens_per_step = 1 + sum(accepted)
    plain_s, num_compared, num_ties = time.monotonic(), 0, 0
    for number, (ids, answer) in enumerate(zip(prompts, drafted, strict=True)):
        if time.monotonic() - plain_s > PLAIN_SECONDS:
            break
        plain = _answer(twin(engine, NoDrafter(models.plan.block)), ids, width, PLAIN_TOKENS)
        num_ties += _compare(engine, number, answer, plain, width)
        num_compared += 1
    detail = (
        f"{tokens_per_step:.2f} tokens committed per step at width {width} over {len(prompts)} prompts "
        f"(at least {min_tokens_per_step} asked), equal tokens without it in {num_compared}"
        + (f", {num_ties} of them up to a tie" if num_ties else "")
    )
    is_passed = tokens_per_step >= min_tokens_per_step
    return _check("drafter", detail, begun_s, is_passed=is_passed), accepted


def _answer(engine: Engine, prompt: list[int], width: int, num_tokens: int) -> _Answer:
    num_tokens = max(1, min(num_tokens, max_tokens(engine) - len(prompt)))
    sampling = SamplingParams(
        temperature=0.0, width=width, max_tokens=num_tokens, min_tokens=min(8, num_tokens), logprobs=2
    )
    engine.add(prompt, sampling)
    deltas = serve(engine)
    metrics = deltas[-1].metrics
    assert metrics is not None
    return _Answer(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        metrics=metrics,
    )


def _accepted(answers: list[_Answer]) -> tuple[float, ...]:
    """By position, whether or not the answer's end cut some of them off."""
    num_steps = sum(answer.metrics.steps for answer in answers)
    by_position = itertools.zip_longest(*(answer.metrics.accepted for answer in answers), fillvalue=0)
    return tuple(sum(counts) / num_steps for counts in by_position)


def _compare(engine: Engine, number: int, drafted: _Answer, plain: _Answer, width: int) -> bool:
    """Plain's tokens begin the drafted answer. False: they do. True: up to a tie. ModelError: they do not."""
    begin = drafted.token_ids[: len(plain.token_ids)]
    if begin == plain.token_ids:
        _compare_logprobs(engine, number, drafted, plain)
        return False
    pairs = zip(begin, plain.token_ids, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), len(begin))
    models = engine.models
    tie = TIES.get(models.plan.dtype, 0.0)
    margins = [_margin(answer, at) for answer in (drafted, plain)]
    if max(margins) < tie:
        return True
    tokens = [list(answer.token_ids[at : at + 1]) for answer in (drafted, plain)]
    raise ModelError(
        f"draft '{_draft_name(models)}' changes the answer: token {at + 1} of built-in prompt {number + 1} "
        f"is {tokens[0]} with it and {tokens[1]} without it, at the same width of {width} (likelier than "
        f"the next by {max(margins):.1e} nats). A drafter may change the speed only, so nothing is "
        "served: use --draft none, and please report this line."
    )


def _compare_logprobs(engine: Engine, number: int, drafted: _Answer, plain: _Answer) -> None:
    models = engine.models
    allowed = LOGPROB_TOLERANCES.get(models.plan.dtype)
    if allowed is None or _has_experts(models):
        return
    pairs = zip(drafted.logprobs, plain.logprobs, strict=False)
    error = max(abs(one.logprob - other.logprob) for one, other in pairs)
    if not error <= allowed:
        raise ModelError(
            f"draft '{_draft_name(models)}' changes the target's probabilities: in built-in prompt "
            f"{number + 1} by {error:.1e} nats, where {allowed:.0e} is rounding. A drafter may change the "
            "speed only, so nothing is served: use --draft none, and please report this line."
        )


def _draft_name(models: Models) -> str:
    return type(models.drafter).__name__ if models.draft_config is None else models.draft_config.name


def _margin(answer: _Answer, at: int) -> float:
    """How much likelier the token at `at` was than the next best."""
    if at >= len(answer.logprobs) or len(answer.logprobs[at].top) < 2:
        return float("inf")
    (_, first), (_, second) = answer.logprobs[at].top
    return first - second


def _misfit(engine: Engine, tokens_per_step: float, floor: float) -> str:
    models = engine.models
    return (
        f"draft '{_draft_name(models)}' is dropped: it commits {tokens_per_step:.2f} tokens per step with "
        f"'{models.config.name}', where a drafter that fits commits 3 to 6 and less than {floor} is slower "
        "than none. It was probably trained for another target: see docs/models.md for pairs that fit."
    )


def _prompts(models: Models) -> list[list[int]]:
    """The built-in prompts as this model wants them: a chat, plain text, or ids where text means nothing."""
    found = []
    for number, text in enumerate(PROMPTS):
        ids = [token for token in _encode(models, text) if token < models.config.vocab_size]
        if len(set(ids)) < 4:  # a tokenizer without words: most of the text is unknown to it
            ids = [(3 * index + 5 * number + 1) % models.config.vocab_size for index in range(12)]
        found.append(ids)
    return found


def _encode(models: Models, text: str) -> list[int]:
    tokenizer = models.tokenizer
    if tokenizer.has_chat_template:
        try:
            return tokenizer.encode_chat([{"role": "user", "content": text}])
        except BlockdraftError:  # a template of its own mind; its users will hear of it
            pass
    return tokenizer.encode(text)
