"""PyTorch with the same float32 weights: a lean forward, and transformers' generate."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cpu_ours import CONTEXT, prompt
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.engine import Engine
from blockdraft.models.decoder import Decoder
from blockdraft.models.layers import attention_config
from blockdraft.step.captures import Graph, capturing
from blockdraft.step.decode import decode_parts, run_all_parts
from blockdraft.step.drafter import NoDrafter


class Lean:
    """Minimal PyTorch for the target: fused projections, SDPA, one contiguous cache, no features."""

    def __init__(self, target: Decoder, size: int) -> None:
        self.target, self.config = target, target.config
        self.heads = attention_config(target.config, 0)  # alike in every layer
        shape = (target.config.num_layers, 1, self.heads.num_kv_heads, size, self.heads.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def forward(self, token_ids: Tensor) -> Tensor:
        c, n, start = self.heads, len(token_ids), self.length
        x = self.target.embedding.weight[token_ids]
        cos, sin = self.target.rotaries[0](torch.arange(start, start + n))
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
        mask = torch.ones(n, start + n, dtype=torch.bool).tril(start) if n > 1 else None
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for i, layer in enumerate(self.target.layers):
            h = self.norm(x, layer.mixer_norm.weight)
            q, k, v = (
                part.view(n, -1, c.head_dim).transpose(0, 1)
                for part in F.linear(h, layer.mixer.qkv.weight).split((q_size, kv_size, kv_size), 1)
            )
            self.keys[i, 0, :, start : start + n] = self.rotate(k, cos, sin)
            self.values[i, 0, :, start : start + n] = v
            out = F.scaled_dot_product_attention(
                self.rotate(q, cos, sin)[None],
                self.keys[i, :, :, : start + n],
                self.values[i, :, :, : start + n],
                attn_mask=mask,
                enable_gqa=True,
            )[0]
            x = x + F.linear(out.transpose(0, 1).reshape(n, -1), layer.mixer.out.weight)
            gate, up = F.linear(self.norm(x, layer.mlp_norm.weight), layer.mlp.gate_up.weight).chunk(2, 1)
            x = x + F.linear(F.silu(gate) * up, layer.mlp.down.weight)
        self.length += n
        return F.linear(self.norm(x, self.target.norm.weight), self.target.embedding.weight)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * weight

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.inference_mode()
def lean(target: Decoder, num_tokens: int) -> tuple[float, list[int]]:
    model = Lean(target, CONTEXT + num_tokens + 1)
    ids = [*prompt(target.config.vocab_size)[:-1], 1000]
    token = int(model.forward(torch.tensor(ids))[-1].argmax())
    tokens, start = [token], time.perf_counter()
    for _ in range(num_tokens):
        tokens.append(int(model.forward(torch.tensor(tokens[-1:]))[-1].argmax()))
    return num_tokens / (time.perf_counter() - start), tokens


def hf_model(target: Decoder) -> object:
    """transformers' own Llama on views of our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c, heads, mlp = target.config, attention_config(target.config, 0), target.config.layers[0].mlp
    assert mlp is not None
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=mlp.inner_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=c.norm_eps,
        rope_theta=heads.rope.theta,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {
        "model.embed_tokens.weight": target.embedding.weight,
        "lm_head.weight": target.embedding.weight,
        "model.norm.weight": target.norm.weight,
    }
    for i, layer in enumerate(target.layers):
        sizes = layer.mixer.qkv.parts
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        parts = dict(zip(names, layer.mixer.qkv.weight.split(sizes), strict=True))
        parts["mlp.gate_proj"], parts["mlp.up_proj"] = layer.mlp.gate_up.weight.chunk(2)
        parts |= {
            "self_attn.o_proj": layer.mixer.out.weight,
            "mlp.down_proj": layer.mlp.down.weight,
            "input_layernorm": layer.mixer_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }
        state |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.inference_mode()
def transformers_generate(model: object, vocab_size: int, num_tokens: int) -> tuple[float, list[int]]:
    ids = torch.tensor([[*prompt(vocab_size)[:-1], 1000]])

    def run(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        out = model.generate(  # type: ignore[attr-defined]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return time.perf_counter() - start, out[0, CONTEXT:].tolist()

    first_s, _ = run(1)
    total_s, tokens = run(num_tokens + 1)
    return num_tokens / (total_s - first_s), tokens


# ---- one forward of k tokens, through the engine's captured step and the lean one

WIDTHS = (1, 2, 4, 8, 16)


@torch.inference_mode()
def forward_costs(engines: Mapping[str, Engine], exact: Decoder, rounds: int) -> list[dict[str, float]]:
    """Best milliseconds by engine, and of the lean forward with the weights of `exact`, for every width."""
    costs = []
    for width in WIDTHS:
        best = dict.fromkeys((*engines, "lean"), float("inf"))
        plain = Lean(exact, CONTEXT + 64)
        steps = {name: captured_step(engine, width) for name, engine in engines.items()}
        for _ in range(rounds * 5):
            for name, engine in engines.items():
                best[name] = min(best[name], step_s(engine, steps[name]))
            plain.length = CONTEXT
            tokens = torch.zeros(width, dtype=torch.int64)
            start = time.perf_counter()
            plain.forward(tokens).argmax(-1)
            best["lean"] = min(best["lean"], time.perf_counter() - start)
        costs.append({"tokens": width, **{name: seconds * 1e3 for name, seconds in best.items()}})
    return costs


def captured_step(engine: Engine, width: int) -> Graph:
    """A step of width `width` without a drafter, as it is replayed."""
    models, rows = engine.models, engine.rows
    rows.activate((), 1)

    def step() -> object:
        drafter = NoDrafter(width)
        return run_all_parts(
            decode_parts(target=models.target, drafter=drafter, cache=engine.cache, rows=rows, width=width)
        )

    return capturing(models.device).capture(step)[0]


def step_s(engine: Engine, step: Graph) -> float:
    rows = engine.rows
    pages = list(range(2, 2 + (CONTEXT + 64) // engine.cache.page_size))
    rows.place(0, [1], CONTEXT, RowSampling(output_start=1, min_end=1))
    rows.set_pages([(0, 0, pages)])
    rows.activate([0])
    start = time.perf_counter()
    step.replay()
    return time.perf_counter() - start
