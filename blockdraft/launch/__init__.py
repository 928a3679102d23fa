"""Starts other engines, vLLM and SGLang, with the right flags.

`translate` is pure: settings in, a command line and an environment out. `issues` knows which combinations of
engine, card and models are bad although the engine accepts them. Nothing here imports either engine.
"""

from __future__ import annotations

from blockdraft.launch.launch_request import Command, LaunchRequest
from blockdraft.launch.sglang import sglang_command
from blockdraft.launch.vllm import vllm_command

__all__ = ["Command", "translate"]

_WRITERS = {"vllm": vllm_command, "sglang": sglang_command}


def translate(order: LaunchRequest) -> Command:
    """Return the command that starts the engine. Raises SettingsError for a setting it has no flag for."""
    assert order.settings.engine in _WRITERS, "our own engine is not launched"
    return _WRITERS[order.settings.engine](order)
