"""The published runs that estimates of vLLM and SGLang are calibrated with, and the fit of their constants.

`python -m tests.planner.published_speeds` prints blockdraft/planner/engine_speeds.toml. A published number is
the time of a step, if the tokens per step are known. Each source counts as the root of its count of numbers.
The fit minimises relative errors, not their squares: one source that contradicts the others hardly moves it.
Later runs (NEWER) test the fit; runs that cannot be estimated are in LEFT_OUT, each with its reason.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import nnls

from benchmarks.shapes import drafter
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.machine.cards import card_by_key
from blockdraft.planner.engine_step import engine_load, step_terms
from blockdraft.planner.external import fit_external
from blockdraft.planner.known_pairs import entry_runs, read_file
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.pair import Case, Model, Pair
from blockdraft.planner.shape import draft_shape, target_shape
from blockdraft.planner.stored import Size, Stored
from blockdraft.planner.values import target_values
from blockdraft.settings.settings import Settings
from tests.checkpoints.published import CONFIGS

CONTEXT = 1024  # behind each user: most answers are of some hundred to 4,096 tokens
ENGINES = ("vllm", "sglang")
SPREAD = 1.25
LEAST_ERROR = 0.05  # smaller ones count as this much

# Runs that tell a step's time but are not estimated, by target and card.
LEFT_OUT = {
    ("Qwen/Qwen3.5-122B-A10B-FP8", "b200"): "the source does not say how many cards, nor the format",
    ("Qwen/Qwen3.8-27B", "h20"): "64,000 tokens of context, the target in fp8",
    ("Qwen/Qwen3.8-27B-FP8", "h200"): "the drafter's sizes are not known; without it they are DFlash2's runs",
    ("LiquidAI/LFM2.5-1.2B-Instruct", "h100"): "short convolutions, whose sizes are not known",
    ("LiquidAI/LFM2.5-8B-A1B", "h100"): "short convolutions, whose sizes are not known",
    ("zai-org/GLM-5.3-Flash", "gb10"): "two cards, no CUDA graphs",
    ("meta-models/Muse-Glimmer-30B", "h200"): "the target's sizes are not known",
}
# Estimated, but not in the fit: the terms of the sum and its constants were chosen without them.
NEWER = {("Qwen/Qwen3.8-27B", "h200")}
# Checkpoints in fewer bits: what they were made of, the format, and bytes of a value with its part of scales.
PACKED = {
    "Intel/Qwen3.5-35B-A3B-int4-AutoRound": ("Qwen/Qwen3.5-35B-A3B", "auto-round", 0.53),
    "Qwen/Qwen3.6-27B-FP8": ("Qwen/Qwen3.6-27B", "fp8", 1.0),
    "cyankiwi/gemma-4-26B-A4B-it-AWQ-4bit": ("google/gemma-4-26B-A4B-it", "awq", 0.53),
    "rdtand/Qwen3.5-27B-NVFP4-DeltaNet-Included": ("Qwen/Qwen3.5-27B", "modelopt NVFP4", 0.5625),
    "sakamakismile/Qwen3.6-27B-NVFP4": ("Qwen/Qwen3.6-27B", "modelopt NVFP4", 0.5625),
    "saricles/Qwen3-Coder-Next-NVFP4-GB10": ("Qwen/Qwen3-Coder-Next", "modelopt NVFP4", 0.5625),
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_NARROW = {"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
# From the drafters' config.json files; where one is not known here, widths that give its parameters.
DRAFTERS = {
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": {**_HEADS, "intermediate_size": 12288, "block_size": 10},
    "z-lab/Qwen3-4B-DFlash-b16": {**_HEADS, "intermediate_size": 9728},
    "z-lab/Qwen3-8B-DFlash-b16": {**_HEADS, "intermediate_size": 12288},
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": {**_NARROW, "num_hidden_layers": 8},
    "z-lab/Qwen3-Coder-Next-DFlash": {**_NARROW, "num_hidden_layers": 8},
    "z-lab/Qwen3.5-4B-DFlash": {**_HEADS, "intermediate_size": 9728},
    "z-lab/Qwen3.5-9B-DFlash": {**_HEADS, "intermediate_size": 12288},
    "z-lab/Qwen3.5-27B-DFlash": {**_HEADS, "intermediate_size": 17408, "num_hidden_layers": 6},
    "z-lab/Qwen3.6-27B-DFlash": {**_HEADS, "intermediate_size": 17408},
    "z-lab/Qwen3.8-27B-DFlash2": {**_HEADS, "intermediate_size": 17408, "block_size": 8},
    "z-lab/Qwen3.5-35B-A3B-DFlash": {**_NARROW, "num_hidden_layers": 8},
    "z-lab/Qwen3.6-35B-A3B-DFlash": {**_NARROW, "num_hidden_layers": 6},
    "z-lab/gemma-4-26B-A4B-it-DFlash": {**_HEADS, "intermediate_size": 5632},
    "z-lab/gemma-4-31B-it-DFlash": {**_HEADS, "intermediate_size": 10752, "num_attention_heads": 64},
    "RedHatAI/gemma-4-31B-it-speculator.dflash": {
        **_HEADS,
        "intermediate_size": 10752,
        "num_attention_heads": 64,
        "block_size": 9,
    },
}


@cache
def pair_of(target, draft_name):
    """The pair with the sizes of its checkpoints, as their headers would give them."""
    base, method, num_bytes = PACKED.get(target, (target, None, 2.0))
    missing = [name for name, known in ((base, CONFIGS), (draft_name, DRAFTERS)) if name not in known]
    assert not missing, f"sizes of {missing} are not known: add them, or a reason to LEFT_OUT"
    raw = {key: value for key, value in CONFIGS[base].items() if key != "quantization_config"}
    config = read_model_config(raw, name=target)
    values = target_values(config)
    section = {} if method is None else {"quantization_config": {"quant_method": method}}
    rest = values.projections + values.plain
    tensors = {
        "model.embed_tokens.weight": Size(values.embedding, 2 * values.embedding, False),
        "lm_head.weight": Size(values.head, 2 * values.head, False),
        "model.layers.0.all.weight": Size(rest, int(num_bytes * rest), method is not None),
        "model.layers.0.experts.weight": Size(
            values.experts, int(num_bytes * values.experts), method is not None
        ),
    }
    stored = Stored(target, "headers", raw | section, None, tensors, ())
    layers = len(config.layers)
    taps = [1, layers // 4, layers // 2, 3 * layers // 4, layers - 3]
    draft_raw = drafter(
        raw, dflash_config={"mask_token_id": 4, "target_layer_ids": taps}, **DRAFTERS[draft_name]
    )
    draft_config = read_draft_config(draft_raw, name=draft_name)
    draft = Model(
        Stored(draft_name, "headers", draft_raw, None, None, ()), draft_shape(draft_config, has_head=False)
    )
    return Pair(Model(stored, target_shape(config)), draft, config, draft_config, draft_config.block)


def case_of(target, run, draft_name):
    """The case that a published run was of."""
    card, pair = card_by_key(run.card), pair_of(target, draft_name)
    settings = Settings(
        model=target,
        draft=draft_name,
        engine=run.engine,
        width=run.width or "auto",
        quantization="fp8" if run.quantization == "fp8" else "auto",
    )
    return Case(settings, machine_of(card), pair, card)


@dataclass(frozen=True)
class Number:
    """One published number, as the seconds of a step."""

    source: tuple[str, ...]  # of all numbers that are held out together
    engine: str
    card: str
    model: str
    what: str
    seconds: float
    terms: dict[str, float]

    @property
    def is_newer(self):
        return (self.model, self.card) in NEWER

    def estimate(self, constants):
        return sum(constants[name] * value for name, value in self.terms.items())


def step_times(run):
    """The seconds of a step, each with whether it is one without a drafter."""
    drafted, plain = run.tokens_per_second, run.baseline_tokens_per_second
    if plain is None and drafted is not None and run.speedup is not None:
        plain = drafted / run.speedup
    both = (plain, 1.0, True), (drafted, run.tokens_per_step, False)
    return [
        (run.concurrency * tokens / speed, is_plain)
        for speed, tokens, is_plain in both
        if speed is not None and tokens is not None
    ]


def why_left_out(target, run):
    """Why a published run gives no number, or "" if it gives some."""
    if run.engine not in ENGINES:
        return "another engine, or none is named"
    if run.card is None:
        return "no card is named"
    return LEFT_OUT.get((target, run.card), "") if step_times(run) else "no time of a step"


def all_runs():
    """All published runs, each with its target and drafter."""
    return [
        (entry["target"], entry["drafter"], run)
        for entry in read_file()["published"]
        for run in entry_runs(entry)
    ]


def numbers():
    """The numbers of the fit."""
    return [one for one in all_numbers() if not one.is_newer]


def newer_numbers():
    return [one for one in all_numbers() if one.is_newer]


@cache
def all_numbers():
    """All published numbers that tell a step's time and can be estimated."""
    found = []
    for target, draft_name, run in all_runs():
        if why_left_out(target, run):
            continue
        case = case_of(target, run, draft_name)
        fit = fit_external(case)
        for seconds, is_plain in step_times(run):
            width = 1 if is_plain else fit.width
            load = engine_load(case, fit, rows=run.concurrency, context=CONTEXT, width=width)
            found.append(
                Number(
                    source=(run.engine, run.card, target, run.source),
                    engine=run.engine,
                    card=run.card,
                    model=PACKED.get(target, (target,))[0],
                    what=f"{run.task or run.workload}, {run.concurrency} users, width {width}",
                    seconds=seconds,
                    terms=step_terms(case, load, width=width),
                )
            )
    return sorted(found, key=lambda one: (one.source, one.what))


def fit_constants(known):
    """The constants, none negative, that minimise the relative errors of step times."""
    names = list(known[0].terms)
    counts = Counter(one.source for one in known)
    shares = np.array([counts[one.source] ** -0.5 for one in known])
    terms = np.array([[one.terms[name] / one.seconds for name in names] for one in known])
    weights = shares
    for _ in range(30):
        constants, _ = nnls(terms * np.sqrt(weights)[:, None], np.sqrt(weights))
        errors = np.abs(np.log(np.maximum(terms @ constants, 1e-3)))
        weights = shares / np.maximum(errors, LEAST_ERROR)
    return dict(zip(names, map(float, constants), strict=True))


def held_out(by, among=None):
    """For each number its estimate over the published value, fitted without those of its group."""
    found, known = {}, numbers() if among is None else among
    for group in sorted({by(one) for one in known}):
        constants = fit_constants([one for one in known if by(one) != group])
        found |= {
            (one.source, one.what, one.seconds): one.estimate(constants) / one.seconds
            for one in known
            if by(one) == group
        }
    return found


def share_within(ratios, factor):
    return float(np.mean([abs(math.log(ratio)) <= math.log(factor) for ratio in ratios]))


def as_toml():
    """The text of engine_speeds.toml."""
    ratios = held_out(lambda one: one.source).values()
    cards = ", ".join(f'"{card}"' for card in sorted({one.card for one in numbers()}))
    constants = fit_constants(numbers()).items()
    lines = (
        "# Constants of a step of vLLM and SGLang (planner/engine_step.py).",
        "# `python -m tests.planner.published_speeds` prints this file.",
        "",
        f"spread = {SPREAD}",
        f"share = {share_within(ratios, SPREAD):.2f}",
        f"num_numbers = {len(numbers())}",
        f"num_sources = {len({one.source for one in numbers()})}",
        f"cards = [{cards}]",
        "",
        "[constants]",
        *(f'"{name}" = {value:.3g}' for name, value in constants),
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_toml())
