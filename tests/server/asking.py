"""Ways to ask an application: through ASGI, and on a real port where the connection matters."""

import asyncio
import contextlib
import socket
import threading

import httpx
import uvicorn

from blockdraft.server.http.protocol import uvicorn_config
from blockdraft.server.options import ServerOptions


@contextlib.asynccontextmanager
async def connected(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


def ask(app, method, path, **kwargs):
    async def one():
        async with connected(app) as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(one())


@contextlib.contextmanager
def listening(app, options=None, *, port=0, flush_s=None):
    """The address of `app` on a real port, served until the block ends."""
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    server = uvicorn.Server(uvicorn_config(app, options or ServerOptions(), flush_s=flush_s))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
