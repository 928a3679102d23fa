"""Attention over compressed keys and values on a card, right and fast: `python -m benchmarks.kv_step`.

First the compiled kernels against the references, and their promise on bits; then the time of a step's
attention, all layers in one CUDA graph, each with memory of its own, against the exact kernel's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.kernels.attention import Mask
from blockdraft.kernels.failure import kernel_errors

FORMS = ("tq4", "tq4v3", "int8")
CONTEXTS = ("1x1024", "1x32768", "8x32768", "1x131072")  # rows, tokens of each
PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """The heads of one layer."""

    heads: int
    groups: int
    dim: int
    window: int | None = None
    has_sinks: bool = False

    def mask(self) -> Mask:
        return Mask(scale=self.dim**-0.5, window=self.window)

    def sinks(self, device: torch.device) -> Tensor | None:
        return torch.linspace(-1, 2, self.heads, device=device).bfloat16() if self.has_sinks else None


SHAPES = {
    "qwen3-8b": Shape(32, 8, 128),
    "smollm2-135m": Shape(9, 3, 64),
    "qwen3.5-35b-a3b": Shape(16, 2, 256),
    "gemma-4-global": Shape(32, 4, 512),
    "gemma-4-window": Shape(32, 16, 256, window=1024),
    "gpt-oss-window": Shape(64, 8, 64, window=128, has_sinks=True),
    "drafter-window": Shape(32, 8, 128, window=4096),
}
Calls = Callable[..., Callable[[], None]]


@dataclass
class Report:
    """Lines printed as they come, and what goes into the file."""

    seconds: float
    began: float
    results: list[dict[str, object]]

    def item(self, name: str, work: Callable[[], dict[str, object]]) -> dict[str, object]:
        """One result. A kernel that does not compile or run is printed, and the next one has its turn."""
        if time.monotonic() - self.began > self.seconds:
            result: dict[str, object] = {"status": "SKIP"}
        else:
            try:
                result = work()
            except kernel_errors() as error:
                while error.__cause__ is not None and isinstance(error.__cause__, Exception):
                    error = error.__cause__
                lines = traceback.format_exception_only(error)
                result = {"status": "FAIL", "error": "".join(lines)[:600]}
        result = {"name": name, **result}
        self.results.append(result)
        print({key: value for key, value in result.items() if key != "config"}, flush=True)
        return result


# ---- right


def check(report: Report, shapes: list[str], forms: list[str], device: torch.device) -> None:
    for name in shapes:
        shape = SHAPES[name]
        for form in forms:
            report.item(
                f"compress {form} {name}", lambda form=form, shape=shape: _check_compress(form, shape, device)
            )
            report.item(
                f"attend {form} {name}", lambda form=form, shape=shape: _check_attend(form, shape, device)
            )
        report.item(f"heads turned {name}", lambda shape=shape: _check_heads(shape, device))
    for number, ragged in enumerate(RAGGED):
        report.item(f"bits {number}", lambda ragged=ragged: _check_bits(ragged, device))


# Rows of unequal lengths and counts: a border of segments inside a block, a prefill, few and many columns.
RAGGED: tuple[dict[str, object], ...] = (
    {"lengths": (8200, 8193, 64, 300), "counts": (16, 16, 16, 16), "heads": 9, "groups": 3, "dim": 64},
    {"lengths": (8200, 100, 5000), "counts": (20, 1, 7), "heads": 8, "groups": 1, "dim": 128},
    {"lengths": (8136, 8091), "counts": (968, 923), "heads": 9, "groups": 3, "dim": 64},
    {"lengths": (1000, 400), "counts": (5, 5), "heads": 32, "groups": 2, "dim": 64, "page_size": 64},
)


def _check_bits(shape: dict[str, object], device: torch.device) -> dict[str, object]:
    """tq4: each query alone, and all ways to cut the work, against all rows at once."""
    from blockdraft.kernels.attention import Blocks
    from blockdraft.kernels.kv_compressed import reference_compress
    from blockdraft.kernels.triton import kv_mma
    from tests.kernels import compressed_case

    case = compressed_case.make(form="tq4", dtype=torch.bfloat16, **shape)
    there = compressed_case.on(case, device)
    reference_compress(there.pages, _moved(case.tiles, device))
    blocks, shared = there.blocks, shape["heads"] // shape["groups"]
    out = kv_mma.attend(there.q, there.pages, blocks, there.mask, None)
    result: dict[str, object] = {}
    for level, parts in enumerate((kv_mma.MAX_SEGMENTS, kv_mma.MAX_SEGMENTS // kv_mma.RUN, 1)):
        for columns, warps, is_wide in ((16, 1, False), (32, 2, False), (64, 4, False), (64, 4, True)):
            if columns < shared or (level == 0 and sum(blocks.counts) > 200):
                continue
            if is_wide and torch.cuda.get_device_capability()[0] != 9:
                continue
            config = kv_mma.Config(min(columns // shared, 64), columns, warps, level, parts, is_wide)
            got = kv_mma.attend(there.q, there.pages, blocks, there.mask, None, config)
            result[f"level {level}, {columns} columns{', wide' * is_wide}"] = torch.equal(got, out)
    begin = 0
    for row, count in enumerate(blocks.counts):
        for column in range(max(0, count - 16), count):
            one = Blocks(
                pages=blocks.table[row : row + 1],
                exact_pages=blocks.exact_table[row : row + 1],
                starts=blocks.starts[row : row + 1] + column,
                counts=(1,),
                page_size=blocks.page_size,
            )
            at = slice(begin + column, begin + column + 1)
            got = kv_mma.attend(there.q[at].contiguous(), there.pages, one, there.mask, None)
            result[f"row {row} alone"] = torch.equal(got, out[at]) and result.get(f"row {row} alone", True)
        begin += count
    return {"status": "PASS" if all(result.values()) else "FAIL", **result}


def _case(
    form: str, shape: Shape, device: torch.device, lengths: tuple[int, ...], width: int
) -> tuple[object, object]:
    from tests.kernels import compressed_case

    case = compressed_case.make(
        form=form,
        lengths=lengths,
        counts=(width,) * len(lengths),
        heads=shape.heads,
        groups=shape.groups,
        dim=shape.dim,
        mask=shape.mask(),
        dtype=torch.bfloat16,
    )
    return case, compressed_case.on(case, device)


def _moved(tiles: object, device: torch.device) -> object:
    names = ("table", "exact_table", "rows", "starts", "counts")
    return replace(tiles, **{name: getattr(tiles, name).to(device) for name in names})


def _check_compress(form: str, shape: Shape, device: torch.device) -> dict[str, object]:
    from blockdraft.kernels.kv_compressed import reference_compress
    from blockdraft.kernels.triton.kv_compress import compress

    case, there = _case(form, shape, device, (1000, 300), 16)
    tiles = _moved(case.tiles, device)
    wanted = copy.deepcopy(there)
    reference_compress(wanted.pages, tiles)
    compress(there.pages, tiles)
    result: dict[str, object] = {}
    is_good = True
    for name in ("keys", "values"):
        got, expected = getattr(there.pages, name), getattr(wanted.pages, name)
        other = (got.codes != expected.codes).float().mean().item()
        scale = (got.scale.float() - expected.scale.float()).abs().nan_to_num().max().item()
        is_good &= other < 1e-4 and scale < 1e-3
        result |= {f"{name} other bytes": other, f"{name} scale": scale}
    return {"status": "PASS" if is_good else "FAIL", **result}


def _check_attend(form: str, shape: Shape, device: torch.device) -> dict[str, object]:
    from blockdraft.kernels.attention import Blocks
    from blockdraft.kernels.kv_compressed import reference_attend_compressed_paged, reference_compress
    from blockdraft.kernels.triton import kv_mma
    from blockdraft.kernels.triton.kv_attention import attend_compressed

    case, there = _case(form, shape, device, (1290, 203), 16)  # both have their border in the block
    pages, blocks, mask, sinks = there.pages, there.blocks, there.mask, shape.sinks(device)
    reference_compress(pages, _moved(case.tiles, device))
    wide = pages._replace(exact_keys=pages.exact_keys.float(), exact_values=pages.exact_values.float())
    expected = reference_attend_compressed_paged(there.q.float(), wide, blocks, mask, sinks)
    out = attend_compressed(there.q, pages, blocks, mask, sinks)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    folded = out
    if not kv_mma.serves(there.q, pages, blocks, mask):  # `_check_bits` has those that it serves
        config = replace(_config(shape, 2, 16), parts=1)
        folded = attend_compressed(there.q, pages, blocks, mask, sinks, config)
    narrow = torch.empty_like(out).view(2, 16, shape.heads, shape.dim)
    for column in range(16):
        one = Blocks(
            pages=blocks.table,
            exact_pages=blocks.exact_table,
            starts=blocks.starts + column,
            counts=(1, 1),
            page_size=blocks.page_size,
        )
        q = there.q.view(2, 16, shape.heads, shape.dim)[:, column].contiguous()
        narrow[:, column] = attend_compressed(q, pages, one, mask, sinks)
    is_folded, is_narrow = torch.equal(folded, out), torch.equal(narrow.view_as(out), out)
    is_good = error < 1e-2 and is_folded and is_narrow
    return {
        "status": "PASS" if is_good else "FAIL",
        "error": error,
        "folded has equal bits": is_folded,
        "width 1 has equal bits": is_narrow,
    }


def _check_heads(shape: Shape, device: torch.device) -> dict[str, object]:
    from blockdraft.kernels import kv_codec
    from blockdraft.kernels.heads import HeadNorms, Rotation, Slots, apply_rotation
    from blockdraft.kernels.triton.pointwise import norm_rope_write

    heads, groups, dim = shape.heads, shape.groups, shape.dim
    rng = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(5, n, dim, generator=rng, device=device) for n in (heads, groups, groups))
    norms = HeadNorms(*(torch.rand(dim, generator=rng, device=device) for _ in range(2)), 1e-6)
    angle = torch.randn(5, 1, dim // 2, generator=rng, device=device)
    rotation = Rotation(kv_codec.signs(dim, device), torch.randn(groups, dim, generator=rng, device=device))
    place = torch.tensor([3, 0, 7, 1, 4], device=device)

    def write(dtype: torch.dtype, rotation: Rotation | None) -> list[Tensor]:
        store = [torch.zeros(groups, 9, dim, dtype=dtype, device=device) for _ in range(2)]
        parts = [x.bfloat16().to(dtype) for x in (q, k, v)]
        out = norm_rope_write(*parts, norms, (angle.cos(), angle.sin()), Slots(*store, place, rotation))
        return [out, *(x[:, place].transpose(0, 1) for x in store)]

    plain = write(torch.float32, None)
    expected = [apply_rotation(x, rotation, rotation.centre if n == 1 else None) for n, x in enumerate(plain)]
    pairs = zip(write(torch.bfloat16, rotation), expected, strict=True)
    errors = [((got.float() - wanted).norm() / wanted.norm()).item() for got, wanted in pairs]
    return {"status": "PASS" if max(errors) < 4e-3 else "FAIL", "errors": errors}


# ---- fast


def _config(shape: Shape, num_rows: int, width: int) -> object:
    from blockdraft.kernels.triton.kv_attention import choose

    return choose(
        num_rows=num_rows,
        num_groups=shape.groups,
        shared=shape.heads // shape.groups,
        head_dim=shape.dim,
        element_size=2,
        max_count=width,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )


class Step:
    """A step's attention over rows that are as long as asked with their block."""

    def __init__(self, shape: Shape, context: str, layers: int, device: torch.device) -> None:
        rows, tokens = map(int, context.split("x"))
        self.shape, self.sinks = shape, shape.sinks(device)
        self.rows, self.tokens, self.layers, self.device = rows, tokens, layers, device
        per_row = -(-tokens // PAGE_SIZE)
        self.num_pages = rows * per_row
        self.table = torch.randperm(self.num_pages, device=device).view(rows, per_row)
        self.exact_pages = min(self.num_pages, 1024)

    def blocks(self, width: int) -> object:
        from blockdraft.kernels.attention import Blocks

        return Blocks(
            pages=self.table,
            exact_pages=self.table % self.exact_pages,
            starts=torch.full((self.rows,), self.tokens - width, device=self.device),
            counts=(width,) * self.rows,
            page_size=PAGE_SIZE,
        )

    def queries(self, width: int) -> Tensor:
        return torch.randn(
            self.rows * width, self.shape.heads, self.shape.dim, device=self.device, dtype=torch.bfloat16
        )

    def exact(self) -> Callable[[int], Callable[[], None]]:
        from blockdraft.kernels.triton.attention import attend

        slots = self.num_pages * PAGE_SIZE
        stores = self._noise((self.layers, 2, self.shape.groups, slots, self.shape.dim))

        def at(width: int) -> Callable[[], None]:
            blocks, q, mask = self.blocks(width), self.queries(width), self.shape.mask()
            return lambda: [attend(q, keys, values, blocks, mask, self.sinks) for keys, values in stores]

        return at

    def cold(self, form: str) -> Callable[..., Callable[[], None]]:
        from blockdraft.kernels.kv_codec import FORMATS
        from blockdraft.kernels.kv_compressed import Codes, CompressedPages
        from blockdraft.kernels.kv_positions import PositionRule
        from blockdraft.kernels.triton.kv_attention import attend_compressed

        slots, format = self.num_pages * PAGE_SIZE, FORMATS[form]
        exact = self._noise((2, self.layers, self.shape.groups, self.exact_pages * PAGE_SIZE, self.shape.dim))
        stores = [
            Codes(
                torch.randint(
                    0,
                    256,
                    (self.layers, self.shape.groups, slots, codec.num_bytes(self.shape.dim) - 2),
                    dtype=torch.uint8,
                    device=self.device,
                ),
                torch.rand((self.layers, self.shape.groups, slots), dtype=torch.float16, device=self.device)
                * 0.01,
            )
            for codec in (format.keys, format.values)
        ]
        pages = CompressedPages(format, PositionRule(), *exact, *stores)
        layers = [pages.layer(index) for index in range(self.layers)]

        def at(width: int) -> Callable[[], None]:
            blocks, q = self.blocks(width), self.queries(width)
            mask = self.shape.mask()
            return lambda: [attend_compressed(q, layer, blocks, mask, self.sinks) for layer in layers]

        return at

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return x.normal_()


def graph_us(call: Callable[[], object], layers: int) -> dict[str, object]:
    """Microseconds of a layer, in replays of a graph of all of them."""
    began = time.monotonic()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which still fills the memory
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    compiled = time.monotonic() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / layers)
    times.sort()
    return {
        "status": "TIME",
        "us": round(times[3], 2),
        "best us": round(times[0], 2),
        "first s": round(compiled, 1),
    }


def times(report: Report, name: str, args: argparse.Namespace, device: torch.device) -> None:
    for context in args.contexts:
        step = Step(SHAPES[name], context, args.layers, device)
        where = f"{name} {context}"
        for kind in ("exact", *args.formats):
            made: list[Calls] = []

            def make(step: Step = step, kind: str = kind, made: list[Calls] = made) -> dict[str, object]:
                made.append(step.exact() if kind == "exact" else step.cold(kind))
                return {"status": "MADE"}

            report.item(f"memory {kind} {where}", make)
            for width in args.widths if made else ():
                report.item(
                    f"{kind} {where} width {width}",
                    lambda width=width, made=made: graph_us(made[0](width), args.layers),
                )
            made.clear()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--seconds", type=float, default=220, help="items that would begin later are left out"
    )
    parser.add_argument("--only", choices=("check", "times"))
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b"], choices=SHAPES)
    parser.add_argument("--formats", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--contexts", nargs="+", default=CONTEXTS, metavar="ROWSxTOKENS")
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 16])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device = torch.device("cuda")
    report = Report(asked.seconds, time.monotonic(), [])
    if asked.only != "times":
        check(report, asked.shapes, asked.formats, device)
    for name in asked.shapes if asked.only != "check" else ():
        times(report, name, asked, device)
    out = os.environ.get("OUT")
    if out:
        text = json.dumps({"layers": asked.layers, "results": report.results}, indent=1)
        (Path(out) / "kv_step.json").write_text(text)
    print()
    for result in report.results:
        if result["status"] != "MADE":
            print(f"{result['status']:5} {result['name']:44} {result.get('us', '')}")


if __name__ == "__main__":
    main()
