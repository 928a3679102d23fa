"""z-lab's own package against ours: with the shipped drafters, both commit the same tokens in every step, and
with small random drafters of drawn configurations, both draft the same blocks.

The package (`dflash` on PyPI) has its own drafters, caches and decoding loop, and runs the target in
transformers. Only the target's weights go through our reader: transformers needs one more package to read
GGUF files. Its steps differ from ours in two ways:

- Its prefill emits a token, and its first block starts from that token. Ours starts from the prompt's last
  token, so our prompt is its prompt and that token.
- It narrows the last block to the tokens that are left. Ours drops the tokens beyond the last one. Compared
  are the tokens that a step delivers, which are the same.
"""

import copy
import functools
import importlib.util
import json
import random
import shutil
import time

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from blockdraft import LLM, SamplingParams
from blockdraft.cache.rows import RowSampling
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.settings.settings import cache_dir
from blockdraft.settings.shipped import shipped_drafter
from tests.fixtures import make_pair
from tests.models.checkpoints import bench_of, load, write_draft
from tests.models.test_dflash import write_small_target

INSTALL = "pip install --no-deps dflash==0.1.0"  # as in the Makefile
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("dflash") is None, reason=f"z-lab's package is missing: {INSTALL}"
    ),
]
WIDTH = 16
NUM_TOKENS = 48
PROMPTS = (
    "def binary_search(items, target):\n",
    "The three primary colours are",
    "Question: What is 12 + 30?\nAnswer:",  # ends by itself
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"]}\n{"name": "Alan", "born":',
    [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
    [{"role": "user", "content": "Write a Python function that counts the words of a text."}],
)


@pytest.fixture(scope="module")
def target():
    """The default model in transformers, in float32."""
    checkpoint = open_checkpoint("default")
    config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "architectures"})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.tensors()}, strict=False)
    model.tie_weights()
    return model


def without_our_key(folder, copy):
    """Copy our DFlash2 drafter, so that pairs count for the first draft, too, as they do in the package."""
    shutil.copytree(folder.parent, copy)
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"].pop("selector_skips_first")
    (copy / folder.name / "config.json").write_text(json.dumps(config))
    return copy / folder.name


def our_steps(llm, prompt, num_tokens):
    """Return the tokens of each step."""
    deltas = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return [list(delta.token_ids) for delta in deltas]


def their_steps(drafter, target, prompt):
    """Return the tokens of each step; the first step is the prefill."""
    from dflash.model import dflash_generate

    done = dflash_generate(
        drafter,
        target,
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        stop_token_ids=[target.config.eos_token_id],
        block_size=WIDTH,
        return_stats=True,
    )
    tokens = iter(done.output_ids[0, len(prompt) :].tolist())
    steps = [[next(tokens) for _ in range(count)] for count in (1, *done.acceptance_lengths)]
    assert not list(tokens)
    return steps


@pytest.mark.skipif(
    not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
)
@pytest.mark.parametrize("kind", ["DFlash", "DFlash2"])
def test_every_step_commits_the_tokens_of_the_packages_step(kind, target, tmp_path, monkeypatch):
    import dflash.model

    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)  # it times with a card
    shipped = shipped_drafter("default", part="dflash2" if kind == "DFlash2" else "")
    drafter = getattr(dflash.model, f"{kind}DraftModel").from_pretrained(shipped, dtype=torch.float32).eval()
    llm = LLM(
        draft=str(without_our_key(shipped, tmp_path / "copy") if kind == "DFlash2" else shipped),
        device="cpu",
        dtype="float32",
        quantization="none",
        draft_quantization="none",
        width=WIDTH,
        max_model_len=512,
    )
    for prompt in PROMPTS:
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.tokenizer.encode_chat(prompt)
        prefill, *steps = their_steps(drafter, target, ids)
        assert our_steps(llm, ids + prefill, NUM_TOKENS - 1) == steps, prompt
        assert max(map(len, steps)) > 1, "drafts are accepted"


# ---- drawn configurations

NUM_BLOCKS = 6
LISTS = ("target_layer_ids",)
ROPES = (
    {"rope_theta": 300.0},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
)
ATTENTION = (
    {},
    {"layer_types": ["full_attention"] * 2},
    *(
        {"layer_types": [*kinds], "use_sliding_window": is_used, "sliding_window": 4}
        for kinds in (["sliding_attention"] * 2, ["sliding_attention", "full_attention"])
        for is_used in (True, False)
    ),
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
)
SOFTCAPS = ({}, {"dflash": 0}, {"dflash": 1.5}, {"top": 1.5}, {"top": 0}, {"top": 1.5, "dflash": None})


def drawn(rng):
    """Return the shape of a drafter, and a config.json that says it in a way that z-lab's code reads."""
    shape = make_pair.dflash2_config() if rng.random() < 0.5 else make_pair.draft_config()
    shape |= {"attention_bias": rng.random() < 0.3, "head_dim": rng.choice((8, 128))}
    shape |= rng.choice(ROPES) | rng.choice(ATTENTION) | rng.choice(({}, {"is_causal": rng.random() < 0.5}))
    shape["dflash_config"] |= {"block_size": shape.pop("block_size")}
    shape["dflash_config"] |= rng.choice(({}, {"input_embedding_scale": 3.5}))
    shape["dflash_config"] |= rng.choice(({}, {"output_multiplier": 0.4}))
    said = copy.deepcopy(shape)
    for key, value in shape["dflash_config"].items():
        place = rng.choice(("dflash_config", "top", "both"))
        if place != "dflash_config":
            said[key] = value if place == "top" else rng.choice((value, [0] if key in LISTS else 1))
        if place == "top":
            del said["dflash_config"][key]
    for place, cap in rng.choice(SOFTCAPS).items():
        (said if place == "top" else said["dflash_config"])["final_logit_softcapping"] = cap
    if said["head_dim"] == 128:
        del said["head_dim"]
    return shape, said


@functools.cache
def small_target(folder):
    return write_small_target(folder).double()


@pytest.mark.parametrize("seed", range(24))
def test_drafts_of_a_drawn_configuration_are_the_packages(seed, tmp_path_factory, tmp_path, monkeypatch):
    import dflash.model

    folder = tmp_path_factory.getbasetemp() / "small"
    target = small_target(folder)
    shape, config = drawn(random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    weights = make_pair.draft_weights(shape, generator)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    write_draft(tmp_path, config, weights)
    if shape.get("use_sliding_window") is False:
        monkeypatch.setattr(dflash.model, "_make_cache", cache_without_windows)
    theirs = getattr(dflash.model, config["architectures"][0])
    theirs = theirs.from_pretrained(tmp_path, dtype=torch.float64).eval()
    features, blocks = recorded(dflash.model.dflash_generate, theirs, target, monkeypatch)
    assert len(blocks) > 3
    assert drafts(load(folder, tmp_path, dtype="float64", max_model_len=100), features, blocks) == blocks, (
        config
    )


def cache_without_windows(_):
    """A cache for what transformers' own refuses: sliding layers without a window."""
    cache = DynamicCache()
    cache.activate_past_recording()
    return cache


def recorded(generate, drafter, target, monkeypatch):
    """Run the package. Return the features that the drafter got before each block, and the blocks."""
    features, blocks, block = [], [], drafter.block_size
    draft, verify = drafter.forward, target.forward

    def told_drafter(**given):
        features.append(given["target_hidden"][0])
        return draft(**given)

    def told_target(ids, **given):
        if features:  # not the prompt
            blocks.append(ids[0].tolist())
        return verify(ids, **given)

    monkeypatch.setattr(drafter, "forward", told_drafter)
    monkeypatch.setattr(target, "forward", told_target)
    prompt = torch.arange(3, 22)[None]
    generate(drafter, target, prompt, max_new_tokens=block + NUM_BLOCKS, stop_token_ids=None)
    whole = [one for one in blocks if len(one) == block]  # the last may be narrower
    return features[: len(whole)], whole


def drafts(models, features, blocks):
    """Return our blocks after the same features and the same anchors."""
    bench, drafter = bench_of(models, 1, 90, page_size=5), models.drafter
    rows, cache, tables = bench.rows, bench.cache, bench.rows.page_table.clone()
    rows.place(0, [3], 0, RowSampling(temperature=0.0))
    rows.page_table.copy_(tables)
    rows.activate([0])
    found = []
    for new, block in zip(features, blocks, strict=True):
        drafter.absorb(new, cache.view(rows, (len(new),)))
        rows.extend((len(new),))
        rows.anchor[0] = block[0]
        drafted = drafter.draft(rows, cache, cache.view(rows, drafter.num_columns), len(block))
        found.append(drafted[0].tolist())
    return found
