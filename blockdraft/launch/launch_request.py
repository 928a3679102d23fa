"""A start of another engine: settings, facts of models and card, and the command made from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from blockdraft.checkpoints.read_draft_config import draft_block, draft_kind
from blockdraft.errors import SettingsError
from blockdraft.launch.engine_versions import EngineVersion, read_version
from blockdraft.machine.cards import Capability
from blockdraft.machine.machine import Machine, external_memory_share
from blockdraft.settings.settings import DEFAULTS, DFLASH2, Settings

HOST = "127.0.0.1"  # clients reach only our server; it talks to the engine
MEETING_PORT = 29501  # port of the head if --head-address has none; vLLM's default
TRUST_FLAG = "--trust-remote-code"  # both engines have this flag
HYBRID_NAMES = ("*qwen3.5-*", "*qwen3.6-*", "*qwen3.8-*", "*qwen3-next*", "*qwen3-coder-next*")
SPARK: Capability = (12, 1)  # the GB10 of a DGX Spark
OUR_KV_DTYPES = ("tq4", "tq4v3")
OTHER_KINDS = {"DSpark": "dspark"}  # by architecture
SECRET_FLAGS = ("--api-key", "--admin-api-key", "--hf-token")

Raw = Mapping[str, object]
Flags = list[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Command:
    """One engine to start. `argv[0]` is the engine's own program, found in its environment or container."""

    engine: str  # "vllm" or "sglang"
    version: str  # the version that the arguments were written for
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # added to the child's environment; may hold secrets
    port: int  # on 127.0.0.1
    image: str | None = None  # the container image, for `docker run` and compose
    build: str | None = None  # the target of container/Containerfile that makes the image
    source: str = ""  # what that target builds: a release, and pull requests to merge
    mounts: tuple[str, ...] = ()  # folders to mount in the container


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """An engine's settings with the facts of its models and its machine. Unknown facts are None."""

    settings: Settings  # `draft` is a name or none, not "auto"
    machine: Machine | None = None
    target: Raw | None = None  # config.json of the target; `draft` is the drafter's
    draft: Raw | None = None

    @property
    def version(self) -> EngineVersion:
        """Return the engine's version: the requested one, else the newest we know."""
        return read_version(self.settings.engine, self.settings.engine_version)

    @property
    def drafter(self) -> str | None:
        """Return the drafter's name; None for plain decoding."""
        name = self.settings.draft
        assert name not in ("auto", DFLASH2), "with_drafter has chosen one"
        return None if name in (None, "none") or self.settings.width == 1 else name

    @property
    def draft_kind(self) -> str | None:
        """Return the drafter's kind, by config.json or else by its name; None if neither says it."""
        if self.draft is None:
            name = (self.settings.draft or "").lower()
            return next((kind for kind in ("dflash2", "dspark") if kind in name), None)
        kind = self.draft.get("speculators_model_type") or draft_kind(self.draft)
        if isinstance(kind, str):
            return kind
        names = str(self.draft.get("architectures"))
        return next((kind for part, kind in OTHER_KINDS.items() if part in names), "dflash")

    @property
    def capability(self) -> Capability | None:
        """Return the compute capability of the first card; None if unknown."""
        return self.machine.gpus[0].capability if self.machine is not None and self.machine.gpus else None

    @property
    def is_hybrid(self) -> bool:
        """Return whether target layers keep a state, by config.json or else by the model's name."""
        if self.target is None:
            return any(fnmatch(self.settings.model.lower(), pattern) for pattern in HYBRID_NAMES)
        inner = self.target.get("text_config")
        config = inner if isinstance(inner, Mapping) else self.target
        types = config.get("layer_types")
        has_states = isinstance(types, list) and "linear_attention" in types
        return has_states or "full_attention_interval" in config

    @property
    def trusts_code(self) -> bool:
        """Return whether the engine may run Python code of the checkpoint."""
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
        """Return the setting `name` as the engines write it; None to keep weights as stored."""
        value: str = getattr(self.settings, name)
        if value not in ("auto", "keep", "fp8"):
            raise self.refusal(name, "it keeps weights as they are stored, or makes fp8 of them")
        return value if value == "fp8" else None

    @property
    def width(self) -> int:
        """Return the tokens verified per step (with the anchor): as set, else the drafter's whole block."""
        asked = self.settings.width
        if asked != "auto":
            return asked
        if self.draft is None:
            drafter = self.settings.draft
            raise SettingsError(
                f"width = 'auto' needs config.json of '{drafter}', which is not known: give --width."
            )
        return draft_block(self.draft)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of engine_env, and for `cuda:N` also CUDA_VISIBLE_DEVICES."""
        settings, device = self.settings, self.settings.device
        if device in ("auto", "cuda", "cpu"):
            return dict(settings.engine_env)
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdigit():
            raise self.refusal("device", "it runs on cuda, cuda:N or cpu")
        if settings.tensor_parallel * settings.pipeline_parallel > settings.num_nodes:
            raise self.refusal("device", "the model needs several: set CUDA_VISIBLE_DEVICES by engine_env")
        return {"CUDA_VISIBLE_DEVICES": index, **dict(settings.engine_env)}

    @property
    def head(self) -> tuple[str, int]:
        """Return host and port of the head node, where the machines connect."""
        address = self.settings.head_address
        assert address is not None  # Settings requires an address for several machines
        host, colon, port = address.rpartition(":")
        if not colon or address.endswith("]") or (address.count(":") > 1 and not host.endswith("]")):
            return address, MEETING_PORT
        if not port.isdigit():
            raise SettingsError(f"head_address '{address}' has no port after its colon: give host:port.")
        return host, int(port)

    @property
    def address_flags(self) -> Flags:
        """Return the flags of the engine's address and the model's name, which are equal in both engines."""
        return [("--host", self.host), ("--port", self.port), ("--served-model-name", self.served_name)]

    def machine_flags(self, tensor: str, pipeline: str) -> Flags:
        """Return the flags of GPUs and machines that share the model. Two flags have a name per engine."""
        settings = self.settings
        parallel = self.changed("tensor_parallel"), self.changed("pipeline_parallel")
        flags: Flags = [(tensor, parallel[0]), (pipeline, parallel[1])]
        if settings.num_nodes > 1:
            flags += [("--nnodes", settings.num_nodes), ("--node-rank", settings.node_rank)]
        return flags

    def refusal(self, name: str, why: str) -> SettingsError:
        """Return the error for a setting that the engine has no flag for."""
        value = getattr(self.settings, name)
        return SettingsError(f"{name} = {value!r} cannot be passed to {self.version}: {why}.")

    def changed(self, name: str) -> object:
        """Return a setting that is neither "auto" nor the default, else None."""
        value: object = getattr(self.settings, name)
        return None if value in ("auto", DEFAULTS[name]) else value


def write_command(
    order: LaunchRequest, program: Iterable[str], flags: Flags, *, env: Mapping[str, str], image: str
) -> Command:
    """Return the command with the flags that the engine's module has chosen."""
    _check(order)
    settings, written = order.settings, _arguments(flags)
    version, build = order.version, None
    if version.engine == "vllm" and version.carried and not (order.is_cpu or version.is_nightly):
        build = "spark" if order.capability == SPARK or version.has_spark_kernels else "vllm"
    built = f"blockdraft-{version.engine}:{version.text.replace('+', '-')}"
    is_published = not (order.is_cpu or version.carried)
    files = (settings.model, settings.draft, settings.chat_template)
    return Command(
        engine=settings.engine,
        version=order.version.text,
        argv=(*program, *written, *_passed_on(settings.engine_args, written)),
        env=env,
        port=order.port,
        image=built if build else image if is_published else None,
        build=build,
        source=version.source,
        mounts=tuple(name for name in files if name and name[0] == "/"),  # paths, not hub ids
    )


def _check(order: LaunchRequest) -> None:
    """Raise SettingsError for settings that only our own engine understands."""
    settings, compressed = (
        order.settings,
        "it is for compressed keys and values of our engine; use --kv-dtype",
    )
    is_gguf = settings.model.lower().endswith(".gguf")
    for name, is_ours, why in (
        ("model", settings.model == "default", "it is a file of ours; name a folder or a hub id"),
        ("model", is_gguf, "a single GGUF file is for the native engine; name a folder or a hub id"),
        ("max_stall_ms", settings.max_stall_ms is not None, "it has no such limit; use --max-prefill-tokens"),
        ("replicas", settings.replicas != 1, "use --engine-args=--data-parallel-size=N, or --dp-size=N"),
        ("recheck", settings.recheck > 0, "only our own engine checks answers again"),
        ("draft_kv_dtype", order.changed("draft_kv_dtype"), compressed),
        ("kv_window", order.changed("kv_window"), compressed),
        ("prefix_state_bytes", order.changed("prefix_state_bytes"), "only our own engine saves such states"),
        ("prefix_disk", settings.prefix_disk != "off", "only our own engine keeps prefixes on disk"),
        ("prefix_disk_bytes", order.changed("prefix_disk_bytes"), "only our own engine has such a folder"),
        (
            "kv_dtype",
            settings.kv_dtype in OUR_KV_DTYPES,
            "it is our format; leave out --engine, or use fp8",
        ),
        ("tool_format", settings.tool_format != "auto", "use --engine-args=--tool-call-parser=NAME"),
        ("dtype", settings.dtype == "float64", "it computes in float32 at most"),
    ):
        if is_ours:
            raise order.refusal(name, why)


def _arguments(flags: Flags) -> tuple[str, ...]:
    """Write flags in order. Leave out None and False, write only the flag for True, and mappings as JSON."""
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
    """Return engine_args. Raise SettingsError if they contain a secret or repeat a flag of a setting."""
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
