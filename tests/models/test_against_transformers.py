"""Targets against transformers on the same tiny weights: all logits, greedy text, tapped layers."""

import functools
import json
import os
import random
import secrets
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from blockdraft.engine.engine import Engine
from blockdraft.engine.loading import load_target
from blockdraft.engine.request import SamplingParams
from blockdraft.models.draft_config import read_draft_config
from blockdraft.models.folder import FolderCheckpoint
from tests.fixtures import make_pair
from tests.models.checkpoints import CPU, Bench, cut, load, write_target

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
# At head_dim 16 the wavelengths 6, 20, 63, 199, … fall in all three bands of 16 and 64.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"head_dim": 16, "rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "qwen2-full": ("qwen2", {"num_key_value_heads": 4, "rope_parameters": DEFAULT}),
    "qwen2-last-layers-slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-slides": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "llama-random": ("llama", None),
    "qwen2-random": ("qwen2", None),
    "qwen3-random": ("qwen3", None),
}


def draw(family, rng):
    """Any configuration of `family` that the engine claims to run."""
    num_kv_heads = rng.choice([1, 2, 3])
    num_layers = rng.randint(1, 4)
    rope = rng.choice([DEFAULT, LINEAR, LLAMA3]) | {"rope_theta": rng.choice([500.0, 10000.0, 1e6])}
    drawn = {
        "vocab_size": rng.randint(50, 130),
        "intermediate_size": rng.randint(1, 60),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * rng.choice([1, 2, 3]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rope,
    }
    # Narrower streams make RMS norms ill-conditioned: rounding alone would show.
    head_dim = rng.choice([dim for dim in (4, 6, 16, 24, 32) if dim * drawn["num_attention_heads"] >= 24])
    drawn["hidden_size"] = drawn["num_attention_heads"] * head_dim
    if family == "llama":
        return drawn | {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    if family == "qwen3":
        drawn |= {"attention_bias": rng.random() < 0.5, "head_dim": rng.choice([2, 8, 12])}
    if rng.random() < 0.5:
        kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(num_layers)]
        # From 2 on: a window of 1 makes transformers' own cache keep everything ([-1 + 1:]).
        drawn |= {"use_sliding_window": True, "sliding_window": rng.randint(2, 50), "layer_types": kinds}
    return drawn


class Case:
    """One configuration in both implementations."""

    def __init__(self, name, folder):
        family, overrides = CASES[name]
        self.seed = int(os.environ.get("TEST_SEED", secrets.randbits(32))) if overrides is None else 1
        if overrides is None:
            overrides = draw(family, random.Random(self.seed))
        self.folder = folder
        self.hf = write_target(folder, FAMILIES[family](**BASE | overrides), self.seed)
        if "max_window_layers" in overrides:  # as older files say it, without layer_types
            file = folder / "config.json"
            raw = json.loads(file.read_text())
            del raw["layer_types"]
            file.write_text(json.dumps(raw))
        self.label = f"{name}, TEST_SEED={self.seed}, {overrides}"
        self.generator = torch.Generator().manual_seed(self.seed)

    @functools.cache  # noqa: B019 - lives as long as the module's fixture
    def models(self, dtype):
        name = str(dtype).removeprefix("torch.")
        return load(self.folder, dtype=name, max_context=400, page_size=3, chunk=7, max_rows=2)

    def tokens(self, length):
        return torch.randint(0, self.hf.config.vocab_size, (length,), generator=self.generator)

    @torch.no_grad()
    def expected(self, sequences, dtype):
        model = self.hf.to(dtype)
        return [model(ids[None]).logits[0] for ids in sequences]

    def logits(self, sequences, chunks, dtype, page_size):
        models = self.models(dtype)
        bench = Bench(
            models.config.layer_specs(),
            num_rows=len(sequences),
            max_length=max(map(len, sequences)),
            vocab_size=models.config.vocab_size,
            page_size=page_size,
            dtype=dtype,
        )
        return bench.prefill(models.target, sequences, chunks)[0]

    def compare(self, sequences, chunks, *, dtype, tolerance, page_size=5):
        actual = self.logits(sequences, chunks, dtype, page_size)
        for mine, theirs in zip(actual, self.expected(sequences, dtype), strict=True):
            assert theirs.std() > 0.1, self.label  # logits that say something
            self.assert_close(mine, theirs, tolerance)

    def assert_close(self, mine, theirs, tolerance):
        """Equal up to `tolerance` of the largest value."""
        atol = tolerance * float(theirs.abs().max())
        label = self.label
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, msg=lambda text: f"{label}\n{text}")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("target"))


# HF keeps norms, softmax and rope in float32 in a float64 model too: 5e-6 is their rounding.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 5e-6)], ids=str)
def test_prefill_in_one_piece_gives_the_logits_of_transformers(case, dtype, tolerance):
    sequences = [case.tokens(40)]
    case.compare(sequences, [[40]], dtype=dtype, tolerance=tolerance)


def test_prefill_past_one_chunk_of_keys_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(300), case.tokens(2)]
    case.compare(sequences, [[300], [2]], dtype=torch.float32, tolerance=2e-5, page_size=16)


def test_prefill_of_two_rows_in_uneven_chunks_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(37), case.tokens(23)]
    chunks = [cut(len(ids), 4, case.generator) for ids in sequences]
    case.compare(sequences, chunks, dtype=torch.float32, tolerance=2e-5, page_size=7)


def test_token_by_token_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(16), case.tokens(16)]
    case.compare(sequences, [[1] * 16] * 2, dtype=torch.float32, tolerance=2e-5, page_size=1)


def test_greedy_text_is_that_of_transformers(case):
    models = case.models(torch.float64)
    engine = Engine(replace(models, plan=replace(models.plan, num_pages=60)))
    num_tokens = 10
    prompts = [case.tokens(11), case.tokens(1), case.tokens(9)]
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    ids = [engine.add(prompt.tolist(), greedy) for prompt in prompts]
    answers = {request_id: [] for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
    model = case.hf.double()
    for request_id, prompt in zip(ids, prompts, strict=True):
        theirs = model.generate(prompt[None], max_new_tokens=num_tokens, do_sample=False)
        assert answers[request_id] == theirs[0, len(prompt) :].tolist(), case.label


def test_features_are_the_outputs_of_the_tapped_layers_in_the_order_asked(case):
    num_layers = case.hf.config.num_hidden_layers
    taps = list(reversed(range(num_layers)))
    raw = make_pair.draft_config() | {"num_target_layers": num_layers}
    raw["dflash_config"] = {"mask_token_id": 1, "target_layer_ids": taps}
    checkpoint = FolderCheckpoint(case.folder, name="target")
    models = case.models(torch.float64)
    target = load_target(checkpoint, models.config, read_draft_config(raw, name="d"), models.plan, CPU)
    ids = case.tokens(12)
    bench = Bench(
        models.config.layer_specs(),
        num_rows=1,
        max_length=12,
        vocab_size=models.config.vocab_size,
        page_size=4,
        dtype=torch.float64,
    )
    _, [features] = bench.prefill(target, [ids], [[5, 7]])
    # Hooks: the last entry of output_hidden_states has been through the final norm already.
    outputs = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, k=index: outputs.update({k: out}))
        for index, layer in enumerate(case.hf.model.layers)
    ]
    with torch.no_grad():
        hidden = case.hf.double()(ids[None], output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    size = hidden[0].shape[-1]
    for place, tap in enumerate(taps):
        mine = features[:, place * size : (place + 1) * size]
        case.assert_close(mine, outputs[tap].squeeze(0), 5e-6)
        if tap < num_layers - 1:
            case.assert_close(mine, hidden[tap + 1][0], 5e-6)
