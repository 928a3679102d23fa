"""Names of settings in vLLM, SGLang, llama.cpp and Ollama, with our names for them.

The command line and `LLM(...)` share the tables. A name with the meaning of one of our settings is accepted
with a note; for other names an error says what to use. Names that equal ours (`--gpu-memory-utilization`) are
not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from blockdraft.errors import SettingsError
from blockdraft.settings.settings import FORMER_NAMES, SETTING_NAMES, suggestion

# Their name, their program, our name. Short flags of llama.cpp are in _SHORT.
SAME = {
    **{name: ("an earlier blockdraft", ours) for name, ours in FORMER_NAMES.items()},
    "context_length": ("SGLang", "max_model_len"),
    "ctx_size": ("llama.cpp", "max_model_len"),
    "max_running_requests": ("SGLang", "max_num_seqs"),
    "parallel": ("llama.cpp", "max_num_seqs"),
    "max_num_batched_tokens": ("vLLM", "max_prefill_tokens"),
    "chunked_prefill_size": ("SGLang", "max_prefill_tokens"),
    "enable_prefix_caching": ("vLLM", "prefix_cache"),
    "kv_cache_memory_bytes": ("vLLM", "cache_bytes"),
    "block_size": ("vLLM", "page_size"),
    "kv_cache_dtype": ("vLLM", "kv_dtype"),
    "tensor_parallel_size": ("vLLM", "tensor_parallel"),
    "tp_size": ("SGLang", "tensor_parallel"),
    "pipeline_parallel_size": ("vLLM", "pipeline_parallel"),
    "model_path": ("SGLang", "model"),
    "random_seed": ("SGLang", "seed"),
    "model_draft": ("llama.cpp", "draft"),
    "speculative_model": ("vLLM", "draft"),
    "speculative_draft_model_path": ("SGLang", "draft"),
    "temp": ("llama.cpp", "temperature"),
    "repeat_penalty": ("llama.cpp", "repetition_penalty"),
    "n_predict": ("llama.cpp", "max_tokens"),
    "max_new_tokens": ("transformers", "max_tokens"),
    "grammar_file": ("llama.cpp", "grammar"),
    "alias": ("llama.cpp", "served_model_name"),
}
_SHORT = {
    "-m": "model",
    "-c": "max_model_len",
    "-np": "max_num_seqs",
    "-md": "draft",
    "-n": "max_tokens",
    "-s": "seed",
    "-a": "served_model_name",
}
# Their name, their program, a hint: {x} becomes --x, or x in Python. A hint with "is …" is a sentence.
OTHERWISE = {
    "speculative_config": ("vLLM", "{draft} and {width}: a folder or hub id, and num_speculative_tokens + 1"),
    "num_speculative_tokens": (
        "vLLM",
        "{width}, which counts the token before the drafts too: 7 drafts are 8",
    ),
    "speculative_num_draft_tokens": ("SGLang", "{width}: tokens verified per step"),
    "draft_max": ("llama.cpp", "{width}, which counts the token before the drafts too: 7 drafts are 8"),
    "speculative_algorithm": (
        "SGLang",
        "{draft}: a DFlash drafter, mtp (the model's own head), or ngram, which has no weights",
    ),
    "mem_fraction_static": ("SGLang", "{gpu_memory_utilization}: a share of all memory, weights included"),
    "enforce_eager": ("vLLM", "{no_graphs}"),
    "cuda_graph": ("SGLang", "{graphs}"),
    "data_parallel_size": ("vLLM", "way of one server per card, behind a load balancer"),
    "n_gpu_layers": ("llama.cpp", "{device}: cpu, or cuda for all layers"),
    "threads": ("llama.cpp", "OMP_NUM_THREADS, a variable of the environment"),
    "batch_size": ("llama.cpp", "{max_prefill_tokens}: most prompt tokens of a step"),
    "cache_type_k": ("llama.cpp", "{kv_dtype}, of keys and values alike: int8 for q8_0, tq4 for q4_0"),
    "cache_type_v": ("llama.cpp", "{kv_dtype}, of keys and values alike: int8 for q8_0, tq4 for q4_0"),
    "flash_attn": ("llama.cpp", "only way: leave it out"),
    "tokenizer": ("vLLM", "{model}, which brings its own: leave it out"),
    "swap_space": ("vLLM", "{cache_bytes}: what is put off is computed again, not swapped. Leave it out"),
    "hf_repo": ("llama.cpp", "{model}, which takes hub ids"),
}
_OTHER_SHORT = {"-ngl": "n_gpu_layers", "-t": "threads", "-b": "batch_size", "-fa": "flash_attn"}
_OTHER_SHORT |= {"-ctk": "cache_type_k", "-ctv": "cache_type_v"}
# Commands of other programs (mostly Ollama), with hints.
COMMANDS = {
    **dict.fromkeys(("list", "ls"), "is `blockdraft models` here"),
    **dict.fromkeys(("pull", "download"), "is `blockdraft fetch MODEL` here"),
    **dict.fromkeys(("rm", "remove", "delete"), "is `blockdraft models rm MODEL` here"),
    **dict.fromkeys(("show", "info"), "is `blockdraft plan MODEL` here"),
    "ps": "every `blockdraft serve` serves one model in a process of its own; its /ready says how it is",
    "stop": "a server ends with Ctrl-C in its terminal, or with SIGTERM",
    "start": "is `blockdraft serve MODEL` here",
    "complete": "is `blockdraft generate --raw PROMPT` here",
    "help": "is `blockdraft --help` here",
    "version": "is `blockdraft --version` here",
}


def command_hint(name: str) -> str | None:
    """Return a hint for a command of another program; None if we do not know the command."""
    told = COMMANDS.get(name)
    return told and (f"'{name}' {told}" if told.startswith("is ") else f"'{name}': {told}")


def as_our_flags(words: Iterable[str], ours: Container[str]) -> tuple[list[str], list[str]]:
    """Replace other programs' flags in a command by ours; return the command and a note for each flag."""
    found, notes, is_over = [], [], False
    for word in words:
        name, equals, value = word.partition("=")
        is_over = is_over or word == "--"
        our_flag = None if is_over or name in ours else _our_flag(name)
        if our_flag is None or our_flag not in ours:
            found.append(word)
            continue
        found.append(our_flag + equals + value)
        notes.append(f"{name} is {our_flag} here")
    return found, notes


def _our_flag(name: str) -> str | None:
    if _one_dash(name) in _SHORT:
        return _flag(_SHORT[_one_dash(name)])
    is_off, theirs = name.startswith("--no-"), name.removeprefix("--no-").removeprefix("--").replace("-", "_")
    if not name.startswith("--") or theirs not in SAME:
        return None
    ours = SAME[theirs][1]
    return _flag(f"no-{ours}" if is_off else ours)


def flag_hint(name: str) -> str | None:
    """Return a hint for a flag of another program; None if we do not know the flag."""
    theirs = _OTHER_SHORT.get(_one_dash(name), name.removeprefix("--").removeprefix("no-").replace("-", "_"))
    if theirs in SAME:
        return f"{SAME[theirs][0]}'s {name} is our {_flag(SAME[theirs][1])}, which is not for this command"
    return _hint(theirs, name, _flag) if theirs in OTHERWISE else None


def as_our_settings(given: Mapping[str, object], note: Callable[[str], None]) -> dict[str, object]:
    """Return the arguments of LLM under our names. `note` is called for each renamed argument."""
    found: dict[str, object] = {}
    for name, value in given.items():
        ours = SAME[name][1] if name in SAME else name
        if ours not in SETTING_NAMES:
            told = f"LLM has no setting '{name}'{suggestion(name, [*SETTING_NAMES, *SAME]) or '.'}"
            if name in SAME:
                told = f"{SAME[name][0]}'s {name} is our SamplingParams({ours}=…)."
            raise SettingsError(f"{_hint(name, name, str)}." if name in OTHERWISE else told)
        if ours in found or (ours != name and ours in given):
            raise SettingsError(f"'{name}' and '{ours}' are the same setting: give one.")
        if ours != name:
            note(f"{SAME[name][0]}'s {name} is {ours} here.")
        found[ours] = value
    return found


def _hint(theirs: str, name: str, spelt: Callable[[str], str]) -> str:
    return f"{OTHERWISE[theirs][0]}'s {name} {explained(theirs, spelt)}"


def explained(theirs: str, spelt: Callable[[str], str]) -> str:
    """Return the hint for a name in OTHERWISE. `spelt` turns our names into flags or fields."""
    what = OTHERWISE[theirs][1]
    names = {field: spelt(field) for field in SETTING_NAMES}
    names["no_graphs"] = "graphs=False" if spelt is str else "--no-graphs"
    return ("" if what.startswith("is ") else "is our ") + what.format_map(names)


def _one_dash(name: str) -> str:
    """Return a flag with one dash if it may be a short name of llama.cpp: --ngl becomes -ngl."""
    return name[1:] if name.startswith("--") and len(name) > 3 else name


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
