"""Finds the known problems of problems.toml that apply to this machine."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blockdraft.doctor.finding import Finding, Level
from blockdraft.doctor.libraries import DISTRIBUTIONS
from blockdraft.machine.machine import Machine
from blockdraft.machine.versions import ANY, is_in_range, read_range

FILE = Path(__file__).with_name("problems.toml")
VERSIONED = {"capability", "driver", "cuda", "kernel", "num_gpus", "python", "torch_cuda", *DISTRIBUTIONS}
CONDITIONS: dict[str, type] = {
    **dict.fromkeys(VERSIONED, str),
    **dict.fromkeys(("card", "cpu_lacks", "missing"), list),
    "unified": bool,
    "architecture": str,
}
Condition = str | bool | list[str]


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """One entry of problems.toml."""

    id: str
    level: Level
    when: Mapping[str, Condition]
    symptom: str
    way_out: str
    thread: str

    def __post_init__(self) -> None:
        assert self.when, f"{self.id} would hold everywhere"
        assert self.level in ("warning", "problem"), self.id
        for name, wanted in self.when.items():
            assert isinstance(wanted, CONDITIONS[name]), f"{self.id}: {name}"
            if name in VERSIONED:
                assert wanted == ANY or read_range(str(wanted)), f"{self.id}: {name}"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a machine, which the conditions of entries are compared with."""

    versions: Mapping[str, str]  # by VERSIONED names; missing libraries are left out
    cards: frozenset[str]
    is_unified: bool
    architecture: str
    cpu_features: frozenset[str]


def load_problems() -> tuple[KnownProblem, ...]:
    return tuple(
        KnownProblem(**entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["problem"]
    )


def facts_of(machine: Machine, versions: Mapping[str, str], torch_cuda: str | None) -> Facts:
    """Collect the facts. `versions` is the result of read_versions."""
    gpus = machine.gpus
    known = {
        "cuda": machine.cuda,
        "kernel": machine.kernel,
        "num_gpus": str(len(gpus)),
        "torch_cuda": torch_cuda,
        "driver": gpus[0].driver if gpus else None,
        "capability": "{}.{}".format(*gpus[0].capability) if gpus and gpus[0].capability[0] else None,
    }
    return Facts(
        versions={**versions, **{name: text for name, text in known.items() if text}},
        cards=frozenset(gpu.card.key for gpu in gpus if gpu.card is not None),
        is_unified=any(gpu.is_unified for gpu in gpus),
        architecture=machine.cpu.architecture,
        cpu_features=machine.cpu.features,
    )


def problem_findings(facts: Facts) -> Iterator[Finding]:
    for problem in load_problems():
        if all(_holds(name, wanted, facts) for name, wanted in problem.when.items()):
            says, advice, thread = problem.symptom, problem.way_out, problem.thread
            yield Finding("known", problem.id, problem.level, says, advice, thread)


def _holds(name: str, wanted: Condition, facts: Facts) -> bool:
    if isinstance(wanted, bool):
        return wanted == facts.is_unified
    if isinstance(wanted, str):
        if name == "architecture":
            return wanted == facts.architecture
        return name in facts.versions and is_in_range(facts.versions[name], wanted)
    if name == "card":
        return not facts.cards.isdisjoint(wanted)
    if name == "missing":
        return facts.versions.keys().isdisjoint(wanted)
    # An empty set means that the features could not be read.
    return bool(facts.cpu_features) and facts.cpu_features.isdisjoint(wanted)
