"""Which devices replicas get, and what is refused before anything is loaded."""

from dataclasses import replace

import pytest

from blockdraft.doctor.hardware import machine_findings
from blockdraft.errors import CapacityError, SettingsError
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.planner.replicas import (
    case_of_one,
    check_fit,
    replica_settings,
    replicas_text,
    settings_beside,
)
from blockdraft.planner.resolver import gpu_budget
from blockdraft.settings.settings import Settings
from blockdraft.start import preflight
from tests.planner.shapes import folders

GB = 10**9
CPU = Machine(memory_bytes=24 * GB)


def card(free=140, name="NVIDIA H200", memory=141, **fields):
    return Gpu(name, (9, 0), memory * GB, free * GB, "580", **fields)


def with_cards(*gpus, **fields):
    first = {"gpu_bytes": gpus[0].memory_bytes, "gpu_free_bytes": gpus[0].free_bytes} if gpus else {}
    return replace(CPU, gpus=gpus, **first, **fields)


def devices(machine=CPU, **settings):
    return [one.device for one in replica_settings(Settings(**settings), machine)]


BUSY = with_cards(card(), card(free=60), card(), card())


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (CPU, {}, ["auto"]),
        (BUSY, {}, ["auto"]),
        (CPU, {"replicas": 3}, ["cpu"] * 3),
        (CPU, {"replicas": "auto"}, ["cpu"]),
        (CPU, {"device": "cpu,cpu"}, ["cpu"] * 2),
        (BUSY, {"device": "cpu", "replicas": 2}, ["cpu"] * 2),
        (BUSY, {"replicas": "auto"}, ["cuda:0", "cuda:2", "cuda:3"]),
        (BUSY, {"replicas": 2}, ["cuda:0", "cuda:2"]),
        (BUSY, {"replicas": "auto", "device": "cuda:1"}, ["cuda:1"]),
        (BUSY, {"device": "cuda:1,cuda:3"}, ["cuda:1", "cuda:3"]),
        (BUSY, {"device": "cuda:0,cuda:0", "replicas": 2}, ["cuda:0"] * 2),
        (with_cards(card(free=100, is_unified=True)), {"replicas": "auto"}, ["cuda:0"]),
    ],
)
def test_replicas_get_free_cards_or_those_that_are_listed(machine, settings, expected):
    assert devices(machine, **settings) == expected


@pytest.mark.parametrize(
    ("machine", "settings", "error"),
    [
        (with_cards(card(), card()), {"replicas": 3}, "this machine has 2 cards: use --replicas 2"),
        (BUSY, {"replicas": 4}, r"other programs use 1 of 4 cards \(cuda:1: 81.0 GB\): use fewer"),
        (with_cards(card(free=9)), {"replicas": "auto"}, r"other programs use 1 of 1 cards"),
        (BUSY, {"device": "cuda:0,cuda:7"}, "lists cuda:7, but this machine's cards are cuda:0 to cuda:3"),
        (BUSY, {"device": "cuda:1", "replicas": 2}, "cuda:1 is one card: list the cards"),
        (BUSY, {"device": "cuda:1,cuda:2", "replicas": 3}, "--device lists 2: leave out --replicas"),
        (BUSY, {"device": "cuda,cuda:1"}, "'cuda' is no single card"),
        (BUSY, {"device": "cpu,cuda:1"}, "on cards or on the CPU, not on both"),
        (CPU, {"device": "cuda", "replicas": 2}, r"cannot be counted \(there is no GPU here\)"),
        (replace(CPU, gpu_error="too old"), {"replicas": 2}, r"cannot be counted \(too old\)"),
        *(
            (
                with_cards(card(), card(name="NVIDIA H100")),
                settings,
                "cuda:0 is NVIDIA H200 and cuda:1 is NVIDIA H",
            )
            for settings in ({"replicas": 2}, {"replicas": "auto"}, {"device": "cuda:0,cuda:1"})
        ),
    ],
)
def test_a_division_that_cannot_work_is_refused_in_one_sentence(machine, settings, error):
    with pytest.raises(SettingsError, match=error):
        devices(machine, **settings)


def test_replicas_that_share_a_card_divide_its_memory_in_any_order_of_starts():
    """Each takes a half, whoever holds the other one already."""
    settings = Settings(device="cuda:0")
    for num_beside in (0, 1):
        one = settings_beside(settings, 2, num_beside, None)
        used = num_beside * gpu_budget(settings, with_cards(card(free=141))) // 2
        machine = replace(with_cards(card()), gpu_free_bytes=141 * GB - used)
        assert gpu_budget(one, machine) == pytest.approx(0.45 * 141 * GB)
    assert settings_beside(settings, 1, 0, 4096) == replace(settings, max_model_len=4096)


def test_a_replica_that_does_not_fit_is_refused_before_anything_is_loaded(monkeypatch):
    settings = Settings(model=folders("qwen3-8b")[0], draft="none", load_format="dummy")  # 16 GB
    small = with_cards(card(23, "RTX 4090", 24), card(23, "RTX 4090", 24))
    check_fit(replica_settings(replace(settings, replicas=2), small), small)
    with pytest.raises(CapacityError, match="one of 2 replicas does not fit on cuda:1: "):
        check_fit(replica_settings(replace(settings, device="cuda:1,cuda:1"), small), small)
    two = replace(settings, replicas=2, device="cpu", dtype="bfloat16", quantization="none")
    check_fit(replica_settings(two, replace(CPU, memory_bytes=48 * GB)), replace(CPU, memory_bytes=48 * GB))
    monkeypatch.setattr(preflight, "read_machine", lambda: CPU)
    with pytest.raises(CapacityError, match="one of 2 replicas does not fit on cpu: "):
        preflight.check_replicas(two)


@pytest.mark.parametrize(
    ("wrong", "why"), [("prefix_cache", "no prefixes to keep"), ("allow_batch_variance", "on the batch")]
)
def test_prefixes_on_disk_are_refused_where_there_are_none_that_keep_answers(wrong, why):
    with pytest.raises(SettingsError, match=f"^--prefix-disk kept: .*{why}"):
        preflight.check_replicas(Settings(prefix_disk="kept", **{wrong: wrong != "prefix_cache"}))


def test_prefixes_are_not_written_to_the_folder_of_the_moment():
    """As an empty variable would have it."""
    with pytest.raises(SettingsError, match=r"^--prefix-disk names no folder"):
        preflight.check_replicas(Settings(prefix_disk=""))


def test_the_part_of_the_machine_that_one_replica_has():
    settings, part = case_of_one(replica_settings(Settings(device="cuda:1,cuda:1"), BUSY), BUSY)
    assert (part.gpus, part.gpu_free_bytes) == ((BUSY.gpus[1],), 60 * GB)
    assert settings.gpu_memory_utilization == pytest.approx(0.45)
    assert case_of_one((Settings(),), BUSY) == (Settings(), BUSY)


def test_replicas_are_described():
    assert (
        replicas_text(replica_settings(Settings(replicas=3), BUSY))
        == "3 replicas, on cuda:0, cuda:2 and cuda:3"
    )
    assert (
        replicas_text(replica_settings(Settings(device="cpu,cpu"), CPU)) == "2 replicas, on cpu (2 of them)"
    )
    (finding,) = (one for one in machine_findings(BUSY) if one.name == "replicas")
    assert finding.says == "3 of 4 cards are free for an engine each: serve --replicas auto"
    assert "replicas" not in [one.name for one in machine_findings(with_cards(card()))]
