"""Reads the default sampling of a model from generation_config.json, as vLLM and SGLang do.

`do_sample` is ignored: a request for greedy answers has temperature 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, RequestError

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(
    raw: Mapping[str, object], *, name: str, file: str = "generation_config.json"
) -> dict[str, float]:
    """Return the sampling values in `file` of the model `name`. Raise ModelError for impossible ones."""
    found = {key: raw[key] for key in NAMES if raw.get(key) is not None}
    try:
        params = SamplingParams(**found)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(
            f"'{name}': {file}: {error} Correct it, or use --sampling-defaults openai."
        ) from None
    return {key: getattr(params, key) for key in found}
