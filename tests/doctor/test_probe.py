"""torch in a process of its own: crashes, hangs and wrong numbers become findings, each of its own shape."""

import json
import os
from dataclasses import replace

import pytest

from blockdraft.doctor import probe as probe_module
from blockdraft.doctor import probe_runner
from blockdraft.doctor.kernels import kernel_findings, torch_findings
from blockdraft.doctor.probe_runner import (
    Failure,
    KernelPath,
    Probe,
    ProbeOutcome,
    ShapeCheck,
    Torch,
    probe_torch,
)
from blockdraft.doctor.shapes import SHAPE_NAMES
from blockdraft.machine.machine import Gpu, Machine

GIB = 1 << 30
TORCH = Torch("2.13.0+cu130", "13.0", None, has_gpu=True, gpu="NVIDIA H200", capability=(9, 0))
CPU_TORCH = Torch("2.13.0+cpu", None, None, has_gpu=False)
H200 = Machine(memory_bytes=1, gpus=(Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "580.95.05"),))
SPARK = Machine(
    memory_bytes=1, gpus=(Gpu("NVIDIA GB10", (12, 1), 120 * GIB, 100 * GIB, "580", is_unified=True),)
)
NO_GPU = Machine(memory_bytes=1)
FACTS = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "has_gpu": False,
    "num_gpus": 0,
    "gpu": None,
    "capability": None,
    "architectures": [],
    "free_bytes": None,
    "num_threads": 2,
}


def bad(findings):
    return {finding.name: finding.level for finding in findings if finding.level != "ok"}


def check(shape="hybrid", operation="linear", error=1e-6, **fields):
    defaults = {"where": "here", "tolerance": 1e-5, "num_comparisons": 3, "is_passed": True}
    return ShapeCheck(shape, operation, error=error, **defaults | fields)


class FakeProbe:
    """Plays the process: `ends` says how it ends at a shape (or before), instead of going on."""

    def __init__(self, **ends):
        self.ends = {name.replace("_", " "): end for name, end in ends.items()}
        self.asked = []

    def __call__(self, argument):
        shapes = json.loads(argument)["shapes"]
        self.asked.append(shapes)
        lines = ["a library says hello", '{"not": "ours"}', "[1]"]
        for what, entry in (
            ("torch", {"kind": "torch", **FACTS}),
            ("a product on cpu", {"kind": "device", "name": "cpu", "is_right": True}),
            (
                "the choice of kernels",
                {"kind": "path", "operation": "products", "taken": "x", "why_not": None},
            ),
            *((name, {"kind": "check", **vars_of(check(name))}) for name in shapes),
        ):
            lines.append(json.dumps({"kind": "begin", "what": what}))
            if what in self.ends:
                err, code = self.ends[what]
                return ProbeOutcome("\n".join(lines), err, code)
            lines.append(json.dumps(entry))
        return ProbeOutcome("\n".join([*lines, '{"kind": "end"}']), "", 0)


def vars_of(item):
    return {name: getattr(item, name) for name in item.__slots__}


# ---- reading what the process says


def test_a_probe_that_ends_well():
    run = FakeProbe()
    probe = probe_torch("auto", run=run)
    assert run.asked == [list(SHAPE_NAMES)]
    assert (probe.torch.version, probe.device, probe.failures) == ("2.13.0", "cpu", ())
    assert [found.shape for found in probe.checks] == list(SHAPE_NAMES)
    assert len(probe.paths) == 1


def test_without_kernels_no_shape_is_asked_for():
    run = FakeProbe()
    assert probe_torch("auto", with_kernels=False, run=run).checks == ()
    assert run.asked == [[]]


def test_a_shape_that_crashes_costs_itself_only():
    run = FakeProbe(wide_heads=("", -11), sinks=("Traceback\n  x\nRuntimeError: CUDA error: bad\n", 1))
    probe = probe_torch("auto", run=run)
    assert [(failure.what, failure.how) for failure in probe.failures] == [
        ("wide heads", "the process was killed by SIGSEGV"),
        ("sinks", "RuntimeError: CUDA error: bad"),
    ]
    assert {found.shape for found in probe.checks} == set(SHAPE_NAMES) - {"wide heads", "sinks"}
    assert run.asked[1][0] == "hybrid"
    assert len(run.asked) == 3
    assert len(probe.paths) == 1, "said by each process, kept once"


def test_a_crash_in_the_last_shape_starts_no_other_process():
    run = FakeProbe(**{SHAPE_NAMES[-1].replace(" ", "_"): ("", None)})
    probe = probe_torch("auto", run=run)
    assert len(run.asked) == 1
    assert probe.failures[0].how == f"it did not end within {probe_runner.TIMEOUT_S:.0f} s"


@pytest.mark.parametrize("what", ["torch", "a product on cpu", "the choice of kernels"])
def test_what_breaks_before_the_shapes_breaks_all_of_them(what):
    run = FakeProbe(**{what.replace(" ", "_"): ("ImportError: libcudart.so.13: cannot open", 1)})
    probe = probe_torch("auto", run=run)
    assert len(run.asked) == 1
    assert probe.failures == (Failure(what, "ImportError: libcudart.so.13: cannot open"),)
    assert (probe.torch is None) is (what == "torch")


def test_a_process_that_says_nothing_failed_at_torch():
    probe = probe_torch("auto", run=lambda argument: ProbeOutcome("", "", 127))
    assert probe.failures == (Failure("torch", "the process ended with code 127"),)


def test_the_error_is_found_among_what_compilers_add():
    err = "Traceback:\n  File x\ntriton.runtime.errors.PTXASError: PTXAS error\n`ptxas` stderr:\nbla\n"
    probe = probe_torch("auto", run=lambda argument: ProbeOutcome("", err, 1))
    assert probe.failures[0].how == "triton.runtime.errors.PTXASError: PTXAS error"


# ---- findings


def test_good_torch_and_kernels():
    probe = Probe(
        torch=replace(TORCH, architectures=("sm_80", "sm_90", "compute_90")),
        device="cuda",
        paths=(KernelPath("attention", "Triton", None),),
        checks=(check("hybrid"), check("sinks")),
    )
    assert bad(torch_findings(H200, probe)) == bad(kernel_findings(probe)) == {}
    assert [finding.name for finding in kernel_findings(probe)] == ["attention", "hybrid", "sinks"]


@pytest.mark.parametrize(
    ("torch", "word"), [(CPU_TORCH, "without CUDA"), (replace(TORCH, has_gpu=False), "580")]
)
def test_a_gpu_that_torch_does_not_see(torch, word):
    found = list(torch_findings(H200, Probe(torch=torch)))
    assert bad(found) == {"torch and the GPU": "problem"}
    assert word in found[-1].says + found[-1].advice
    assert bad(torch_findings(NO_GPU, Probe(torch=torch))) == {}


@pytest.mark.parametrize(
    ("capability", "architectures", "is_good"),
    [
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 1), ("sm_90", "sm_120"), True),
        ((12, 0), ("sm_121",), False),
        ((9, 0), ("sm_90a",), True),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((8, 0), ("compute_90",), False),
        ((8, 9), ("sm_80",), True),
        ((8, 9), (), True),
    ],
)
def test_code_for_this_card(capability, architectures, is_good):
    probe = Probe(torch=replace(TORCH, capability=capability, architectures=architectures))
    assert bad(torch_findings(H200, probe)) == ({} if is_good else {"torch's kernels": "problem"})


@pytest.mark.parametrize(("free", "expected"), [(20, {"page cache": "warning"}), (90, {}), (None, {})])
def test_on_unified_memory_the_page_cache_hides_free_memory(free, expected):
    torch = replace(TORCH, capability=(12, 1), free_bytes=None if free is None else free * GIB)
    assert bad(torch_findings(SPARK, Probe(torch=torch))) == expected
    assert bad(torch_findings(H200, Probe(torch=torch))) == {}


def test_a_product_that_is_wrong():
    assert bad(torch_findings(NO_GPU, Probe(torch=TORCH, is_product_right=False))) == {"a product": "problem"}


def test_a_kernel_that_is_off_is_named_with_its_error():
    wrong = check("sinks", "attention", error=0.5, is_passed=False)
    broken = check("sinks", "experts", error=None, is_passed=False)
    found = list(kernel_findings(Probe(checks=(check("sinks"), wrong, broken))))
    assert bad(found) == {"sinks: attention": "problem", "sinks: experts": "problem"}
    assert "off by 5.0e-01 at here" in found[0].says
    assert "not a number" in found[1].says


def test_a_path_that_something_installed_would_open_is_a_warning():
    missing = KernelPath("attention", None, "llvmlite is not installed (pip install llvmlite)")
    elsewhere = KernelPath("products", None, "the CPU kernels were never measured on x86_64")
    found = list(kernel_findings(Probe(paths=(missing, elsewhere))))
    assert bad(found) == {"attention": "warning"}
    assert found[0].advice == "pip install llvmlite"


def test_a_kernel_that_does_not_compile_is_a_warning_since_its_reference_serves():
    why = "does not compile here (OutOfResources: out of resource: shared memory, Required: 300000)"
    (found,) = kernel_findings(Probe(paths=(KernelPath("attention", None, why),)))
    assert (found.name, found.level) == ("attention", "warning")
    assert found.says == f"{why}: the slower reference is used"
    assert "--engine vllm" in found.advice


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory", "--engine vllm"),
        ("triton.runtime.errors.PTXASError: PTXAS error: Internal error", "TRITON_PTXAS_BLACKWELL_PATH"),
        ("subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'main.c']' returned 1", "python3-dev"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "install gcc"),
        ("RuntimeError: CUDA error: no kernel image is available", "pytorch.org"),
        ("torch.OutOfMemoryError: CUDA out of memory", "nvidia-smi"),
        ("the process was killed by SIGILL", "newer CPU"),
        ("it did not end within 900 s", "dmesg"),
        ("KeyError: 3", "report"),
    ],
)
def test_a_failure_has_advice(how, word):
    (found,) = kernel_findings(Probe(failures=(Failure("sinks", how),)))
    assert (found.level, word in found.advice) == ("problem", True)
    assert how in found.says


def test_torch_that_cannot_be_imported():
    (found,) = torch_findings(H200, Probe(failures=(Failure("torch", "ImportError: no"),)))
    assert (found.area, found.level) == ("libraries", "problem")
    assert "install it again" in found.advice


# ---- real processes


def fake_torch(tmp_path, monkeypatch, code):
    """A torch in front of the real one."""
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "ImportError: libcudart"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
    ],
)
def test_a_broken_torch_is_a_finding(tmp_path, monkeypatch, code, how):
    fake_torch(tmp_path, monkeypatch, code)
    probe = probe_torch("auto")
    assert probe.torch is None
    assert probe.failures[0].what == "torch"
    assert how in probe.failures[0].how


def test_a_torch_that_hangs_is_stopped(tmp_path, monkeypatch):
    fake_torch(tmp_path, monkeypatch, "import time\ntime.sleep(60)")
    monkeypatch.setattr(probe_runner, "TIMEOUT_S", 1.0)
    assert probe_torch("auto").failures == (Failure("torch", "it did not end within 1 s"),)


def test_a_device_that_is_not_there_is_a_finding():
    lines = []
    with pytest.raises((AssertionError, RuntimeError)):
        lines.extend(probe_module.examine("cuda:63", []))
    assert lines[-1] == {"kind": "begin", "what": "a product on cuda:63"}
