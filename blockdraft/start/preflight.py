"""Checks a start of our own engine before weights are downloaded and torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blockdraft.errors import CapacityError, FetchError, ModelError, SettingsError
from blockdraft.machine.machine import may_have_gpu, read_machine
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.replicas import check_fit, replica_settings, wants_replicas
from blockdraft.planner.resolver import device_for
from blockdraft.settings.recipe import check_recipe_card
from blockdraft.settings.settings import Settings, pin_threads
from blockdraft.text.template import compile_template

MAX_TEMPLATE_BYTES = 1 << 20  # arbitrary; templates have about ten thousand bytes


def check_native(settings: Settings, warn: Callable[[str], None] = lambda line: None) -> None:
    """Raise an error for weights that are too large, a pair that does not match, or a bad chat template."""
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    if settings.model == "default" or ":" in settings.device:
        return
    machine = read_machine()
    for warning in check_recipe_card(settings.recipe, settings.model, settings.device, machine):
        warn(warning)
    if settings.device == "cuda" and not machine.gpu_bytes:
        return
    try:
        fit = fit_native(Case(settings, machine, open_pair(settings)))
    except FetchError:
        return
    if fit.problem is not None and fit.weight_bytes > fit.budget:
        raise CapacityError(f"{fit.problem} `blockdraft plan` with the same flags says more.")


def check_replicas(
    settings: Settings, warn: Callable[[str], None] = lambda line: None
) -> tuple[Settings, ...]:
    """Return the settings of each replica. Raise an error if one cannot start."""
    _check_prefix_disk(settings)
    if not wants_replicas(settings):
        check_native(settings, warn)
        return (settings,)
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    machine = read_machine()
    replicas = replica_settings(settings, machine)
    for warning in check_recipe_card(settings.recipe, settings.model, replicas[0].device, machine):
        warn(warning)
    if settings.model != "default":
        with suppress(FetchError):
            check_fit(replicas, machine)
    return replicas


def _check_prefix_disk(settings: Settings) -> None:
    """Raise SettingsError for no folder, and if no prefixes would be kept, or none that keep answers."""
    if not settings.prefix_disk:
        raise SettingsError("--prefix-disk names no folder: give one, or leave the flag out.")
    for is_wrong, what in (
        (not settings.prefix_cache, "--no-prefix-cache leaves no prefixes to keep"),
        (settings.allow_batch_variance, "with --allow-batch-variance prefixes depend on the batch"),
    ):
        if settings.prefix_disk != "off" and is_wrong:
            raise SettingsError(f"--prefix-disk {settings.prefix_disk}: {what}. Leave out one of the two.")


def use_cores(device: str, number: int, count: int) -> None:
    """Use the cores of CPU replica `number` of `count`. Call this before importing torch."""
    if device_for(device, has_gpu=may_have_gpu()) != "cpu" or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    own = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
    os.sched_setaffinity(0, own or {cores[number % len(cores)]})


def pin_cpu_threads(device: str) -> None:
    """Pin the CPU's threads if the model will certainly run on the CPU. Call this before importing torch."""
    if device_for(device, has_gpu=may_have_gpu()) == "cpu":
        pin_threads()


def read_chat_template(file: str) -> str:
    """Return the text of a chat template. Raise SettingsError if it cannot be read or parsed."""
    path = Path(file).expanduser()
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            size = f"more than {MAX_TEMPLATE_BYTES} bytes"
            raise SettingsError(f"--chat-template {file} has {size}: it is not a template.")
        text = path.read_text(encoding="utf-8")
        compile_template(text)
    except OSError as error:
        raise SettingsError(f"--chat-template {file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--chat-template {file} is not UTF-8 text.") from None
    except ModelError as error:
        raise SettingsError(f"--chat-template {file}: {error}") from None
    return text
