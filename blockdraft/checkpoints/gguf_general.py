"""General metadata of a GGUF file: how to sample from it, and which published model it is. No torch here."""

from __future__ import annotations

import re

from blockdraft.checkpoints.gguf_header import GgufHeader

# llama.cpp's own (common/common.h). It cuts off unlikely tokens before it applies the temperature.
LLAMA_CPP_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?", re.ASCII)


def own_sampling(file: GgufHeader) -> dict[str, float]:
    """Returns what the file's makers recommend (`general.sampling.*`), by the names of SamplingParams."""
    found: dict[str, float] = {}
    for name, key in _SAMPLING_KEYS.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = round(value, 6)  # of float32: 0.95 is stored as 0.949999988
    if "temperature" in found:
        found["temperature"] = max(found["temperature"], 0.0)  # llama.cpp takes any below 0 for greedy
    return found


def published_names(file: GgufHeader) -> tuple[str, ...]:
    """Returns the names that the file gives its model and the models it was made of, likeliest first."""
    keys = ["general.source.huggingface.repository", "general.source.repo_url", "general.repo_url"]
    keys += ["general.name", "general.base_model.0.repo_url", "general.base_model.0.name"]
    texts = [file.metadata.get(key) for key in keys]
    parts = [file.metadata.get(f"general.{part}") for part in ("basename", "size_label", "finetune")]
    texts.insert(4, "-".join(part for part in parts if isinstance(part, str) and part))
    found = [_HUB_ADDRESS.sub(r"\1", text.strip()) for text in texts if isinstance(text, str) and text]
    return tuple(dict.fromkeys(found))
