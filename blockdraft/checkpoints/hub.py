"""The exceptions of the hub's client. Import this module only for downloads, because the import is slow."""

from __future__ import annotations

from huggingface_hub.errors import HfHubHTTPError

# HfHubHTTPError derives from the error of the HTTP library in use, which changes with the client's version.
# The downloader raises RuntimeError.
HUB_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    RuntimeError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
