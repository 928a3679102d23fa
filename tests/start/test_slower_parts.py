"""A start names each part that no kernel takes, and none that merely has other tiles; the GPU is made up."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.packed_speeds import KernelSpeed
from blockdraft.models.layers import Linear
from blockdraft.models.moe import ExpertLinear
from blockdraft.models.packed import Dense, Scaled, Stacked, quantise_fp8
from blockdraft.models.packed_groups import Fp4Groups
from blockdraft.models.packed_words import pack_for_kernel
from blockdraft.phases import StartProgress
from blockdraft.settings.settings import Settings
from blockdraft.start.slower_parts import slower_parts
from blockdraft.start.start_engine import plain_engine, start_engine
from tests import tiny
from tests.check.test_selfcheck import family_engine
from tests.start.test_memory import on_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytest.importorskip("triton")
needs_llvm = pytest.mark.skipif(
    why_no_llvm(torch.float32, CPU) is not None, reason="the CPU kernels are not chosen"
)


def mixture(folder, device):
    """A pair with experts, on a CPU or on a made-up GPU, and its plan."""
    engine = family_engine("qwen3_moe-plain", folder, dtype="float32")
    if device == CPU:
        return engine.models, engine.plan
    models = engine.models.with_kernels(kernels_for(torch.bfloat16, CUDA))
    models.target.to(torch.bfloat16)
    return replace(models, device=CUDA, dtype="bfloat16"), replace(engine.plan, dtype="bfloat16")


def repack(models, kind, pack, *, is_drafter=False):
    """Give every weight of a kind of module the format that `pack` makes of it."""
    for part in (models.drafter.model if is_drafter else models.target).modules():
        if isinstance(part, kind):
            weight = part.weight.data
            del part.weight
            part.weight = pack(weight)


def in_blocks(weight):
    scale = torch.ones(-(-weight.shape[0] // 16), -(-weight.shape[1] // 16))
    return Scaled(weight.to(torch.int8), scale, block=(16, 16))


def test_a_pair_that_kernels_take_has_no_slower_part(tmp_path):
    assert slower_parts(*on_gpu()) == ()
    assert slower_parts(*mixture(tmp_path, CUDA)) == ()


@needs_llvm
def test_on_a_cpu_neither(tmp_path):
    """Its experts have no kernel for any shape."""
    assert slower_parts(tiny.load("float32"), tiny.plan("float32")) == ()
    assert slower_parts(*mixture(tmp_path, CPU)) == ()


def test_references_that_were_requested_are_not_named():
    assert slower_parts(tiny.load("float32").with_kernels(REFERENCE), tiny.plan("float32")) == ()


@needs_llvm
@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", CPU), ("float64", CUDA)])
def test_a_dtype_without_kernels_is_one_line(dtype, device):
    models = tiny.load("float32").with_kernels(kernels_for(getattr(torch, dtype), device))
    (line,) = slower_parts(replace(models, dtype=dtype, device=device), tiny.plan("float32"))
    assert dtype in line
    assert "PyTorch's operations run instead, which is slower" in line


def test_a_machine_without_kernels_is_left_to_the_doctor(monkeypatch):
    monkeypatch.setattr("blockdraft.kernels.choice.why_no_llvm", lambda dtype, device: "no AVX2")
    assert slower_parts(tiny.load("bfloat16"), tiny.plan("bfloat16")) == ()


def test_experts_in_a_format_without_a_kernel_are_named(tmp_path):
    models, plan = mixture(tmp_path, CUDA)
    repack(models, ExpertLinear, Dense)
    assert slower_parts(models, plan) == (
        "the target's experts run one after another and steps are not captured, which is slower: no kernel "
        "reads the format of these experts.",
    )
    without_graphs = replace(plan, start=replace(plan.start, graphs=False))
    assert "captured" not in slower_parts(models, without_graphs)[0]
    without = models.with_kernels(models.target.kernels.without("experts"))
    assert slower_parts(without, plan) == (), "the start names a kernel that does not compile"


@needs_llvm
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_weights_in_a_format_without_a_kernel_are_named(tmp_path, device):
    models, plan = mixture(tmp_path, device)
    repack(models, Linear, in_blocks)
    (line,) = slower_parts(models, plan)
    count = sum(math.prod(part.weight.shape) for part in models.target.modules() if isinstance(part, Linear))
    moved = f"{2 * count * (4 if device == CPU else 2) / 1e6:.1f}"
    assert line == (
        "the target's weights are unpacked for every product and steps are not captured, which is slower: no "
        f"kernel reads int8 with a scale for each 16 x 16 values. A step moves {moved} MB more. See "
        "--quantization."
    )


def test_a_drafter_s_weights_are_named_too():
    models, plan = on_gpu()
    repack(models, Linear, lambda weight: Stacked([in_groups(weight), in_groups(weight)]), is_drafter=True)
    assert slower_parts(models, plan) == (
        "the drafter's weights are unpacked for every product and steps are not captured, which is slower: "
        "no kernel reads FP4 in groups. A step moves 0.1 MB more. See --draft-quantization.",
    )


def test_why_a_weight_is_not_packed_for_a_kernel_that_was_measured_is_said(monkeypatch):
    monkeypatch.setattr("blockdraft.models.packed_words.speed_of", lambda code, device: KernelSpeed(16))
    models, plan = on_gpu()
    repack(models, Linear, in_groups, is_drafter=True)
    lines = slower_parts(models, plan)
    assert any("no kernel reads FP4 in groups (32 x 32 values are not tiles" in line for line in lines)


def test_weights_in_words_have_a_kernel_and_are_captured():
    models, plan = on_gpu()
    groups = Fp4Groups(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 4).to(torch.float8_e4m3fn))
    for part in models.drafter.model.modules():
        if isinstance(part, Linear):
            del part.weight
            part.weight = pack_for_kernel(groups)
    assert models.why_not_captured() is None
    assert slower_parts(models, plan) == ()


def in_groups(weight):
    codes = torch.zeros(weight.shape[0], 16, dtype=torch.uint8)
    return Fp4Groups(codes, torch.ones(weight.shape[0], 2).to(torch.float8_e4m3fn))


@needs_llvm
def test_fp8_weights_have_a_kernel_on_a_gpu_only(tmp_path):
    models, plan = mixture(tmp_path, CUDA)
    repack(models, Linear, quantise_fp8)
    assert slower_parts(models, plan) == ()
    models, plan = mixture(tmp_path, CPU)
    repack(models, Linear, quantise_fp8)
    (line,) = slower_parts(models, plan)
    assert "no kernel of this device reads float8_e4m3fn with a scale for each row" in line


def test_fp8_weights_that_an_old_card_cannot_convert_are_named(tmp_path, monkeypatch):
    models, plan = mixture(tmp_path, CUDA)
    repack(models, Linear, quantise_fp8)
    monkeypatch.setattr("blockdraft.kernels.triton.linear.can_read", lambda values, dtype: False)
    (line,) = slower_parts(models, plan)
    assert "this card cannot convert fp8" in line
    assert "captured" not in line


@pytest.mark.parametrize(("is_fast", "is_named"), [(False, False), (True, True)])
def test_fp8_products_of_odd_sides_are_named_where_they_would_be_native(tmp_path, is_fast, is_named):
    """The mixture's router has 6 rows."""
    models, plan = mixture(tmp_path, CUDA)
    models = models.with_kernels(kernels_for(torch.bfloat16, CUDA, is_fast=is_fast))
    repack(models, Linear, quantise_fp8)
    found = slower_parts(models, plan)
    assert any("multiples of 16, not 6 x 32" in line for line in found) is is_named


@needs_llvm
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "said"),
    [
        (6, "auto", "the kernel takes heads of a multiple of 4 values, not of 6"),
        (24, "tq4", "the kernel takes heads in tq4 of a multiple of 16 values, not of 24"),
        (20, "auto", None),
        (24, "int8", None),
    ],
)
def test_heads_that_a_cpu_s_attention_does_not_take_are_named(tmp_path, head_dim, kv_dtype, said):
    more = {"head_dim": head_dim}
    engine = family_engine("qwen3-wide-heads", tmp_path, more, kv_dtype=kv_dtype)
    found = slower_parts(engine.models, engine.plan)
    assert [said in line for line in found] == ([] if said is None else [True])


@pytest.mark.parametrize(("asked", "is_named"), [(1000, True), ("auto", False)])
def test_a_hybrid_whose_states_cannot_be_saved_is_named(tmp_path, asked, is_named):
    engine = family_engine("qwen3_5-whole", tmp_path, prefix_state_bytes=asked, dtype="float32")
    found = slower_parts(engine.models, engine.plan)
    assert (
        any("prompts that begin alike are computed whole: --prefix-state-bytes" in one for one in found)
        is is_named
    )


# ---- a start says so


SETTINGS = Settings(
    model=tiny.TARGET,
    draft="none",
    dtype="bfloat16",
    device="cpu",
    max_model_len=64,
    max_num_seqs=1,
    verify="off",
)


@needs_llvm
def test_a_start_warns_of_slower_parts():
    startup = StartProgress()
    start_engine(SETTINGS, startup)
    assert [line for line in startup.warnings if "PyTorch's operations run instead" in line]


@needs_llvm
def test_the_python_api_hears_of_slower_parts():
    warnings = []
    plain_engine(SETTINGS, lambda text: None, warnings.append)
    assert [line for line in warnings if "PyTorch's operations run instead" in line]


@needs_llvm
def test_a_start_whose_steps_cannot_be_recorded_says_so(tmp_path):
    """A captured step cannot hold PyTorch's attention, which reads lengths on the host."""
    family_engine("qwen3-wide-heads", tmp_path, {"head_dim": 6})
    startup = StartProgress()
    engine = start_engine(replace(SETTINGS, model=str(tmp_path), dtype="float32"), startup)
    assert engine.graphs is None
    attention, steps = startup.warnings
    assert "a multiple of 4 values, not of 6" in attention
    assert "steps run kernel by kernel, which is slower" in steps


def test_a_start_names_keys_of_the_drafter_that_nothing_reads(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(tiny.DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"strange": 1, "num_anchors": 512}))
    told = []
    settings = Settings(model=tiny.TARGET, draft=str(folder), device="cpu", width=2, max_model_len=64)
    plain_engine(settings, lambda _: None, told.append)
    assert told == ["the drafter's config.json has keys that are not known here and change nothing: strange."]
