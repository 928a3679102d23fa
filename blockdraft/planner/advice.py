"""Advises configurations for six kinds of users: each line is a plan that was tried and fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from blockdraft.errors import BlockdraftError
from blockdraft.planner.acceptance import KINDS, fading
from blockdraft.planner.engine_step import estimate_engine_step
from blockdraft.planner.estimate import (
    TREE_GAINS,
    Step,
    committed,
    estimate_step,
    first_token_s,
    served_per_s,
    tokens_per_s,
)
from blockdraft.planner.external import fit_external
from blockdraft.planner.memory_fit import Fit, fit_native
from blockdraft.planner.pair import Case

TEAM_ROWS, TEAM_MIN = 16, 4
FLEET_ROWS, FLEET_MIN, FLEET_CONTEXT = 128, 32, 16_384
LONG_CONTEXT = 32_768
TYPICAL_CONTEXT = 1024  # tokens of context of most requests while they decode
LEAST_CONTEXT = 4096  # if the user requests no context; a shorter one is hardly useful
CROWD_ROWS = (32, 16, 8, 4)
KV_DTYPES = ("int8", "tq4")  # our engine's formats to try, the most exact first
_MAX_FIXES = 6
_WORTH_SAYING = 50e6  # bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for one kind of user."""

    who: str
    flags: str
    result: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that makes the requested setup fit."""

    flags: str
    result: str
    needs: str = ""  # further needs, such as a second machine


def fit_pair(case: Case) -> Fit:
    return fit_native(case) if case.settings.engine == "native" else fit_external(case)


# ---- speed


@dataclass(frozen=True, slots=True)
class Speed:
    """Estimated tokens a second of all rows together, for whole answers with their prompts."""

    step: Step
    plain: float
    by_kind: dict[str, float]

    @property
    def chat(self) -> float:
        return self.by_kind.get("chat", self.plain)


def estimate_speed(
    case: Case, fit: Fit, *, rows: int, context: int, width: int, tree: int = 0
) -> Speed | None:
    """Estimate the speed. Return None on a CPU, or if our table lacks the card, and so its bandwidth.

    `tree`: the tokens of each row's tree; 0: drafts are chains.
    """
    if case.card is None or fit.is_cpu:
        return None
    tokens = _tokens_by_kind(case, context, width, TREE_GAINS[tree] if tree else 1.0)
    if case.settings.engine != "native":
        plain = estimate_engine_step(case, fit, rows=rows, context=context, width=1)
        step = estimate_engine_step(case, fit, rows=rows, context=context, width=width)
        by_kind = {kind: tokens_per_s(step, mean) for kind, mean in tokens.items()}
        return Speed(step, tokens_per_s(plain, 1.0), by_kind)
    plain = estimate_step(fit, case.pair, case.card, rows=rows, context=context, width=1)
    step = estimate_step(fit, case.pair, case.card, rows=rows, context=context, width=width, tree=tree)
    first_s = first_token_s(fit, case.pair, case.card, rows=rows)
    by_kind = {kind: served_per_s(step, mean, first_s) for kind, mean in tokens.items()}
    return Speed(step, served_per_s(plain, 1.0, first_s), by_kind)


def _tokens_by_kind(case: Case, context: int, width: int, gain: float = 1.0) -> dict[str, float]:
    """Return the tokens per step by kind of text, times `gain`; none for plain decoding."""
    if width < 2 or case.pair.block < 2:
        return {}
    acceptance, left = case.pair.acceptance, fading(context)
    block = acceptance.block or case.pair.block
    means = {kind: 1.0 + (acceptance.committed(kind) - 1.0) * left for kind in KINDS}
    return {
        kind: min(width, gain * committed(mean, width=width, block=block)) for kind, mean in means.items()
    }


def best_width(case: Case, fit: Fit, *, rows: int, context: int) -> tuple[int, Speed | None]:
    """Return the width with the most tokens a second in chat and its speed; the plan's width if unknown.

    The speed may be that of trees, whose width is the block's. With a fixed width all steps that may have
    trees have the largest.
    """
    block = case.pair.block
    trees = fit.plan.trees if fit.plan is not None and rows in fit.plan.tree_rows else ()
    if case.settings.width != "auto" or block == 1:
        tree = max(trees, default=0)
        width = block if tree else fit.width
        return fit.width, estimate_speed(case, fit, rows=rows, context=context, width=width, tree=tree)
    tries = [(width, 0) for width in sorted({1, 4, 8, block}) if width <= block]
    found = {
        (width, tree): estimate_speed(case, fit, rows=rows, context=context, width=width, tree=tree)
        for width, tree in [*tries, *((block, tree) for tree in trees)]
    }
    speeds = {one: speed.chat for one, speed in found.items() if speed is not None}
    if not speeds:
        return fit.width, None
    best = max(speeds, key=lambda one: (speeds[one], -one[0], -one[1]))
    return best[0], found[best]


def _speed_text(speed: Speed | None, rows: int) -> str:
    if speed is None:
        return ""
    each = f" ({speed.chat / rows:,.0f} each)" if rows > 1 else ""
    return f", about {speed.chat:,.0f} tok/s{' in chat' if speed.by_kind else ''}{each}"


# ---- which config?


def advise(case: Case) -> tuple[Advice, ...]:
    """Return the advice for six kinds of users. If nothing fits one, say what would have to change."""
    lines = (_single(case), _team(case), _fleet(case), _long(case), _crowd(case), _out_of_memory(case))
    return tuple(line for line in lines if line is not None)


def _single(case: Case) -> Advice | None:
    fit = _tried(case.asking(max_num_seqs=1, max_model_len="auto"))
    if fit is None:
        return None
    width, speed = best_width(case, fit, rows=1, context=TYPICAL_CONTEXT)
    flags = f"--max-num-seqs 1{_width_flag(case, fit, width)}"
    return Advice("one user, chat", flags, f"context to {fit.max_model_len:,} tokens{_speed_text(speed, 1)}")


def _team(case: Case) -> Advice | None:
    """Advise for up to 16 users with a useful context. If four do not fit, say what would help."""
    who, context = "4-16 users", min(LEAST_CONTEXT, case.pair.target.shape.max_positions)
    if _tried(case.asking(max_num_seqs=1, max_model_len="auto")) is None:
        return None
    for flags, roomier in _larger_cache(case.asking(max_num_seqs=TEAM_ROWS, max_model_len=context)):
        fit = _tried(roomier)
        if fit is not None and fit.sequences(context) >= TEAM_ROWS:
            return Advice(
                who, f"{flags} --max-num-seqs {TEAM_ROWS}", f"{TEAM_ROWS} at {context:,} tokens each"
            )
    for rows in range(TEAM_ROWS, TEAM_MIN - 1, -1):
        fit = _tried(case.asking(max_num_seqs=rows, max_model_len="auto"))
        longest = 0 if fit is None else fit.longest(rows, fit.max_model_len)
        if fit is not None and longest >= context:
            width, speed = best_width(case, fit, rows=rows, context=TYPICAL_CONTEXT)
            result = f"{rows} at {longest:,} tokens each{_speed_text(speed, rows)}"
            return Advice(who, f"--max-num-seqs {rows}{_width_flag(case, fit, width)}", result)
    return _what_it_takes(who, case.asking(max_num_seqs=TEAM_MIN, max_model_len=context), TEAM_MIN, context)


def _fleet(case: Case) -> Advice | None:
    """Advise for many short conversations with tools. The cache is their first limit."""
    context = min(FLEET_CONTEXT, case.pair.target.shape.max_positions)
    fit = _tried(case.asking(max_num_seqs=FLEET_ROWS, max_model_len=context))
    count = 0 if fit is None else fit.sequences(context)
    if fit is None or count < FLEET_MIN:
        smallest = case.asking(max_num_seqs=FLEET_MIN, max_model_len=context)
        return _what_it_takes("agent fleet", smallest, FLEET_MIN, context)
    width, speed = best_width(case, fit, rows=count, context=TYPICAL_CONTEXT)
    flags = f"--max-num-seqs {count} --max-model-len {context}{_width_flag(case, fit, width)}"
    return Advice("agent fleet", flags, f"{count} sequences of {context:,} tokens{_speed_text(speed, count)}")


def _what_it_takes(who: str, case: Case, rows: int, context: int) -> Advice | None:
    """Say what would serve `rows` users. Return None if no change would and not even one fits now."""
    fit = _tried(case)
    count = 0 if fit is None else fit.sequences(context)
    asked = f"--max-num-seqs {rows} --max-model-len {context}"
    if count == rows:
        return Advice(who, asked, f"{count} sequences of {context:,} tokens")
    for fix in fixes(case, serves_less=False):
        result = f"{rows} sequences of {context:,} tokens{fix.needs} (as it is, {count})"
        return Advice(who, f"{fix.flags} {asked}", result)
    if count == 0:
        return None
    more = "more or larger cards" if case.machine.gpu_bytes else "more memory"
    return Advice(who, more, f"as it is, {count} sequences of {context:,} tokens fit")


def _long(case: Case) -> Advice | None:
    limit = case.pair.target.shape.max_positions
    if limit <= LONG_CONTEXT:
        return Advice("long context", "-", f"the model knows {limit:,} positions")
    fit = _tried(case.asking(max_num_seqs=1, max_model_len="auto"))
    if fit is None:
        return None
    longest = fit.max_model_len
    width, speed = best_width(case, fit, rows=1, context=longest)
    note = " (acceptance fades with length)" if speed is not None and speed.by_kind else ""
    flags = f"--max-num-seqs 1 --max-model-len {longest}{_width_flag(case, fit, width)}"
    return Advice("long context", flags, f"{longest:,} tokens{_speed_text(speed, 1)} at the end{note}")


def _crowd(case: Case) -> Advice | None:
    """Say how many more sequences our engine serves if it compresses keys and values."""
    if case.settings.engine != "native" or case.settings.kv_dtype != "auto":
        return None
    fit = _tried(case)
    context = wanted(case)[0] if fit is None or case.settings.max_model_len != "auto" else fit.max_model_len
    case = case.asking(max_model_len=context)
    (before, _), *after = (_most(case.asking(kv_dtype=name), context) for name in ("auto", *KV_DTYPES))
    found = {name: most for name, most in zip(KV_DTYPES, after, strict=True) if most[0] > before}
    if not found:
        return None
    best = max(found, key=lambda name: found[name][0])
    count, flag = found.pop(best)
    others = "".join(f", {other} with {name}" for name, (other, _) in found.items())
    result = f"{count} sequences of {context:,} tokens{others} (as it is, {before})"
    return Advice("more at once", f"--kv-dtype {best}{flag}", f"{result}; `blockdraft kv` says what it costs")


def _most(case: Case, context: int) -> tuple[int, str]:
    """Return the most sequences at once, and the flag for them: fewer rows leave more memory to the cache."""
    found = [(0, "")]
    for rows in (case.settings.max_num_seqs, *(CROWD_ROWS if case.settings.max_num_seqs == "auto" else ())):
        fit = _tried(case.asking(max_num_seqs=rows))
        if fit is not None:
            found.append((fit.sequences(context), "" if rows == "auto" else f" --max-num-seqs {rows}"))
    return max(found, key=lambda one: one[0])


def _out_of_memory(case: Case) -> Advice | None:
    """Name the changes that free the most memory."""
    before, freed = _fixed_bytes(case), []
    if before is None:
        return None
    for flags, changed in (*_savings(case), *_without_drafter(case)):
        after = _fixed_bytes(changed)
        if after is not None and before - after >= _WORTH_SAYING:
            freed.append((before - after, flags))
    if not freed:
        shorter = min(LEAST_CONTEXT, case.pair.target.shape.max_positions // 2)
        return Advice("out of memory", f"--max-model-len {shorter}", "a shorter context needs less cache")
    (most, flags), *others = sorted(freed, reverse=True)[:3]
    text = ", ".join(f"{flags} {saved / 1e9:.1f} GB" for saved, flags in others)
    return Advice("out of memory", flags, f"frees {most / 1e9:.1f} GB" + (f" (or {text})" if text else ""))


def _fixed_bytes(case: Case) -> int | None:
    """Return all memory but the cache, even if it does not fit. None if there is no plan."""
    fit = _planned(case)
    if fit is None:
        return None
    return sum(item.num_bytes for item in fit.items if not item.name.endswith("cache"))


def _width_flag(case: Case, fit: Fit, width: int) -> str:
    """Return the flag for a width; "" for our engine, which finds the width, or if the flag is not needed."""
    is_set = case.settings.engine == "native" or case.settings.width != "auto"
    return "" if is_set or width == fit.width else f" --width {width}"


# ---- what would make it fit


def fixes(case: Case, *, serves_less: bool = True) -> tuple[Fix, ...]:
    """List single changes that make the request fit; with `serves_less`, also smaller requests."""
    context, rows = wanted(case)
    found: list[Fix] = []
    smaller = _smaller(case) if serves_less else ()
    for flags, changed in (
        *_savings(case),
        *_larger_cache(case),
        *smaller,
        *_other_engines(case),
        *_without_drafter(case),
    ):
        has_enough_cards = found and "--tensor-parallel" in found[-1].flags and "--tensor-parallel" in flags
        fit = None if has_enough_cards else _tried(changed)
        if fit is None:
            continue
        target = min(context, fit.max_model_len) if "--max-model-len" in flags else context
        count = min(rows, fit.max_num_seqs) if "--max-num-seqs" in flags else rows
        if fit.max_model_len >= target and fit.sequences(target) >= count:
            needs = _needs(changed)
            found.append(Fix(flags, f"{fit.sequences(target)} x {target:,} tokens{needs}", needs))
    return tuple(found[:_MAX_FIXES])


def wanted(case: Case) -> tuple[int, int]:
    """Return the requested context and sequences, by default one sequence of useful length."""
    asked, rows = case.settings.max_model_len, case.settings.max_num_seqs
    context = min(case.pair.target.shape.max_positions, LEAST_CONTEXT) if asked == "auto" else asked
    return context, 1 if rows == "auto" else rows


def _savings(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield changes that take less memory and serve the same requests."""
    is_native, pair = case.settings.engine == "native", case.pair
    fewer_bits = "fp8" if case.machine.gpu_bytes and case.settings.device != "cpu" else "int8"
    method, asked = pair.target.stored.method, case.settings.quantization
    if is_native and method is not None and asked in ("none", "both"):
        yield "--quantization keep", case.asking(quantization="keep")
    makes = method in (None, "GGUF") if is_native else method is None and fewer_bits == "fp8"
    if asked in ("auto", "none") and makes:
        yield f"--quantization {fewer_bits}", case.asking(quantization=fewer_bits)
    if pair.draft is not None and pair.draft.stored.method is None and is_native:
        yield f"--draft-quantization {fewer_bits}", case.asking(draft_quantization=fewer_bits)
    if case.settings.kv_dtype == "auto":
        for kv_dtype in KV_DTYPES if is_native else ("fp8",):
            yield f"--kv-dtype {kv_dtype}", case.asking(kv_dtype=kv_dtype)
    if case.settings.max_num_seqs == "auto":
        yield f"--max-num-seqs {TEAM_ROWS}", case.asking(max_num_seqs=TEAM_ROWS)
    if case.settings.max_prefill_tokens == "auto":
        yield "--max-prefill-tokens 512", case.asking(max_prefill_tokens=512)


def _larger_cache(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield a larger cache on a CPU, where the default is small."""
    is_cpu = not case.machine.gpu_bytes or case.settings.device == "cpu"
    if not is_cpu or case.settings.engine != "native" or case.settings.cache_bytes != "auto":
        return
    fit = _planned(case.asking(max_num_seqs=1, max_model_len="auto"))
    if fit is not None:
        context, rows = wanted(case)
        # 1 % more for partly filled pages, rounded up to whole gigabytes.
        num_bytes = math.ceil(fit.footprint.at(context) * rows * 1.01 / 1e9) * 10**9
        fixed = sum(item.num_bytes for item in fit.items if not item.name.endswith("cache"))
        if fixed + num_bytes <= fit.budget:
            yield f"--cache-bytes {num_bytes}", case.asking(cache_bytes=num_bytes)


def _without_drafter(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield plain decoding, which is slower."""
    if case.pair.draft is not None and case.settings.synthetic_acceptance is None:
        plain = replace(case.pair, draft=None, draft_config=None, block=1)
        without = case.asking(draft=None, draft_ngram="auto", width="auto")
        yield "--draft none", replace(without, pair=plain)


def _smaller(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield a shorter context and fewer sequences."""
    context, rows = wanted(case)
    tried = _tried(case.asking(max_model_len="auto", max_num_seqs=max(rows, 1)))
    if tried is not None:
        longest = tried.longest(rows, min(context, tried.max_model_len)) // 256 * 256
        if 256 <= longest < context:
            yield f"--max-model-len {longest}", case.asking(max_model_len=longest, max_num_seqs=rows)
    if rows > 1:
        asked = _tried(case.asking(max_num_seqs=rows))
        count = 1 if asked is None else max(asked.sequences(context), 1)
        if count < rows:
            yield f"--max-num-seqs {count}", case.asking(max_num_seqs=count)


def _other_engines(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield more GPUs and smaller cache formats, which other engines have."""
    if not case.machine.gpu_bytes or case.settings.device == "cpu":
        return
    engine = "vllm" if case.settings.engine == "native" else case.settings.engine
    name = f"--engine {engine} " if case.settings.engine == "native" else ""
    # Leave out the settings that only our own engine has.
    base = _without_ngrams(case).asking(quantization="auto", draft_quantization="auto", cache_bytes="auto")
    base = base.asking(engine=engine)
    if case.pair.is_ngram:
        name += "--draft none "
    elif case.settings.draft_ngram not in ("auto", 0):
        name += "--draft-ngram 0 "
    if case.settings.engine == "native":
        yield f"{name}--kv-dtype fp8", base.asking(kv_dtype="fp8")
    for count in (2, 4, 8):
        if count > case.settings.tensor_parallel:
            flags, changed = f"{name}--tensor-parallel {count}", base.asking(tensor_parallel=count)
            if case.machine.is_unified:  # one GPU in each such machine
                flags += f" --num-nodes {count} --head-address HOST"
                changed = changed.asking(num_nodes=count, head_address="HOST")
            yield flags, changed


def _without_ngrams(case: Case) -> Case:
    if not case.pair.is_ngram:
        return case.asking(draft_ngram="auto")
    plain = replace(case.pair, block=1, is_ngram=False)
    return replace(case.asking(draft=None, draft_ngram="auto", width="auto"), pair=plain)


def _needs(case: Case) -> str:
    count = case.settings.num_nodes
    return "" if count == 1 else f", with {'a second machine' if count == 2 else f'{count} machines'}"


def _tried(case: Case) -> Fit | None:
    """Return the fit, or None if it cannot start or is known to fail."""
    fit = _planned(case)
    return fit if fit is not None and fit.problem is None else None


def _planned(case: Case) -> Fit | None:
    """Return the fit, even if it cannot start. None on an error, or if the case is known to fail."""
    try:
        return fit_pair(case) if case.is_allowed(case) else None
    except BlockdraftError:
        return None
