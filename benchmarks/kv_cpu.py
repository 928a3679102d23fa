"""Attention over compressed keys and values on a CPU against exact ones, and what compressing a tile costs.

    python -m benchmarks.kv_cpu [--format tq4] [--layers 30] [--json FILE]

One step's attention of a model: every layer has keys and values of its own, so that they come from where they
would come from. Times are the fastest of some rounds, in which both kernels take turns, per layer.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import record
from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.kernels import Kernels, kernels_for
from blockdraft.kernels.kv_compressed import Codes, CompressedPages, Tiles
from blockdraft.kernels.kv_positions import TILE, PositionRule

HEADS, GROUPS, DIM = 9, 3, 64  # SmolLM2-135M
PAGE = 16


class Setup(NamedTuple):
    pages: CompressedPages
    table: torch.Tensor


def setup(form: str, layers: int, length: int) -> Setup:
    rng = torch.Generator().manual_seed(0)
    num_pages = length // PAGE + 1
    slots = (num_pages + 1) * PAGE
    exact = [torch.randn(layers, GROUPS, slots, DIM, generator=rng) for _ in range(2)]
    codes = []
    for codec in (kv_codec.FORMATS[form].keys, kv_codec.FORMATS[form].values):
        shape = (layers, GROUPS, slots)
        packed = torch.zeros(*shape, codec.num_bytes(DIM) - kv_codec.SCALE_BYTES, dtype=torch.uint8)
        codes.append(Codes(packed, torch.zeros(shape, dtype=torch.float16)))
    pages = CompressedPages(kv_codec.FORMATS[form], PositionRule(), exact[0], exact[1], *codes)
    return Setup(pages, 1 + torch.randperm(num_pages, generator=rng)[None])


def tiles(table: torch.Tensor, begin: int, end: int) -> Tiles:
    row, rule, count = torch.zeros(1, dtype=torch.int64), PositionRule(), end - begin
    start = begin + rule.window - rule.block + 1
    return Tiles(table, table, row, row + start, row + count, rule, max(1, count // TILE), PAGE)


def fastest(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Milliseconds of each, taking turns."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            best[index] = min(best[index], (time.perf_counter() - begin) * 1e3)
    return best


def measure(kernels: Kernels, given: Setup, length: int, width: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of a layer: exact, compressed."""
    pages, layers = given.pages, given.pages.exact_keys.shape[0]
    blocks = Blocks(
        pages=given.table,
        exact_pages=given.table,
        starts=torch.tensor([length - width]),
        counts=(width,),
        page_size=PAGE,
    )
    q, mask = torch.randn(width, HEADS, DIM), Mask(scale=DIM**-0.5)
    each = [pages.layer(index) for index in range(layers)]

    def exact() -> None:
        for one in each:
            kernels.attend(q, one.exact_keys[0], one.exact_values[0], blocks, mask, None)

    def cold() -> None:
        for one in each:
            kernels.attend_compressed(q, one, blocks, mask, None)

    first, second = fastest(rounds, exact, cold)
    return first / layers, second / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--format", default="tq4", choices=kv_codec.FORMATS)
    parser.add_argument("--layers", type=int, default=30, help="1: keys of 2k tokens stay in the caches")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    context, kernels = record.context(), kernels_for(torch.float32, torch.device("cpu"))
    found: list[list[object]] = []
    for length in args.lengths:
        given = setup(args.format, args.layers, length)
        whole = tiles(given.table, 0, length // TILE * TILE)
        kernels.compress(given.pages, whole)
        for threads in args.threads:
            torch.set_num_threads(threads)
            for width in args.widths:
                exact, cold = measure(kernels, given, length, width, args.rounds)
                found.append([length, width, threads, exact, cold, cold / exact])
            one, none = (tiles(given.table, 0, end) for end in (TILE, 0))
            work, idle = fastest(
                args.rounds,
                lambda given=given, one=one: kernels.compress(given.pages, one),
                lambda given=given, none=none: kernels.compress(given.pages, none),
            )
            print(
                f"{length} tokens, {threads} threads: a tile of all layers {work:.2f} ms, none {idle:.3f} ms"
            )
    header = ["tokens", "width", "threads", "exact ms", f"{args.format} ms", "ratio"]
    print(record.table(header, found))
    rows = [dict(zip(header, row, strict=True)) for row in found]
    record.save(args.json, {**context, "format": args.format, "layers": args.layers, "rows": rows})


if __name__ == "__main__":
    main()
