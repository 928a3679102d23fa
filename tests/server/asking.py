"""Clients of an application, always over a real port and our own connections."""

import asyncio
import contextlib
import functools
import socket
import threading

import httpx
import uvicorn
from uvicorn.server import ServerState

from blockdraft.server.http.lifetime import uvicorn_config
from blockdraft.server.options import ServerOptions


@contextlib.asynccontextmanager
async def connected(app):
    """A client of `app`, which is served on the event loop that runs."""
    config = uvicorn_config(app, ServerOptions())
    config.load()
    connection = functools.partial(config.http_protocol_class, config, ServerState(), {})
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    transport = httpx.AsyncHTTPTransport(verify=False)  # certificates would take long to read
    client = httpx.AsyncClient(transport=transport, base_url=f"http://{host}:{port}", timeout=60)
    async with server, client:
        yield client


def ask(app, method, path, **kwargs):
    """The answer of `app` to one request."""

    async def one():
        async with connected(app) as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(one())


@contextlib.contextmanager
def listening(app, options=None, *, port=0, flush_s=None):
    """The address of `app` on a real port, served by a thread until the block ends."""
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    server = uvicorn.Server(uvicorn_config(app, options or ServerOptions(), flush_s=flush_s))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
