"""How another engine is started: its command line, what is added to its environment, where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

SECRETS = frozenset({"VLLM_API_KEY", "SGLANG_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


@dataclass(frozen=True, slots=True)
class Command:
    """One engine to start. `argv[0]` is the engine's own program, found in its environment or container."""

    engine: str  # "vllm" or "sglang"
    version: str  # what the arguments were written for
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # added to the child's environment; may hold secrets
    port: int  # on 127.0.0.1
    image: str | None = None  # the container image, for `docker run` and compose
    build: str | None = None  # the target of container/Containerfile that makes the image
    mounts: tuple[str, ...] = ()  # folders that the container must see

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))


def is_secret(name: str) -> bool:
    """Whether a variable's value may never be printed or passed as an argument."""
    return name in SECRETS or name.upper().endswith(SECRET_ENDINGS)
