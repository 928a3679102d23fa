"""Other engines, started with the right flags instead of being imitated: vLLM and SGLang.

`translate` is pure: settings in, a command line and an environment out. `issues` knows which combinations of
engine, card and models are bad although the engine accepts them. Nothing here imports either engine.
"""

from __future__ import annotations

from blockdraft.launch.engine_versions import read_version
from blockdraft.launch.launch_request import HOST, Command, LaunchRequest, Raw
from blockdraft.launch.sglang import sglang_command
from blockdraft.launch.vllm import vllm_command
from blockdraft.machine.machine import Machine
from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.settings import Settings

__all__ = ["Command", "translate"]

_WRITERS = {"vllm": vllm_command, "sglang": sglang_command}


def translate(  # noqa: PLR0913  # all facts
    settings: Settings,
    *,
    served_name: str,
    port: int,
    host: str = HOST,
    api_key: str | None = None,
    machine: Machine | None = None,
    target: Raw | None = None,
    draft: Raw | None = None,
) -> Command:
    """Return the command of an engine; SettingsError for a setting it has no flag for."""
    settings = with_drafter(settings)
    order = LaunchRequest(
        settings=settings,
        version=read_version(settings.engine, settings.engine_version),
        machine=machine,
        target=target,
        draft=draft,
        served_name=served_name,
        port=port,
        host=host,
        api_key=api_key,
    )
    return _WRITERS[settings.engine](order)
