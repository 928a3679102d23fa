"""Times each product of a model on a GPU: `python -m benchmarks.products --model Qwen/Qwen3-8B`.

A product is timed at several numbers of tokens, beside the time that its bytes need and the time that its
arithmetic needs; the larger of the two is its floor. Weights are random. Copies of at least `FRESH_BYTES`
take turns, because a step finds none of its weights in the cache. Times are of graph replays, which is how
the engine runs. Ceilings are measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.on_card import copy_ceiling
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.kernels.kernels import kernels_for
from blockdraft.models.config import ModelConfig
from blockdraft.models.kernel_module import bind
from blockdraft.models.layers import Linear
from blockdraft.models.moe import Experts
from blockdraft.models.registry import build_decoder
from blockdraft.start.memory import release
from tests.checkpoints.published import CONFIGS

TOKENS = (1, 16, 17, 32, 64, 65, 128, 256, 512, 2048, 8192)
FRESH_BYTES = 256 << 20  # five times the cache of an H200
MAX_COPIES = 64
CALLS = 24  # of one graph
DTYPE = torch.bfloat16
SLOW = 2.0  # times the floor


@dataclass(frozen=True)
class Product:
    """One kind of product: its name without a layer's number, and what runs it."""

    name: str
    rows: int
    columns: int
    count: int  # of them in a whole model
    module: nn.Module


def _config(model: str) -> ModelConfig:
    """A published shape without its quantisation: products in bfloat16."""
    raw = {key: value for key, value in CONFIGS[model].items() if key != "quantization_config"}
    return read_model_config(raw, name=model)


def _num_chosen(config: ModelConfig) -> int:
    """Experts of a token; 0 where there are none."""
    return next((layer.moe.num_chosen for layer in config.layers if layer.moe is not None), 0)


def products(model: str) -> list[Product]:
    """Each different product of a published shape once, with how often a forward runs it."""
    config = _config(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("meta"):
            decoder = build_decoder(config, taps=(), max_positions=16, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    found: dict[tuple[str, int, int], list[nn.Module]] = {}
    for name, module in _parts(decoder):
        kind = ".".join(part for part in name.split(".") if not part.isdigit() and part != "layers")
        rows, columns = _size(module)
        found.setdefault((kind, rows, columns), []).append(module)
    return [Product(*key, len(modules), modules[0]) for key, modules in found.items()]


def _parts(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear maps and mixtures; a mixture's own parts are timed with it."""
    inside = {
        id(part)
        for module in decoder.modules()
        if isinstance(module, Experts) or type(module).__name__ == "SharedExpert"
        for part in module.modules()
        if part is not module
    }
    for name, module in decoder.named_modules():
        if isinstance(module, Linear | Experts) and id(module) not in inside:
            yield name, module
    for name, parameter in decoder.named_parameters():
        if ".router" in name and parameter.dim() == 2 and not _is_linear(decoder, name):
            yield name, Linear(parameter.shape[1], parameter.shape[0])
    if decoder.head is None:
        yield "head", Linear(*reversed(decoder.embedding.weight.shape))


def _is_linear(decoder: nn.Module, name: str) -> bool:
    return isinstance(decoder.get_submodule(name.rpartition(".")[0]), Linear)


def _size(module: nn.Module) -> tuple[int, int]:
    weight = module.down.weight if isinstance(module, Experts) else module.weight
    return tuple(weight.shape[-2:])  # type: ignore[return-value]


def fresh_copies(product: Product, device: torch.device) -> list[nn.Module]:
    """Return so many copies that none is in the card's cache when its turn comes."""
    size = sum(parameter.numel() for parameter in product.module.parameters()) * DTYPE.itemsize
    count = max(1, min(MAX_COPIES, -(-FRESH_BYTES // size)))
    return [_filled(product.module, device) for _ in range(count)]


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    made = copy.deepcopy(module).to(DTYPE).to_empty(device=device)
    for parameter in made.parameters():
        parameter.requires_grad_(False).normal_(std=0.02)
    return bind(made, kernels_for(DTYPE, device))


def _linear_calls(
    product: Product, copies: list[nn.Module], num_tokens: int, device: torch.device
) -> tuple[list[Callable[[], Tensor]], int, float]:
    x = torch.randn(num_tokens, product.columns, device=device, dtype=DTYPE)
    is_gated = product.name.endswith("gate_up")
    outputs = product.rows // 2 if is_gated else product.rows
    calls = [
        (lambda one=one: one.gated(x, "silu")) if is_gated else (lambda one=one: one(x)) for one in copies
    ]
    moved = DTYPE.itemsize * (product.rows * product.columns + num_tokens * (product.columns + outputs))
    return calls, moved, 2.0 * num_tokens * product.rows * product.columns


def _experts_calls(
    copies: list[nn.Module], num_tokens: int, num_chosen: int, device: torch.device
) -> tuple[list[Callable[[], Tensor]], int, float]:
    """Experts chosen evenly at random, a different choice for each copy."""
    num_experts, hidden, inner = copies[0].down.weight.shape
    x = torch.randn(num_tokens, hidden, device=device, dtype=DTYPE)
    calls, touched = [], []
    for one in copies:
        scores = torch.randn(num_tokens, num_experts, device=device, dtype=DTYPE)
        choice = one.kernels.route(scores, num_chosen, "renormalised", None)
        touched.append(len(torch.unique(choice.ids)))

        def call(one: nn.Module = one, scores: Tensor = scores) -> Tensor:
            # With the choice, as a step makes it: small ones are grouped by the same kernel.
            return one(x, one.kernels.route(scores, num_chosen, "renormalised", None), None, None)[0]

        calls.append(call)
    weights = statistics.mean(touched) * 3 * hidden * inner
    moved = int(DTYPE.itemsize * (weights + 2 * num_tokens * hidden))
    return calls, moved, 6.0 * num_tokens * num_chosen * hidden * inner


def _seconds_each(calls: list[Callable[[], Tensor]]) -> float:
    """Return the seconds of one call, over copies in turn, by graph replays."""
    rounds = [calls[index % len(calls)] for index in range(max(CALLS, len(calls)))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in rounds:
            call()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(rounds))
    return statistics.median(times)


def product_ceiling() -> float:
    """Floating-point operations per second of a large product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    seconds = _seconds_each([lambda: a @ b])
    return 2.0 * 8192**3 / seconds


@torch.inference_mode()
def measure(model: str, tokens: list[int], bytes_per_s: float, flops: float) -> list[dict[str, object]]:
    chosen = _num_chosen(_config(model))
    device, found = torch.device("cuda"), []
    for product in products(model):
        copies = fresh_copies(product, device)
        for num_tokens in tokens:
            if product.name == "head" and num_tokens > 512:
                continue  # a prefill multiplies its last tokens by it
            if isinstance(product.module, Experts):
                calls, moved, operations = _experts_calls(copies, num_tokens, chosen, device)
            else:
                calls, moved, operations = _linear_calls(product, copies, num_tokens, device)
            seconds, floor = _seconds_each(calls), max(moved / bytes_per_s, operations / flops)
            found.append(
                {
                    "model": model,
                    "product": product.name,
                    "shape": f"{product.rows} x {product.columns}",
                    "count": product.count,
                    "tokens": num_tokens,
                    "us": seconds * 1e6,
                    "floor_us": floor * 1e6,
                    "times_floor": seconds / floor,
                    "lost_ms": max(0.0, seconds - floor) * product.count * 1e3,
                }
            )
        del copies, calls
        release()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", choices=sorted(CONFIGS), default=["Qwen/Qwen3.5-35B-A3B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    bytes_per_s, flops = copy_ceiling(), product_ceiling()
    release()
    found: list[dict[str, object]] = []
    for model in args.model:
        found += measure(model, args.tokens, bytes_per_s, flops)
        record.save(
            args.json,
            {
                "what": "random weights that no cache holds; products by CUDA graph replay",
                "gpu": torch.cuda.get_device_name(),
                "ceiling_tb_s": bytes_per_s / 1e12,
                "ceiling_tflops": flops / 1e12,
                **record.context(),
                "products": found,
            },
        )
        _print(model, [one for one in found if one["model"] == model])


def _print(model: str, found: list[dict[str, object]]) -> None:
    """Products beyond `SLOW` times their floor, those that lose most in a forward first."""
    slow = sorted((one for one in found if one["times_floor"] > SLOW), key=lambda one: -one["lost_ms"])
    keys = ("tokens", "us", "floor_us", "times_floor", "count", "lost_ms")
    rows = [[f"{one['product']} {one['shape']}", *(one[key] for key in keys)] for one in slow[:24]]
    print(f"{model}: {len(slow)} of {len(found)} beyond {SLOW} x their floor")
    print(record.table(["product", "tokens", "us", "floor us", "x floor", "in a forward", "lost ms"], rows))


if __name__ == "__main__":
    main()
