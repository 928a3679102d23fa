"""How a model's makers would have it sampled, for requests that do not say: generation_config.json.

vLLM and SGLang do the same. `do_sample` is not looked at: who wants greedy answers asks for temperature 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.engine.request import SamplingParams
from blockdraft.errors import ModelError, RequestError

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(
    raw: Mapping[str, object], *, name: str, file: str = "generation_config.json"
) -> dict[str, float]:
    """Returns what `file` of the model `name` says about these. Raises ModelError."""
    found = {key: raw[key] for key in NAMES if raw.get(key) is not None}
    try:
        params = SamplingParams(**found)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(
            f"'{name}': {file}: {error} Correct it, or use --sampling-defaults openai."
        ) from None
    return {key: getattr(params, key) for key in found}
