"""Times products with 4-bit codes on a GPU: `python -m benchmarks.packed_products --json FILE`.

Every product of a published shape is computed from random codes: by our kernel in each candidate division, by
unpacking the weight first, and in bfloat16. All have to have the same bits. Times are of graph replays over
copies that no cache holds, beside the time that the packed weight's bytes need. `MEASURED` in
kernels/packed.py decides which weights a server packs: the last lines say what to write there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks import products as dense
from benchmarks import record
from benchmarks.on_card import copy_ceiling
from blockdraft.kernels.kernels import Kernels, kernels_for
from blockdraft.kernels.triton import packed as kernel
from blockdraft.kernels.triton.cache_keys import settle_cache_keys
from blockdraft.kernels.triton.compile_pool import CompilePool, collecting
from blockdraft.kernels.triton.narrow import MAX_ROWS
from blockdraft.kernels.triton.packed import Config
from blockdraft.kernels.triton.packed_few import Division, takes
from blockdraft.models.packed_gguf import gguf_blocks
from blockdraft.models.packed_groups import Fp4Groups, IntGroups
from blockdraft.models.packed_words import GGUF, Words, pack_for_kernel
from blockdraft.start.memory import release

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3.5-27B")
TOKENS = (1, 16, 512, 8192)
CODES = ("int4-128", "int4-128-float16", "int4-32", "nvfp4", "mxfp4", "q4_0", "q4_1", "q8_0")
# Candidates: tiles, chunks, warps and stages. With more warps than tiles, several warps widen the values of a
# tile of 16 rows and pass them on in shared memory.
FEW = ((4, 2, 4, 4), (4, 4, 4, 3), (4, 4, 4, 4), (1, 8, 1, 4), (1, 8, 2, 4), (2, 8, 2, 4))
SOME = ((4, 2, 4, 3), (8, 1, 4, 4), (8, 2, 8, 3))
MANY = ((8, 2, 8, 3), (8, 1, 4, 3), (16, 1, 8, 3))
WIDE = ((8, 1, 8, 4),)

Clock = Callable[[list[Callable[[], Tensor]]], float]  # seconds of one call


@dataclass(frozen=True)
class Shape:
    """A product of a model, and how often a forward computes it."""

    name: str
    rows: int
    columns: int
    count: int = 1

    @property
    def is_gated(self) -> bool:
        return self.name.endswith("gate_up")


@dataclass
class Bench:
    """Where products run, and how they are timed."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    clock: Clock
    fresh_bytes: int
    bytes_per_s: float
    wrong: list[str] = field(default_factory=list)  # products whose bits differ


def candidates(num_tokens: int, *, is_gated: bool) -> Iterator[Config | Division]:
    """Yield the divisions to try."""
    if num_tokens <= 16 and not is_gated:
        yield Division(8 if num_tokens <= 8 else 16)
    if num_tokens <= 16:
        for one in FEW:
            yield Config(8 if num_tokens <= 8 else 16, *one)
    elif num_tokens <= 64:
        for one in SOME:
            yield Config(32 if num_tokens <= 32 else 64, *one)
    else:
        for one in MANY:
            if not is_gated or one[0] <= one[2]:  # twice the sums do not fit the registers
                yield Config(128, *one)
        for one in () if is_gated else WIDE:
            yield Config(256, *one)


def shapes(model: str) -> list[Shape]:
    """The linear products of a model that its checkpoints quantise and that the kernel takes."""
    found = [Shape(one.name, one.rows, one.columns, one.count) for one in dense.products(model)]
    return [one for one in found if "head" not in one.name and one.rows > MAX_ROWS and one.rows % 32 == 0]


def random_words(code: str, shape: Shape, device: torch.device) -> Words:
    """Return a weight of random codes and scales."""
    generator = torch.Generator(device=device).manual_seed(0)
    rows, columns = shape.rows, shape.columns
    if code in GGUF:
        return _random_blocks(code, rows, columns, generator)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, device=device, dtype=torch.uint8)
    kind, _, rest = code.partition("-")
    group, _, scale_kind = rest.partition("-")
    size = int(group) if group else {"nvfp4": 16, "mxfp4": 32}[kind]
    scale = torch.rand(rows, columns // size, generator=generator, device=device)
    weight: IntGroups | Fp4Groups
    if kind == "int4":
        scale = (0.001 + 0.01 * scale).to(torch.float16 if scale_kind else torch.bfloat16)
        zero = torch.randint(16, scale.shape, generator=generator, device=device, dtype=torch.uint8)
        buffers = {"codes": codes, "scale": scale, "zero": zero, "group_index": None}
        weight = IntGroups((rows, columns), buffers, bits=4, group_size=size)
    elif kind == "nvfp4":
        second = torch.full((1, 1), 0.000137, device=device)
        weight = Fp4Groups(codes, (1 + 400 * scale).to(torch.float8_e4m3fn), multiplier=second)
    else:
        exponent = (116 + 6 * scale).to(torch.uint8)
        weight = Fp4Groups(codes, exponent.view(torch.float8_e8m0fnu))
    words = pack_for_kernel(weight)
    assert isinstance(words, Words), words
    return words


def _random_blocks(code: str, rows: int, columns: int, generator: torch.Generator) -> Words:
    """Return a weight of random blocks as a GGUF file has them."""
    device, num_numbers = generator.device, 2 if code == "q4_1" else 1
    codes = torch.randint(
        256 if code == "q8_0" else 16, (rows, columns), generator=generator, device=device, dtype=torch.uint8
    )
    numbers = torch.rand(rows, columns // 32, num_numbers, generator=generator, device=device)
    words = pack_for_kernel(gguf_blocks(codes, (0.001 + 0.01 * numbers).half(), GGUF[code]))
    assert isinstance(words, Words), words
    return words


def copies(weight: Words, fresh_bytes: int) -> list[Words]:
    """Return so many copies that no cache holds one until its turn comes again."""
    one = weight.weight
    count = max(1, min(dense.MAX_COPIES, -(-fresh_bytes // weight.num_bytes)))
    return [
        weight,
        *(Words(one._replace(words=one.words.clone(), scales=one.scales.clone())) for _ in range(count - 1)),
    ]


def _same(bench: Bench, what: str, got: Tensor, expected: Tensor) -> bool:
    is_same = torch.equal(got, expected)
    if not is_same:
        share = float((got != expected).float().mean())
        bench.wrong.append(f"{what}: {share:.2e} of the outputs differ")
    return is_same


def _plain_product(bench: Bench, x: Tensor, gate: str, weight: Tensor) -> Tensor:
    if gate == "silu":
        return bench.kernels.gated_linear(x, weight, None, "silu")
    return bench.kernels.linear(x, weight, None, None)


def _unpacked_product(bench: Bench, x: Tensor, gate: str, words: Words) -> Tensor:
    return _plain_product(bench, x, gate, kernel.unpack(words.weight, bench.dtype))


def _try(
    bench: Bench,
    words: list[Words],
    x: Tensor,
    expected: Tensor,
    config: Config | Division,
    what: str,
    gate: str,
) -> dict[str, object]:
    """Time one division; `us` is missing if it does not fit the card."""
    from triton.runtime.errors import OutOfResources

    calls = [partial(kernel.linear, x, one.weight, gate=gate, config=config) for one in words]
    found: dict[str, object] = {"config": _name(config)}
    try:
        found["is_same"] = _same(bench, f"{what} {_name(config)}", calls[0](), expected)
        found["us"] = 1e6 * bench.clock(calls)
    except OutOfResources as error:
        found["why_not"] = str(error)[:120]
    return found


def _name(config: Config | Division) -> str:
    if isinstance(config, Division):
        return f"{config.tokens}/loop"
    return f"{config.block_m}/{config.tiles}/{config.chunks}/{config.warps}/{config.stages}"


def measure_shape(bench: Bench, code: str, shape: Shape, tokens: list[int]) -> list[dict[str, object]]:
    words = copies(random_words(code, shape, bench.device), bench.fresh_bytes)
    values = words[0].dequantise(bench.dtype)
    _same(bench, f"{code} {shape.name}, unpacked", kernel.unpack(words[0].weight, bench.dtype), values)
    plain = [
        values,
        *(values.clone() for _ in range(min(len(words), -(-bench.fresh_bytes // values.nbytes)) - 1)),
    ]
    gate, found = "silu" if shape.is_gated else "none", []
    for count in tokens:
        x = torch.randn(count, shape.columns, device=bench.device).to(bench.dtype)
        expected = _plain_product(bench, x, gate, values)
        what = f"{code} {shape.name} {shape.rows} x {shape.columns}, {count} tokens"
        tried = [
            _try(bench, words, x, expected, config, what, gate)
            for config in candidates(count, is_gated=shape.is_gated)
            if not isinstance(config, Division) or takes(x, words[0].weight, gate, config)
        ]
        moved = words[0].num_bytes + bench.dtype.itemsize * (x.numel() + expected.numel())
        found.append(
            {
                "code": code,
                "product": shape.name,
                "shape": f"{shape.rows} x {shape.columns}",
                "count": shape.count,
                "tokens": count,
                "bf16_us": 1e6 * bench.clock([partial(_plain_product, bench, x, gate, one) for one in plain]),
                "unpacked_us": 1e6
                * bench.clock([partial(_unpacked_product, bench, x, gate, one) for one in words]),
                "bytes_us": 1e6 * moved / bench.bytes_per_s,
                "tried": tried,
            }
        )
    return found


def best(one: dict[str, object]) -> dict[str, object] | None:
    """Return the fastest division with the right bits, or None."""
    fit = [tried for tried in one["tried"] if tried.get("is_same") and "us" in tried]
    return min(fit, key=lambda tried: tried["us"], default=None)


def totals(found: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the milliseconds of a forward's products by code and tokens."""
    keys = dict.fromkeys((one["code"], one["tokens"]) for one in found)
    sums = []
    for code, tokens in keys:
        some = [one for one in found if (one["code"], one["tokens"]) == (code, tokens)]
        fastest = [(best(one) or {}).get("us", float("inf")) for one in some]
        weighed = [one["count"] / 1e3 for one in some]
        sums.append(
            {
                "code": code,
                "tokens": tokens,
                "kernel_ms": sum(map(float.__mul__, weighed, fastest)),
                **{
                    f"{name}_ms": sum(
                        one[f"{name}_us"] * times for one, times in zip(some, weighed, strict=True)
                    )
                    for name in ("bf16", "unpacked", "bytes")
                },
            }
        )
    return sums


def most_tokens(sums: list[dict[str, object]]) -> dict[str, int]:
    """Return up to how many tokens the kernel beats unpacking first; 0 if it loses to bf16 at the fewest."""
    found: dict[str, int] = {}
    for one in sums:
        code = str(one["code"])
        found.setdefault(code, 0)
        is_first = one["tokens"] == min(other["tokens"] for other in sums if other["code"] == code)
        if one["kernel_ms"] < one["bf16_ms" if is_first else "unpacked_ms"] and (is_first or found[code]):
            found[code] = max(found[code], int(one["tokens"]))
    return found


def most_tokens_of_both(found: list[dict[str, object]]) -> dict[str, dict[str, int]]:
    """Return up to how many tokens the kernel beats bf16 by code, in all plain and all gated products."""
    limits: dict[str, dict[str, int]] = {}
    for code in dict.fromkeys(str(one["code"]) for one in found):
        limits[code] = {}
        for kind, is_gated in (("plain", False), ("gated", True)):
            some = [
                one
                for one in found
                if one["code"] == code and str(one["product"]).endswith("gate_up") == is_gated
            ]
            sums = [one for one in totals(some) if one["kernel_ms"] < one["bf16_ms"]]
            limits[code][kind] = max((int(one["tokens"]) for one in sums), default=0)
    return limits


@torch.inference_mode()
def measure(bench: Bench, codes: list[str], some: list[Shape], tokens: list[int]) -> list[dict[str, object]]:
    return [
        one
        for code in codes
        for shape in some
        for one in _released(measure_shape(bench, code, shape, tokens))
    ]


def _released(found: list[dict[str, object]]) -> list[dict[str, object]]:
    release()
    return found


def compile_ahead(bench: Bench, codes: list[str], some: list[Shape], tokens: list[int]) -> None:
    """Compile all kernels in parallel; without it, most of the run would be the compiler's."""
    settle_cache_keys()
    pool = CompilePool(min(16, os.cpu_count() or 1))
    before, bench.clock = bench.clock, lambda calls: 1.0 if calls[0]() is not None else 0.0
    fresh, bench.fresh_bytes = bench.fresh_bytes, 1
    with collecting(pool):
        measure(bench, codes, some, tokens)
    bench.clock, bench.fresh_bytes = before, fresh
    bench.wrong.clear()
    pool.wait()
    pool.close()
    print(f"{pool.num_done} kernels compiled, {len(pool.errors)} not")


def show(model: str, found: list[dict[str, object]]) -> None:
    rows = []
    for one in found:
        fastest = best(one)
        us, name = ("-", "-") if fastest is None else (fastest["us"], fastest["config"])
        times = (one["bf16_us"], us, one["unpacked_us"], one["bytes_us"], name)
        rows.append([f"{one['code']} {one['product']} {one['shape']}", one["tokens"], *times])
    header = [
        "product",
        "tokens",
        "bf16 us",
        "kernel us",
        "unpack first us",
        "bytes us",
        "tokens/tiles/chunks/warps/stages",
    ]
    print(f"{model}\n{record.table(header, rows)}\n")
    sums = totals(found)
    keys = ("tokens", "bf16_ms", "kernel_ms", "unpacked_ms", "bytes_ms")
    print("All products of a forward, each in its best division:")
    print(record.table(["code", *keys], [[one["code"], *(one[key] for key in keys)] for one in sums]))
    print(f"The kernel beats unpacking first up to so many tokens: {most_tokens(sums)}")
    print(f"It beats bf16 up to so many tokens: {most_tokens_of_both(found)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--code", nargs="+", choices=CODES, default=["int4-128", "nvfp4", "mxfp4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernels, bytes_per_s = kernels_for(dtype, device), copy_ceiling()
    release()
    bench = Bench(device, dtype, kernels, dense._seconds_each, dense.FRESH_BYTES, bytes_per_s)
    result: dict[str, object] = {
        "what": "products with random 4-bit codes that no cache holds, by CUDA graph replay",
        "gpu": torch.cuda.get_device_name(),
        "ceiling_tb_s": bytes_per_s / 1e12,
        **record.context(),
    }
    for model in args.model:
        some = shapes(model)
        compile_ahead(bench, args.code, some, args.tokens)
        found: list[dict[str, object]] = []
        for code in args.code:  # saved one by one, as the whole takes minutes
            own = measure(bench, [code], some, args.tokens)
            show(model, own)
            found += own
            result[model] = {"products": found, "totals": totals(found)}
            record.save(args.json, {**result, "wrong": bench.wrong})
    for line in bench.wrong:
        print(f"NOT EQUAL: {line}")
    print(f"{len(bench.wrong)} products do not have the bits of the unpacked weight.")


if __name__ == "__main__":
    main()
