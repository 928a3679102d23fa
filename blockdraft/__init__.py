"""blockdraft: lossless block-diffusion speculative decoding (DFlash).

`LLM`, `SamplingParams` and `StructuredOutputs` are the Python API. They are imported on first use: so
`blockdraft --help` does not load torch, and Ctrl-C works early.
"""

from __future__ import annotations

from importlib import import_module

from blockdraft.errors import (
    BlockdraftError,
    CapacityError,
    FetchError,
    ModelError,
    RequestError,
    SettingsError,
)

TYPE_CHECKING = False  # `typing` takes longer to import than this whole module
if TYPE_CHECKING:
    from blockdraft.engine.request import SamplingParams
    from blockdraft.grammar.structured_output import StructuredOutputs
    from blockdraft.llm import LLM, Completion, Result
    from blockdraft.settings.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BlockdraftError",
    "CapacityError",
    "Completion",
    "FetchError",
    "ModelError",
    "RequestError",
    "Result",
    "SamplingParams",
    "Settings",
    "SettingsError",
    "StructuredOutputs",
    "__version__",
]

_LAZY = {
    "LLM": "blockdraft.llm",
    "Completion": "blockdraft.llm",
    "Result": "blockdraft.llm",
    "SamplingParams": "blockdraft.engine.request",
    "Settings": "blockdraft.settings.settings",
    "StructuredOutputs": "blockdraft.grammar.structured_output",
}


def __dir__() -> list[str]:
    """Return all public names, including names that are imported on first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'blockdraft' has no attribute '{name}'")
