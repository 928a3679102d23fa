"""The engine on a CPU, beside what it must beat: a lean PyTorch forward and transformers' generate.

    python -m benchmarks.cpu [--json FILE]

All in one process, the same float32 weights, the same threads, a cache of 512 tokens, greedy, in rounds that
take turns, best of `--rounds`. Then what a forward of k tokens costs, eight streams against one, resident
memory, and the time from start to the first token (in fresh processes). Nothing else may run meanwhile:
the load before the start is recorded.
"""

import argparse
import subprocess
import sys
import time

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from benchmarks.record import context, save, table  # noqa: E402
from blockdraft.cache.rows import RowSampling  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.engine.request import SamplingParams  # noqa: E402
from blockdraft.models.decoder import Decoder  # noqa: E402
from blockdraft.models.layers import attention_config  # noqa: E402
from blockdraft.settings.settings import Settings  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.step.decode import decode_parts, run_through  # noqa: E402
from blockdraft.step.drafter import NoDrafter  # noqa: E402

CONTEXT = 512
WIDTHS = (1, 2, 4, 8, 16)


class Lean:
    """The least PyTorch that runs the target: fused projections, SDPA, one contiguous cache, no features."""

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


def prompt(vocab_size: int, length: int = CONTEXT) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(100, vocab_size - 100, (length,), generator=generator).tolist()


def ours(engine: Engine, num_rows: int, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Decode tok/s over all rows, first tokens excluded, and the tokens of each row."""
    ids = prompt(engine.models.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    names = [engine.add([*ids[:-1], 1000 + row], params) for row in range(num_rows)]
    answers: dict[str, list[int]] = {name: [] for name in names}
    start = None
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
        if start is None and all(answers.values()):
            done = sum(len(tokens) for tokens in answers.values())
            start = time.perf_counter()
    assert start is not None
    total = sum(len(tokens) for tokens in answers.values()) - done
    return total / (time.perf_counter() - start), list(answers.values())


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


@torch.inference_mode()
def forward_costs(engine: Engine, rounds: int) -> list[dict[str, float]]:
    """Best milliseconds of one target forward of k tokens: through the engine's step, and lean."""
    models, rows = engine.models, engine.rows
    pages = list(range(2, 2 + (CONTEXT + 64) // engine.cache.page_size))
    sampling = RowSampling(output_start=1, min_end=1)
    costs = []
    for width in WIDTHS:
        best, best_lean = float("inf"), float("inf")
        plain = Lean(models.target, CONTEXT + 64)
        for _ in range(rounds * 5):
            rows.place(0, [1], CONTEXT, sampling)
            rows.set_pages([(0, 0, pages)])
            rows.activate([0])
            start = time.perf_counter()
            run_through(
                decode_parts(
                    target=models.target,
                    drafter=NoDrafter(width),
                    cache=engine.cache,
                    rows=rows,
                    width=width,
                )
            )
            best = min(best, time.perf_counter() - start)
            plain.length = CONTEXT
            tokens = torch.zeros(width, dtype=torch.int64)
            start = time.perf_counter()
            plain.forward(tokens).argmax(-1)
            best_lean = min(best_lean, time.perf_counter() - start)
        costs.append({"tokens": width, "ours_ms": best * 1e3, "lean_ms": best_lean * 1e3})
    return costs


def memory() -> dict[str, float]:
    """Resident megabytes after an answer in a fresh process, and what accounts for them."""
    code = (
        "import json, re, pathlib\n"
        "from blockdraft.settings.settings import pin_threads; pin_threads()\n"
        "from blockdraft import LLM, SamplingParams\n"
        "llm = LLM(device='cpu')\n"
        "llm.generate([list(range(100, 612))], SamplingParams(temperature=0, max_tokens=32))\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "rss = {k: int(re.search(k + r':\\s+(\\d+)', status)[1]) / 1024 for k in ('VmRSS', 'VmHWM')}\n"
        "weights = sum(p.nbytes for p in llm.engine.models.target.parameters()) / 2**20\n"
        "cache = 544 * llm.engine.cache.num_bytes / (llm.engine.cache.num_pages * 16) / 2**20\n"
        "print(json.dumps(rss | {'weights': weights, 'cache': cache}))\n"
    )
    import json

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["other"] = found["VmRSS"] - found["weights"] - found["cache"]
    return found


def first_token_s(rounds: int) -> float:
    """Best seconds from starting `blockdraft generate` to the first character of its answer."""
    command = [sys.executable, "-m", "blockdraft", "generate", "Say hello", "--max-tokens", "8"]
    command += ["--device", "cpu"]
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = context()
    models = load_models(
        Settings(draft="none", device="cpu", prefix_cache=False, max_context=2048), lambda _: None
    )
    engine, hf = Engine(models), hf_model(models.target)
    speeds: dict[str, list[float]] = {"blockdraft": [], "lean": [], "transformers": [], "blockdraft x8": []}
    for _ in range(options.rounds):
        speed, answers = ours(engine, 1, options.tokens)
        speeds["blockdraft"].append(speed)
        speed, lean_answer = lean(models.target, options.tokens)
        speeds["lean"].append(speed)
        speed, hf_answer = transformers_generate(hf, models.config.vocab_size, options.tokens)
        speeds["transformers"].append(speed)
        speeds["blockdraft x8"].append(ours(engine, 8, options.tokens)[0])
    result["tokens_per_s"] = speeds
    result["same_tokens_as"] = {"lean": answers[0] == lean_answer, "transformers": answers[0] == hf_answer}
    result["forward_ms"] = costs = forward_costs(engine, options.rounds)
    result["memory_mb"] = memory()
    result["first_token_s"] = first_token_s(options.rounds)
    best = {name: max(values) for name, values in speeds.items()}
    print(table(["one stream, greedy, cache 512", "tok/s"], [[name, value] for name, value in best.items()]))
    print(f"eight streams: {best['blockdraft x8'] / best['blockdraft']:.2f} x one stream")
    print(f"same tokens: {result['same_tokens_as']}")
    base = costs[0]["ours_ms"]
    rows = [[f"{c['tokens']:.0f} tokens", c["ours_ms"], c["ours_ms"] / base, c["lean_ms"]] for c in costs]
    print(table(["forward of", "ms", "x one", "lean ms"], rows))
    print("memory MB:", {name: round(value) for name, value in result["memory_mb"].items()})
    print(f"start to first token: {result['first_token_s']:.2f} s")
    save(options.json, result)


if __name__ == "__main__":
    main()
