"""Divides a machine among replicas: the device of each, and the refusals of a division that cannot work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from blockdraft.errors import CapacityError, SettingsError
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.resolver import asked_otherwise, runs_on_cpu
from blockdraft.settings.settings import Settings

FREE_SHARE = 0.9  # of a card's memory: if less is free, other programs use the card; arbitrary


def wants_replicas(settings: Settings) -> bool:
    return settings.replicas != 1 or "," in settings.device


def replica_settings(settings: Settings, machine: Machine) -> tuple[Settings, ...]:
    """Return the settings of each replica, with its own device. Raise SettingsError if there is no room."""
    if not wants_replicas(settings):
        return (settings,)
    devices = _listed(settings) if "," in settings.device else _chosen(settings, machine)
    _check_cards(devices, machine)
    return tuple(asked_otherwise(settings, device=device, replicas=1) for device in devices)


def settings_beside(
    settings: Settings, num_on_card: int, num_beside: int, max_model_len: int | None
) -> Settings:
    """Return the settings of a replica that starts now.

    `num_on_card`: how many share its card, itself included; `num_beside`: how many others hold memory of it
    now. `max_model_len`: that of replicas that serve, which every other one must have.
    """
    changes: dict[str, object] = {}
    if num_on_card > 1 and settings.device != "cpu":
        share = settings.gpu_memory_utilization * (num_beside + 1) / num_on_card
        changes["gpu_memory_utilization"] = share
    if max_model_len is not None:
        changes["max_model_len"] = max_model_len
    return asked_otherwise(settings, **changes)


def case_of_one(replicas: tuple[Settings, ...], machine: Machine) -> tuple[Settings, Machine]:
    """Return the settings of the first replica, and its part of the machine."""
    first, devices = replicas[0], Counter(one.device for one in replicas)
    if len(replicas) == 1 and ":" not in first.device:
        return first, machine
    if runs_on_cpu(first, machine):
        return first, replace(machine, memory_bytes=machine.memory_bytes // len(replicas))
    index = int(first.device.partition(":")[2] or 0)
    if index < len(machine.gpus):
        gpu = machine.gpus[index]
        part = {"gpus": (gpu,), "gpu_bytes": gpu.memory_bytes, "gpu_free_bytes": gpu.free_bytes}
        machine = replace(machine, **part)  # type: ignore[arg-type]
    return settings_beside(first, devices[first.device], 0, None), machine


def check_fit(replicas: tuple[Settings, ...], machine: Machine) -> None:
    """Raise CapacityError if a replica does not fit into its part of the machine."""
    for device in dict.fromkeys(one.device for one in replicas):
        of_device = tuple(one for one in replicas if one.device == device)
        settings, part = case_of_one(of_device, machine)
        fit = fit_native(Case(settings, part, open_pair(settings)))
        if fit.problem is not None:
            who = "a replica" if len(of_device) == 1 else f"one of {len(of_device)} replicas"
            raise CapacityError(
                f"{who} does not fit on {device}: {fit.problem} `blockdraft plan` with the same flags says "
                "more."
            )


def replicas_text(replicas: tuple[Settings, ...]) -> str:
    """Return "2 replicas, on cuda:0 and cuda:1"."""
    devices = [f"{name}{'' if count == 1 else f' ({count} of them)'}" for name, count in _counted(replicas)]
    names = " and ".join(filter(None, (", ".join(devices[:-1]), devices[-1])))
    return f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}, on {names}"


def _counted(replicas: tuple[Settings, ...]) -> list[tuple[str, int]]:
    return list(Counter(one.device for one in replicas).items())


def is_free(gpu: Gpu) -> bool:
    """Return whether no other program uses the card. Unified memory is the system's, too."""
    return gpu.is_unified or gpu.free_bytes >= FREE_SHARE * gpu.memory_bytes


def _listed(settings: Settings) -> list[str]:
    devices = settings.device.split(",")
    if settings.replicas not in (1, "auto", len(devices)):
        raise SettingsError(
            f"--replicas {settings.replicas}, but --device lists {len(devices)}: leave out --replicas."
        )
    vague = next((name for name in devices if name in ("auto", "cuda")), None)
    if vague is not None:
        raise SettingsError(f"--device {settings.device}: '{vague}' is no single card: use cuda:0, cuda:1.")
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise SettingsError(f"--device {settings.device}: replicas run on cards or on the CPU, not on both.")
    return devices


def _chosen(settings: Settings, machine: Machine) -> list[str]:
    """Return free cards, or the CPU as often as asked."""
    count, gpus = settings.replicas, machine.gpus
    if settings.device.startswith("cpu") or (
        settings.device == "auto" and not gpus and not machine.gpu_error
    ):
        return ["cpu"] * (1 if count == "auto" else count)
    if ":" in settings.device:
        if count == "auto":
            return [settings.device]
        raise SettingsError(
            f"--replicas {count}, but --device {settings.device} is one card: list the cards, as in --device "
            f"cuda:0,cuda:1, or this one {count} times to share it."
        )
    if not gpus:
        why = machine.gpu_error or "there is no GPU here"
        raise SettingsError(
            f"--replicas {count}: the cards cannot be counted ({why}): list them in --device."
        )
    free = [index for index, gpu in enumerate(gpus) if is_free(gpu)]
    if count == "auto" and free:
        return [f"cuda:{index}" for index in free]
    wanted = 1 if count == "auto" else count
    if wanted > len(gpus):
        cards = "1 card" if len(gpus) == 1 else f"{len(gpus)} cards"
        raise SettingsError(
            f"--replicas {wanted}, but this machine has {cards}: use --replicas {len(gpus)}, or list a card "
            "twice in --device to share it."
        )
    if wanted > len(free):
        used = ", ".join(
            f"cuda:{index}: {(gpu.memory_bytes - gpu.free_bytes) / 1e9:.1f} GB"
            for index, gpu in enumerate(gpus)
            if not is_free(gpu)
        )
        raise SettingsError(
            f"--replicas {count}, but other programs use {len(gpus) - len(free)} of {len(gpus)} cards "
            f"({used}): use fewer, or list the cards in --device."
        )
    return [f"cuda:{index}" for index in free[:wanted]]


def _check_cards(devices: list[str], machine: Machine) -> None:
    """Raise SettingsError for cards that are not here, or that differ: their answers would differ, too."""
    cards = [name for name in devices if name.startswith("cuda")]
    if not cards or not machine.gpus:
        return  # the start itself finds out
    indices = [int(name.partition(":")[2]) for name in cards]
    missing = next((index for index in indices if index >= len(machine.gpus)), None)
    if missing is not None:
        raise SettingsError(
            f"--device lists cuda:{missing}, but this machine's cards are cuda:0 to "
            f"cuda:{len(machine.gpus) - 1}."
        )
    first = machine.gpus[indices[0]]
    for index in indices[1:]:
        gpu = machine.gpus[index]
        if (gpu.name, gpu.capability) != (first.name, first.capability):
            raise SettingsError(
                f"cuda:{indices[0]} is {first.name} and cuda:{index} is {gpu.name}: replicas on cards of "
                "different kinds may answer differently. List cards of one kind in --device."
            )
