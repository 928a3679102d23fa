"""Findings about machines: nothing bad of good ones, and the right advice for the others."""

import os
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest

from blockdraft.doctor.abilities import abilities
from blockdraft.doctor.hardware import disk_findings, limit_findings, machine_findings
from blockdraft.doctor.libraries import library_findings, read_versions
from blockdraft.machine.cards import CARDS
from blockdraft.machine.machine import Cpu, Gpu, Limits, Machine

GIB = 1 << 30
CPU = Cpu("EPYC", "x86_64", 16, frozenset({"avx2", "fma"}))
PLAIN = Machine(memory_bytes=64 * GIB, total_bytes=128 * GIB, cpu=CPU, limits=Limits(open_files=65536))


def gpu(name="NVIDIA H200", capability=(9, 0), memory=140, free=139, **fields):
    return Gpu(name, capability, memory * GIB, free * GIB, "580.95.05", **fields)


def with_gpus(*gpus, **limits):
    return replace(PLAIN, gpus=gpus, limits=replace(PLAIN.limits, **limits))


def bad(findings):
    """Names of the findings that are not ok, with their level."""
    return {finding.name: finding.level for finding in findings if finding.level != "ok"}


def about(findings, name):
    (found,) = (finding for finding in findings if finding.name == name)
    return found


# ---- cards


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_every_card_from_ampere_on_is_good_and_older_ones_are_not(card, tmp_path):
    free = card.memory_bytes
    one = Gpu(card.title, card.capability, card.memory_bytes, free, "580", is_unified=card.is_unified)
    found = list(machine_findings(replace(PLAIN, gpus=(one,)), tmp_path))
    assert bad(found) == ({} if card.capability >= (8, 0) else {"GPU 0": "problem"})
    assert ("unified" in about(found, "GPU 0").says) is card.is_unified


def test_a_card_is_described_in_one_line(tmp_path):
    says = about(machine_findings(with_gpus(gpu()), tmp_path), "GPU 0").says
    assert says == "NVIDIA H200: capability 9.0, 140.0 GiB (139.0 free), 4,800 GB/s, driver 580.95.05"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (gpu("NVIDIA Whatever", (0, 0)), {"GPU 0": "warning"}),  # nobody knows it
        (gpu(free=60), {"GPU 0 in use": "warning"}),
        (gpu(free=70), {}),
    ],
)
def test_a_card_that_is_unknown_or_in_use(card, expected, tmp_path):
    assert bad(machine_findings(with_gpus(card), tmp_path)) == expected


def test_cards_of_different_kinds_are_counted_in_different_orders(tmp_path):
    other = gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 24)
    found = list(machine_findings(with_gpus(gpu(), other), tmp_path))
    assert bad(found) == {"cards": "warning"}
    assert "PCI_BUS_ID" in about(found, "cards").advice
    assert bad(machine_findings(with_gpus(gpu(), gpu()), tmp_path)) == {}


@pytest.mark.parametrize(("container", "advice"), [(None, "reboot"), ("docker", "--gpus all")])
def test_a_driver_that_does_not_answer(container, advice, tmp_path):
    machine = replace(
        with_gpus(container=container), gpu_error="driver and library are of different versions"
    )
    found = list(machine_findings(machine, tmp_path))
    assert bad(found) == {"driver": "problem"}
    assert "different versions" in about(found, "driver").says
    assert advice in about(found, "driver").advice


@pytest.mark.parametrize(
    ("device", "level", "word"),
    [(None, "ok", "CPU"), ("kfd", "warning", "AMD"), ("nvidiactl", "warning", "may see")],
)
def test_no_card(device, level, word, tmp_path):
    if device is not None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / device).touch()
    found = about(machine_findings(PLAIN, tmp_path), "GPU")
    assert (found.level, word in found.says) == (level, True)


# ---- processor, memory, limits


def test_processor_features_that_matter_are_named(tmp_path):
    says = about(machine_findings(PLAIN, tmp_path), "CPU").says
    assert says == "EPYC (x86_64), 16 cores; has avx2, fma; lacks avx512f, avx512_bf16, amx_tile"


def test_a_quota_below_the_cores(tmp_path):
    found = list(machine_findings(with_gpus(cpus=3.5), tmp_path))
    assert bad(found) == {"CPU quota": "warning"}
    assert "OMP_NUM_THREADS=3" in about(found, "CPU quota").advice
    assert bad(machine_findings(with_gpus(cpus=16.0), tmp_path)) == {}


def test_too_little_memory(tmp_path):
    low = replace(PLAIN, memory_bytes=GIB, limits=Limits(memory_bytes=4 * GIB))
    found = list(machine_findings(low, tmp_path))
    assert bad(found) == {"memory": "problem"}
    assert "limit is 4.0 GiB" in about(found, "memory").says


def test_good_limits():
    machine = with_gpus(gpu(), gpu(), shm_bytes=16 * GIB, container="docker", locked_bytes=8 << 20)
    assert bad(limit_findings(machine)) == {}, "locked memory matters with RDMA only"


def test_dockers_64_megabytes_of_shared_memory():
    small = {"shm_bytes": 64 << 20, "container": "docker"}
    found = list(limit_findings(with_gpus(gpu(), gpu(), **small)))
    assert bad(found) == {"/dev/shm": "problem"}
    assert "--shm-size" in about(found, "/dev/shm").advice
    assert bad(limit_findings(with_gpus(gpu(), **small))) == {}, "one process needs none"


def test_ulimits():
    assert bad(limit_findings(with_gpus(open_files=1024))) == {"open files": "warning"}
    rdma = with_gpus(gpu(), has_rdma=True, locked_bytes=8 << 20)
    assert bad(limit_findings(rdma)) == {"locked memory": "warning"}
    assert bad(limit_findings(with_gpus(gpu(), address_bytes=GIB))) == {"address space": "problem"}
    assert bad(limit_findings(with_gpus(address_bytes=GIB))) == {}


# ---- disks


@pytest.mark.parametrize(
    ("free", "may_write", "expected"),
    [
        (100, True, {}),
        (20, True, {"downloads": "warning", "hub": "warning"}),
        (1, True, {"downloads": "problem", "hub": "problem", "triton": "problem"}),
        (100, False, {"downloads": "problem", "hub": "problem", "triton": "problem"}),
    ],
)
def test_disks(monkeypatch, tmp_path, free, may_write, expected):
    """A folder that is not there yet has the room of its parent."""
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or Mock(free=free * GIB))
    monkeypatch.setattr(os, "access", lambda path, mode: may_write)
    found = list(disk_findings(dict.fromkeys(("downloads", "hub", "triton"), tmp_path / "a" / "b")))
    assert bad(found) == expected
    assert set(asked) == {tmp_path}
    assert next(disk_findings({"hub": tmp_path})).name == "hub"
    assert asked[-1] == tmp_path
    assert not expected or "HF_HOME" in about(found, "hub").advice


# ---- libraries

ALL = {"python": "3.12", "torch": "2.13.0", "numpy": "2.4", "tokenizers": "0.23", "huggingface_hub": "2.4"}


def test_what_must_be_installed():
    assert bad(library_findings(ALL, has_gpu=False)) == {}
    assert bad(library_findings(ALL, has_gpu=True)) == {"triton": "problem", "nvidia-ml-py": "warning"}
    without = {name: version for name, version in ALL.items() if name != "huggingface_hub"}
    found = list(library_findings(without, has_gpu=False))
    assert about(found, "huggingface-hub").advice == "pip install huggingface-hub"


@pytest.mark.parametrize(
    ("code", "binaries", "is_good"),
    [
        ("0.7.2", "0.7.2+cu130", True),
        ("0.7.2", "0.6.13", False),
        ("0.7.2", None, True),
        (None, "0.6.13", True),
    ],
)
def test_flashinfers_binaries_are_of_its_own_version(code, binaries, is_good):
    versions = {**ALL, "flashinfer": code, "flashinfer_cubin": binaries}
    versions = {name: version for name, version in versions.items() if version}
    assert bad(library_findings(versions, has_gpu=False)) == ({} if is_good else {"flashinfer": "problem"})


def test_versions_of_this_environment():
    versions = read_versions()
    assert versions["torch"].startswith("2.")
    assert "vllm" not in read_versions(_only_torch)


def _only_torch(name):
    import importlib.metadata

    if name != "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return "2.13.0"


# ---- abilities


@pytest.mark.parametrize(
    ("capability", "expected"),  # bf16, fp8, NVFP4, MXFP4, TMA
    [
        ((7, 5), ["emulated", "emulated", "emulated", "emulated", "no"]),
        ((8, 0), ["native", "emulated", "emulated", "emulated", "no"]),
        ((8, 9), ["native", "native", "emulated", "emulated", "no"]),
        ((9, 0), ["native", "native", "emulated", "emulated", "native"]),
        ((10, 0), ["native", "native", "native", "native", "native"]),
        ((12, 1), ["native", "native", "native", "native", "native"]),
    ],
)
def test_what_a_card_computes_in(capability, expected):
    found = {ability.name: ability for ability in abilities(capability, frozenset())}
    assert [found[name].state for name in ("bf16", "fp8", "NVFP4", "MXFP4", "TMA")] == expected
    assert found["programmatic dependent launch"].state == found["TMA"].state, "both came with Hopper"
    newest = {9: "FlashAttention 3 ", 10: "FlashAttention 4 "}.get(capability[0], "FlashAttention 2")
    assert found["TMA"].others.startswith(newest)
    assert ("17 to 128" in found["TMA"].native_engine) is (capability[0] == 9), "that kernel is Hopper's"


@pytest.mark.parametrize(("features", "state"), [({"bf16"}, "native"), ({"avx2"}, "emulated")])
@pytest.mark.parametrize("capability", [None, (0, 0)])
def test_what_a_processor_computes_in(capability, features, state):
    found = {ability.name: ability.state for ability in abilities(capability, frozenset(features))}
    assert (found["int8"], found["float32"], found["bf16"]) == ("native", "native", state)
