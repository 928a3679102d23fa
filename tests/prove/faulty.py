"""A server of made-up answers, which follow from question, temperature and seed; with one fault or none."""

import asyncio
import hashlib
import json

from aiohttp import web

FAULTS = (
    "one in a hundred",  # a token of every hundredth answer is another
    "no seeds",  # every sampled answer is new
    "one seed",  # every seed gives the same
    "other seeds after a restart",
    "company",  # who is not alone gets another token
    "company by chance",  # who is not alone often gets another token
    "drafts",  # a token changes where drafts are on
    "prefix",  # a token changes where the prompt was found in the cache
    "log-probabilities",
    "streams",
    "choices",
    "own temperature",  # a request that names none is sampled at 0.3
    "keeps answers",  # the same request gets the same answer, id included
)
OPENAPI = {"components": {"schemas": {"ChatRequest": {"properties": {"speculative": {}, "cache_salt": {}}}}}}


class FaultyServer:
    """`fault` may be set at any time; `restart` does what a restart of a real server does."""

    def __init__(self, fault=None, *, sampling=None):
        self.fault = fault
        self.sampling = {} if sampling is None else sampling  # defaults that it declares
        self.refuses = []  # statuses of the next requests
        self.breaks_streams = False
        self.num_cached = (0, 16)  # reported without and with a prefix hit
        self.num_asked = self.num_running = self.num_starts = 0
        self.kept = {}
        self.salts = set()

    def restart(self):
        self.num_starts += 1
        self.salts.clear()

    def app(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/events", self.events)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, request):
        return web.json_response({"data": [{"id": "made-up", "owned_by": "blockdraft"}]})

    async def openapi(self, request):
        return web.json_response(OPENAPI)

    async def events(self, request):
        return web.Response(text="data: " + json.dumps({"engine": {"sampling": self.sampling}}) + "\n\n")

    async def chat(self, request):
        body = await request.json()
        if self.refuses:
            message = {"error": {"message": "not now"}}
            return web.json_response(message, status=self.refuses.pop(0), headers={"retry-after": "0"})
        self.num_asked += 1
        number = self.num_asked
        self.num_running += 1
        try:
            await asyncio.sleep(0.001)
            answer = self.answer(body, number)
        finally:
            self.num_running -= 1
        return await self.stream(request, answer) if body.get("stream") else web.json_response(answer)

    def answer(self, body, number):
        key = json.dumps({name: value for name, value in body.items() if name != "cache_salt"})
        if self.fault == "keeps answers" and key in self.kept:
            return self.kept[key]
        is_cached = body["cache_salt"] in self.salts
        self.salts.add(body["cache_salt"])
        choices = [self.choice(body, index, number, is_cached=is_cached) for index in range(body.get("n", 1))]
        usage = {"prompt_tokens_details": {"cached_tokens": self.num_cached[is_cached]}}
        self.kept[key] = {"id": f"id-{number}", "choices": choices, "usage": usage}
        return self.kept[key]

    def choice(self, body, index, number, *, is_cached):
        temperature = body.get("temperature", self.sampling.get("temperature", 1.0))
        if self.fault == "own temperature" and "temperature" not in body:
            temperature = 0.3
        seed = body["seed"] + index
        if self.fault == "no seeds":
            seed = number + 1_000_000
        elif self.fault == "one seed":
            seed = 0
        elif self.fault == "other seeds after a restart":
            seed += 10_000 * self.num_starts
        drawn = f"{temperature}/{seed}" if temperature else ""
        source = f"{body['messages'][-1]['content']}/{drawn}"
        tokens = [hashlib.sha256(f"{source}/{at}".encode()).hexdigest()[:4] + " " for at in range(8)]
        if self.is_wrong(body, index, number, is_cached=is_cached):
            tokens[5] = "wrong "
        entries = [
            {"token": token, "top_logprobs": [entry(token, -0.5), entry("other", -0.75)]} for token in tokens
        ]
        return {
            "index": index,
            "message": {"content": "".join(tokens)},
            "finish_reason": "length",
            **({"logprobs": {"content": entries}} if body.get("logprobs") else {}),
        }

    def is_wrong(self, body, index, number, *, is_cached):
        return {
            "one in a hundred": number % 100 == 0,
            "company": self.num_running > 1,
            "company by chance": self.num_running > 1 and number % 3 > 0,
            "drafts": body.get("speculative", True),
            "prefix": is_cached,
            "log-probabilities": bool(body.get("logprobs")),
            "streams": bool(body.get("stream")),
            "choices": index > 0 and body.get("temperature") == 0.0,
        }.get(self.fault, False)

    async def stream(self, request, answer):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for choice in answer["choices"]:
            for piece in choice["message"]["content"].split(" ")[:-1]:
                delta = {"index": choice["index"], "delta": {"content": piece + " "}}
                await send(response, {"id": answer["id"], "choices": [delta]})
            if self.breaks_streams:
                return response
            end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            await send(response, {"id": answer["id"], "choices": [end]})
        await send(response, {"id": answer["id"], "choices": [], "usage": answer["usage"]})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response, event):
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def entry(token, logprob):
    return {"token": token, "logprob": logprob}
