"""What the client of the model hub raises; imported where something is fetched."""

from __future__ import annotations

from huggingface_hub.errors import HfHubHTTPError

# Its HTTP library changes with its version: its own error derives from that library's. The part of it that
# downloads raises RuntimeError.
HUB_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    RuntimeError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
