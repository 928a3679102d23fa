"""A card that cannot be had, or not all of it, is one line: what happened, who holds it, what to do."""

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from blockdraft.cli.main import main
from blockdraft.errors import BlockdraftError, CapacityError, ModelError, warn_caller
from blockdraft.llm import LLM
from blockdraft.machine import nvml
from blockdraft.machine.limits import Limits
from blockdraft.machine.machine import Gpu, Machine, read_holders
from blockdraft.machine.nvml import Holder
from blockdraft.machine.remedies import why_unseen
from blockdraft.phases import StartProgress
from blockdraft.planner.plan import Weights
from blockdraft.settings.settings import Settings
from blockdraft.start import card_errors as card
from blockdraft.start import loading
from blockdraft.start import start_engine as start
from blockdraft.start.fallback import with_kernels_that_compile
from blockdraft.start.loading import OpenedTarget
from blockdraft.start.memory import memory_explained
from blockdraft.start.start_engine import plain_engine, start_engine
from tests import tiny
from tests.machine.fake_nvml import FakeCard, FakeNvml

GB = 10**9
H100 = Gpu("NVIDIA H100", (9, 0), 80 * GB, 3 * GB, "535.54.03")
MACHINE = Machine(memory_bytes=64 * GB, gpus=(H100,), cuda="12.2")
OTHERS = (Holder(4711, 70 * GB),)
SMALL = {"dtype": "float32", "max_model_len": 64, "width": 2, "max_num_seqs": 1}
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your driver\nmore"


@pytest.fixture
def machine(monkeypatch):
    """A machine with one card, of which another process holds nearly all; torch is built for CUDA 13."""

    def set_up(found=MACHINE, cuda="13.0", holders=OTHERS):
        monkeypatch.setattr(card, "read_machine", lambda: found)
        monkeypatch.setattr(card, "read_holders", lambda index: holders)
        monkeypatch.setattr(card, "process_name", lambda pid: "python3")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GB, 80 * GB))

    return set_up


def torch_says(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.torch, "empty", fail)


def line_of(error):
    assert "\n" not in str(error)
    return str(error)


# ---- who holds a card


def test_the_driver_names_the_processes_of_a_card():
    mine = FakeCard("NVIDIA H100", total=80_000, processes=((7, 300), (9, None), (8, 5000)))
    library = FakeNvml(FakeCard("another"), mine, missing=("nvmlDeviceGetGraphicsRunningProcesses_v3",))
    found = nvml.holders(None, 1, load=lambda: library)
    assert found == (Holder(8, 5000 << 20), Holder(7, 300 << 20), Holder(9, None))
    assert nvml.holders(None, 0, load=lambda: library) == ()
    assert nvml.holders(None, 2, load=lambda: library) == ()
    assert not library.is_open


def test_a_driver_that_does_not_tell_names_nobody():
    silent = FakeNvml(
        FakeCard("x", processes=((7, 1),)), missing=("nvmlDeviceGetComputeRunningProcesses_v3",)
    )
    assert nvml.holders(None, 0, load=lambda: silent) == ()
    assert nvml.holders(None, 0, load=Mock(side_effect=ImportError)) == ()
    assert nvml.holders(None, 0, load=lambda: FakeNvml(init=9)) == ()


def test_this_process_is_not_among_the_others(tmp_path):
    found = (Holder(os.getpid(), 5), Holder(12, 4))
    assert read_holders(0, tmp_path, lambda visible, index: found) == ()  # there is no driver
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert read_holders(0, tmp_path, lambda visible, index: found) == (Holder(12, 4),)


def test_the_usage_of_a_card_names_a_few_of_its_holders(machine):
    machine(holders=())
    assert card.usage(torch.device("cuda")) == "3.0 of 80.0 GB are free"
    machine(holders=(Holder(5, None), *(Holder(pid, GB) for pid in range(10, 15))))
    text = card.usage(torch.device("cuda", 0))
    assert "process 5 (python3) holds some and process 10 (python3) holds 1.0 GB" in text
    assert text.endswith("2 more hold the rest")


def test_the_driver_answers_where_cuda_does_not(machine, monkeypatch):
    machine()

    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert card.memory_of(torch.device("cuda")) == (3 * GB, 80 * GB)
    assert card.memory_of(torch.device("cuda:1")) == (0, 0)


# ---- too little memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore"),
        RuntimeError("CUDA error: out of memory\nMore"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_loading", [False, True])
def test_running_out_says_what_is_free_who_holds_it_and_what_helps(machine, error, is_loading):
    machine()
    with (
        pytest.raises(CapacityError) as caught,
        memory_explained(tiny.plan("float32"), torch.device("cuda"), is_loading=is_loading),
    ):
        raise error
    line = line_of(caught.value)
    assert HELD in line
    assert "--quantization fp8" in line
    # A smaller cache does not make room for weights.
    assert ("--max-num-seqs" in line) != is_loading
    assert ("weights" in line) == is_loading


def test_other_errors_and_other_devices_are_not_explained():
    for device, text in (("cuda", "a bug of ours"), ("cpu", "out of memory")):
        with (
            pytest.raises(RuntimeError, match=text),
            memory_explained(tiny.plan("float32"), torch.device(device)),
        ):
            raise RuntimeError(text)


@pytest.mark.parametrize("name", ["read_weights", "_prepared", "_plain"])
def test_every_part_of_a_start_is_explained(machine, monkeypatch, name):
    machine()
    models = replace(tiny.load("float32"), device=torch.device("cuda"))
    opened = SimpleNamespace(
        target=SimpleNamespace(tokenizer=None), device=models.device, plan=tiny.plan("float32")
    )
    monkeypatch.setattr(start, "open_models", lambda settings, note: opened)
    monkeypatch.setattr(start, "read_weights", lambda opened, *_: models)
    monkeypatch.setattr(start, "compiling_for", lambda opened: contextlib.nullcontext())

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(start, name, fail)
    begin = (
        (lambda: plain_engine(Settings(device="cuda"), lambda text: None))
        if name == "_plain"
        else lambda: start_engine(Settings(device="cuda"), StartProgress())
    )
    with pytest.raises(CapacityError) as caught:
        begin()
    assert "process 4711" in line_of(caught.value)


def test_a_plan_that_does_not_fit_says_who_is_in_the_way(machine, monkeypatch):
    machine()
    monkeypatch.setattr(loading, "read_machine", lambda: MACHINE)
    config = tiny.load("float32").config
    target = OpenedTarget(None, config, Weights(40 * GB), None, has_tokenizer=True, sampling={})
    settings = Settings(device="cuda", draft="none", dtype="bfloat16")
    with pytest.raises(CapacityError) as caught:
        loading._plan(settings, torch.device("cuda", 0), target, None)
    line = line_of(caught.value)
    assert "weights of 80.0 GB" in line
    assert HELD in line


# ---- a card that does not begin


HELD = "3.0 of 80.0 GB are free, process 4711 (python3) holds 70.0 GB"


@pytest.mark.parametrize(
    ("kind", "device", "error", "words"),
    [
        (
            CapacityError,
            "cuda:0",
            RuntimeError(BUSY),
            ("'cuda:0' is taken", "busy or unavailable", "process 4711", "nvidia-smi -c DEFAULT"),
        ),
        (CapacityError, "cuda", RuntimeError("CUDA error: out of memory\nmore"), (HELD,)),
        (
            ModelError,
            "cuda:7",
            RuntimeError("CUDA error: invalid device ordinal\nmore"),
            ("2 GPUs are visible",),
        ),
    ],
)
def test_a_card_that_cannot_begin_says_why(machine, monkeypatch, kind, device, error, words):
    machine()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch_says(monkeypatch, error)
    with pytest.raises(kind) as caught:
        loading._device(device)
    line = line_of(caught.value)
    assert all(word in line for word in words)


DRIVERS = {
    "too old": (MACHINE, "13.0", ("driver 535.54.03", "CUDA 13 needs driver 580 or newer", "CUDA 12.2")),
    "built without CUDA": (MACHINE, None, ("NVIDIA H100", "built without CUDA", "install PyTorch for CUDA")),
    "new enough": (MACHINE, "12.8", ("CUDA 12.8 does not find it", "CUDA 12 needs 525")),
    "in a container": (
        replace(MACHINE, limits=Limits(container="docker")),
        "12.8",
        ("--gpus all", "NVIDIA_DRIVER_CAPABILITIES"),
    ),
    "silent": (Machine(memory_bytes=GB, gpu_error="the driver is not loaded"), "13.0", ("is not loaded",)),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_gpu_that_was_asked_for_and_is_not_seen_is_an_error(machine, monkeypatch, name):
    found, cuda, words = DRIVERS[name]
    machine(found, cuda)
    torch_says(monkeypatch, RuntimeError(TOO_OLD))
    with pytest.raises(ModelError) as caught:
        loading._device("cuda")
    line = line_of(caught.value)
    assert all(word in line for word in ("device 'cuda'", "on your system is too old", *words))


def test_without_any_gpu_the_error_says_that(machine, monkeypatch):
    machine(Machine(memory_bytes=GB), None)
    torch_says(monkeypatch, AssertionError("Torch not compiled with CUDA enabled"))
    with pytest.raises(ModelError, match="no GPU that this process may see"):
        loading._device("cuda")


@pytest.mark.parametrize("name", DRIVERS)
def test_where_auto_means_the_cpu_a_gpu_that_is_not_used_is_named(machine, name):
    found, cuda, words = DRIVERS[name]
    machine(found, cuda)
    told = []
    start._check_gpu(Settings(), told.append)
    (line,) = told
    assert all(word in line for word in ("so the CPU serves", *words))
    assert "\n" not in line


def test_a_server_keeps_that_warning(machine):
    machine()
    startup = StartProgress()
    start_engine(Settings(model=tiny.TARGET, draft="none", verify="off", **SMALL), startup)
    assert ["so the CPU serves" in line for line in startup.warnings] == [True]


def test_nothing_is_said_where_there_is_no_gpu_or_the_cpu_was_asked_for(machine):
    assert why_unseen(Machine(memory_bytes=GB), "2.13", None) is None
    machine()
    told = []
    start._check_gpu(Settings(device="cpu"), told.append)
    machine(Machine(memory_bytes=GB))
    start._check_gpu(Settings(device="auto"), told.append)
    assert told == []


# ---- the same by every way in


def test_the_python_api_warns(machine, monkeypatch):
    machine()
    told = []
    LLM(tiny.TARGET, "none", warn=told.append, **SMALL)
    assert "so the CPU serves" in told[0]
    with pytest.warns(UserWarning, match="so the CPU serves") as caught:
        LLM(tiny.TARGET, "none", **SMALL)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="far inside") as caught:
        with_kernels_that_compile(None, lambda _: warn_caller("far inside"), None)  # through our own frames
    assert caught[0].filename == __file__
    torch_says(monkeypatch, RuntimeError(TOO_OLD))
    with pytest.raises(BlockdraftError, match="cannot be used"):
        LLM(tiny.TARGET, "none", device="cuda", **SMALL)


def test_generate_warns_and_goes_on_or_ends_with_one_line(machine, monkeypatch, capsys):
    machine()
    model = ["generate", "--raw", "a b", "--model", tiny.TARGET, "--draft", "none", "--max-tokens", "2"]
    small = ["--dtype", "float32", "--max-model-len", "64", "--width", "2"]
    assert main([*model, *small]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("warning: there is a GPU (NVIDIA H100")] == said[:1]
    torch_says(monkeypatch, RuntimeError(TOO_OLD))
    assert main([*model, *small, "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("blockdraft: error: device 'cuda' cannot be used")


def test_serve_ends_with_one_line(machine, monkeypatch, capsys):
    machine()
    torch_says(monkeypatch, RuntimeError(TOO_OLD))
    args = SimpleNamespace(json_logs=False, log_level="info")
    from blockdraft.cli.server_terminal import exit_code
    from blockdraft.engine.loop import EngineLoop

    loop = EngineLoop(
        lambda startup: start_engine(Settings(model=tiny.TARGET, device="cuda"), startup), None
    ).wait()
    loop.close()
    assert exit_code(args, loop.error, was_ready=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "device 'cuda' cannot be used" in line
    assert loop.startup.snapshot()["error"] == loop.error
