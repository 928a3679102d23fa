"""Known problems, from known.toml: which of them this machine may meet."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from blockdraft.doctor.finding import Finding, Level
from blockdraft.doctor.libraries import DISTRIBUTIONS
from blockdraft.machine.machine import Machine

VERSIONED = {"capability", "driver", "cuda", "kernel", "num_gpus", "python", "torch_cuda", *DISTRIBUTIONS}
CONDITIONS: dict[str, type] = {
    **dict.fromkeys(VERSIONED, str),
    **dict.fromkeys(("card", "cpu_lacks", "missing"), list),
    **dict.fromkeys(("unified", "container"), bool),
    "architecture": str,
}
Condition = str | bool | list[str]
_ORDER = re.compile(r"(>=|<=|==|>|<)([\d.-]+)")


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """One entry."""

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
                check_range(str(wanted))


@dataclass(frozen=True, slots=True)
class Facts:
    """What conditions are about."""

    versions: Mapping[str, str]  # VERSIONED names; what is not there is not in it
    cards: frozenset[str]
    is_unified: bool
    architecture: str
    cpu_features: frozenset[str]
    is_container: bool


def load() -> tuple[KnownProblem, ...]:
    text = resources.files("blockdraft.doctor").joinpath("known.toml").read_text()
    return tuple(KnownProblem(**entry) for entry in tomllib.loads(text)["problem"])


def facts_of(machine: Machine, versions: Mapping[str, str], torch_cuda: str | None) -> Facts:
    """`versions` of libraries, as read_versions gives them."""
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
        is_container=machine.limits.container is not None,
    )


def known_findings(facts: Facts, problems: tuple[KnownProblem, ...] | None = None) -> Iterator[Finding]:
    for problem in load() if problems is None else problems:
        if all(_holds(name, wanted, facts) for name, wanted in problem.when.items()):
            yield Finding(
                "known", problem.id, problem.level, problem.symptom, problem.way_out, problem.thread
            )


def _holds(name: str, wanted: Condition, facts: Facts) -> bool:
    if isinstance(wanted, bool):
        return wanted == (facts.is_unified if name == "unified" else facts.is_container)
    if isinstance(wanted, str):
        if name == "architecture":
            return wanted == facts.architecture
        return name in facts.versions and is_in_range(facts.versions[name], wanted)
    if name == "card":
        return not facts.cards.isdisjoint(wanted)
    if name == "missing":
        return facts.versions.keys().isdisjoint(wanted)
    # A CPU without any feature is one of which nothing was read.
    return bool(facts.cpu_features) and facts.cpu_features.isdisjoint(wanted)


# ---- versions


def check_range(text: str) -> None:
    """ValueError for what is_in_range cannot read."""
    for part in re.split(r"[|,]", text):
        if part.strip() != "*" and not _ORDER.fullmatch(part.strip()):
            raise ValueError(f"{part.strip()!r} is not a version to compare with")


def is_in_range(version: str, text: str) -> bool:
    """ "<0.25", ">=12.0,<13", "*"; alternatives stand between bars. "==" holds for all that begins so."""
    return any(
        all(_compare(version, part.strip()) for part in ranges.split(",")) for ranges in text.split("|")
    )


def _compare(version: str, text: str) -> bool:
    if text == "*":
        return True
    found = _ORDER.fullmatch(text)
    assert found is not None, text
    here, there = _numbers(version), _numbers(found[2])
    if found[1] == "==":
        return here[: len(there)] == there
    length = max(len(here), len(there))
    here, there = (numbers + (0,) * (length - len(numbers)) for numbers in (here, there))
    return {">=": here >= there, "<=": here <= there, ">": here > there, "<": here < there}[found[1]]


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 is (2, 13, 0), 7.0.0-1019-nvidia is (7, 0, 0, 1019), 3.6.0rc1 is (3, 6, 0)."""
    found = re.match(r"[\d.-]+", version.split("+")[0])
    return tuple(int(part) for part in re.findall(r"\d+", found[0])) if found else ()
