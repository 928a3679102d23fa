"""blockdraft: lossless block-diffusion speculative decoding (DFlash).

`LLM`, `SamplingParams` and `StructuredOutputs` are the Python API; they are imported on first use, so that
`import blockdraft` and `blockdraft --help` stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from blockdraft.errors import (
    BlockdraftError,
    CapacityError,
    FetchError,
    ModelError,
    RequestError,
    SettingsError,
)
from blockdraft.settings.settings import Settings

if TYPE_CHECKING:
    from blockdraft.engine.request import SamplingParams
    from blockdraft.grammar.form import StructuredOutputs
    from blockdraft.llm import LLM, Completion, Result

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
    "StructuredOutputs": "blockdraft.grammar.form",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'blockdraft' has no attribute '{name}'")
