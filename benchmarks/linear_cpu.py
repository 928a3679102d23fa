"""Time every linear of a SmolLM2-135M forward on the CPU, for several ways of computing it.

    OMP_PROC_BIND=true OMP_PLACES=cores OMP_NUM_THREADS=2 python -m benchmarks.linear_cpu

Each of the 30 layers has its own float32 weights (538 MB in all), so they come from memory as in a
real forward. A number is the sum over the 121 calls of each call's best of `--rounds` passes, which
survives foreign load on the machine; variants take turns within a round. `--only torch,tile`
selects; `--json FILE` also saves.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.llvm.linear import TileLinear

NUM_LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, o, gate_up, down
HEAD_SHAPE = (49152, 576)
Op = Callable[[Tensor, Tensor], Tensor]
Prepare = Callable[[Tensor], Tensor]


def mv_per_token(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.mv(weight, token) for token in x])


def padded_to_8(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.pad(x, (0, 0, 0, -x.shape[0] % 8)), weight)[: x.shape[0]]


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


def keep(weight: Tensor) -> Tensor:
    return weight


def transpose(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 8)  # type: ignore[no-any-return]


def variants() -> dict[str, tuple[str, Prepare, Op]]:
    """Name -> (what it is, how it stores a weight, the call)."""
    tile = TileLinear(torch.float32)
    return {
        "torch": ("F.linear", keep, F.linear),
        "mm": ("torch.mm(W, x.T).T", keep, lambda x, w: torch.mm(w, x.t()).t()),
        "mv": ("one torch.mv per token", keep, mv_per_token),
        "pad": ("F.linear on M padded to 8", keep, padded_to_8),
        "transposed": ("x @ Wt, Wt [in, out]", transpose, torch.mm),
        "onednn": ("oneDNN/ACL, reordered weight", reorder, pointwise),
        "tile": ("kernels.linear.TileLinear", keep, tile),
    }


def make_weights() -> list[Tensor]:
    shapes = [*(shape for _ in range(NUM_LAYERS) for shape in LAYER_SHAPES), HEAD_SHAPE]
    return [torch.randn(shape) * 0.02 for shape in shapes]


def call_times_ms(op: Op, stored: list[tuple[Tensor, int]], num_tokens: int) -> list[float]:
    inputs = {k: torch.randn(num_tokens, k) for k in {k for _, k in stored}}
    marks = [time.perf_counter()]
    for weight, k in stored:
        op(inputs[k], weight)
        marks.append(time.perf_counter())
    return [(stop - start) * 1e3 for start, stop in pairwise(marks)]


def measure(*, names: list[str], tokens: list[int], num_rounds: int) -> dict[str, dict[int, float]]:
    table = variants()
    weights = make_weights()
    stored = {name: [(table[name][1](weight), weight.shape[1]) for weight in weights] for name in names}
    best = {(name, m): [math.inf] * len(weights) for name in names for m in tokens}
    for _ in range(num_rounds):
        for m in tokens:
            for name in names:
                times = call_times_ms(table[name][2], stored[name], m)
                best[name, m] = [min(pair) for pair in zip(best[name, m], times, strict=True)]
    return {name: {m: sum(best[name, m]) for m in tokens} for name in names}


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in os.popen("lscpu").read().splitlines()
            if line.startswith("Model name")
        ),
        platform.processor(),
    )
    pinned = os.environ.get("OMP_PROC_BIND", "not pinned")
    return (
        f"{platform.machine()} {model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads "
        f"(OMP_PROC_BIND {pinned}), torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(variants()), help="variants, by comma")
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names, tokens = args.only.split(","), [int(m) for m in args.tokens.split(",")]
    torch.manual_seed(0)
    with torch.inference_mode():
        best = measure(names=names, tokens=tokens, num_rounds=args.rounds)
    num_bytes = 4 * (NUM_LAYERS * sum(n * k for n, k in LAYER_SHAPES) + HEAD_SHAPE[0] * HEAD_SHAPE[1])
    print(f"{machine()}\n{num_bytes / 1e6:.0f} MB of weights; ms per pass (GB/s of weights)")
    print(f"{'M =':32s}" + "".join(f"{m:>15d}" for m in tokens))
    for name in names:
        cells = (f"{t:7.1f} ({num_bytes / t / 1e6:4.1f})" for t in best[name].values())
        print(f"{variants()[name][0]:32s}" + "".join(f"{cell:>15s}" for cell in cells))
    if args.json:
        record = {"machine": machine(), "weight_bytes": num_bytes, "ms": best}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
