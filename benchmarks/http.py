"""What HTTP costs: time to the first token at one client, and the engine's rate with 64 that stream.

    python -m benchmarks.http [--rounds 3] [--clients 64] [--json FILE]

The engine and its server are in this process, the clients in another. The first token's overhead is the
client's time from sending a request to its first text, less the engine's own from arrival to first token:
parsing, the chat template, tokenising, the event loop and the connection. The rate counts the steps in which
all rows run, with the same prompts once through the engine alone and once through HTTP, in turns. Clients
take processor time themselves: give the engine fewer threads (OMP_NUM_THREADS) than there are cores. Nothing
else may run meanwhile: the load before the start is recorded.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.record import context, save, table

CHAT = "/v1/chat/completions"
MAX_OVERHEAD_MS = 3.0
MAX_LOSS = 0.10


def body_of(number: int, num_tokens: int) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": f"Story number {number}, please: once upon a time"}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }


# ---- the clients, in a process of their own


async def first_text_s(client: httpx.AsyncClient, body: dict[str, object]) -> float:
    """Seconds to the first event with text; the stream is read to its end."""
    start_s, first_s = time.perf_counter(), None
    async with client.stream("POST", CHAT, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first_s is None and line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                first_s = time.perf_counter() - start_s if delta.get("content") else None
    assert first_s is not None
    return first_s


def one_client(url: str, num_requests: int, num_tokens: int) -> list[float]:
    """The same by the standard library, one request after the other: httpx takes a millisecond itself."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    for number in range(num_requests):
        body, first_s = json.dumps(body_of(number, num_tokens)), None
        start_s = time.perf_counter()
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.status
        for line in response:
            if first_s is None and line.startswith(b"data: {"):
                now_s = time.perf_counter()
                choices = json.loads(line[6:])["choices"]
                first_s = now_s - start_s if choices and choices[0]["delta"].get("content") else None
        assert first_s is not None
        seconds.append(first_s)
    return seconds


async def run_clients(url: str, num_clients: int, num_tokens: int) -> list[float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        tasks = (first_text_s(client, body_of(i, num_tokens)) for i in range(num_clients))
        return await asyncio.gather(*tasks)


def clients(url: str, num_clients: int, num_requests: int, num_tokens: int) -> list[float]:
    numbers = [str(number) for number in (num_clients, num_requests, num_tokens)]
    command = [sys.executable, "-m", "benchmarks.http", "--as-clients", url, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


# ---- the engine and its server


class Steps:
    """Records what each step of an engine did: begin, end, tokens, rows left."""

    def __init__(self, engine: object) -> None:
        from blockdraft.engine.engine import Engine

        assert isinstance(engine, Engine)
        self.engine = engine
        self.log: list[tuple[float, float, int, int]] = []
        self.first_token_s: list[float] = []
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[object]:
        start_s = time.perf_counter()
        deltas = self._step()
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        self.log.append((start_s, time.perf_counter(), num_tokens, len(deltas)))
        self.first_token_s += [delta.metrics.first_token_s for delta in deltas if delta.metrics is not None]
        return list(deltas)

    def rate(self, num_rows: int) -> float:
        """Tokens per second from the first to the last step in which all rows decoded, pauses included."""
        full = [entry for entry in self.log if entry[3] == num_rows]
        assert len(full) > 2, "the rows never ran together: raise --tokens"
        return sum(entry[2] for entry in full[1:]) / (full[-1][1] - full[0][1])

    def clear(self) -> None:
        self.log.clear()
        self.first_token_s.clear()


@contextlib.contextmanager
def serving(engine: object) -> Iterator[str]:
    """The address of a server over `engine`, which is nobody else's meanwhile."""
    import uvicorn

    from blockdraft.engine.engine import Engine
    from blockdraft.engine.loop import EngineLoop
    from blockdraft.server.app import make_app
    from blockdraft.server.options import ServerOptions
    from blockdraft.server.protocol import uvicorn_config

    assert isinstance(engine, Engine)
    loop, options = EngineLoop(lambda startup: engine).wait(), ServerOptions()
    app = make_app(loop, name="default", options=options)
    config = uvicorn_config(app, options)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        loop.close()


def engine_alone(steps: Steps, num_rows: int, num_tokens: int) -> float:
    from blockdraft.engine.request import SamplingParams

    engine = steps.engine
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    steps.clear()
    for number in range(num_rows):
        messages = body_of(number, num_tokens)["messages"]
        engine.add(engine.models.tokenizer.encode_chat(messages), params)  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()
    return steps.rate(num_rows)


def engine_serving(steps: Steps, num_rows: int, num_tokens: int) -> float:
    with serving(steps.engine) as url:
        steps.clear()
        clients(url, num_rows, num_rows, num_tokens)
    return steps.rate(num_rows)


def overhead_ms(steps: Steps, num_requests: int) -> list[float]:
    """One client, one request after the other; the first ones warm everything up."""
    with serving(steps.engine) as url:
        clients(url, 1, 3, 2)
        steps.clear()
        seen = clients(url, 1, num_requests, 2)
    return [(outer - own) * 1e3 for outer, own in zip(seen, steps.first_token_s, strict=True)]


def main() -> None:
    if sys.argv[1:2] == ["--as-clients"]:
        url = sys.argv[2]
        num_clients, num_requests, num_tokens = map(int, sys.argv[3:])
        if num_clients == 1:
            print(json.dumps(one_client(url, num_requests, num_tokens)))
        else:
            print(json.dumps(asyncio.run(run_clients(url, num_clients, num_tokens))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", default="default")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()

    from blockdraft.settings.settings import Settings, pin_threads

    pin_threads()
    from blockdraft.engine.engine import Engine
    from blockdraft.start.loading import load_models

    result = context()
    settings = Settings(
        model=options.model,
        draft="none",
        device="cpu",
        max_context=256,
        max_rows=options.clients,
        prefix_cache=False,
    )
    # In a thread of its own, as in the server: whoever starts OpenMP is bound to a core, and the event loop
    # must not be.
    own = ThreadPoolExecutor(1)
    steps = own.submit(lambda: Steps(Engine(load_models(settings, lambda _: None)))).result()
    overheads = overhead_ms(steps, 20 * options.rounds)
    alone, served = [], []
    for _ in range(options.rounds):
        alone.append(own.submit(engine_alone, steps, options.clients, options.tokens).result())
        served.append(engine_serving(steps, options.clients, options.tokens))
    loss = 1 - max(served) / max(alone)
    result |= {"clients": options.clients, "tokens": options.tokens, "first_token_overhead_ms": overheads}
    result |= {"engine_tokens_per_s": {"alone": alone, "serving": served}, "loss": loss}
    rows: list[list[object]] = [
        ["first token, one client: median overhead, ms", statistics.median(overheads), MAX_OVERHEAD_MS],
        [f"engine alone, {options.clients} rows, tok/s", max(alone), ""],
        [f"engine with {options.clients} streams, tok/s", max(served), ""],
        ["lost to serving, %", loss * 100, MAX_LOSS * 100],
    ]
    print(table(["HTTP", "measured", "aim"], rows))
    save(options.json, result)


if __name__ == "__main__":
    main()
