"""Translates the container's variables into settings. Only the container's entrypoint uses it.

The names come from existing `docker run` lines. A setting whose variable is not set keeps its default.
docs/container.md has the table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blockdraft.errors import SettingsError
from blockdraft.settings.model_source import HUB_ID, MOUNTS
from blockdraft.settings.settings import SETTING_NAMES, read_setting, suggestion, variable_of

PORT = 8000
# Container variable: the setting that takes the same values.
SAME = {
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_num_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_prefill_tokens",
    "GPU_MEMORY_UTILIZATION": "gpu_memory_utilization",
    "ATTENTION_BACKEND": "attention_backend",
    "KV_CACHE_DTYPE": "kv_dtype",
}
OTHERS = (
    *("MODEL_PATH", "DFLASH_DRAFTER", "DFLASH_NUM_SPEC_TOKENS", "SERVED_MODEL_NAME"),
    *("QUANTIZATION", "VLLM_API_KEY", "EXTRA_ARGS", "PORT"),
)
TURBOQUANT = (
    *("ENABLE_TURBOQUANT", "TQ_MODE", "TQ_KEY_BITS", "TQ_VALUE_BITS", "TQ_VALUE_GROUP_SIZE"),
    *("TQ_RING_CAPACITY", "TQ_INITIAL_LAYERS"),
)
TQ_DEFAULTS = {"TQ_MODE": "hybrid", "TQ_KEY_BITS": "4", "TQ_VALUE_BITS": "3"}  # the documents' container's
COMPRESSING = ("hybrid", "full_tq")
MEASURING = "capture_only"
# (bits of a key, bits of a value): our format.
KV_DTYPES = {("4", "3"): "tq4v3", ("4", "4"): "tq4", ("8", "8"): "int8"}
LEAST_RING = 16  # tokens: a block must not be compressed before it is verified
VARIABLES = (*OTHERS, *SAME, *TURBOQUANT)
OUR_PREFIXES = ("DFLASH_", "TQ_")  # an unknown name with this prefix is misspelt
OTHER_PREFIXES = ("BLOCKDRAFT_", "SGLANG_", "VLLM_")  # variables that other code reads
# QUANTIZATION for our own engine: the formats that it makes; STORED_FORMATS are formats of checkpoints.
MADE_HERE = ("fp8", "int8", "int4", "none")
STORED_FORMATS = (
    "modelopt",
    "compressed-tensors",
    "nvfp4",
    "awq",
    "gptq",
    "mxfp4",
    "gguf",
    "quark",
    "fbgemm",
)
# The documents' container starts vLLM with these defaults, which were tuned on a DGX Spark.
TUNED = {"max_model_len": 65536, "max_num_seqs": 16, "max_prefill_tokens": 32768}
TUNED_BACKEND = "flash_attn"
OTHER_BACKENDS = ("gemma4", "gpt_oss")  # kinds of models that need another backend
LEAST_LENGTH = 9  # shorter names (PORT, SUPPORT) resemble others by chance
OFF = ("", "0", "off", "false", "no", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings that the variables set, as texts for `read_setting`."""

    settings: Mapping[str, str]
    served_name: str | None
    port: int
    extra_args: tuple[str, ...] = field(repr=False)  # may hold a key
    quantization: str | None
    turboquant: Mapping[str, str]  # settings of our own engine; empty if nothing is compressed
    api_key: str | None = field(repr=False)
    notes: tuple[str, ...]


def read_container(environment: Mapping[str, str]) -> Wanted:
    """Read the container's variables. SettingsError names the variable and never shows a key."""
    _check_names(environment)
    given = {name: environment[name].strip() for name in VARIABLES if name in environment}
    turboquant, notes = _turboquant(given)
    settings = {
        SAME[name]: _readable(name, SAME[name], text) for name, text in given.items() if name in SAME and text
    }
    model = given.get("MODEL_PATH")
    if model:
        settings["model"] = model
    if "DFLASH_DRAFTER" in given:
        drafter = given["DFLASH_DRAFTER"]
        settings["draft"] = "none" if drafter.lower() in OFF else drafter
    if given.get("DFLASH_NUM_SPEC_TOKENS"):
        settings["width"] = str(
            _number(given, "DFLASH_NUM_SPEC_TOKENS", 0) + 1
        )  # plus the target's own token
    return Wanted(
        settings=settings,
        served_name=given.get("SERVED_MODEL_NAME") or base_name(model),
        port=_number(given, "PORT", 1, 65535) if given.get("PORT") else PORT,
        extra_args=_words(given.get("EXTRA_ARGS", "")),
        quantization=given.get("QUANTIZATION") or None,
        turboquant=turboquant,
        api_key=_api_key(given, environment),
        notes=notes,
    )


def quantization_of(wanted: Wanted, engine: str) -> tuple[str | None, list[str]]:
    """Return QUANTIZATION as a setting of ours if there is one, else as flags of the other engine."""
    asked = wanted.quantization
    if asked is None:
        return None, []
    if asked == "fp8" or (engine == "native" and asked in MADE_HERE):
        return asked, []
    if engine != "native":
        return None, ["--quantization", asked]
    if asked.lower().replace("_", "-").startswith(STORED_FORMATS):
        return "keep", []
    raise SettingsError(
        f"QUANTIZATION = {asked}: our engine keeps what a checkpoint has, or makes one of "
        f"{', '.join(MADE_HERE)}. Leave it out."
    )


def child_environment(environment: Mapping[str, str], wanted: Wanted) -> dict[str, str]:
    """Return the server's environment, without the container's variables and with our API key."""
    child = {name: value for name, value in environment.items() if name not in VARIABLES}
    return child | ({} if wanted.api_key is None else {"BLOCKDRAFT_API_KEY": wanted.api_key})


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without BLOCKDRAFT_ settings, for a command that gets them all as flags."""
    ours = {variable_of(name) for name in SETTING_NAMES}
    return {name: value for name, value in environment.items() if name not in ours}


# ---- models


def check_model(source: str, *, variable: str) -> None:
    """Raise SettingsError if a name can be neither a mounted model nor a hub id, before anything starts."""
    if source == "default" or (source.endswith(".gguf") and Path(source).is_file()):
        return
    path = Path(source).expanduser()
    if path.is_dir():
        _check_folder(path, variable=variable)
        return
    head = source.partition("/")[0]
    if HUB_ID.fullmatch(source) is None:
        raise SettingsError(
            f"{variable} = '{source}' is no folder in this container and no hub id (org/name): mount it with "
            f"-v /on/the/host:{path if path.is_absolute() else '/models/target'}:ro, or give an id."
        )
    if MOUNTS.fullmatch(head) or Path("/", head).is_dir():
        raise SettingsError(
            f"{variable} = '{source}' looks like a folder in this container, not like a hub id: write "
            f"'/{source}', and mount it with -v /on/the/host:/{source}:ro."
        )


def hub_id(source: str) -> tuple[str, str | None] | None:
    """Return repository and revision of a hub id; None for a folder, a file or the default model."""
    found = HUB_ID.fullmatch(source)
    if found is None or Path(source).expanduser().exists():
        return None
    return found["repo"], found["revision"]


def _check_folder(path: Path, *, variable: str) -> None:
    config, snapshots = path / "config.json", sorted((path / "snapshots").glob("*"))
    if config.is_file():
        return
    if config.is_symlink():
        why = f": config.json is a link to {config.readlink()}, which is not mounted: mount the hub's whole "
        why += "cache on /cache/huggingface/hub and give the hub id instead."
    elif not any(path.iterdir()):
        why = " is an empty folder: engines make one where the host's folder of -v does not exist. Check the "
        why += "path on the host."
    elif snapshots:
        why = f" is a folder of the hub's cache, for several versions: give {snapshots[-1]}, or the id."
    else:
        why = " has no config.json: it is not a model's folder."
    raise SettingsError(f"{variable} = '{path}'{why}")


# ---- single variables


def _check_names(environment: Mapping[str, str]) -> None:
    for name in sorted(environment.keys() - set(VARIABLES)):
        is_ours = name.startswith(OUR_PREFIXES)
        if not is_ours and (name.startswith(OTHER_PREFIXES) or len(name) < LEAST_LENGTH):
            continue
        hint = suggestion(name, VARIABLES, cutoff=0.7 if is_ours else 0.88)
        if is_ours or hint:
            hint = hint or ": see docs/container.md for those that are."
            raise SettingsError(f"{name} is no variable of this container{hint}")


def _turboquant(given: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return TurboQuant's variables as settings, and notes on variables without an effect."""
    if given.get("ENABLE_TURBOQUANT", "").lower() in OFF:
        names = [name for name in TURBOQUANT if name.startswith("TQ_") and given.get(name)]
        return {}, (f"{', '.join(names)}: no effect without ENABLE_TURBOQUANT=1",) if names else ()
    asked = TQ_DEFAULTS | {name: text.lower() for name, text in given.items() if name in TQ_DEFAULTS and text}
    mode, bits = asked["TQ_MODE"], (asked["TQ_KEY_BITS"], asked["TQ_VALUE_BITS"])
    if mode in OFF:
        return {}, (f"TQ_MODE = {mode}: keys and values are not compressed",)
    if mode == MEASURING:
        what = "served with exact keys and values; `blockdraft kv MODEL` measures the effect of compression"
        return {}, (f"TQ_MODE = {MEASURING}: {what}",)
    if mode not in COMPRESSING:
        known = ", ".join((*COMPRESSING, MEASURING, "off"))
        raise SettingsError(f"TQ_MODE = {mode} is unknown: use one of {known}.")
    if bits not in KV_DTYPES:
        wrong = f"TQ_KEY_BITS = {bits[0]} with TQ_VALUE_BITS = {bits[1]}"
        known = ", ".join(f"{'/'.join(both)} ({name})" for both, name in KV_DTYPES.items())
        raise SettingsError(f"{wrong}: there is no such format. Bits of keys and values may be {known}.")
    found = {"kv_dtype": KV_DTYPES[bits]}
    other = given.get("KV_CACHE_DTYPE") or "auto"
    if other not in ("auto", found["kv_dtype"]):
        raise SettingsError(
            f"KV_CACHE_DTYPE = {other}, but TurboQuant is {found['kv_dtype']}: set one of them."
        )
    if given.get("TQ_RING_CAPACITY"):
        found["kv_window"] = str(_number(given, "TQ_RING_CAPACITY", LEAST_RING))
    names = [name for name in _UNUSED if given.get(name, "0") not in ("", "0")]
    return found, tuple(f"{name} = {given[name]}: no effect, {_UNUSED[name]}" for name in names)


_UNUSED = {
    "TQ_INITIAL_LAYERS": "all layers are kept alike, because what keys have in common is not stored at all",
    "TQ_VALUE_GROUP_SIZE": "each key and each value has one scale",
}


def _readable(variable: str, setting: str, text: str) -> str:
    try:
        read_setting(setting, text)
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}.") from None
    return text


def _number(given: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = given[name]
    if not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SettingsError(f"{name}: '{text}' is not a whole number {limits}.")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:  # the text may contain a key
        raise SettingsError(f"EXTRA_ARGS cannot be split into words ({error}): check its quotes.") from None


def base_name(model: str | None) -> str | None:
    """Return the model's name for clients: the last part of its path or id, without a revision."""
    return model.rstrip("/").rpartition("/")[2].partition("@")[0] or None if model else None


def _api_key(given: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    key, other = given.get("VLLM_API_KEY") or None, environment.get("BLOCKDRAFT_API_KEY") or None
    if key is not None and other is not None and key != other:
        raise SettingsError("VLLM_API_KEY and BLOCKDRAFT_API_KEY are both set and differ: set one of them.")
    return key or other
