"""z-lab's own package against ours: with the shipped drafters, both commit the same tokens in every step.

The package (`dflash` on PyPI) has its own drafters, caches and decoding loop, and runs the target in
transformers. Only the target's weights go through our reader: transformers needs one more package to read
GGUF files. Its steps differ from ours in two ways:

- Its prefill emits a token, and its first block starts from that token. Ours starts from the prompt's last
  token, so our prompt is its prompt and that token.
- It narrows the last block to the tokens that are left. Ours drops the tokens beyond the last one. Compared
  are the tokens that a step delivers, which are the same.
"""

import importlib.util
import json
import shutil
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.settings.settings import cache_dir
from blockdraft.settings.shipped import shipped_drafter

INSTALL = "pip install --no-deps dflash==0.1.0"  # as in the Makefile
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("dflash") is None, reason=f"z-lab's package is missing: {INSTALL}"
    ),
    pytest.mark.skipif(
        not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
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
