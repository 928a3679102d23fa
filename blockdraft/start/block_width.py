"""Chooses how many tokens to verify per step, from the time and the committed tokens of each width.

fit.json has the acceptance of drafts by category of prompts; it is lowered, because a user's prompts differ.
Costs are measured: plain and speculative steps of one row alternate, and the fastest of each counts, because
noise only adds time. A wider step never costs less, so no speed-up exceeds the tokens that a step commits.
The width with the best mean speed-up is chosen, among those at which no category is slower than plain
decoding. If there is no such width, the width is 1, and requests decode plainly unless they set a width. If
other work disturbed the times, the width is a guess and no speed-up is reported.

Serving begins with this width. Then engine/width_controller.py chooses the width before each step, for any
number of requests, from the observed tokens and times.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from blockdraft import __version__
from blockdraft.cache.cache import SCRATCH_PAGE
from blockdraft.cache.rows import RowSampling
from blockdraft.checkpoints.fit_file import Acceptance
from blockdraft.engine.describe import fingerprint
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.trial_engine import max_tokens, trial_engine
from blockdraft.engine.width_controller import widths_for
from blockdraft.machine.machine import read_machine
from blockdraft.models.config import ModelConfig
from blockdraft.planner.plan import Plan
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir
from blockdraft.step.drafter import NoDrafter
from blockdraft.step.graphs import Reading, pack
from blockdraft.step.step_sizes import fill

MIN_SPEEDUP = 1.03  # of the worst category: two measurements differ by as much
# A user's prompts differ from the fit's, so each draft is assumed to be accepted this much less often. Short
# questions ran at 0.88x with the width that suits the fit (6), and at 1.09x with the width chosen so (3).
CAUTION = 0.75
AS_GOOD = 0.98  # of the best mean speed-up; the narrowest such width costs least if many rows share a step
CONTEXT = 256  # tokens before the block, as in a usual prompt
SEVERAL = 4  # rows
MIN_ROUNDS, MAX_ROUNDS = 3, 12  # the first is cold
MAX_SECONDS = 1.0  # after this time, no round after the third begins
STEADY = 1.25  # the largest ratio of two times that count as equal
CHEAPER = 0.9  # a wider step that takes less than this share of a narrower step's time was disturbed
FORMAT = 4  # version of a stored measurement
SLACK, FIRST_SLACK = 1.1, 1.3  # if the speed falls by this factor, no wider step is tried


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of one step, for one row and for several."""

    plain_s: float
    by_width: Mapping[int, float]  # drafting, verifying and absorbing
    several: Mapping[tuple[int, int], float] = field(default_factory=dict)  # by rows and width
    is_steady: bool = True  # False: other work disturbed the measurement

    @property
    def by_place(self) -> dict[tuple[int, int], float]:
        """Return all costs by rows and width."""
        return {(1, 1): self.plain_s, **{(1, width): s for width, s in self.by_width.items()}, **self.several}


class WidthChoice(NamedTuple):
    """A width (1: plain decoding) and the reason for it."""

    width: int
    reason: str


TOO_BUSY = (
    "the machine was busy while the cost of drafts was measured: the width to begin with may not be the "
    "best, and is corrected by what the steps of answers take"
)


BUSY_GUESS = "a guess, as the machine was busy"


def committed(shares: tuple[float, ...], width: int) -> float:
    """Return the mean tokens per step, the target's own included."""
    return 1 + sum(shares[: width - 1])


def speedups(acceptance: Acceptance, costs: Costs, width: int) -> dict[str, float]:
    """Return the speed-up against plain decoding by category."""
    ratio = costs.by_width[width] / costs.plain_s
    return {category: committed(shares, width) / ratio for category, shares in acceptance.items()}


def cautious(acceptance: Acceptance, caution: float = CAUTION) -> dict[str, tuple[float, ...]]:
    return {
        category: tuple(share * caution ** (place + 1) for place, share in enumerate(shares))
        for category, shares in acceptance.items()
    }


def chances_of(acceptance: Acceptance, block: int, *, caution: float = CAUTION) -> tuple[float, ...]:
    """Return for each position the chance that a draft is right if all before it are, over all categories."""
    known = [fmean(shares) for shares in zip(*cautious(acceptance, caution).values(), strict=False)]
    found = [share / max(before, 1e-6) for share, before in zip(known, (1.0, *known), strict=False)]
    return tuple((found + [found[-1]] * block)[: block - 1])


def choose_width(acceptance: Acceptance, costs: Costs, *, caution: float = CAUTION) -> WidthChoice:
    """Return the width with the best mean speed-up that slows no category down, or 1 if every width does."""
    expected = cautious(acceptance, caution)
    gains = {width: speedups(expected, costs, width) for width in costs.by_width}
    mean = {width: fmean(found.values()) for width, found in gains.items()}
    safe = [width for width, found in gains.items() if min(found.values()) >= MIN_SPEEDUP]
    best = max(safe or gains, key=lambda width: mean[width])
    width = min((one for one in safe if mean[one] >= AS_GOOD * mean[best]), default=best)
    worst = min(gains[width], key=lambda category: gains[width][category])
    found = f"{mean[width]:.2g}x ({gains[width][worst]:.2g}x on {worst})"
    if not costs.is_steady:
        return WidthChoice(width if safe else 1, BUSY_GUESS)
    if not safe:
        return WidthChoice(
            1, f"no draft pays on this machine: {width} tokens tried per step would give {found}"
        )
    return WidthChoice(width, f"expected {found}")


def may_choose_width(engine: Engine) -> bool:
    """Return whether a start chooses the width: the user set none, and drafts have a known acceptance."""
    models = engine.models
    is_known = models.rates is not None or not models.labels.is_dummy
    return not engine.plan.is_asked("width") and models.draft_name is not None and is_known


def known_acceptance(models: LoadedPair) -> Acceptance:
    """Return the acceptance that is known before serving: the fit's, or the synthetic rates for timing."""
    return models.acceptance if models.rates is None else {"the synthetic acceptance": models.rates}


def choose_widths(engine: Engine) -> None:
    """Measure an idle engine's steps and let it choose its widths, for benchmarks."""
    engine.replan(plan_with_width(engine, known_acceptance(engine.models), stores=False))


def plan_with_width(
    engine: Engine,
    acceptance: Acceptance,
    *,
    uses_stored: bool = False,
    stores: bool = True,
    warn: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return the idle engine's plan with the fastest width. `uses_stored` allows an earlier start's costs."""
    file = cache_dir() / "widths" / f"{_key(engine, acceptance)}.json"
    models = engine.models
    plan, is_cpu = engine.plan, models.device.type == "cpu"
    caution = CAUTION if models.rates is None else 1.0  # synthetic rates are exact
    costs = _stored(file) if uses_stored else None
    if costs is None:
        costs = _measured(engine, acceptance, caution)
        if costs.is_steady and stores:
            _store(file, costs)
    if not costs.is_steady:
        warn(TOO_BUSY)
        if not is_cpu:  # keep the whole block: on a GPU it costs little more than one token
            return plan
    width, reason = choose_width(acceptance, costs, caution=caution)
    is_sure = models.draft_config is not None  # the acceptance of n-grams depends on the text
    if is_cpu and width == 1 and costs.is_steady and is_sure:
        return plan.changed({"width": reason}, width=1)
    chances = chances_of(acceptance, plan.block, caution=caution)
    return plan.changed(
        {"width": reason},
        width=width,
        step_costs=costs.by_place,
        is_sure_of_costs=costs.is_steady,
        chosen_share=_chosen_share(models.config),
        draft_chances=chances,
    )


def _chosen_share(config: ModelConfig) -> float:
    """Return the share of the experts that a token chooses, in the layer with the smallest; 1 without any."""
    mixtures = [layer.moe for layer in config.layers if layer.moe is not None]
    return min((one.num_chosen / one.num_experts for one in mixtures), default=1.0)


# ---- measuring


def measure_costs(
    engine: Engine, acceptance: Acceptance, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """Measure plain steps, and each width that can still be the best.

    The engine must be idle, and does not change. On a GPU, captured steps are measured only at the planned
    width, because each width needs a capture.
    """
    plan, begun_s = engine.plan, clock()
    widths = [width for width in widths_for(plan.block) if width > 1]
    # A captured step of width 1 also absorbs features, which costs little.
    plain = trial_engine(engine, NoDrafter()) if engine.graphs is None else engine
    if engine.graphs is not None and engine.models.device.type == "cuda":
        widths = [plan.width]
    times: dict[int, list[float]] = {width: [] for width in (1, *widths)}
    pages = engine.scheduler.pages
    held = pages.allocate(-(-(_context(engine) + plan.block) // pages.page_size))
    try:
        for number in range(MAX_ROUNDS):
            is_late = clock() - begun_s > MAX_SECONDS
            if number >= MIN_ROUNDS and (is_late or _is_steady(times)):
                break
            for width in list(times):
                times[width].append(_step_s(plain if width == 1 else engine, width, held, clock))
                if _is_past_the_best(acceptance, times, width, slack=FIRST_SLACK if number == 0 else SLACK):
                    times = {one: taken for one, taken in times.items() if one <= width}
                    break
    finally:
        pages.release(held)
    return replace(_costs(times), is_steady=_is_steady(times))


def _measured(engine: Engine, acceptance: Acceptance, caution: float) -> Costs:
    costs, plan = measure_costs(engine, acceptance), engine.plan
    if not costs.is_steady:
        return costs
    if engine.models.device.type == "cpu":
        width = choose_width(acceptance, costs, caution=caution).width
        return replace(costs, several=measure_several(engine, width, most=SEVERAL))
    return replace(costs, several=measure_several(engine, plan.width, most=plan.max_num_seqs))


def measure_several(
    engine: Engine, width: int, *, most: int, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[int, int], float]:
    """Measure plain steps and steps of `width` with `most` rows. Return {} if only one row can run.

    Use fewer rows if there are fewer rows or pages; with graphs, use a number of rows that a graph has.
    """
    plan, pages = engine.plan, engine.scheduler.pages
    per_row = -(-(_context(engine) + plan.block) // pages.page_size)
    rows = min(most, plan.max_num_seqs, pages.num_free // per_row)
    plain = engine
    if engine.graphs is None:
        plain = trial_engine(engine, NoDrafter())
    elif rows > 0:
        rows = max(size for size in engine.graphs.sizes if size <= rows)
    if rows < 2:
        return {}
    held = pages.allocate(rows * per_row)
    times: dict[int, list[float]] = {one: [] for one in sorted({1, width})}
    try:
        for _ in range(MIN_ROUNDS):
            for one, taken in times.items():
                taken.append(_step_s(engine if one > 1 else plain, one, held, clock, rows))
    finally:
        pages.release(held)
    return {(rows, one): min(taken) for one, taken in times.items()}


def _costs(times: Mapping[int, list[float]]) -> Costs:
    """Return each width's least time, of its own steps or wider ones: a narrower step never takes longer."""
    fastest: dict[int, float] = {}
    least = math.inf
    for width in sorted((one for one, taken in times.items() if taken), reverse=True):
        fastest[width] = least = min(least, *times[width])
    return Costs(fastest.pop(1), dict(sorted(fastest.items())))


def _is_steady(times: Mapping[int, list[float]]) -> bool:
    """Return whether the two fastest times of each width agree, and no wider step takes much less."""
    pairs = [sorted(times[width])[:2] for width in sorted(times)]
    are_alike = all(len(pair) == 2 and pair[1] <= STEADY * pair[0] for pair in pairs)
    return are_alike and all(two[0] >= CHEAPER * one[0] for one, two in pairwise(pairs))


def _is_past_the_best(
    acceptance: Acceptance, times: Mapping[int, list[float]], width: int, *, slack: float
) -> bool:
    """Return whether wider steps can only be slower: the speed rises with the width, then falls."""
    if width == 1:
        return False
    costs = _costs(times)
    mean = {one: fmean(speedups(acceptance, costs, one).values()) for one in costs.by_width if one <= width}
    return slack * mean[width] < max(mean.values())


def _step_s(
    engine: Engine, width: int, pages: list[int], clock: Callable[[], float], num_rows: int = 1
) -> float:
    """Return the seconds of one step after a context that was never computed: its contents do not matter."""
    context, per_row = _context(engine), len(pages) // num_rows
    graph = None if engine.graphs is None else engine.graphs.captured_for(num_rows, width)
    token_ids, sampling = [0] * (context + 1), RowSampling()
    engine.rows.place_all([(row, token_ids, context, sampling) for row in range(num_rows)])
    engine.rows.set_pages([(row, 0, pages[row * per_row : (row + 1) * per_row]) for row in range(num_rows)])
    if engine.rows.exact_table is not None:
        engine.rows.set_exact_pages([(row, 0, [SCRATCH_PAGE] * per_row) for row in range(num_rows)])
    if graph is None:
        engine.rows.activate(range(num_rows))
    else:
        filled = fill([width] * num_rows, graph.size)
        engine.rows.activate(range(num_rows), graph.size.rows, widths=filled.widths, limits=filled.limits)
    engine.wait()
    begun_s = clock()
    Reading(pack(engine.decode(width)) if graph is None else graph.replay()).token_ids()
    return clock() - begun_s


def _context(engine: Engine) -> int:
    return max(1, min(CONTEXT, max_tokens(engine) - 1))


# ---- storing, to shorten later starts


def _key(engine: Engine, acceptance: Acceptance) -> str:
    """Return a hash of everything that a measurement depends on: machine, threads, models and plan."""
    models, plan, machine = engine.models, engine.plan, read_machine()
    drafting = models.draft_name if models.drafter.model is None else fingerprint(models.drafter.model)
    facts = [
        [machine.cpu.name, machine.cpu.num_cores, *(gpu.name for gpu in machine.gpus)],
        [__version__, torch.__version__, torch.get_num_threads()],
        [fingerprint(models.target), drafting, plan.draft_ngram],  # dtypes and packing included
        [str(models.device), plan.page_size, plan.block, plan.max_num_seqs],
        [plan.kv_dtype, plan.draft_kv_dtype, plan.kv_window],
        [FORMAT, engine.graphs is not None],
        dict(acceptance),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _stored(file: Path) -> Costs | None:
    """Return the stored costs, or None if there are no usable ones."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        several = {(int(rows), int(width)): float(value) for rows, width, value in raw["several"]}
        by_width = {int(key): float(value) for key, value in raw["by_width"].items()}
        costs = Costs(float(raw["plain_s"]), by_width, several)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sound = costs.by_width and min(costs.plain_s, *costs.by_width.values()) > 0
    return costs if is_sound else None


def _store(file: Path, costs: Costs) -> None:
    several = [[*place, seconds] for place, seconds in costs.several.items()]
    raw = {"plain_s": costs.plain_s, "by_width": dict(costs.by_width), "several": several}
    keep(file, json.dumps(raw).encode())
