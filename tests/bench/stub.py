"""A server whose times, tokens, drafts and failures are known, for measuring what measures."""

import asyncio
import contextlib
import json
import sys
import threading
from dataclasses import dataclass

from aiohttp import web

MODEL = "stub"
# What makes a stub of the owner "blockdraft" one that can do without speculation, request by request.
OWN_ROUTES = {
    "/version": {"version": "1.2.3"},
    "/openapi.json": {
        "components": {"schemas": {"ChatRequest": {"properties": {"speculative": {}, "cache_salt": {}}}}}
    },
    "/events": (
        'data: {"engine": {"draft": "stub-drafter", "draft_kind": "DFlash2", "draft_hash": "0123"}}\n\n'
    ),
}


@dataclass(frozen=True)
class Script:
    """The answer to one request. Chunk i leaves `ttft_s + i * gap_s` after the request has come."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    num_chunks: int = 4
    tokens_per_chunk: int = 1
    num_thoughts: int = 0  # of the chunks, the first ones
    thought_fields: tuple[str, ...] = ("reasoning_content",)
    num_tool_calls: int = 0  # of the chunks, the last ones
    text: str | None = None  # of each chunk; None: w0, w1, ...
    histogram: tuple[int, ...] | None = None  # steps by number of accepted drafts
    extra: dict | None = None  # fields of the last chunk
    has_usage: bool = True
    prompt_tokens: int = 10
    status: int = 200
    error: object = None  # the body of an answer whose status is not 200
    failure: str | None = None  # "no done", "no finish", or one of _fail
    fails_at: int = 2  # chunks before a failure in the middle
    line_end: str = "\n"


class Stub:
    """The server. `script` may be set at any time, or a function of the request's number and body."""

    def __init__(self, script=None, *, api_key=None, models=(MODEL,), owner="vllm", routes=None):
        self.script = script or Script()
        self.api_key = api_key
        self.models = models
        self.owner = owner
        self.routes = routes or {}  # path: JSON object, or text
        self.bodies = []
        self.num_running = self.max_running = 0
        self.seen_prefixes = set()
        self.url = None

    def app(self):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/{path:.*}", self.get)
        app.router.add_post("/{path:.*}", self.post)
        return app

    def _refused(self, request):
        is_guarded = request.path.endswith(("/models", "/completions", "/events"))
        given = request.headers.get("authorization")
        if self.api_key is not None and is_guarded and given != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": f"wrong key: {given}"}}, status=401)
        return None

    async def get(self, request):
        if (refused := self._refused(request)) is not None:
            return refused
        if request.path in self.routes:
            found = self.routes[request.path]
            return web.Response(text=found) if isinstance(found, str) else web.json_response(found)
        if request.path.endswith("/v1/models"):
            cards = [{"id": name, "owned_by": self.owner, "max_model_len": 4096} for name in self.models]
            return web.json_response({"object": "list", "data": cards})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def post(self, request):
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        script = self.script(len(self.bodies), body) if callable(self.script) else self.script
        self.bodies.append(body)
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"no model '{body['model']}'"}}, status=404)
        if script.status != 200:
            return web.json_response(script.error, status=script.status)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await self._stream(request, body, script)
        finally:
            self.num_running -= 1

    async def _stream(self, request, body, script):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if script.ttft_s:
            await asyncio.sleep(script.ttft_s)
        await response.prepare(request)
        for number in range(script.num_chunks):
            if script.failure not in (None, "no done", "no finish") and number == script.fails_at:
                return await self._fail(request, response, script)
            await asyncio.sleep(max(0.0, start_s + script.ttft_s + number * script.gap_s - loop.time()))
            await _send(response, _chunk(body, script, number, script.text or f"w{number} "), script)
        cached = self._cached(body)
        for chunk in _last_chunks(body, script, cached):
            await _send(response, chunk, script)
        if script.failure != "no done":
            await response.write(f"data: [DONE]{script.line_end * 2}".encode())
        return response

    def _cached(self, body):
        """A prefix cache: whether the prompt was here before, with the same salt."""
        text = json.dumps([body.get("messages", body.get("prompt")), body.get("cache_salt")])
        is_known = text in self.seen_prefixes and body.get("cache_prompt", True)
        self.seen_prefixes.add(text)
        return is_known

    async def _fail(self, request, response, script):
        if script.failure == "hang":
            await asyncio.sleep(3600)
        elif script.failure == "break":
            request.transport.abort()
        elif script.failure == "end":
            pass
        elif script.failure == "half event":
            await response.write(b'data: {"choices": [{"del')
        elif script.failure == "error event":
            await response.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
        else:
            await response.write({"no JSON": b"data: {oops}\n\n", "no event": b"<html>\n\n"}[script.failure])
        return response

    @contextlib.contextmanager
    def running(self):
        """The stub in a thread of its own; gives its address. What runs at the end is cut off."""
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.01)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        self._end = lambda: asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        try:
            self.url = asyncio.run_coroutine_threadsafe(listen(runner), loop).result(10)
            yield self.url
        finally:
            self._end()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def die(self):
        """From any thread: no more answers, no more connections."""
        self._end()


async def listen(runner, port=0):
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


def _is_chat(body):
    return "messages" in body


def _chunk(body, script, number, text):
    if number < script.num_thoughts:
        delta = dict.fromkeys(script.thought_fields, text)
    elif number >= script.num_chunks - script.num_tool_calls:
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    else:
        delta = {"content": text}
    choice = {"index": 0, "delta": delta} if _is_chat(body) else {"index": 0, "text": text}
    return _outer([{**choice, "finish_reason": None}])


def _outer(choices, **fields):
    return {"id": "x", "object": "chunk", "created": 1, "model": MODEL, "choices": choices, **fields}


def _last_chunks(body, script, is_cached):
    choice = {"index": 0, "delta": {}} if _is_chat(body) else {"index": 0, "text": ""}
    if script.failure != "no finish":
        yield _outer([{**choice, "finish_reason": "length"}])
    if not script.has_usage:
        return
    usage = {
        "prompt_tokens": script.prompt_tokens,
        "completion_tokens": script.num_chunks * script.tokens_per_chunk,
        "prompt_tokens_details": {"cached_tokens": script.prompt_tokens - 1 if is_cached else 0},
    }
    fields = dict(script.extra or {})
    if script.histogram is not None and body.get("speculative", True):
        fields["metrics"] = {"speculative_decoding": _drafts(script.histogram)}
    yield _outer([], **{"usage": usage, **fields})


def _drafts(histogram):
    steps = sum(histogram)
    return {
        "acceptance_histogram": list(histogram),
        "num_spec_steps": steps,
        "num_draft_tokens": steps * (len(histogram) - 1),
        "num_accepted_draft_tokens": sum(i * count for i, count in enumerate(histogram)),
    }


async def _send(response, chunk, script):
    await response.write(f"data: {json.dumps(chunk)}{script.line_end * 2}".encode())


def main(port):
    """Serves until it is told to end."""

    async def serve():
        await listen(web.AppRunner(Stub(owner="blockdraft", routes=OWN_ROUTES).app()), port)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
