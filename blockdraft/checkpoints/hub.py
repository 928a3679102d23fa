"""The exceptions that the hub's client raises. Import it only where something is fetched: it is slow."""

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
