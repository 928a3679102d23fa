"""The socket that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import socket
from ipaddress import ip_address

from blockdraft.errors import SettingsError

ANY_HOST = ("0.0.0.0", "::")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. Call it first, as a port in use is the commonest mistake."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
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
    return _address(*listener.getsockname()[:2])


def addresses_to_use(listener: socket.socket) -> tuple[str, str | None]:
    """Return an address for programs on this machine, and one for other machines.

    They differ if the server listens on all addresses (0.0.0.0 or ::), which clients cannot call. The second
    is None if there is only one address, or if this machine has no network.
    """
    host, port = listener.getsockname()[:2]
    if host not in ANY_HOST:
        return _address(host, port), None
    outward = outward_host()
    return _address("127.0.0.1", port), None if outward is None else _address(outward, port)


def outward_host() -> str | None:
    """Return this machine's address on its network; None if it has none. Sends no data."""
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))  # on a datagram socket, this only chooses the route
            host = str(probe.getsockname()[0])
            if not ip_address(host).is_loopback:
                return host
    return None


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
