"""Examines a machine: collects all findings, and turns them into JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from blockdraft import __version__
from blockdraft.doctor.abilities import Ability, abilities
from blockdraft.doctor.finding import Finding, Level, worst
from blockdraft.doctor.hardware import disk_findings, limit_findings, machine_findings
from blockdraft.doctor.kernels import kernel_findings, torch_findings
from blockdraft.doctor.libraries import library_findings, read_versions
from blockdraft.doctor.probe_runner import Probe, probe_torch
from blockdraft.doctor.problems import facts_of, problem_findings
from blockdraft.machine.machine import Machine, read_machine
from blockdraft.settings.settings import cache_dirs

SCHEMA = "blockdraft-doctor/1"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings about a machine. `probe` has the results of the process that ran torch."""

    machine: Machine
    versions: dict[str, str]
    probe: Probe
    abilities: tuple[Ability, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Level:
        return worst(self.findings)


def examine(device: str, *, with_kernels: bool, note: Note) -> Diagnosis:
    """Examine this machine. `device` is a torch device, or "auto"."""
    machine, versions = read_machine(), read_versions()
    note("importing torch" + (" and comparing kernels with their references" if with_kernels else ""))
    if with_kernels and machine.gpus:
        note("the first time, Triton compiles them: a few minutes")
    return diagnose(machine, versions, probe_torch(device, with_kernels=with_kernels))


def diagnose(machine: Machine, versions: dict[str, str], probe: Probe) -> Diagnosis:
    """Derive findings from the facts of a machine. Only the free space on disks is read here."""
    torch_cuda = None if probe.torch is None else probe.torch.cuda
    facts = facts_of(machine, versions, torch_cuda)
    findings = (
        *machine_findings(machine),
        *limit_findings(machine),
        *disk_findings(cache_dirs()),
        *library_findings(versions, has_gpu=bool(machine.gpus)),
        *torch_findings(machine, probe),
        *kernel_findings(probe),
        *problem_findings(facts),
    )
    capability = None if probe.torch is None else probe.torch.capability
    if capability is None and machine.gpus:
        capability = machine.gpus[0].capability
    able = tuple(abilities(capability, machine.cpu.features))
    return Diagnosis(machine, versions, probe, able, findings)


def as_json(report: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON values. Sizes are in bytes; null means unknown."""
    machine = asdict(report.machine)
    machine["cpu"]["features"] = sorted(report.machine.cpu.features)
    for entry, gpu in zip(machine["gpus"], report.machine.gpus, strict=True):
        entry["card"] = None if gpu.card is None else gpu.card.key
    probe = asdict(report.probe)
    return {
        "schema": SCHEMA,
        "blockdraft": __version__,
        "verdict": report.verdict,
        "machine": machine,
        "libraries": report.versions,
        "torch": probe["torch"],
        "device": probe["device"],
        "abilities": [asdict(ability) for ability in report.abilities],
        "kernels": {"paths": probe["paths"], "checks": probe["checks"], "failures": probe["failures"]},
        "findings": [asdict(finding) for finding in report.findings],
    }
