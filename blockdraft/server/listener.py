"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket

from blockdraft.errors import SettingsError


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything else: a port in use is the commonest mistake."""
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise SettingsError(f"--port {port} is outside 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} ({error.strerror}): {_advice(error)}.") from None
    return listener


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "--port 0 takes a free port, or end what listens there"
    return "choose another --host or --port"


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
