"""The report of `blockdraft fit`: measurements, the likely cause, and whether more training pays."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from blockdraft import __version__
from blockdraft.bench.weak_spots import WeakSpots, weak_spots
from blockdraft.errors import SettingsError
from blockdraft.models.draft_config import DraftConfig, DraftKind
from blockdraft.planner.resolver import named_drafter
from blockdraft.settings.settings import NGRAM
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.job import TRAINED

FITS = 1.2  # tokens per step: below it no width is faster than plain decoding
LOW = 2.0  # tokens per step: below it training or another drafter should help
RAISES = 1.1  # a change is a cause if it multiplies the tokens per step by this, on the same answers
RAISES_ELSEWHERE = 1.25  # as RAISES, if the change alters the answers, which may then be easier
AGREES = 0.01  # relative difference that engine and simulation may have
# A first drafter for SmolLM2-135M: 2.5 to 3.4 by kind of prompt, after 640 s of training on an H200.
REACHABLE = 3.0
DECAYS = 0.9  # later drafts are weak if they are right less often than this times the first draft
FitKind = DraftKind | Literal["mtp", "ngram"]
OWN_PROMPTS = "prompts.jsonl"  # named in the advice: a file that the user has to write


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuestion:
    """The arguments of `blockdraft fit`."""

    target: str
    drafter: str
    prompts: Path | None = None  # None: the prompts that come with blockdraft
    limit: int = 16  # prompts of each category, the first ones of the file
    max_tokens: int = 256
    width: int | None = None  # None: the drafter's block
    temperature: float = 0.0
    draft_ngram: int | None = None  # None: the default of `serve`
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    is_quick: bool = False  # numbers only: no simulation, no suspects

    def __post_init__(self) -> None:
        for name, value in (("--limit", self.limit), ("--max-tokens", self.max_tokens)):
            if value < 1:
                raise SettingsError(f"{name} {value} is not at least 1.")
        if self.width is not None and self.width < 2:
            raise SettingsError(f"--width {self.width} drafts nothing: give 2 or more.")
        if self.drafter == "none":
            raise SettingsError(f"'none' drafts nothing: give a folder, a hub id or '{NGRAM}'.")

    @property
    def source(self) -> str:
        """Return the name of the prompts' source."""
        return f"built in, blockdraft {__version__}" if self.prompts is None else str(self.prompts)


@dataclass(frozen=True, slots=True)
class SimulationAgreement:
    """The tokens per step that engine and simulation give for the same greedy answers."""

    num_documents: int
    engine: float
    simulated: float

    @property
    def agrees(self) -> bool:
        return abs(self.simulated / self.engine - 1) <= AGREES


@dataclass(frozen=True, slots=True)
class Tried:
    """A change that was tried, with the tokens per step before and after it."""

    name: str
    what: str
    before: float
    after: float
    advice: str
    key: str | None = None  # of config.json
    value: object = None
    needed: float = RAISES

    @property
    def is_cause(self) -> bool:
        return self.after >= self.needed * self.before


@dataclass(frozen=True, slots=True)
class Cost:
    """The time and the committed tokens of a step of one sequence at one width, compared with width 1."""

    width: int
    step_ms: float
    break_even: float  # tokens per step at which this width is as fast as plain decoding
    committed: float  # tokens per step; an estimate for widths below the measured one
    speed_up: float


@dataclass(frozen=True, slots=True)
class Prospect:
    """A judgement whether more training is worth it."""

    is_worth_it: bool | None  # None: unknown
    reasons: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class FitReport:
    """All results of `fit` for a pair."""

    question: FitQuestion
    kind: FitKind
    title: str  # the drafter's title
    width: int
    dtype: str
    quantization: str  # of the target's weights
    num_left_out: int  # prompts that are too long
    categories: Mapping[str, DrafterFit]
    overall: DrafterFit
    costs: tuple[Cost, ...]
    agreement: SimulationAgreement | None
    tried: tuple[Tried, ...]
    untried: tuple[str, ...]
    prospect: Prospect | None

    @property
    def fits(self) -> bool:
        return self.overall.committed >= FITS

    @property
    def weak(self) -> WeakSpots:
        return weak_spots(self.overall.counts, {name: one.counts for name, one in self.categories.items()})

    @property
    def cause(self) -> Tried | None:
        """Return the cause that raises the tokens per step by the largest factor, or None."""
        return likely_cause(self.tried)

    def to_json(self) -> dict[str, object]:
        question = asdict(self.question) | {"prompts": self.question.source}
        agreement, prospect = self.agreement, self.prospect
        return {
            "question": question,
            "kind": self.kind,
            "drafts_with": self.title,
            "width": self.width,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "verdict": "fits" if self.fits else "does not fit",
            "overall": _fit_json(self.overall),
            "categories": {name: _fit_json(fit) for name, fit in self.categories.items()},
            "weak": asdict(self.weak),
            "prompts_left_out": self.num_left_out,
            "speed": [asdict(cost) for cost in self.costs],
            "agreement": None if agreement is None else asdict(agreement) | {"agrees": agreement.agrees},
            "tried": [asdict(one) | {"is_cause": one.is_cause} for one in self.tried],
            "untried": list(self.untried),
            "cause": None if self.cause is None else self.cause.name,
            "training": None if prospect is None else asdict(prospect),
        }


# ---- conclusions


def likely_cause(tried: Iterable[Tried]) -> Tried | None:
    causes = [one for one in tried if one.is_cause]
    return max(causes, key=lambda one: one.after / one.before, default=None)


def prospect_of(
    question: FitQuestion,
    config: DraftConfig,
    categories: Mapping[str, DrafterFit],
    costs: Sequence[Cost],
    overall: DrafterFit,
    greedy: float | None,
) -> Prospect:
    """Judge whether more training is worth it, with reasons.

    `greedy` is the tokens per step of greedy answers; it is given if `overall` is about sampled answers.
    """
    low = [name for name, one in categories.items() if one.committed < LOW]
    is_worth_it, reasons = None, list[str]()
    pairs = why_dflash2(config, overall)
    if pairs is not None:
        reasons.append(pairs)
    if low:
        reasons = reasons or [describe_depth(overall)]
        is_worth_it, reason = training_pays(costs)
        share = f"{len(low)} of {len(categories)} categories are low"
        known = f"{share}, and the drafter does not predict these: {', '.join(low)}"
        if len(low) == len(categories):
            known = "every category is low: the drafter does not know this target or this workload"
        reasons += [known, reason]
    else:
        reasons.append("no category is low: how much training would gain is unknown")
    if low and greedy is not None and greedy >= LOW:
        is_worth_it = False
        reasons.append(f"greedy answers commit {greedy:.2f}: sampling causes the loss, training gains little")
    if is_untrained(config):
        reasons.append(
            "this drafter's kind is not trained, or it has its own head: only a new drafter can be trained"
        )
    if question.prompts is None:
        reasons.append(
            f"the built-in prompts are too few to train with: write some of your workload into {OWN_PROMPTS}"
        )
    kind = [] if pairs is None else ["--kind", "dflash2"]
    drafter = str(named_drafter(question.target, question.drafter, takes_head=config.kind == "dflash2"))
    start = [] if is_untrained(config) else [*kind, "--from", drafter]
    prompts = str(question.prompts or OWN_PROMPTS)
    words = ["blockdraft", "train", question.target, *start, "--prompts", prompts, "--out", "trained"]
    return Prospect(is_worth_it, tuple(reasons), shlex.join([*words, "--minutes", "30"]))


def has_prospect(config: DraftConfig, categories: Mapping[str, DrafterFit], overall: DrafterFit) -> bool:
    """Return whether training may help at all."""
    is_low = any(one.committed < LOW for one in categories.values())
    return is_low or why_dflash2(config, overall) is not None


def is_untrained(config: DraftConfig) -> bool:
    """Return whether `train --from` refuses the drafter: its kind, or its head for fewer tokens."""
    return config.draft_vocab_size != config.vocab_size or config.kind not in TRAINED


def why_dflash2(config: DraftConfig, overall: DrafterFit) -> str | None:
    """Return a sentence about later drafts that are much worse than the first, which DFlash2 could improve.

    Return None if they are not, or if `blockdraft train --kind dflash2 --from` refuses this drafter.
    """
    is_speculators = config.has_anchored_window  # only speculators' layout has such windows
    if config.kind != "dflash" or config.drafts_from_anchor or is_speculators or is_untrained(config):
        return None
    counts = overall.counts
    first, later = counts.right(1, 1), counts.right(2, len(counts.reached))
    if first is None or later is None or first < 0.5 or later >= DECAYS * first:
        return None
    return (
        f"draft 1 is right in {first:.0%} of the steps, a later one in {later:.0%} where it is reached: "
        "--kind dflash2 lets each know the one before it, and begins as this drafter"
    )


def describe_depth(overall: DrafterFit) -> str:
    """Return a sentence about the positions in the block at which the drafter fails."""
    rates = overall.by_position
    first = rates[0] if rates else 0.0
    reached = sum(rates[:-1])
    deeper = sum(rates[1:]) / reached if reached else 0.0
    text = f"the first draft is right in {first:.0%} of the steps, a later one in {deeper:.0%} if reached"
    if first < 0.5:
        return f"{text}: the drafter does not know this target or this workload"
    if deeper < 0.75 * first:
        return f"{text}: it predicts the next token but not the block: train longer, or use a narrow width"
    return f"{text}: it fails evenly along the block"


def training_pays(costs: Sequence[Cost]) -> tuple[bool | None, str]:
    """Return whether a briefly trained drafter would be faster than plain decoding here, with the reason."""
    if not costs:
        return None, "steps could not be timed: whether a better drafter would be faster here is unknown"
    best = max(costs, key=lambda one: min(REACHABLE, one.width) / one.break_even)
    speed_up = min(REACHABLE, best.width) / best.break_even
    where = f"a step of width {best.width} costs {best.break_even:.2f} plain ones here"
    told = f"{where}: at {min(REACHABLE, best.width):g} tokens per step, {speed_up:.2f}x"
    if speed_up > 1:
        return True, f"{told} of plain decoding"
    return False, f"{told}: even a good drafter is no faster here"


def _fit_json(one: DrafterFit) -> dict[str, object]:
    return {
        "prompts": one.num_documents,
        "tokens": one.num_tokens,
        "steps": one.num_steps,
        "committed_per_step": one.committed,
        "accepted_by_position": list(one.by_position),
        "accepted_where_reached": list(one.where_reached),
    }
