"""What the user asked for, and the only place where the environment is read."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar, get_type_hints

from blockdraft.errors import SettingsError
from blockdraft.settings.acceptance_profile import read_profile

Auto = Literal["auto"]
T = TypeVar("T")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
TOOL_FORMATS = ("auto", "hermes", "qwen_xml", "gemma", "harmony", "llama", "plain")
NGRAM = "ngram"  # of a drafter: none that is stored
DFLASH2 = "dflash2"  # of a drafter: the head that ships for the model
DRAFT_WORDS = ("auto", "none", NGRAM, DFLASH2)  # these name no folder: that is ./ngram
MAX_NGRAM = 32  # tokens that are compared with earlier ones
QUANTIZATIONS = ("auto", "keep", "none", "fp8", "int8")


def _setting(default: T, help_text: str, **facts: object) -> T:
    """A field whose help text is also its row in --help. `facts`: its least value, or its `choices`."""
    return field(default=default, metadata={"help": help_text, **facts})


def _launched(default: T, help_text: str, **facts: object) -> T:
    """The same of what only the engines we launch understand."""
    return _setting(default, help_text, is_launched=True, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine, as asked for.

    "auto" is resolved by planner.resolver.resolve; the drafter's by settings/shipped.py and the device's by
    asking torch, both before that.
    """

    model: str = _setting("default", "target: folder, hub id, GGUF file, or 'default'")
    draft: str | None = _setting(
        "auto",
        "drafter: folder or hub id; auto is the one that ships for the model, or for a GGUF file one that is "
        "known for its model and on this disk, if any; 'dflash2' is the shipped one's "
        "DFlash2 head, which auto takes on a card with our own engine; 'ngram' drafts from what prompt and "
        "answer say again, for any model; or 'none'",
    )
    draft_ngram: int | Auto = _setting(
        "auto",
        "draft what followed, where as many of the last tokens occurred before; auto: 1 with --draft ngram, "
        "0 (never) beside a drafter",
        least=0,
    )
    width: int | Auto = _setting(
        "auto", "tokens verified per step, anchor included; 1 is plain decoding", least=1
    )
    device: str = _setting(
        "auto", "cpu, cuda, or cuda:N for one card; auto is cuda where there is one, else cpu"
    )
    dtype: str = _setting("auto", f"one of {', '.join(DTYPES)}", choices=DTYPES)
    quantization: str = _setting(
        "auto",
        "the target's weights: keep as stored, none (unpacked), or fp8 or int8 made while loading; "
        "auto unpacks what fits easily",
        choices=QUANTIZATIONS,
    )
    draft_quantization: str = _setting("auto", "the same for the drafter's weights", choices=QUANTIZATIONS)
    load_format: str = _setting(
        "auto",
        "dummy: random weights, for timing only; of a folder or hub id config.json is enough",
        choices=("auto", "dummy"),
    )
    synthetic_acceptance: str | None = _setting(
        None,
        "for timing only: accept drafts by chance, with these probabilities by position (0.9,0.8,0.6) or "
        "for this many tokens per step (mean:4.5)",
    )
    max_model_len: int | Auto = _setting("auto", "longest prompt and answer together, in tokens", least=2)
    max_num_seqs: int | Auto = _setting("auto", "sequences that run at once", least=1)
    max_queue: int = _setting(1024, "sequences that may wait; more are refused", least=1)
    page_size: int = _setting(16, "tokens per cache page", least=1)
    kv_dtype: str = _setting(
        "auto",
        "keys and values: auto in the model's dtype; int8, fp8, tq4 or tq4v3 compress what lies behind; "
        "with --engine, in the words of vllm or sglang",
    )
    draft_kv_dtype: str = _setting("auto", "the same for the drafter's own; auto: never compressed")
    kv_window: int = _setting(
        128, "tokens behind each position that it reads exact where others are compressed", least=1
    )
    cache_bytes: int | Auto = _setting("auto", "memory for the KV cache, in bytes", least=1)
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of the GPU's memory that may be in use, by us and by others; the cache takes what is left",
    )
    max_prefill_tokens: int | Auto = _setting(
        "auto", "most prompt tokens of a prefill step, fewer beside decoding", least=1
    )
    max_stall_ms: int | None = _setting(
        None, "longest that a prefill step may hold up decoding, in milliseconds; cuts the chunk", least=1
    )
    prefix_cache: bool = _setting(True, "reuse the cache of common prompt beginnings")
    overlap: bool | Auto = _setting(
        "auto", "launch the next step before reading the last one's result; auto: on a GPU"
    )
    graphs: bool = _setting(True, "on a GPU, run each decode step as one CUDA graph")
    allow_batch_variance: bool = _setting(
        False,
        "on a GPU, the fastest kernels: near-ties may then be answered otherwise in other company",
    )
    verify: str = _setting(
        "auto",
        "check kernels, model and drafter before serving: auto what has changed since it was checked here, "
        "full everything, off nothing",
        choices=("auto", "full", "off"),
    )
    sampling_defaults: str = _setting(
        "model",
        "of requests that do not say: the model's own (generation_config.json; of a GGUF file its metadata, "
        "else llama.cpp's), or openai's (temperature 1)",
        choices=("model", "openai"),
    )
    chat_template: str | None = _setting(None, "a file with a chat template, in place of the model's own")
    tool_format: str = _setting(
        "auto", "how the model writes tool calls; auto: as its chat template shows", choices=TOOL_FORMATS
    )
    seed: int = _setting(0, "where requests without a seed draw theirs from", least=-(2**63))
    engine: str = _setting(
        "native",
        "native is ours; vllm and sglang are started and served through",
        choices=("native", "vllm", "sglang"),
    )
    engine_version: str | None = _launched(
        None, "of vllm or sglang, whose flags differ by version; none: the newest known"
    )
    tensor_parallel: int = _launched(1, "GPUs that share each layer; vllm and sglang only", least=1)
    pipeline_parallel: int = _launched(
        1, "groups of GPUs that share the layers; vllm and sglang only", least=1
    )
    num_nodes: int = _launched(1, "machines that share the model; vllm and sglang only", least=1)
    node_rank: int = _launched(
        0, "which of the machines this is; 0 is the head, which answers clients", least=0
    )
    head_address: str | None = _launched(
        None, "HOST or HOST:PORT where the machines meet, the same on all of them"
    )
    attention_backend: str | None = _launched(None, "the target's, in the words of vllm or sglang")
    draft_attention_backend: str | None = _launched(None, "the same for the drafter")
    engine_args: tuple[str, ...] = _launched(
        (), "more flags for vllm or sglang, in one text after '=', passed on as they are"
    )
    engine_env: tuple[tuple[str, str], ...] = _launched((), "more environment variables for vllm or sglang")
    trust_remote_code: bool = _launched(
        False, "let vllm or sglang run code that a checkpoint brings: only what you have read"
    )
    recipe: str | None = _setting(None, "settings from a file: the name of a known one, or a path")

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value, low = item.name, getattr(self, item.name), item.metadata.get("least")
            if low is None or value == "auto" or (value is None and name == "max_stall_ms"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise SettingsError(f"{name} = {value!r} is not a whole number of at least {low}.")
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError(
                f"gpu_memory_utilization = {share!r} is not a share: give 0.9 for nine tenths."
            )
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise SettingsError(f"{name} '{value}' is unknown: use one of {', '.join(known)}.")
        self._check_engine()
        self._check_ngram()
        if self.synthetic_acceptance is not None:
            read_profile(self.synthetic_acceptance)
            if self.draft in (None, "none"):
                raise SettingsError(
                    f"synthetic_acceptance = {self.synthetic_acceptance!r}, but there is no drafter whose "
                    "drafts could be accepted: add --draft."
                )

    def _check_engine(self) -> None:
        """The native engine runs on one device and takes no flags of others; machines must meet somewhere."""
        if self.engine == "native":
            check_device(self.device)
        for item in fields(self):
            value = getattr(self, item.name)
            if self.engine == "native" and item.name in LAUNCH_SETTINGS and value != item.default:
                flag = f"--{item.name.replace('_', '-')}"
                raise SettingsError(
                    f"{item.name} = {value!r} is not for the native engine: add --engine vllm or "
                    f"--engine sglang, or leave out {flag}."
                )
        if self.node_rank >= self.num_nodes:
            raise SettingsError(
                f"node_rank = {self.node_rank} of num_nodes = {self.num_nodes}: ranks count from 0 to "
                f"{self.num_nodes - 1}."
            )
        if self.num_nodes > 1 and self.head_address is None:
            raise SettingsError(
                f"num_nodes = {self.num_nodes}, but nobody says where they meet: add --head-address."
            )

    def _check_ngram(self) -> None:
        """Drafts from the row's own tokens are our engine's, and need something to be told from chance by."""
        asked = self.draft_ngram
        if self.engine != "native" and (self.draft == NGRAM or asked not in ("auto", 0)):
            raise SettingsError(
                f"drafts from n-grams are the native engine's, not {self.engine}'s: leave out "
                f"{'--draft ngram' if self.draft == NGRAM else '--draft-ngram'}."
            )
        if asked == "auto":
            return
        if asked > MAX_NGRAM:
            raise SettingsError(f"draft_ngram = {asked}, but {MAX_NGRAM} tokens are compared: use fewer.")
        if asked == 0 and self.draft == NGRAM:
            raise SettingsError("draft_ngram = 0 leaves --draft ngram nothing to draft: use --draft none.")
        if asked and self.draft in (None, "none"):
            raise SettingsError(
                f"draft_ngram = {asked}, but there is no drafter to go beside: use --draft ngram."
            )

    @property
    def suffix(self) -> str:
        """What the model's name ends with where answers are for timing only; empty where they are real."""
        dummy = "+dummy" if self.load_format == "dummy" else ""
        return dummy + ("+synthetic" if self.synthetic_acceptance is not None else "")


_FACTS = {item.name: item.metadata for item in fields(Settings)}
CHOICES: dict[str, tuple[str, ...]] = {
    name: facts["choices"] for name, facts in _FACTS.items() if "choices" in facts
}
LAUNCH_SETTINGS = frozenset(name for name, facts in _FACTS.items() if "is_launched" in facts)
FORMER_NAMES = {  # still read: from flags, the environment, recipes and LLM(...)
    "max_context": "max_model_len",
    "max_rows": "max_num_seqs",
    "chunk": "max_prefill_tokens",
    "fast": "allow_batch_variance",
}
SETTING_NAMES = tuple(item.name for item in fields(Settings))
SETTING_TYPES: dict[str, object] = get_type_hints(Settings)
DEFAULTS: dict[str, object] = {item.name: item.default for item in fields(Settings)}
_DEVICE = re.compile(r"auto|(cpu|cuda)(:[0-9]{1,4})?", re.ASCII)
_OTHER_DEVICES = {
    "mps": "Apple's GPU",
    "metal": "Apple's GPU",
    "rocm": "an AMD GPU",
    "hip": "an AMD GPU",
    "xpu": "an Intel GPU",
    "tpu": "Google's TPU",
    "xla": "Google's TPU",
    "npu": "an NPU",
    "vulkan": "a GPU by way of Vulkan",
}
_WORDS = {
    **dict.fromkeys(("on", "true", "yes", "1"), True),
    **dict.fromkeys(("off", "false", "no", "0"), False),
}


def check_device(name: str) -> None:
    """Raises SettingsError for a device that our engine does not compute on."""
    if _DEVICE.fullmatch(name):
        return
    kind = name.partition(":")[0].lower()
    what = f"device '{name}' is unknown"
    if kind in _OTHER_DEVICES:
        what = f"device '{name}' is {_OTHER_DEVICES[kind]}, which our engine does not compute on"
    raise SettingsError(f"{what}: use auto, cpu, cuda, or cuda:N for the card of that number.")


def suggestion(wrong: str, names: Iterable[str], *, cutoff: float = 0.7) -> str:
    """ ": did you mean x?" for the closest name, or nothing."""
    close = difflib.get_close_matches(wrong, list(names), 1, cutoff)
    return f": did you mean {close[0]}?" if close else ""


def read_setting(name: str, text: str) -> object:
    """The value that `text` stands for. ValueError says what it is not; ranges are checked by Settings."""
    hint = SETTING_TYPES[name]
    if name == "engine_args":
        return tuple(shlex.split(text))
    if name == "engine_env":
        return tuple(read_variable(word) for word in shlex.split(text))
    if text == "auto" and hint in (int | Auto, bool | Auto):
        return text
    # Of a drafter, "none" is the engine's own word.
    if text == "none" and hint in (str | None, int | None) and name != "draft":
        return None
    kinds, what = _KINDS.get(hint, (str, ""))
    try:
        return kinds(text)
    except (ValueError, KeyError):
        raise ValueError(f"'{text}' is not {what}") from None


def read_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"'{text}' is not NAME=VALUE")
    return name, value


def _read_bool(text: str) -> bool:
    return _WORDS[text.lower()]


_KINDS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    int | None: (int, "a whole number or 'none'"),
    int | Auto: (int, "a whole number or 'auto'"),
    float: (float, "a number"),
    bool: (_read_bool, "on or off"),
    bool | Auto: (_read_bool, "on, off or 'auto'"),
}

PREFIX = "BLOCKDRAFT_"
TEST_PREFIX = "BLOCKDRAFT_TEST_"  # read by the test suite alone
OTHER_VARIABLES = {
    "BLOCKDRAFT_API_KEY": "what clients of the server must send",
    "BLOCKDRAFT_CACHE": "the folder for downloads (default: `blockdraft/` in the user's cache folder)",
    "BLOCKDRAFT_PRODUCTS": "how a CPU multiplies int8: sdot, vnni, avx2 or generic (default: the fastest)",
}


def environment_settings() -> dict[str, object]:
    """Settings of BLOCKDRAFT_NAME variables, by field; an empty one counts as unset."""
    return read_variables(os.environ)


def read_variables(environment: Mapping[str, str]) -> dict[str, object]:
    """The same of any environment. Raises SettingsError for a variable that nobody would read."""
    known = {variable_of(name): name for name in SETTING_NAMES}
    known |= {variable_of(name): ours for name, ours in FORMER_NAMES.items()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in known:
            raise SettingsError(f"the environment's {variable} is no setting of ours{_near(variable)}")
        if not text:
            continue
        try:
            values[known[variable]] = read_setting(known[variable], text)
        except ValueError as error:
            raise SettingsError(f"the environment's {variable}: {error}.") from None
    return values


def _near(variable: str) -> str:
    # Without their prefix, which makes all of them alike.
    names = [variable_of(name).removeprefix(PREFIX) for name in SETTING_NAMES]
    names += [name.removeprefix(PREFIX) for name in OTHER_VARIABLES]
    hint = suggestion(variable.removeprefix(PREFIX), names)
    return hint.replace("mean ", f"mean {PREFIX}") if hint else ": see docs/settings.md for those that are."


def wanted_products() -> str:
    """How a CPU shall multiply int8; empty: as it does fastest."""
    return os.environ.get("BLOCKDRAFT_PRODUCTS", "")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def forget_environment_settings() -> None:
    """Take our settings out of the environment, so that a child that gets flags gets nothing else."""
    for name in SETTING_NAMES:
        os.environ.pop(variable_of(name), None)


def cache_dir() -> Path:
    """Where downloads are kept: $BLOCKDRAFT_CACHE, or blockdraft/ in the user's cache folder."""
    chosen = os.environ.get("BLOCKDRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "blockdraft"


def environment_api_key() -> str | None:
    """$BLOCKDRAFT_API_KEY: what clients of the server must send; None when unset or empty."""
    return os.environ.get("BLOCKDRAFT_API_KEY") or None


def whole_environment() -> dict[str, str]:
    """A copy, for the container's entrypoint, which puts other variables into our words."""
    return dict(os.environ)


def pin_threads() -> None:
    """Bind OpenMP's threads to cores, one each; takes effect only before torch is imported.

    Unbound, the kernel may pack them on one core: a small model was 2.5 times slower (2 x Neoverse-N1,
    2026-11). Whoever set any of these variables has decided, and nothing is changed.
    """
    chosen = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    if not any(name in os.environ for name in chosen):
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES="cores")


def write_no_perf_maps() -> None:
    """oneDNN, a part of PyTorch, would leave a perf-PID.map behind, for profilers; call before it is used."""
    if "DNNL_JIT_PROFILE" not in os.environ:
        os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Our environment for a program that we start, without our own secrets, and with `added`."""
    return {name: value for name, value in os.environ.items() if name != "BLOCKDRAFT_API_KEY"} | dict(added)


def visible_gpus() -> str | None:
    """$CUDA_VISIBLE_DEVICES: the cards that programs may use; None when unset, empty for none of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_dirs() -> dict[str, Path]:
    """Every folder that a run may fill: our downloads, the hub's, and the kernels that Triton compiles."""
    home = Path.home()
    base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache").expanduser()
    hub_home = Path(os.environ.get("HF_HOME") or base / "huggingface").expanduser()
    triton_home = Path(os.environ.get("TRITON_HOME") or home).expanduser()
    return {
        "downloads": cache_dir(),
        "hub": Path(os.environ.get("HF_HUB_CACHE") or hub_home / "hub").expanduser(),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache").expanduser(),
    }
