"""Settings of one engine, as the user set them. Only this module reads the environment."""

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
ENGINES = ("native", "vllm", "sglang")
NGRAM = "ngram"  # as a drafter: n-gram lookup, without a model
DFLASH2 = "dflash2"  # as a drafter: the shipped head for the model
MTP = "mtp"  # as a drafter: the head for multi-token prediction in the target's own checkpoint
DRAFT_WORDS = ("auto", "none", NGRAM, DFLASH2, MTP)  # words, not folders: a folder of that name is ./ngram
TREES = (16, 32, 64, 128)  # tokens of a tree of drafts
MAX_NGRAM = 32  # longest match of tokens with earlier ones
QUANTIZATIONS = ("auto", "keep", "none", "both", "fp8", "int8", "int4")


def _setting(default: T, help_text: str, **facts: object) -> T:
    """Return a field with its text in --help. `facts` are its least value or its `choices`."""
    return field(default=default, metadata={"help": help_text, **facts})


def _launched(default: T, help_text: str, **facts: object) -> T:
    """Return a field that only vLLM and SGLang understand."""
    return _setting(default, help_text, is_launched=True, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one engine, as requested. The planner resolves "auto", drafter and device."""

    model: str = _setting("default", "target: folder, hub id, GGUF file, or 'default'")
    draft: str | None = _setting(
        "auto",
        "drafter: folder or hub id; 'auto': the drafter that ships with us for the model (GGUF files: also a "
        "known one on this disk), else the model's own MTP head with our engine; 'dflash2': the shipped "
        "drafter with its DFlash2 head ('auto' uses the head on a GPU with our engine); 'mtp': the MTP head "
        "in the model's checkpoint (Qwen3-Next, Qwen3.5, Qwen3.6); 'ngram': copy what followed the same "
        "tokens earlier (any model); 'none'",
    )
    draft_ngram: int | Auto = _setting(
        "auto",
        "if the last N tokens occurred earlier, draft what followed them; 0: never; auto: 1 with --draft "
        "ngram, else 0",
        least=0,
    )
    tree: int | Auto = _setting(
        "auto",
        "tokens of a tree of drafts, in steps of up to 4 rows: 16, 32, 64 or 128; 0 and, so far, auto: "
        "drafts are chains",
        least=0,
    )
    width: int | Auto = _setting("auto", "tokens verified per step with the anchor; 1: no drafts", least=1)
    device: str = _setting(
        "auto",
        "cpu, cuda, or cuda:N for one card; auto: cuda if there is one, else cpu; `serve` takes a list, one "
        "replica each: cuda:0,cuda:1, or cuda:0,cuda:0 to share a card",
    )
    replicas: int | Auto = _setting(
        1, "engines that `serve` runs, each on a card of its own; auto: one on each free card", least=1
    )
    dtype: str = _setting("auto", "number format of both models", choices=DTYPES)
    quantization: str = _setting(
        "auto",
        "format of the target's weights; keep: as stored; none: unpacked; both: as stored and unpacked, each "
        "step takes the faster; fp8, int8 or int4: converted while loading; auto: none if they fit "
        "easily, keep if they do not or if that is faster",
        choices=QUANTIZATIONS,
    )
    draft_quantization: str = _setting(
        "auto", "format of the drafter's weights, as in --quantization", choices=QUANTIZATIONS
    )
    load_format: str = _setting(
        "auto", "dummy: random weights, for timing only; needs only config.json", choices=("auto", "dummy")
    )
    synthetic_acceptance: str | None = _setting(
        None,
        "for timing only: accept drafts at random, with a probability for each position (0.9,0.8,0.6) or a "
        "mean number of tokens per step (mean:4.5)",
    )
    max_model_len: int | Auto = _setting("auto", "longest prompt and answer together, in tokens", least=2)
    max_num_seqs: int | Auto = _setting("auto", "sequences that run at once", least=1)
    max_queue: int = _setting(1024, "sequences that may wait; more are refused", least=1)
    page_size: int = _setting(16, "tokens per cache page", least=1)
    kv_dtype: str = _setting(
        "auto",
        "format of keys and values; auto: the model's dtype; int8, tq4, tq4v3: compress all but the "
        "last --kv-window tokens; with --engine, a name that vllm or sglang knows",
    )
    draft_kv_dtype: str = _setting("auto", "format of the drafter's keys and values; auto: not compressed")
    kv_window: int = _setting(128, "last tokens whose keys and values are not compressed", least=1)
    cache_bytes: int | Auto = _setting("auto", "memory for the KV cache, in bytes", least=1)
    gpu_memory_utilization: float = _setting(
        0.9, "share of the GPU's memory that all programs together may use; the cache takes the rest of it"
    )
    max_prefill_tokens: int | Auto = _setting(
        "auto", "most prompt tokens in one prefill step; fewer are used while other requests decode", least=1
    )
    max_stall_ms: int | None = _setting(
        None, "longest time in ms that a prefill step may delay decoding; longer steps are split", least=1
    )
    prefix_cache: bool = _setting(True, "reuse the cache of common prompt beginnings")
    prefix_state_bytes: int | Auto = _setting(
        "auto",
        "memory for recurrent states, which prefix hits of hybrid models need, in bytes; auto: a quarter of "
        "the cache",
        least=0,
    )
    prefix_disk: str = _setting(
        "off",
        "folder that keeps cached prefixes, and so what users wrote, from the end of `serve` to its next "
        "start; off: none",
    )
    prefix_disk_bytes: int | Auto = _setting(
        "auto", "most bytes in that folder, for each replica; auto: a tenth of the free disk", least=1
    )
    overlap: bool | Auto = _setting("auto", "launch a step before reading the last result; auto: on a GPU")
    graphs: bool = _setting(True, "on a GPU, run each decode step as one CUDA graph")
    allow_batch_variance: bool = _setting(
        False,
        "on a GPU, use the fastest kernels: an answer may vary with the batch if two tokens are nearly tied",
    )
    verify: str = _setting(
        "auto",
        "check kernels, model and drafter before serving; auto: what changed since the last check on this "
        "machine; full: everything; off: nothing",
        choices=("auto", "full", "off"),
    )
    sampling_defaults: str = _setting(
        "model",
        "source of sampling values that a request leaves out; model: generation_config.json (or a GGUF "
        "file's metadata, then llama.cpp's defaults); openai: OpenAI's defaults (temperature 1)",
        choices=("model", "openai"),
    )
    chat_template: str | None = _setting(None, "file with a chat template, in place of the model's own")
    tool_format: str = _setting(
        "auto", "format of the model's tool calls; auto: found from its chat template", choices=TOOL_FORMATS
    )
    recheck: float = _setting(
        0.0,
        "share of the answers (0 to 1) that are computed again by plain decoding while nobody asks; "
        "differences are counted at /metrics, and logged with a receipt",
    )
    seed: int = _setting(0, "sampling seed for requests without their own", least=-(2**63))
    engine: str = _setting(
        "native", "native: our own engine; vllm, sglang: run behind our server", choices=ENGINES
    )
    engine_version: str | None = _launched(
        None, "version of vllm or sglang to write flags for; none: the newest known version"
    )
    tensor_parallel: int = _launched(1, "GPUs that share each layer", least=1)
    pipeline_parallel: int = _launched(1, "groups of GPUs that share the layers", least=1)
    num_nodes: int = _launched(1, "machines that share the model", least=1)
    node_rank: int = _launched(0, "number of this machine; 0 is the head, which answers clients", least=0)
    head_address: str | None = _launched(None, "HOST or HOST:PORT of the head, the same on all machines")
    attention_backend: str | None = _launched(None, "the target's attention backend in vllm or sglang")
    draft_attention_backend: str | None = _launched(None, "the drafter's attention backend")
    engine_args: tuple[str, ...] = _launched((), "more flags for vllm or sglang, as one text after '='")
    engine_env: tuple[tuple[str, str], ...] = _launched((), "more environment variables for vllm or sglang")
    trust_remote_code: bool = _launched(
        False, "let vllm or sglang run Python code from the checkpoint; read that code first"
    )
    recipe: str | None = _setting(
        None, "settings from a file: a name that `blockdraft recipes` lists, or a path"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value, low = item.name, getattr(self, item.name), item.metadata.get("least")
            if low is None or value == "auto" or (value is None and name == "max_stall_ms"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise SettingsError(f"{name} = {value!r} is not a whole number of at least {low}.")
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError(f"gpu_memory_utilization = {share!r} is not above 0 and at most 1: try 0.9.")
        if not isinstance(self.recheck, int | float) or not 0 <= self.recheck <= 1:
            raise SettingsError(f"recheck = {self.recheck!r} is not a share from 0 to 1: try 0.01.")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise SettingsError(f"{name} '{value}' is unknown: use one of {', '.join(known)}.")
        self._check_engine()
        self._check_drafts()
        if self.synthetic_acceptance is not None:
            read_profile(self.synthetic_acceptance)
            if self.draft in (None, "none"):
                raise SettingsError(
                    f"synthetic_acceptance = {self.synthetic_acceptance!r}, but there is no drafter whose "
                    "drafts could be accepted: add --draft."
                )

    def _check_engine(self) -> None:
        """Raise SettingsError for another engine's settings, and for wrong settings of several machines."""
        if self.engine == "native":
            for name in self.device.split(","):
                check_device(name)
        for item in fields(self):
            value = getattr(self, item.name)
            if self.engine == "native" and item.name in LAUNCH_SETTINGS and value != item.default:
                raise SettingsError(
                    f"{item.name} = {value!r} is not for the native engine: add --engine vllm or "
                    f"--engine sglang, or leave out --{item.name.replace('_', '-')}."
                )
        if self.node_rank >= self.num_nodes:
            ranks = f"ranks count from 0 to {self.num_nodes - 1}"
            raise SettingsError(f"node_rank = {self.node_rank} of num_nodes = {self.num_nodes}: {ranks}.")
        if self.num_nodes > 1 and self.head_address is None:
            raise SettingsError(f"num_nodes = {self.num_nodes}, but no head is given: add --head-address.")

    def _check_tree(self) -> None:
        """Raise SettingsError for trees of drafts that nothing can grow."""
        if self.tree in ("auto", 0):
            return
        if self.tree not in TREES:
            raise SettingsError(f"tree = {self.tree}: use one of 0, {', '.join(map(str, TREES))}.")
        for is_wrong, why in (
            (self.engine != "native", f"{self.engine} verifies chains only"),
            (self.draft in ("none", NGRAM, MTP), f"draft '{self.draft}' makes chains"),
            (self.draft_ngram not in ("auto", 0), "drafts of n-grams are chains: draft_ngram must be 0"),
            (self.width == 1, "width = 1 switches drafts off"),
            (self.synthetic_acceptance is not None, "a synthetic acceptance is one of chains"),
        ):
            if is_wrong:
                raise SettingsError(f"tree = {self.tree}, but {why}: leave out --tree.")

    def _check_drafts(self) -> None:
        """Raise SettingsError for drafts of n-grams or of an MTP head that the engine cannot make."""
        self._check_tree()
        asked = self.draft_ngram
        if self.engine != "native" and self.draft == MTP:
            raise SettingsError(
                f"{self.engine} is not started with a model's own MTP head, only our native engine is: leave "
                "out --draft mtp."
            )
        if self.engine != "native" and (self.draft == NGRAM or asked not in ("auto", 0)):
            raise SettingsError(
                f"{self.engine} cannot draft from n-grams, only our native engine can: leave out "
                f"{'--draft ngram' if self.draft == NGRAM else '--draft-ngram'}."
            )
        if asked == "auto":
            return
        if asked > MAX_NGRAM:
            raise SettingsError(
                f"draft_ngram = {asked}, but at most {MAX_NGRAM} tokens can be compared: use fewer."
            )
        if asked == 0 and self.draft == NGRAM:
            raise SettingsError("draft_ngram = 0 leaves --draft ngram nothing to draft: use --draft none.")
        if asked and self.draft in (None, "none"):
            raise SettingsError(f"draft_ngram = {asked} needs a drafter: use --draft ngram.")

    @property
    def suffix(self) -> str:
        """Return the suffix that marks a model whose answers are for timing only; empty for real answers."""
        dummy = "+dummy" if self.load_format == "dummy" else ""
        return dummy + ("+synthetic" if self.synthetic_acceptance is not None else "")


_FACTS = {item.name: item.metadata for item in fields(Settings)}
CHOICES: dict[str, tuple[str, ...]] = {
    name: facts["choices"] for name, facts in _FACTS.items() if "choices" in facts
}
LAUNCH_SETTINGS = frozenset(name for name, facts in _FACTS.items() if "is_launched" in facts)
FORMER_NAMES = {  # still accepted in flags, the environment, recipes and LLM(...)
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
    **dict.fromkeys(("mps", "metal"), "Apple's GPU"),
    **dict.fromkeys(("rocm", "hip"), "an AMD GPU"),
    **dict.fromkeys(("tpu", "xla"), "Google's TPU"),
    "xpu": "an Intel GPU",
    "npu": "an NPU",
    "vulkan": "a GPU through Vulkan",
}
_WORDS = {
    **dict.fromkeys(("on", "true", "yes", "1"), True),
    **dict.fromkeys(("off", "false", "no", "0"), False),
}


def check_device(name: str) -> None:
    """Raise SettingsError for a device that our engine does not compute on."""
    if _DEVICE.fullmatch(name):
        return
    kind = name.partition(":")[0].lower()
    what = f"device '{name}' is unknown"
    if kind in _OTHER_DEVICES:
        what = f"device '{name}' is {_OTHER_DEVICES[kind]}, which our engine does not compute on"
    raise SettingsError(f"{what}: use auto, cpu, cuda, or cuda:N for the card of that number.")


def suggestion(wrong: str, names: Iterable[str], *, cutoff: float = 0.7) -> str:
    """Return ": did you mean x?" for the closest name, or an empty text."""
    close = difflib.get_close_matches(wrong, list(names), 1, cutoff)
    return f": did you mean {close[0]}?" if close else ""


def read_setting(name: str, text: str) -> object:
    """Return the value of `text` in the setting's type, or raise ValueError. Settings checks ranges."""
    hint = SETTING_TYPES[name]
    if name == "engine_args":
        return tuple(shlex.split(text))
    if name == "engine_env":
        return tuple(read_variable(word) for word in shlex.split(text))
    if text == "auto" and hint in (int | Auto, bool | Auto):
        return text
    # For a drafter, "none" is a value, not None.
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


_KINDS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    int | None: (int, "a whole number or 'none'"),
    int | Auto: (int, "a whole number or 'auto'"),
    float: (float, "a number"),
    bool: (lambda text: _WORDS[text.lower()], "on or off"),
    bool | Auto: (lambda text: _WORDS[text.lower()], "on, off or 'auto'"),
}

PREFIX = "BLOCKDRAFT_"
TEST_PREFIX = "BLOCKDRAFT_TEST_"  # only the test suite reads these
OTHER_VARIABLES = {
    "BLOCKDRAFT_API_KEY": "what clients of the server must send",
    "BLOCKDRAFT_CACHE": "the folder for downloads (default: `blockdraft/` in the user's cache folder)",
    "BLOCKDRAFT_PRODUCTS": "how a CPU multiplies int8: sdot, vnni, avx2 or generic (default: the fastest)",
}


def read_variables(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the settings of non-empty BLOCKDRAFT_NAME variables. Raise SettingsError for unknown ones."""
    environment = os.environ if environment is None else environment
    known = {variable_of(name): name for name in SETTING_NAMES}
    known |= {variable_of(name): ours for name, ours in FORMER_NAMES.items()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in known:
            raise SettingsError(f"the environment's {variable} is not a setting{_near(variable)}")
        if not text:
            continue
        try:
            values[known[variable]] = read_setting(known[variable], text)
        except ValueError as error:
            raise SettingsError(f"the environment's {variable}: {error}.") from None
    return values


def _near(variable: str) -> str:
    # Compare without the prefix, which makes all names similar.
    names = [name.removeprefix(PREFIX) for name in (*map(variable_of, SETTING_NAMES), *OTHER_VARIABLES)]
    hint = suggestion(variable.removeprefix(PREFIX), names)
    return hint.replace("mean ", f"mean {PREFIX}") if hint else ": see docs/settings.md for those that are."


def wanted_products() -> str:
    """Return the chosen way to multiply int8 on a CPU; empty for the fastest."""
    return os.environ.get("BLOCKDRAFT_PRODUCTS", "")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def forget_environment_settings() -> None:
    """Remove our settings from the environment, so that a child process gets them only as flags."""
    for name in SETTING_NAMES:
        os.environ.pop(variable_of(name), None)


def cache_dir() -> Path:
    """Return the folder of downloads: $BLOCKDRAFT_CACHE, or blockdraft/ in the user's cache folder."""
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or _user_cache() / "blockdraft").expanduser()


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()


def environment_api_key() -> str | None:
    """Return $BLOCKDRAFT_API_KEY, the key that clients must send; None if it is unset or empty."""
    return os.environ.get("BLOCKDRAFT_API_KEY") or None


def whole_environment() -> dict[str, str]:
    """Return a copy of the environment, for the container's entrypoint, which translates its variables."""
    return dict(os.environ)


def pin_threads() -> None:
    """Bind OpenMP's threads to cores, one each; takes effect only before torch is imported.

    Without this, Linux may put several threads on one core: a small model was 2.5 times slower (2 x
    Neoverse-N1, 2026-11). If the user has set one of the variables, nothing changes.
    """
    chosen = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    if not any(name in os.environ for name in chosen):
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES="cores")


def write_no_perf_maps() -> None:
    """Keep oneDNN, a part of PyTorch, from writing perf-PID.map files. Call this before oneDNN is used."""
    if "DNNL_JIT_PROFILE" not in os.environ:
        os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return our environment for a program that we start, with `added` and without our secrets."""
    return {name: value for name, value in os.environ.items() if name != "BLOCKDRAFT_API_KEY"} | dict(added)


def visible_gpus() -> str | None:
    """Return $CUDA_VISIBLE_DEVICES, the cards that programs may use; None if unset, "" for no card."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_dirs() -> dict[str, Path]:
    """Return the folders that a run may fill: our downloads, the hub's, and Triton's compiled kernels."""
    hub_home = Path(os.environ.get("HF_HOME") or _user_cache() / "huggingface").expanduser()
    triton_home = Path(os.environ.get("TRITON_HOME") or Path.home()).expanduser()
    return {
        "downloads": cache_dir(),
        "hub": Path(os.environ.get("HF_HUB_CACHE") or hub_home / "hub").expanduser(),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache").expanduser(),
    }
