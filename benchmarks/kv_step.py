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

from blockdraft.kernels.failure import kernel_errors

HEADS, GROUPS, DIM = 32, 8, 128  # Qwen3-8B
FORMS = ("tq4", "tq4v3", "int8", "fp8")
SHAPES = ((1, 1024), (1, 32 * 1024), (8, 32 * 1024), (1, 128 * 1024))  # rows, tokens of each
PAGE_SIZE = 16
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


def check(report: Report, device: torch.device) -> None:
    for form in FORMS:
        report.item(f"compress {form}", lambda form=form: _check_compress(form, device))
        report.item(f"attend {form}", lambda form=form: _check_attend(form, device))
    for number, shape in enumerate(RAGGED):
        report.item(f"bits {number}", lambda shape=shape: _check_bits(shape, device))
    report.item("heads turned", lambda: _check_heads(device))


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


def _case(form: str, device: torch.device, lengths: tuple[int, ...], width: int) -> object:
    from tests.kernels import compressed_case

    case = compressed_case.make(
        form=form,
        lengths=lengths,
        counts=(width,) * len(lengths),
        heads=HEADS,
        groups=GROUPS,
        dim=DIM,
        dtype=torch.bfloat16,
    )
    return case, compressed_case.on(case, device)


def _moved(tiles: object, device: torch.device) -> object:
    names = ("table", "exact_table", "rows", "starts", "counts")
    return replace(tiles, **{name: getattr(tiles, name).to(device) for name in names})


def _check_compress(form: str, device: torch.device) -> dict[str, object]:
    from blockdraft.kernels.kv_compressed import reference_compress
    from blockdraft.kernels.triton.kv_compress import compress

    case, there = _case(form, device, (1000, 300), 16)
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


def _check_attend(form: str, device: torch.device) -> dict[str, object]:
    from blockdraft.kernels.attention import Blocks
    from blockdraft.kernels.kv_compressed import reference_attend_compressed_paged, reference_compress
    from blockdraft.kernels.triton.kv_attention import attend_compressed

    case, there = _case(form, device, (1290, 203), 16)  # both have their border in the block
    pages, blocks, mask = there.pages, there.blocks, there.mask
    reference_compress(pages, _moved(case.tiles, device))
    wide = pages._replace(exact_keys=pages.exact_keys.float(), exact_values=pages.exact_values.float())
    expected = reference_attend_compressed_paged(there.q.float(), wide, blocks, mask)
    out = attend_compressed(there.q, pages, blocks, mask)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    folded = out  # `_check_bits` has those of tq4
    if form != "tq4":
        config = replace(_config(2, 16), parts=1)
        folded = attend_compressed(there.q, pages, blocks, mask, None, config)
    narrow = torch.empty_like(out).view(2, 16, HEADS, DIM)
    for column in range(16):
        one = Blocks(
            pages=blocks.table,
            exact_pages=blocks.exact_table,
            starts=blocks.starts + column,
            counts=(1, 1),
            page_size=blocks.page_size,
        )
        q = there.q.view(2, 16, HEADS, DIM)[:, column].contiguous()
        narrow[:, column] = attend_compressed(q, pages, one, mask)
    is_folded, is_narrow = torch.equal(folded, out), torch.equal(narrow.view_as(out), out)
    is_good = error < 1e-2 and is_folded and is_narrow
    return {
        "status": "PASS" if is_good else "FAIL",
        "error": error,
        "folded has equal bits": is_folded,
        "width 1 has equal bits": is_narrow,
    }


def _check_heads(device: torch.device) -> dict[str, object]:
    from blockdraft.kernels import kv_codec
    from blockdraft.kernels.heads import HeadNorms, Rotation, Slots, apply_rotation
    from blockdraft.kernels.triton.pointwise import norm_rope_write

    rng = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(5, n, DIM, generator=rng, device=device) for n in (HEADS, GROUPS, GROUPS))
    norms = HeadNorms(*(torch.rand(DIM, generator=rng, device=device) for _ in range(2)), 1e-6)
    angle = torch.randn(5, 1, DIM // 2, generator=rng, device=device)
    rotation = Rotation(kv_codec.signs(DIM, device), torch.randn(GROUPS, DIM, generator=rng, device=device))
    place = torch.tensor([3, 0, 7, 1, 4], device=device)

    def write(dtype: torch.dtype, rotation: Rotation | None) -> list[Tensor]:
        store = [torch.zeros(GROUPS, 9, DIM, dtype=dtype, device=device) for _ in range(2)]
        parts = [x.bfloat16().to(dtype) for x in (q, k, v)]
        out = norm_rope_write(*parts, norms, (angle.cos(), angle.sin()), Slots(*store, place, rotation))
        return [out, *(x[:, place].transpose(0, 1) for x in store)]

    plain = write(torch.float32, None)
    expected = [apply_rotation(x, rotation, rotation.centre if n == 1 else None) for n, x in enumerate(plain)]
    pairs = zip(write(torch.bfloat16, rotation), expected, strict=True)
    errors = [((got.float() - wanted).norm() / wanted.norm()).item() for got, wanted in pairs]
    return {"status": "PASS" if max(errors) < 4e-3 else "FAIL", "errors": errors}


# ---- fast


def _config(num_rows: int, width: int) -> object:
    from blockdraft.kernels.triton.kv_attention import choose

    return choose(
        num_rows=num_rows,
        num_groups=GROUPS,
        shared=HEADS // GROUPS,
        head_dim=DIM,
        element_size=2,
        max_count=width,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )


class Step:
    """A step's attention over rows that are as long as asked with their block."""

    def __init__(self, rows: int, tokens: int, layers: int, device: torch.device) -> None:
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
        return torch.randn(self.rows * width, HEADS, DIM, device=self.device, dtype=torch.bfloat16)

    def exact(self) -> Callable[[int], Callable[[], None]]:
        from blockdraft.kernels.attention import Mask
        from blockdraft.kernels.triton.attention import attend

        slots = self.num_pages * PAGE_SIZE
        stores = self._noise((self.layers, 2, GROUPS, slots, DIM))

        def at(width: int) -> Callable[[], None]:
            blocks, q, mask = self.blocks(width), self.queries(width), Mask(scale=DIM**-0.5)
            return lambda: [attend(q, keys, values, blocks, mask) for keys, values in stores]

        return at

    def cold(self, form: str) -> Callable[..., Callable[[], None]]:
        from blockdraft.kernels.attention import Mask
        from blockdraft.kernels.kv_codec import FORMATS
        from blockdraft.kernels.kv_compressed import Codes, CompressedPages
        from blockdraft.kernels.kv_positions import PositionRule
        from blockdraft.kernels.triton.kv_attention import attend_compressed

        slots, format = self.num_pages * PAGE_SIZE, FORMATS[form]
        exact = self._noise((2, self.layers, GROUPS, self.exact_pages * PAGE_SIZE, DIM))
        stores = [
            Codes(
                torch.randint(
                    0,
                    120,
                    (self.layers, GROUPS, slots, codec.num_bytes(DIM) - 2),
                    dtype=torch.uint8,
                    device=self.device,
                ),
                torch.rand((self.layers, GROUPS, slots), dtype=torch.float16, device=self.device) * 0.01,
            )
            for codec in (format.keys, format.values)
        ]
        pages = CompressedPages(format, PositionRule(), *exact, *stores)
        layers = [pages.layer(index) for index in range(self.layers)]

        def at(width: int) -> Callable[[], None]:
            blocks, q = self.blocks(width), self.queries(width)
            mask = Mask(scale=DIM**-0.5)
            return lambda: [attend_compressed(q, layer, blocks, mask) for layer in layers]

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


def times(report: Report, layers: int, device: torch.device) -> None:
    for rows, tokens in SHAPES:
        step = Step(rows, tokens, layers, device)
        where = f"{rows}x{tokens // 1024}k"
        for kind in ("exact", *FORMS):
            made: list[Calls] = []

            def make(step: Step = step, kind: str = kind, made: list[Calls] = made) -> dict[str, object]:
                made.append(step.exact() if kind == "exact" else step.cold(kind))
                return {"status": "MADE"}

            report.item(f"memory {kind} {where}", make)
            for width in (1, 16) if made else ():
                report.item(
                    f"{kind} {where} width {width}",
                    lambda width=width, made=made: graph_us(made[0](width), layers),
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
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device = torch.device("cuda")
    report = Report(asked.seconds, time.monotonic(), [])
    if asked.only != "times":
        check(report, device)
    if asked.only != "check":
        times(report, asked.layers, device)
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
