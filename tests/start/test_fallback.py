"""A kernel that does not compile on this card costs its speed: the start says so, and its reference serves.

Triton's interpreter stands in for the card, and a kernel that raises for one that does not compile.
"""

import functools
import subprocess

import pytest
import torch

from blockdraft.errors import ModelError
from blockdraft.kernels.choice import HOST_BOUND, OPERATIONS
from blockdraft.kernels.failure import DoesNotCompile, DoesNotFit, named, why_no_compiler, why_not_compiled
from blockdraft.kernels.kernels import kernels_for
from blockdraft.phases import StartProgress
from blockdraft.settings.settings import Settings
from blockdraft.start import loading
from blockdraft.start.fallback import with_kernels_that_compile
from blockdraft.start.memory import why_no_graphs
from blockdraft.start.start_engine import plain_engine, start_engine
from tests import tiny
from tests.start.test_memory import on_gpu

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

TOO_LARGE = OutOfResources(300_000, 101_376, "shared memory")
SETTINGS = Settings(
    model=tiny.TARGET,
    draft=tiny.DRAFT,
    dtype="float32",
    device="cpu",
    max_model_len=64,
    width=3,
    max_num_seqs=1,
)


# ---- which errors are a kernel's


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TOO_LARGE, "out of resource: shared memory, Required: 300000, Hardware limit: 101376"),
        (CompilationError("a = b\n", None, "b is not defined\nmore"), "CompilationError: b is not defined"),
        (
            PTXASError("`ptxas` failed with error code 255\n`ptxas` stderr:\nptxas fatal : no sm_121\n"),
            "ptxas fatal : no sm_121",
        ),
        (RuntimeError("PassManager::run failed"), "PassManager::run failed"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "kernel image is invalid"),
        (DoesNotFit("the 48 KB of shared memory are too few"), "48 KB"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_compiler_says_is_one_line(error, words):
    line = why_not_compiled(error)
    assert words in line
    assert "\n" not in line
    assert "more" not in line


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("a bug of ours"),
        ValueError("a bug of ours"),
    ],
    ids=str,
)
def test_other_errors_are_no_kernels_fault(error):
    assert why_not_compiled(error) is None
    assert why_no_compiler(error) is None


def test_a_missing_c_compiler_is_about_every_kernel():
    assert "install gcc" in why_no_compiler(RuntimeError("Failed to find C compiler. Please specify"))
    assert "python3-dev" in why_no_compiler(subprocess.CalledProcessError(1, ["gcc", "x.c"]))


# ---- which operation it was


@pytest.mark.parametrize(
    "error", [TOO_LARGE, DoesNotFit("too wide"), RuntimeError("PassManager::run failed")]
)
def test_a_kernel_that_does_not_compile_names_its_operation(error):
    def kernel(x, *, scale):
        raise error

    with pytest.raises(DoesNotCompile) as caught:
        named("norms", kernel)(1, scale=2)
    assert (caught.value.operation, caught.value.why) == ("norms", why_not_compiled(error))
    with pytest.raises(DoesNotCompile) as caught:  # one operation runs inside another
        named("experts", named("norms", kernel))(1, scale=2)
    assert caught.value.operation == "norms"


@pytest.mark.parametrize("error", [RuntimeError("a bug of ours"), ValueError("a bug of ours"), KeyError("x")])
def test_other_errors_of_a_kernel_stay_what_they_are(error):
    def kernel():
        raise error

    with pytest.raises(type(error)) as caught:
        named("norms", kernel)()
    assert caught.value is error


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_is_off_has_its_reference_and_the_others_have_not(operation):
    kernels = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    without = kernels.without(operation)
    assert without.off == (operation,)
    assert kernels.off == ()
    assert [one for one in OPERATIONS if without.available.why_reference(one) is not None] == [operation]
    assert "does not compile" in str(without.available.why_reference(operation)).replace("do not", "does not")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_graphs_are_left_out_where_a_reference_asks_the_host(operation):
    models, plan = on_gpu()
    assert why_no_graphs(models, plan) is None
    reason = why_no_graphs(models.with_kernels(models.target.kernels.without(operation)), plan)
    assert (reason is not None) == (operation in HOST_BOUND)
    assert reason is None or operation in reason


# ---- a start


@pytest.fixture
def broken(monkeypatch):
    """Lets the kernel of an operation raise, and counts how often it was asked."""
    calls = []

    def breaks(module, name, error):
        def fail(*args, **kwargs):
            calls.append(name)
            raise error

        monkeypatch.setattr(f"blockdraft.kernels.triton.{module}.{name}", fail)
        return calls

    return breaks


def start(monkeypatch, **changes):
    """As far as a CPU allows: steps are prepared, but neither warmed nor checked in the slow interpreter."""
    from dataclasses import replace

    from blockdraft.start import start_engine as module

    def one_request(engine, note, choose):
        from blockdraft.engine.request import SamplingParams
        from blockdraft.engine.trial_engine import serve, trial_engine

        other = trial_engine(engine)
        other.add([3, 5], SamplingParams(temperature=0.0, max_tokens=1, width=2))
        serve(other)

    monkeypatch.setattr(module, "warm", one_request)
    monkeypatch.setattr(loading, "kernels_for", functools.partial(kernels_for, is_interpreted=True))
    startup = StartProgress()
    return start_engine(replace(SETTINGS, verify="off", **changes), startup), startup


@pytest.mark.parametrize(
    ("module", "name", "operation"),
    [
        ("attention", "attend", "attention"),
        ("pointwise", "rms_norm", "norms"),
        ("acceptance", "advance", "acceptance"),
    ],
)
@pytest.mark.slow
def test_a_start_goes_on_without_a_kernel_that_does_not_compile(monkeypatch, broken, module, name, operation):
    calls = broken(module, name, TOO_LARGE)
    engine, startup = start(monkeypatch)
    assert engine.models.target.kernels.off == engine.models.drafter.model.kernels.off == (operation,)
    (warning,) = startup.warnings
    assert f"the kernel of {operation} does not compile on this card" in warning
    assert "Required: 300000" in warning
    assert "its reference serves" in warning
    assert calls == [name], "the kernel is tried once"
    assert [phase.state for phase in startup.phases()] == ["done"] * 3 + ["skipped", "done", "skipped"]
    assert not engine.has_work


def test_each_of_several_operations_is_left_out_once(monkeypatch, broken):
    broken("attention", "attend", TOO_LARGE)
    broken("pointwise", "norm_rope_write", CompilationError("", None, "unknown type"))
    engine, startup = start(monkeypatch)
    assert set(engine.models.target.kernels.off) == {"attention", "heads"}
    assert engine.models.drafter.model.kernels.off == engine.models.target.kernels.off
    assert len(startup.warnings) == 2
    assert any("the kernel of attention does not compile on this card" in line for line in startup.warnings)
    assert [phase.state for phase in startup.phases()] == ["done"] * 3 + ["skipped", "done", "skipped"]
    assert not engine.has_work


def test_other_errors_of_a_start_stay_what_they_are(monkeypatch, broken):
    broken("attention", "attend", RuntimeError("a bug of ours"))
    with pytest.raises(RuntimeError, match="a bug of ours"):
        start(monkeypatch)


def test_a_missing_c_compiler_ends_the_start_with_a_line(monkeypatch, broken):
    broken("pointwise", "rms_norm", RuntimeError("Failed to find C compiler. Please specify via CC"))
    with pytest.raises(ModelError, match="install gcc") as caught:
        start(monkeypatch)
    assert "\n" not in str(caught.value)


def test_the_python_api_hears_of_it_as_well(monkeypatch):
    from blockdraft.start import start_engine as module

    tries, warnings = [], []

    def plain(models, plan, note, warn):
        tries.append(models.target.kernels.off)
        if len(tries) == 1:
            raise DoesNotCompile("sampling", "too large")
        return "the engine"

    monkeypatch.setattr(module, "_plain", plain)
    assert plain_engine(SETTINGS, lambda text: None, warnings.append) == "the engine"
    assert tries == [(), ("sampling",)]
    assert "the kernel of sampling" in warnings[0]
    assert "too large" in warnings[0]


def test_an_engine_that_goes_without_a_kernel_leaves_the_others_theirs():
    """Nothing of the process is switched off: the models that were given keep their kernels."""
    models, tries = on_gpu()[0], []

    def make(given):
        tries.append(given)
        if len(tries) == 1:
            raise DoesNotCompile("norms", "too large")
        return given

    made = with_kernels_that_compile(models, make, lambda operation, why: None)
    assert tries[0] is models
    assert models.target.kernels.off == ()
    assert made.target.kernels.off == made.drafter.model.kernels.off == ("norms",)
    assert made.target.layers[0].mlp_norm.kernels is made.target.kernels
    assert made.target.layers[0].mlp_norm.weight is models.target.layers[0].mlp_norm.weight
