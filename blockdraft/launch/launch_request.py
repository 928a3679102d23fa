"""What is asked of another engine: settings, with what is known of the models and of the card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from blockdraft.checkpoints.read_draft_config import draft_block
from blockdraft.errors import SettingsError
from blockdraft.launch.command import Command
from blockdraft.launch.engine_versions import EngineVersion, read_version
from blockdraft.machine.cards import Capability
from blockdraft.machine.machine import Machine, external_memory_share
from blockdraft.settings.settings import DEFAULTS, DFLASH2, Settings

HOST = "127.0.0.1"  # clients talk to our server, and only it to the engine
MEETING_PORT = 29501  # where machines meet when --head-address names no port; vLLM's own
TRUST_FLAG = "--trust-remote-code"  # the same word in both engines
HYBRID_NAMES = ("*qwen3.5-*", "*qwen3.6-*", "*qwen3.8-*", "*qwen3-next*", "*qwen3-coder-next*")
SPARK: Capability = (12, 1)  # the GB10 of a DGX Spark
OUR_KV_DTYPES = ("tq4", "tq4v3")
SECRET_FLAGS = ("--api-key", "--admin-api-key", "--hf-token")

Raw = Mapping[str, object]
Flags = list[tuple[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What is asked of an engine, and what is known of its models and its machine. None: not known."""

    settings: Settings  # with a drafter by name, or none
    machine: Machine | None = None
    target: Raw | None = None  # config.json of both models
    draft: Raw | None = None

    @property
    def version(self) -> EngineVersion:
        """The engine's, as asked for or the newest we know."""
        return read_version(self.settings.engine, self.settings.engine_version)

    @property
    def drafter(self) -> str | None:
        """The drafter's name; None: plain decoding."""
        name = self.settings.draft
        assert name not in ("auto", DFLASH2), "with_drafter has chosen one"
        return None if name in (None, "none") or self.settings.width == 1 else name

    @property
    def capability(self) -> Capability | None:
        """The first card's."""
        return self.machine.gpus[0].capability if self.machine is not None and self.machine.gpus else None

    @property
    def is_hybrid(self) -> bool:
        """Whether some of the target's layers keep a state: by config.json, else by the model's name."""
        if self.target is None:
            return any(fnmatch(self.settings.model.lower(), pattern) for pattern in HYBRID_NAMES)
        inner = self.target.get("text_config")
        config = inner if isinstance(inner, Mapping) else self.target
        types = config.get("layer_types")
        has_states = isinstance(types, list) and "linear_attention" in types
        return has_states or "full_attention_interval" in config

    @property
    def trusts_code(self) -> bool:
        """Whether the engine may run what a checkpoint brings."""
        return self.settings.trust_remote_code or TRUST_FLAG in self.settings.engine_args

    @property
    def is_cpu(self) -> bool:
        device, machine = self.settings.device, self.machine
        return device == "cpu" or (device == "auto" and machine is not None and not machine.gpus)

    @property
    def memory_share(self) -> float:
        return external_memory_share(self.settings.gpu_memory_utilization, self.machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(Combination):
    """One engine to start, before its flags are written."""

    served_name: str
    port: int
    host: str = HOST
    api_key: str | None = None

    def quantization(self, name: str) -> str | None:
        """The setting `name` in the engines' word; None: the weights as they are stored."""
        value: str = getattr(self.settings, name)
        if value in ("auto", "keep"):
            return None
        if value == "fp8":
            return value
        raise self.refusal(name, "it keeps weights as they are stored, or makes fp8 of them")

    @property
    def width(self) -> int:
        """Tokens verified per step, anchor included: what was asked, else the drafter's whole block."""
        asked = self.settings.width
        if asked != "auto":
            return asked
        if self.draft is None:
            raise SettingsError(
                f"width = 'auto' is the block of '{self.settings.draft}', whose config.json is not known "
                "here: give --width."
            )
        return draft_block(self.draft)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that settings name, and the one that picks the card of `cuda:N`."""
        settings, device = self.settings, self.settings.device
        if device in ("auto", "cuda", "cpu"):
            return dict(settings.engine_env)
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdigit():
            raise self.refusal("device", "it runs on cuda, cuda:N or cpu")
        if settings.tensor_parallel * settings.pipeline_parallel > settings.num_nodes:
            why = "several cards share the model: set CUDA_VISIBLE_DEVICES in engine_env"
            raise self.refusal("device", why)
        return {"CUDA_VISIBLE_DEVICES": index, **dict(settings.engine_env)}

    @property
    def head(self) -> tuple[str, int]:
        """The address where machines meet."""
        address = self.settings.head_address
        assert address is not None  # of several machines, Settings requires one
        host, colon, port = address.rpartition(":")
        if not colon or address.endswith("]") or (address.count(":") > 1 and not host.endswith("]")):
            return address, MEETING_PORT
        if not port.isdigit():
            raise SettingsError(f"head_address '{address}' has no port behind its colon: give host:port.")
        return host, int(port)

    @property
    def address_flags(self) -> Flags:
        """Where the engine listens, and under which name: both engines have the same words for it."""
        return [("--host", self.host), ("--port", self.port), ("--served-model-name", self.served_name)]

    def machine_flags(self, tensor: str, pipeline: str) -> Flags:
        """How many GPUs share the model, in two words of the engine, and of several machines which it is."""
        settings = self.settings
        flags: Flags = [
            (tensor, self.changed("tensor_parallel")),
            (pipeline, self.changed("pipeline_parallel")),
        ]
        if settings.num_nodes > 1:
            flags += [("--nnodes", settings.num_nodes), ("--node-rank", settings.node_rank)]
        return flags

    def refusal(self, name: str, why: str) -> SettingsError:
        """The error for a setting that the engine cannot be told."""
        value = getattr(self.settings, name)
        return SettingsError(f"{name} = {value!r} cannot be passed to {self.version}: {why}.")

    def changed(self, name: str) -> object:
        """The setting where it is neither "auto" nor the default, else None."""
        value: object = getattr(self.settings, name)
        return None if value in ("auto", DEFAULTS[name]) else value


def _build_target(order: LaunchRequest) -> str | None:
    """Of container/Containerfile, for a release with pull requests merged into it; None: there is none."""
    version = order.version
    if order.is_cpu or not version.carried or version.is_nightly or version.engine != "vllm":
        return None
    return "spark" if order.capability == SPARK else "vllm"


def _built_image(order: LaunchRequest) -> str:
    return f"blockdraft-{order.version.engine}:{order.version.text.replace('+', '-')}"


def write_command(
    order: LaunchRequest, program: Iterable[str], flags: Flags, *, env: Mapping[str, str], image: str
) -> Command:
    """Makes the command of the flags that the engine's own module has chosen."""
    _check(order)
    settings, written = order.settings, _arguments(flags)
    build, carries = _build_target(order), order.version.carried  # images that are published are of releases
    return Command(
        engine=settings.engine,
        version=order.version.text,
        argv=(*program, *written, *_passed_on(settings.engine_args, written)),
        env=env,
        port=order.port,
        image=_built_image(order) if build else None if order.is_cpu or carries else image,
        build=build,
        # LoadedPair that are named by a whole path, and not by a hub id; and a file of ours.
        mounts=tuple(
            name
            for name in (settings.model, settings.draft, settings.chat_template)
            if name and name[0] == "/"
        ),
    )


def _check(order: LaunchRequest) -> None:
    """Raises SettingsError for what only our own engine reads or does."""
    settings = order.settings
    if settings.model == "default":
        raise order.refusal("model", "it is a file of ours; name a folder or a hub id")
    if settings.model.lower().endswith(".gguf"):
        raise order.refusal("model", "a single GGUF file is for the native engine; name a folder or a hub id")
    if settings.max_stall_ms is not None:
        raise order.refusal("max_stall_ms", "it has no such limit; use --max-prefill-tokens")
    for name in ("draft_kv_dtype", "kv_window"):
        if order.changed(name) is not None:
            raise order.refusal(name, "it is for compressed keys and values of our engine; use --kv-dtype")
    if settings.kv_dtype in OUR_KV_DTYPES:
        raise order.refusal("kv_dtype", "it is a format of our engine; leave out --engine, or use fp8")
    if settings.tool_format != "auto":
        raise order.refusal("tool_format", "it has names of its own; --engine-args=--tool-call-parser=NAME")
    if settings.dtype == "float64":
        raise order.refusal("dtype", "it computes in float32 at most")


def _arguments(flags: Flags) -> tuple[str, ...]:
    """Flags in order. None and False are left out, True is the flag alone, a mapping is written as JSON."""
    found: list[str] = []
    for flag, value in flags:
        if value is None or value is False:
            continue
        found.append(flag)
        if isinstance(value, Mapping):
            found.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            found.append(str(value))
    return tuple(found)


def _passed_on(engine_args: tuple[str, ...], written: Iterable[str]) -> tuple[str, ...]:
    """Refuse engine_args that hold a secret or repeat a flag that comes from a setting."""
    for argument in engine_args:
        flag = argument.partition("=")[0]
        if flag in SECRET_FLAGS:
            raise SettingsError(
                f"engine_args holds {flag}: everybody on the machine can read a process's arguments. "
                "Set BLOCKDRAFT_API_KEY or HF_TOKEN in the environment instead."
            )
        if flag.startswith("--") and flag in written:
            raise SettingsError(
                f"engine_args repeats {flag}, which is written from a setting: use the setting alone. "
                "`blockdraft settings` lists them."
            )
    return engine_args
