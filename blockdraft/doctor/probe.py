"""The part of the doctor that imports torch. It runs in its own process, so that a crash is only a finding.

`python -m blockdraft.doctor.probe` takes one JSON object as its argument and writes one JSON object per line:
facts about torch, the kernel path of each operation, and for each shape a `begin` and comparisons. Kernels
that do not compile are reported as unused paths, as in a start. Other errors are not caught: a shape that
raises or crashes ends the process, and the reader (`probe_runner.py`) knows which shape it was.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.doctor.shapes import SHAPE_NAMES, SHAPES, ProbeShape
from blockdraft.settings.settings import write_no_perf_maps

if TYPE_CHECKING:
    import torch

    from blockdraft.engine.loaded_pair import LoadedPair
    from blockdraft.planner.plan import Plan

Line = dict[str, object]

CACHE_BYTES = 64 << 20
BITS_SHAPE = SHAPE_NAMES[0]  # the shape that is checked for batch invariance
NUM_INPUTS = 256  # inputs of the product that tests the gate-and-up kernel; any multiple of 16


def main(argument: str) -> None:
    write_no_perf_maps()
    asked = json.loads(argument)
    for line in examine(asked["device"], asked["shapes"]):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()  # so that the reader has the line even after a crash


def examine(device_name: str, names: list[str]) -> Iterator[Line]:
    yield {"kind": "begin", "what": "torch"}
    import torch

    yield {"kind": "torch", **_torch_facts()}
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    yield {"kind": "begin", "what": f"a product on {device_name}"}
    ones = torch.ones(64, 64, device=device)  # tests that torch has code for this card and adds correctly
    yield {"kind": "device", "name": device_name, "is_right": bool((ones @ ones == 64).all())}
    yield {"kind": "begin", "what": "the choice of kernels"}
    yield from _paths_on_gpu(device) if device.type == "cuda" else _paths_on_cpu(device)
    _compile_ahead([shape for shape in SHAPES if shape.name in names], device)
    for shape in SHAPES:
        if shape.name in names:
            yield {"kind": "begin", "what": shape.name}
            yield from _check(shape, device_name)
    yield {"kind": "end"}


def _torch_facts() -> Line:
    import torch

    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "has_gpu": has_gpu,
        "num_gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "capability": None if capability is None else list(capability),
        "architectures": torch.cuda.get_arch_list() if has_gpu else [],
        "free_bytes": torch.cuda.mem_get_info()[0] if has_gpu else None,
        "num_threads": torch.get_num_threads(),
    }


# ---- the path that the dispatch takes


def _paths_on_gpu(device: torch.device) -> Iterator[Line]:
    import torch

    from blockdraft.kernels.choice import Available, has_triton

    missing = None if has_triton() else "triton is not installed (pip install triton)"
    for name in ("attention", "products", "heads", "sampling", "gated delta", "acceptance"):
        yield _path(name, "Triton", missing)
    experts = Available("triton", torch.bfloat16, device)
    yield _path("experts", "Triton", experts.why_reference("experts"))
    yield _path("CUDA graphs", "one per step", missing)
    if missing is not None:
        return
    from blockdraft.kernels.linear import has_fp8
    from blockdraft.kernels.triton.gated_tile import fits
    from blockdraft.kernels.triton.launch import has_pdl

    x = torch.zeros(32, NUM_INPUTS, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2 * NUM_INPUTS, NUM_INPUTS, dtype=torch.bfloat16, device=device)
    tile = (
        None if fits(x, weight) else "written for Hopper (capability 9.x): cuBLAS and an activation instead"
    )
    yield _path("gate and up in one tile (TMA)", "Triton", tile)
    early = None if has_pdl(device) else "needs capability 9.0: each kernel starts when the last has ended"
    yield _path("programmatic dependent launch", "every kernel", early)
    rounded = None if has_fp8(device) else "needs capability 8.9: fp8 weights are widened to bf16, exactly"
    yield _path("fp8 by fp8 products", "cuBLAS", rounded)


def _paths_on_cpu(device: torch.device) -> Iterator[Line]:
    import torch

    from blockdraft.kernels.cpu import why_no_llvm

    why = why_no_llvm(torch.float32, device)
    for name in ("attention", "products", "norms and activations", "gated delta"):
        yield _path(name, "our own, compiled by LLVM", why)


def _path(operation: str, taken: str, why_not: str | None) -> Line:
    taken_here = taken if why_not is None else None
    return {"kind": "path", "operation": operation, "taken": taken_here, "why_not": why_not}


# ---- the operations against their references


def _compile_ahead(shapes: list[ProbeShape], device: torch.device) -> None:
    """Compile the kernels of all shapes in parallel. Others are compiled when they are first used."""
    from blockdraft.engine.engine import Engine
    from blockdraft.start.compile_ahead import CompileAhead, run_checks, run_steps

    ahead = CompileAhead(device, [repr(shapes)])
    for shape in shapes:
        with ahead.collecting() as is_useful:
            if is_useful:
                engine = Engine(*_models(shape, str(device)))
                run_checks(engine)
                if shape.name == BITS_SHAPE:
                    run_steps(engine)
    ahead.wait(lambda done, total, name: None)
    ahead.close(is_done=True)


def _check(shape: ProbeShape, device_name: str) -> Iterator[Line]:
    from blockdraft.check.operations import check_kernels
    from blockdraft.engine.engine import Engine
    from blockdraft.start.fallback import with_kernels_that_compile

    models, plan = _models(shape, device_name)
    slow: list[Line] = []
    results, bits = with_kernels_that_compile(
        models,
        lambda models: (list(check_kernels(Engine(models, plan))), list(_bits(shape, models, plan))),
        lambda operation, why: slow.append(_path(operation, "", f"does not compile here ({why})")),
    )
    yield from (*slow, *bits)
    for result in results:
        error = result.error if result.error < float("inf") else None
        passed = {"error": error, "is_passed": result.is_passed}
        yield {"kind": "check", "shape": shape.name, **asdict(result), **passed}


def _bits(shape: ProbeShape, models: LoadedPair, plan: Plan) -> Iterator[Line]:
    """Check batch invariance of one shape on a card. A start checks the model that it serves."""
    from blockdraft.check.batch_invariance import check_bits
    from blockdraft.engine.engine import Engine

    if models.device.type == "cuda" and shape.name == BITS_SHAPE:
        found = check_bits(Engine(models, plan), list(range(1, 40)))
        yield _path("batch invariance", "tested", found.difference)


def _models(shape: ProbeShape, device_name: str) -> tuple[LoadedPair, Plan]:
    from blockdraft.start.loading import load_pair

    with tempfile.TemporaryDirectory(prefix="blockdraft-doctor-") as folder:
        target = _write(shape.target, Path(folder) / "target")
        draft = None if shape.draft is None else _write(shape.draft, Path(folder) / "draft")
        return load_pair(
            model=target,
            draft=draft or "none",
            device=device_name,
            load_format="dummy",
            quantization=shape.quantization,
            draft_quantization=shape.quantization,
            kv_dtype=shape.kv_dtype,
            width=8 if device_name == "cpu" else 16,
            max_model_len=1024,
            max_num_seqs=4,
            max_prefill_tokens=64,
            cache_bytes=CACHE_BYTES,
        )


def _write(config: object, folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    main(sys.argv[1])
