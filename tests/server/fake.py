"""A server with the engine's wire formats and canned text, for the page's tests. No model, no torch.

`Fake` says what it answers and lets a test change its mind; `serve` runs it on a real port.
"""

import asyncio
import contextlib
import json
import math
import re
import time
from itertools import cycle

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from blockdraft.server.page import live_page as page
from tests.server.asking import listening

WIDTH = 8
ACCEPTED = (4, 7, 2, 5, 0, 6, 3, 7, 1)  # drafts accepted in one step after the other
STEP_S = 0.01  # what a forward of the target costs, wide or not
PHASES = ("fetch", "load", "allocate", "capture", "warm", "verify")
TEXT = """Speculative decoding lets a small model guess ahead and a large model check the guess.

1. The **drafter** proposes a whole block of tokens in one forward.
2. The target verifies the block in one forward, and keeps what it would have written itself.
3. It adds `one` token of its own, so every step makes progress.

```python
def step(target, drafter, rows):
    block = drafter.draft(rows)
    verdict = verify(target(block), block)
    return verdict.num_committed
```

<b>Markup</b> stays text: the answer is the same, the number of steps is not."""
TOKENS = re.findall(r"\s?\w+|\s?[^\w\s]+|\s", TEXT)
ENGINE = {
    "target": "default",
    "target_title": "Example-4B-Instruct",
    "target_format": "GGUF Q4_1",
    "target_bytes": 98_362_432,
    "target_computed": "computed in int8",
    "draft": "/srv/drafters/example-4b-instruct",
    "draft_title": "Example-4B-DFlash-b16",
    "draft_format": "safetensors bfloat16",
    "draft_bytes": 38_722_304,
    "width": WIDTH,
    "block": 16,
    "max_model_len": 8192,
    "max_num_seqs": 64,
    "num_pages": 4096,
    "page_size": 16,
    "dtype": "bfloat16",
    "device": "cuda:0",
    "quantization": "int8",
    "num_cache_bytes": 9 << 30,
    "kv_dtype": "tq4",
    "draft_kv_dtype": "bfloat16",
    "kv_window": 128,
    "kv_bytes_per_token": 38_016,
    "kv_compression": 3.1,
    "is_dummy": False,
    "synthetic_acceptance": None,
    "sampling": {"temperature": 0.6, "top_p": 0.95},
    "system_prompt": "You are Example, a helpful model.",
    "notices": [],
}


def steps(width):
    """The answer as steps: (texts, number of accepted drafts). The first is the prompt's."""
    yield TOKENS[:1], 0
    position = 1
    for wanted in cycle(ACCEPTED):
        if position >= len(TOKENS):
            return
        accepted = min(wanted, width - 1, len(TOKENS) - position)
        texts = TOKENS[position : position + accepted + 1]
        yield texts, accepted
        position += len(texts)


def remaining(all_steps, said):
    """The steps behind the text that was said already, which ends where a step ends."""
    for texts, accepted in all_steps:
        text = "".join(texts)
        if said:
            assert said.startswith(text)
            said = said.removeprefix(text)
        else:
            yield texts, accepted


def rate(time_s):
    """Tokens per second of some earlier answers."""
    is_idle = time_s % 110 < 30
    return 0.0 if is_idle else 160 + 18 * math.sin(time_s / 7) + 9 * math.sin(time_s / 2.3)


class Fake:
    def __init__(self):
        self.state = "ready"
        self.num_done = len(PHASES)  # phases behind us, while starting
        self.warnings = ["no CUDA graphs for more than 32 rows: larger batches run a little slower."]
        self.engine = dict(ENGINE)
        self.key = None
        self.refusal = None  # (status, headers) of every question
        self.breaks_after = None  # steps, then the connection ends without [DONE]
        self.differs = False  # plain decoding says something else
        self.deltas = None  # what it says instead of TEXT, a step each
        self.step_s = STEP_S
        self.draft_s = 0.0  # what drafting adds to a step
        self.num_drafts = 0
        self.governed_width = WIDTH
        self.acceptance = [0.93, 0.86, 0.77, 0.66, 0.55, 0.45, 0.36]  # while it is busy
        self.bodies = []
        self.num_stopped = 0
        self.num_feeds = 0
        self.event_s = 0.2
        self.history = [[t, rate(t)] for t in range(300)]
        self.time_s = 300
        self.tokens_per_second = 0.0

    def app(self):
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        others = [
            Route(path, answer)
            for path, answer in (
                ("/events", self.events),
                ("/ready", self.ready),
                ("/v1/models", self.models),
            )
        ]
        return Starlette(routes=[*page.routes(), *others, chat])

    def startup(self):
        phases = []
        for index, name in enumerate(PHASES):
            is_done, is_running = index < self.num_done, index == self.num_done
            state = "done" if is_done else "running" if is_running else "waiting"
            if self.state == "failed" and is_running:
                state = "failed"
            phases.append(
                {
                    "name": name,
                    "state": state,
                    "seconds": 0.4 + 1.7 * index if is_done or is_running else None,
                    "detail": "weights, 3 of 5 files" if is_running else None,
                    "progress": 0.6 if is_running else None,
                }
            )
        error = "the drafter does not fit the target." if self.state == "failed" else None
        return {
            "state": self.state,
            "seconds": 21.7,
            "phases": phases,
            "warnings": self.warnings,
            "error": error,
        }

    def now(self):
        is_busy = self.tokens_per_second > 0
        return {
            "tokens_per_second": self.tokens_per_second,
            "running": int(is_busy),
            "waiting": 0,
            "pages_used": 611 if is_busy else 530,
            "num_pages": 4096,
            "lately_s": 10,
            "tokens_per_step": 4.89 if is_busy else None,
            "acceptance": self.acceptance if is_busy else [],
            "speculation": "speculation: on, 8 tokens tried per step with one answer, "
            "lately 2.3x the speed of plain decoding",
            "governed_width": self.governed_width,
            "num_drafts": self.num_drafts,
            "speedup": 2.3,
            "steps_per_second": self.tokens_per_second / 4.89,
        }

    def is_allowed(self, request):
        return self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"

    async def events(self, request: Request) -> Response:
        if not self.is_allowed(request):
            return error(401, "an API key is needed.")
        self.num_feeds += 1
        return StreamingResponse(self.feed(), media_type="text/event-stream")

    async def feed(self):
        history = self.history
        while True:
            is_starting = self.state in ("starting", "failed")
            yield line(
                {
                    "startup": self.startup(),
                    "engine": None if is_starting else self.engine,
                    "now": self.now(),
                    "history": history,
                }
            )
            await asyncio.sleep(self.event_s)
            self.time_s += 1
            history = [[self.time_s, self.tokens_per_second]]

    async def ready(self, request: Request) -> Response:
        """Open to all, as on the real server."""
        return JSONResponse(self.startup(), status_code=200 if self.state == "ready" else 503)

    async def models(self, request: Request) -> Response:
        if not self.is_allowed(request):
            return error(401, "an API key is needed.")
        return JSONResponse({"object": "list", "data": [{"id": "default", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        if not self.is_allowed(request):
            return error(401, "an API key is needed.")
        if self.refusal is not None:
            status, headers = self.refusal
            return error(status, "refused.", headers)
        body = await request.json()
        self.bodies.append(body)
        answer = self.answer(body) if self.deltas is None else self.said(self.deltas)
        return StreamingResponse(answer, media_type="text/event-stream")

    async def said(self, deltas):
        for delta in deltas:
            await asyncio.sleep(self.step_s)
            yield line(chunk(delta))
        yield line(chunk({}, finish_reason="tool_calls" if "tool_calls" in deltas[-1] else "stop"))
        yield line({"choices": [], "usage": {"completion_tokens": len(deltas)}})
        yield "data: [DONE]\n\n"

    async def answer(self, body):
        asked = body.get("speculative", True)
        width = {False: 1, True: WIDTH}[asked] if isinstance(asked, bool) else asked.get("width", WIDTH)
        has_detail = isinstance(asked, dict) and asked.get("detail", False)
        num_tokens, start_s, finish_reason = 0, time.monotonic(), "stop"
        said = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
        try:
            yield line(chunk({"role": "assistant", "content": ""}))
            for index, (texts, accepted) in enumerate(remaining(steps(width), said)):
                if index == self.breaks_after:
                    return
                await asyncio.sleep(self.step_s + (self.draft_s if width > 1 else 0))
                num_tokens += len(texts)
                self.tokens_per_second = num_tokens / (time.monotonic() - start_s)
                if self.differs and width == 1 and index == 3:
                    texts = [" otherwise"]
                draft = {"tokens": texts, "accepted": accepted} if has_detail else None
                yield line(chunk({"content": "".join(texts)}, draft=draft))
                if num_tokens >= body.get("max_completion_tokens", len(TOKENS) + 1):
                    finish_reason = "length"
                    break
            yield line(chunk({}, finish_reason=finish_reason))
            usage = {"prompt_tokens": 12, "completion_tokens": num_tokens, "total_tokens": 12 + num_tokens}
            yield line({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_stopped += 1
            raise
        finally:
            self.tokens_per_second = 0.0


def chunk(delta, *, draft=None, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if draft is not None:
        choice["draft"] = draft
    return {"object": "chat.completion.chunk", "choices": [choice]}


def line(data):
    return f"data: {json.dumps(data)}\n\n"


def error(status, message, headers=None):
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)


@contextlib.contextmanager
def serve(app, port=0):
    """The address of `app`, served until the block ends."""
    with listening(app, port=port, flush_s=1) as (host, port):
        yield f"http://{host}:{port}"
