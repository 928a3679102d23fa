"""The options of a training run. The command line reads its defaults here, so torch is not imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from blockdraft.errors import SettingsError
from blockdraft.models.draft_config import DraftKind

TRAINED: tuple[DraftKind, ...] = ("dflash", "dflash2", "dspark")
CPU_ROWS = 2  # default rows per step on a CPU, where more rows take minutes


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """The shape of a drafter. None copies the value of the target."""

    rank: int = 256  # of the token-pair tables of DFlash2 and DSpark
    num_candidates: int = 16  # in each of DFlash2's columns
    block: int = 16
    num_layers: int = 5
    taps: tuple[int, ...] | None = None  # 0-based target layers; None: `num_taps` evenly spaced
    num_taps: int = 5
    inner_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_causal: bool = True  # inside the block
    mask_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options for generating the target's answers."""

    max_tokens: int = 400
    sampled: float = 0.0  # share of the conversations answered at `temperature`; the rest is greedy
    temperature: tuple[float, float] = (0.7, 0.7)  # range: each conversation draws its own
    top_p: float = 0.95
    seed: int = 0
    max_repeat: int | None = 64  # cut an answer whose last so many tokens occurred before


@dataclass(frozen=True, slots=True)
class Objective:
    """Options of the loss and of its column weights."""

    weighting: Literal["dpace", "decay", "uniform"] = "dpace"
    alpha: float = 0.5
    gamma: float = 7.0
    hardness: float = 0.0  # for dpace: how strongly blocks that fail early are preferred
    distill: float = 0.0  # share of the divergence from the target's distribution in the loss
    selector: float = 1.0  # for DFlash2: weight of the selector's loss


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """All settings of the training itself, except data and duration."""

    rows_per_step: int = 24
    num_anchors: int = 128  # per row
    short_blocks: float = 0.0  # share of the run, from its start, with blocks of half the length
    anchoring: Literal["even", "walk"] = "even"  # anchors anywhere, or mostly where steps begin
    deep_from: int = 1024  # position in a document from which anchors are weighted by `deep_weight`
    deep_weight: float = 1.0  # how many times as often these anchors are drawn as earlier ones
    phases: int = 1  # split the rows into so many parts and train on them in turn, equally long
    optimizer: str = "muon"  # "muon" or "adamw"
    rate: float = 3e-3
    warm_up: float = 0.03  # share of the run
    floor: float = 0.0  # share of the rate at the end
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.0  # decay of a moving average of the weights, to be exported; 0: no average
    objective: Objective = field(default_factory=Objective)
    trained: Literal["all", "added", "selector"] = "all"  # parts of DFlash2 to train
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All options of one training run."""

    out: Path
    prompts: tuple[Path, ...] = ()
    more_answers: tuple[Path, ...] = ()  # folders with shards of earlier runs
    held_out: tuple[tuple[str | None, Path], ...] = ()  # (category or None for the file's own, file)
    model: str = "default"
    start_from: str | None = None  # a drafter to continue from
    kind: DraftKind | None = None  # None: the kind of `start_from`, or dflash
    device: str = "auto"
    dtype: str = "auto"
    steps: int | None = None
    minutes: float | None = None
    answer_minutes: float | None = None  # the part of `minutes` for answers; None: a fifth
    max_prompts: int | None = None
    length: int = 1024  # tokens of a packed row: the longest prompt with its answer
    bulk_rows: int | None = None  # sequences answered at once
    init: str = "random"
    shape: DrafterShape = field(default_factory=DrafterShape)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    recipe: TrainingRecipe = field(default_factory=TrainingRecipe)
    command: str = ""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise SettingsError("give either --steps or --minutes.")
        for folder in self.more_answers:
            if not any(folder.glob("shard-*.npz")):
                raise SettingsError(
                    f"--answers {folder} has no shard-*.npz: give the folder 'answers' of a training run."
                )
        if not self.prompts and not self.more_answers and not any(self.out.glob("answers/shard-*.npz")):
            raise SettingsError("no prompts: give --prompts FILE.")
        if self.more_answers and not self.prompts and not self.held_out:
            raise SettingsError(
                "--answers without --prompts leaves no prompts for evaluation: add --held-out FILE."
            )
        _check("--length", self.length, 64, 32767)
        _check("--steps", self.steps, 1)
        _check("--minutes", self.minutes, 0)
        _check("--answer-minutes", self.answer_minutes, 0)
        _check("--max-prompts", self.max_prompts, 1)
        _check("--rows", self.bulk_rows, 1)
        # A sequence needs space for a prompt, the answer, and a whole round of training/offline_batch.py.
        _check("--max-answer", self.answers.max_tokens, 1, self.length - 16)
        _check("--max-repeat", self.answers.max_repeat, 1)
        _check("--sampled", self.answers.sampled, 0, 1)
        lowest, highest = self.answers.temperature
        _check("--temperature", lowest, 0, highest)
        _check("--top-p", self.answers.top_p, 0, 1)
        recipe, objective = self.recipe, self.recipe.objective
        _check("--rows-per-step", recipe.rows_per_step, 1)
        _check("--anchors", recipe.num_anchors, 1)
        _check("--short-blocks", recipe.short_blocks, 0, 1)
        _check("--deep-from", recipe.deep_from, 0)
        _check("--deep-weight", recipe.deep_weight, 0.01)
        _check("--phases", recipe.phases, 1)
        _check("--average", recipe.average, 0, 1)
        _check("--hardness", objective.hardness, 0)
        if objective.hardness and objective.weighting != "dpace":
            raise SettingsError(f"--hardness {objective.hardness} needs --weighting dpace: leave it out.")
        _check("--distill", objective.distill, 0, 1)
        _check("--selector-weight", objective.selector, 0)
        _check("--rank", self.shape.rank, 1)
        _check("--candidates", self.shape.num_candidates, 2, 64)
        if recipe.trained != "all" and self.start_from is None:
            raise SettingsError(f"--train {recipe.trained} needs a trained drafter: add --from DRAFTER.")

    def fingerprint(self) -> dict[str, object]:
        """Return the options that must be equal when a run is resumed."""
        free = {"out", "command", "minutes", "prompts", "held_out", "device", "bulk_rows", "answer_minutes"}
        stored = {"answers": "manner"}  # names in run.json
        kept = {stored.get(name, name): value for name, value in asdict(self).items() if name not in free}
        return json.loads(json.dumps(kept, default=str))  # type: ignore[no-any-return]


def _check(flag: str, value: float | None, least: float, most: float | None = None) -> None:
    if value is not None and not (value >= least and (most is None or value <= most)):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise SettingsError(f"{flag} {value} is outside {allowed}.")
