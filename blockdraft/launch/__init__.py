"""Starts other engines, vLLM and SGLang, with the right flags.

`translate` is a pure function: it turns settings into a command line and an environment. `issues` lists bad
combinations of engine, card and models that an engine accepts. Nothing here imports either engine.
"""

from __future__ import annotations

from blockdraft.launch.launch_request import Command, LaunchRequest
from blockdraft.launch.sglang import sglang_command
from blockdraft.launch.vllm import vllm_command

__all__ = ["Command", "translate"]

_WRITERS = {"vllm": vllm_command, "sglang": sglang_command}


def translate(order: LaunchRequest) -> Command:
    """Return the command that starts the engine. Raise SettingsError if a setting has no flag there."""
    assert order.settings.engine in _WRITERS, "our own engine is not launched"
    return _WRITERS[order.settings.engine](order)
