"""The command on this very machine, and what it prints for others."""

import argparse
import json
from dataclasses import replace

import pytest

from blockdraft.cli import doctor
from blockdraft.doctor import report as report_module
from blockdraft.doctor.probe_runner import Failure, Probe, ShapeCheck, Torch
from blockdraft.doctor.report import as_json, diagnose
from blockdraft.doctor.shapes import SHAPE_NAMES
from blockdraft.errors import SettingsError
from blockdraft.machine.machine import Cpu, Gpu, Limits, Machine

GIB = 1 << 30
SPARK = Machine(
    memory_bytes=100 * GIB,
    total_bytes=120 * GIB,
    gpus=(Gpu("NVIDIA GB10", (12, 1), 120 * GIB, 100 * GIB, "580.95.05", is_unified=True),),
    cuda="13.0",
    cpu=Cpu("Cortex-X925", "aarch64", 20, frozenset({"asimd", "bf16"})),
    limits=Limits(open_files=65536),
    kernel="7.0.0-1019-nvidia",
)
VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2", "tokenizers": "1", "huggingface_hub": "2"}
TORCH = Torch(
    "2.13.0+cu130",
    "13.0",
    None,
    has_gpu=True,
    gpu="NVIDIA GB10",
    capability=(12, 1),
    architectures=("sm_120",),
)
CHECK = ShapeCheck("hybrid", "attention", "4/2 heads", 1e-3, 2e-2, 4, is_passed=True)
GOOD = Probe(torch=TORCH, device="cuda", checks=(CHECK,))


def run(monkeypatch, *flags, found=None):
    """The exit code; `found` in place of an examination."""
    if found is not None:
        monkeypatch.setattr(report_module, "examine", lambda device, **options: found)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(flags))


def by_name(report):
    return {finding.name: finding for finding in report.findings}


@pytest.mark.slow
def test_this_machine_computes_what_it_should(monkeypatch, capsys):
    """The real thing: every shape, every operation, on whatever device there is."""
    run(monkeypatch, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "blockdraft-doctor/1"
    assert found["kernels"]["failures"] == []
    assert {check["shape"] for check in found["kernels"]["checks"]} == set(SHAPE_NAMES)
    assert all(check["is_passed"] for check in found["kernels"]["checks"])
    operations = {check["operation"] for check in found["kernels"]["checks"]}
    assert {"attention", "linear", "experts", "gated delta", "packed product", "sampling"} <= operations
    wrong = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert not [finding for finding in wrong if finding["area"] == "kernels"]
    assert found["torch"]["version"] == found["libraries"]["torch"]
    assert found["machine"]["memory_bytes"] > 0


@pytest.mark.slow
def test_quick_leaves_the_kernels_out(monkeypatch, capsys):
    run(monkeypatch, "--quick", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"]["checks"] == found["kernels"]["failures"] == []
    assert found["kernels"]["paths"]


def test_a_machine_with_a_known_problem():
    report = diagnose(SPARK, VERSIONS, GOOD)
    found = by_name(report)
    assert (report.verdict, found["gb10-kernel-1019"].level) == ("problem", "problem")
    assert {ability.name: ability.state for ability in report.abilities}["NVFP4"] == "native"
    fixed = diagnose(replace(SPARK, kernel="6.17.0-1032-nvidia"), VERSIONS, GOOD)
    assert fixed.verdict == "warning", "unified memory is one"


def test_torchs_word_on_the_card_goes_before_the_drivers():
    ampere = replace(TORCH, capability=(8, 0))
    states = {a.name: a.state for a in diagnose(SPARK, VERSIONS, replace(GOOD, torch=ampere)).abilities}
    assert states["NVFP4"] == "emulated"
    states = {a.name: a.state for a in diagnose(SPARK, VERSIONS, Probe()).abilities}
    assert states["NVFP4"] == "native"


@pytest.mark.parametrize(
    ("kernel", "is_passed", "code"),
    [("6.17.0", True, 0), ("7.0.0-1019-nvidia", True, 1), ("6.17.0", False, 1)],
)
def test_the_exit_code_is_one_for_problems_only(monkeypatch, capsys, kernel, is_passed, code):
    probe = replace(GOOD, checks=(replace(CHECK, is_passed=is_passed),))
    found = diagnose(replace(SPARK, kernel=kernel), VERSIONS, probe)
    assert run(monkeypatch, found=found) == code
    assert run(monkeypatch, "--json", found=found) == code


def test_the_text_has_every_finding_with_its_advice_and_thread(monkeypatch, capsys):
    report = diagnose(SPARK, VERSIONS, GOOD)
    run(monkeypatch, found=report)
    text = capsys.readouterr().out
    for finding in report.findings:
        assert f"{finding.name}: {finding.says}" in text
        for line in filter(None, (finding.advice, finding.thread)):
            assert line in text
    for title in ("Machine", "Limits", "Disk", "Libraries", "Kernels", "Number formats", "Known problems"):
        assert f"\n{title}\n" in f"\n{text}"
    assert text.endswith("There are problems. The line 'do:' below each says how to solve it.\n")


def test_formats_are_told_without_a_torch_that_could_be_asked(monkeypatch, capsys):
    run(monkeypatch, found=diagnose(SPARK, VERSIONS, replace(GOOD, torch=None, paths=(), checks=())))
    text = capsys.readouterr().out
    assert text.startswith("Machine\n")
    assert "\nKernels\n" not in text
    assert "  NVFP4 " in text.partition("\n\nNumber formats\n")[2]


def test_brackets_in_a_finding_are_not_markup(monkeypatch, capsys):
    text = "RuntimeError: [enforce fail at alloc_cpu.cpp:124] out of memory"
    run(monkeypatch, found=diagnose(SPARK, VERSIONS, replace(GOOD, failures=(Failure("hybrid", text),))))
    assert text in capsys.readouterr().out


def test_the_json_is_whole():
    report = diagnose(SPARK, VERSIONS, GOOD)
    found = json.loads(json.dumps(as_json(report)))
    (gpu,) = found["machine"]["gpus"]
    assert (gpu["card"], gpu["capability"], gpu["is_unified"]) == ("gb10", [12, 1], True)
    assert found["machine"]["cpu"]["features"] == ["asimd", "bf16"]
    assert found["verdict"] == report.verdict
    assert len(found["findings"]) == len(report.findings)
    assert found["kernels"]["checks"][0]["operation"] == "attention"


def test_an_unknown_device_is_refused_before_anything_runs(monkeypatch):
    with pytest.raises(SettingsError, match="device 'tpu' is unknown"):
        run(monkeypatch, "--device", "tpu")
