"""The embedded default, end to end. `make test` fetches it; without it these tests skip."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.settings.settings import cache_dir

pytestmark = pytest.mark.skipif(
    not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", width=8, max_model_len=512)


def test_it_writes_what_transformers_writes_with_the_same_weights():
    checkpoint = open_checkpoint("default")
    config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "architectures"})
    with torch.device("meta"):  # random weights take seconds
        model = LlamaForCausalLM(config).eval()
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    llm = LLM(device="cpu", width=8, max_model_len=512, quantization="none", draft_quantization="none")
    prompt = llm.tokenizer.encode("def binary_search(items, target):\n    low, high = 0,")
    token_ids = llm.generate([prompt], GREEDY)[0].token_ids
    with torch.inference_mode():  # the token that it would write at each position
        logits = model(torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
    assert list(token_ids) == logits.argmax(dim=1).tolist()


def test_it_answers_a_question_whole_and_streamed_and_metrics_add_up(llm):
    result, deltas = llm.chat(QUESTION, GREEDY)[0], list(llm.stream(QUESTION, GREEDY))
    assert result.text == "".join(delta.text for delta in deltas) == "The capital of France is Paris."
    assert result.finish_reason == "stop"
    metrics = deltas[-1].metrics
    assert metrics.num_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert metrics.first_token_s <= metrics.seconds


def test_conversations_answered_together_are_answered_as_alone(llm):
    questions = [[{"role": "user", "content": f"Name a {thing}."}] for thing in ("colour", "river")]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)
    together = [result.text for result in llm.chat(questions, params)]
    assert together == [llm.chat(question, params)[0].text for question in questions]


@pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)
@pytest.mark.parametrize(("temperature", "max_tokens"), [(0.0, 24), (0.8, 8)])
def test_captured_int8_steps_write_what_plain_decoding_writes(llm, temperature, max_tokens):
    """A step with log-probabilities is not captured, and one of width 1 drafts nothing."""
    engine = llm.engine
    assert isinstance(engine.models.target.embedding.weight, Int8Matrix)
    assert engine.graphs is not None
    params = SamplingParams(temperature=temperature, seed=8, max_tokens=max_tokens)
    prompts = ["The three primary colours are red,", "def add(a, b):\n    return"]
    num_blocks = engine.stats.num_blocks
    wide = [result.token_ids for result in llm.generate(prompts, params)]
    assert engine.stats.num_blocks - num_blocks < sum(map(len, wide)), "drafts are accepted"
    plain = llm.generate(prompts, replace(params, width=1, logprobs=0))
    assert wide == [result.token_ids for result in plain]
