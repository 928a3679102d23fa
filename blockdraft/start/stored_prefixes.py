"""Restores the prefixes that the last server has kept (`--prefix-disk`), or says in a sentence why not."""

from __future__ import annotations

import os
from pathlib import Path

from blockdraft.check.fingerprint import prefix_parts
from blockdraft.engine.engine import Engine
from blockdraft.engine.prefix_disk import PrefixDisk, PrefixesRefused
from blockdraft.phases import StartProgress
from blockdraft.settings.settings import Auto


def restore_prefixes(engine: Engine, path: str, max_bytes: int | Auto, startup: StartProgress) -> None:
    """Let the engine read the folder's prefixes, and write its own at its end. Warn of what it cannot."""
    reason = engine.fingerprint.reason
    if not engine.plan.prefix_cache:
        reason = engine.plan.reasons.get("prefix_cache", "no prefix is cached")
    if reason:
        startup.warn(f"--prefix-disk keeps nothing: {reason}.")
        return
    folder = Path(os.path.expanduser(path))
    try:
        disk = PrefixDisk(folder, prefix_parts(engine), None if max_bytes == "auto" else max_bytes)
    except PrefixesRefused as why:
        startup.warn(f"--prefix-disk keeps nothing: {why}.")
        return
    try:
        engine.open_prefix_disk(disk)
    except PrefixesRefused as why:
        startup.warn(f"no prefix is restored: {why}. This server's end replaces them.")
        return
    restored = engine.restored
    told = f"restored from {folder}: {restored}" if restored.num_pages else f"will be kept in {folder}"
    startup.tell_chosen(f"prefixes {told}")
    if restored.num_refused:
        startup.warn(
            f"{restored.num_refused} pages of prefixes in {folder} are damaged, or follow a damaged one: "
            "they are not used."
        )
