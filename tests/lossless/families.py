"""Engines over tiny targets of every family, each with a random drafter of its own, in float64."""

import functools
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from blockdraft.cache.recurrent import RecurrentState
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.seeds import mix
from blockdraft.step.drafter import NoDrafter, Weightless
from tests import tiny
from tests.fixtures import make_pair as fixture
from tests.models import families
from tests.models.checkpoints import load_pair, write_draft, write_target
from tests.models.mtp import write_mtp_target

BLOCK = 16
MAX_MODEL_LEN = 120
# Of every family one configuration at least: windows, shared layers, dense layers between mixtures,
# and delta layers first, last and side by side.
NAMES = (
    "llama-llama3",
    "qwen2-layer-types",
    "qwen3-slides",
    "qwen3_moe-some-dense",
    "qwen3_next-whole",
    "qwen3_next-all-delta-but-one",
    "qwen3_5-whole",
    "qwen3_5-mrope",
    "qwen3_5_moe-whole",
    "gemma4-keys-are-values",
    "gemma4-shared",
    "gemma4-mixture",
    "gpt_oss-whole",
)
transformers.utils.logging.disable_progress_bar()  # of every checkpoint that is written

HYBRID_NAMES = tuple(name for name in NAMES if families.CASES[name][0] in families.HYBRIDS)


@functools.cache
def pair(name):
    """Models and plan of a configuration in tests/models/families.py, through the real loader."""
    return make_pair(*families.CASES[name], seed=1)


def models(name):
    return pair(name)[0]


@functools.lru_cache(maxsize=4)
def drawn_pair(family, seed):
    """A pair of a configuration drawn from `seed`."""
    overrides = families.draw(family, random.Random(seed))
    if overrides.get("moe_intermediate_size") == 1:
        overrides["moe_intermediate_size"] = 2  # transformers saves experts of size 1 as vectors
    return make_pair(family, overrides, seed=seed)


def make_pair(family, overrides, *, seed, block=BLOCK, draft_head_dim=8, **settings):
    """Models with random weights, and their plan; `settings` override those that all tests here share."""
    settings = {
        "dtype": "float64",
        "max_model_len": MAX_MODEL_LEN,
        "width": block,
        "max_num_seqs": 4,
        "prefix_cache": True,
        **settings,
    }
    config = families.CONFIGS[family](**families.BASE | overrides)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        write_target(target, config, seed)
        raw = draft_config(config, block) | {"head_dim": draft_head_dim}
        weights = fixture.draft_weights(raw, torch.Generator().manual_seed(seed))
        write_draft(draft, raw, weights)
        loaded, plan = load_pair(target, draft, **settings)
    return untied(loaded), plan


def untied(loaded):
    if loaded.config.ties_embeddings:
        # Random weights behind a tied head repeat the last token for ever, whatever came before it.
        loaded.target.embedding.weight *= 0.1
        loaded.target.norm.weight *= 10
    return loaded


@functools.cache
def mtp_pair(name, *, attends=False, **settings):
    """A hybrid that drafts with its own head, and the plan; `attends`: all layers do, as prefixes need."""
    changes = {"layer_types": ["full_attention"] * families.HYBRID["num_hidden_layers"]} if attends else {}
    shared = {"dtype": "float64", "max_model_len": MAX_MODEL_LEN, "width": BLOCK, "max_num_seqs": 4}
    with tempfile.TemporaryDirectory() as folder:
        write_mtp_target(Path(folder), name, **changes)
        loaded, plan = load_pair(Path(folder), "mtp", **shared | settings)
    return untied(loaded), plan


def draft_config(target, block=BLOCK):
    """A drafter of two layers that reads the first and the last layer of `target`."""
    depth = target.num_hidden_layers
    return fixture.draft_config() | {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "block_size": block,
        "num_target_layers": depth,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": sorted({0, depth - 1})},
    }


class HintedDrafter(Weightless):
    """Knows the answers and draws for each block how many drafts are right, 0 to `most`, equally often."""

    block = BLOCK

    def __init__(self, answers, vocab_size, most):
        self.answers = answers  # seed of a sequence -> prompt and answer
        self.vocab_size = vocab_size
        self.most = most
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, rows, cache, view, width):
        return tiny.asked_again(self._draft, rows, width)

    def _draft(self, block, lengths, seeds):
        width = block.shape[1]
        for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
            answer = self.answers.get(seed, ())  # none: the scratch row's
            right = torch.tensor(([*answer[length + 1 : length + width]] + [0] * width)[: width - 1])
            block[row, 1:] = right
            most = min(self.most, width - 1)
            first_wrong = 1 + int(torch.randint(0, most + 1, (), generator=self.generator))
            # Nothing is wrong past the block. After a wrong draft the rest is right: it must not be taken.
            block[row, first_wrong : first_wrong + 1] += 1
        block[:, 1:] %= self.vocab_size


def engine(pair, drafter="own", *, chunks=None, widths=None, is_captured=False, **plan):
    """An engine on a pair of models and plan; `plan` overrides fields of the Plan.

    `drafter`: none, own, or a drafter.
    `chunks`: a seed, for prompts that are cut by chance. `widths`: a seed, for widths of rows and steps.
    """
    models, planned = pair
    if drafter == "none":
        drafter = NoDrafter(BLOCK)
    elif drafter == "own":
        drafter = models.drafter
    grid = 2 * plan.get("page_size", planned.page_size)
    plan = {"num_pages": 1024, "max_prefill_tokens": 64, "state_grid": grid, **plan}
    plan = tiny.with_exact_pages(replace(planned, **plan))
    made = Engine(replace(models, drafter=drafter), plan)
    if made.scheduler.states is not None:
        made.scheduler.states.spacing = 2 * grid
    if is_captured:
        tiny.capture(made)
    if widths is not None:
        tiny.with_any_widths(made, widths)
    return made if chunks is None else tiny.with_any_chunks(made, chunks)


def plain_engine(pair, **plan):
    """Plain decoding: no drafter, no prefix cache, prefill in chunks that nobody else uses."""
    return engine(
        pair,
        "none",
        **{"width": 1, "prefix_cache": False, "page_size": 16, "max_prefill_tokens": 7, **plan},
    )


def plain(pair, requests):
    """The results of every request alone, one token at a time."""
    answers = []
    for prompt, params in requests:
        answers += tiny.run(plain_engine(pair), [(prompt, replace(params, width=1))])
    return answers


def hinted(models, requests, expected, *, most=BLOCK - 1):
    """A drafter that knows the `expected` results of `requests`, all choices of them."""
    answers = {}
    for (prompt, params), choices in zip(requests, expected, strict=True):
        for index, (token_ids, _, _) in enumerate(choices):
            own = params.seed if index == 0 else mix(params.seed, index)
            answers[own] = list(prompt) + token_ids
    return HintedDrafter(answers, models.config.vocab_size, most)


def make_requests(lengths=(1, 9, 4, 14), max_tokens=16, **params):
    """Ragged prompts, greedy and sampled by turns, with seeds of their own."""
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(0, 50, (length,), generator=generator).tolist(),
            SamplingParams(
                temperature=float(index % 2),
                seed=70 + index,
                max_tokens=max_tokens,
                ignore_eos=True,
                **params,
            ),
        )
        for index, length in enumerate(lengths)
    ]


def check_compressed(pair, kv_dtype, *, drafts=None, is_captured=True):
    """By the rule of positions, two schedules that share nothing agree with one token at a time.

    Then, with `drafts`, the pair's own drafter, whose keys and values are in that format, changes nothing.
    """
    kept = {"kv_dtype": kv_dtype, "kv_window": 16, "page_size": 16}
    requests = make_requests(lengths=(262, 9, 170), max_tokens=24)  # c(t) grows within an answer
    expected = []
    for prompt, params in requests:
        expected += tiny.run(plain_engine(pair, **kept), [(prompt, replace(params, width=1))])
    schedules = (
        {"max_prefill_tokens": 100, "overlap": False},
        {"max_prefill_tokens": 19, "overlap": True, "max_num_seqs": 3, "is_captured": is_captured},
    )
    for schedule in schedules:
        drafter = hinted(pair[0], requests, expected)
        assert tiny.run(engine(pair, drafter, width=BLOCK, **schedule, **kept), requests) == expected
    if drafts is not None:
        kept |= {"draft_kv_dtype": drafts, "width": BLOCK, "max_prefill_tokens": 100}
        assert tiny.run(engine(pair, is_captured=is_captured, **kept), requests) == expected


def recurrent_layers(cache):
    return [storage for storage in cache.storage if isinstance(storage, RecurrentState)]


def committed(engine):
    """(state, tail) of every delta layer, copied, for each running sequence: (seed, length) -> copies."""
    lengths = engine.rows.length.tolist()
    return {
        (sequence.sampling.seed, lengths[sequence.row]): [
            (layer.state[sequence.row].clone(), layer.tail[sequence.row].clone())
            for layer in recurrent_layers(engine.cache)
        ]
        for sequence in engine.scheduler.running
        if sequence.num_placed_pages is not None
    }
