"""A stand-in for vLLM, run as a process: its log lines, routes and metrics, and ways to go wrong.

    stub_engine.py serve MODEL --port N --served-model-name NAME ...        $STUB: a mode, $STUB_PIDS: a file

Modes: "die" and "hang" in the middle of the start, "deaf" to SIGTERM, "plain" without a drafter, "other"
serves another name, "mute" answers no completion, "empty" completions without tokens, "free" streams without
waiting for a test, with usage, each token in 4 ms with a drafter and in 12 without.
$STUB_SAYS: more lines of its log.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

FLAGS = {
    flag: value
    for flag, value in zip(sys.argv[3:], [*sys.argv[4:], ""], strict=True)
    if flag.startswith("--")
}
MODE = os.environ.get("STUB", "")
KEY = os.environ.get("VLLM_API_KEY")
NAME = "another" if MODE == "other" else FLAGS["--served-model-name"]
HAS_DRAFTER = "--speculative-config" in FLAGS and MODE != "plain"
TOKENS = ["One", " two", " three", " four"]
START = """\
(APIServer pid=1) INFO 11-15 12:55:46 [api_utils.py:347]  version 0.32.0
(APIServer pid=1) INFO 11-15 12:55:46 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-15 12:55:56 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: ...
(Worker pid=3) INFO 11-15 12:56:10 [cpu_model_runner.py:68] Starting to load model m...
Fetching 3 files:  33%|###3      | 1/3 [00:00<00:00, 11.20it/s]
(Worker pid=3) INFO 11-15 12:56:10 [weight_utils.py:533] Time spent downloading weights for m: 1.0 seconds
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 120.84it/s]
(Worker pid=3) INFO 11-15 12:56:10 [default_loader.py:501] Loading weights took 0.01 seconds
(EngineCore pid=2) INFO 11-15 12:56:13 [monitor.py:40] Starting torch.compile
(EngineCore pid=2) INFO 11-15 12:56:13 [kv_cache_utils.py:2327] GPU KV cache size: 349,440 tokens
Capturing CUDA graphs (decode, FULL): 100%|##########| 4/4 [00:01<00:00,  3.1it/s]
(Worker pid=3) INFO 11-15 12:56:14 [gpu_model_runner.py:6582] Graph capturing finished in 1 secs, took 0.5 GiB
"""
counts = {"completions": 0, "tokens": 0, "aborted": 0, "streams": 0}
release = asyncio.Event()


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def start():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(os.environ["STUB_PIDS"]).write_text(f"{os.getpid()} {worker.pid} {stray.pid}")
    say(f"the key is {KEY}")
    for line in (START + os.environ.get("STUB_SAYS", "")).splitlines():
        say(line)
        if "Starting to load" in line and MODE == "die":
            say("(Worker pid=3) ERROR 11-15 12:56:10 [core.py:9] torch.OutOfMemoryError: 80 GiB are too few")
            sys.exit(1)
        if "Starting to load" in line and MODE == "hang":
            time.sleep(600)
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@web.middleware
async def guard(request, handler):
    if request.path.startswith("/v1") and KEY and request.headers.get("authorization") != f"Bearer {KEY}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    response = await handler(request)
    if not response.prepared:
        response.headers["access-control-allow-origin"] = "*"
    return response


async def models(request):
    card = {"id": NAME, "object": "model", "owned_by": "vllm", "max_model_len": 512}
    return web.json_response({"object": "list", "data": [card]})


async def complete(request):
    body = await request.json()
    counts["completions"] += 1
    if body.get("max_tokens") == -1:
        return web.json_response(
            {"error": {"message": "max_tokens must be at least 1", "code": 400}}, status=400
        )
    if MODE == "mute":
        return web.json_response({"error": {"message": "no kernel image"}}, status=500)
    if body.get("stream"):
        return await stream(request, body)
    if body.get("slow"):
        await until_released()
    tokens = [] if MODE == "empty" else TOKENS
    counts["tokens"] += len(tokens)
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    return web.json_response(
        {"model": NAME, "choices": [{"index": 0, "text": "".join(tokens)}], "usage": usage}
    )


async def stream(request, body):
    """One event, and the rest when a test says so; with "slow" the first too."""
    counts["streams"] += 1
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    if body.get("slow"):
        await until_released()
    for place, token in enumerate(TOKENS):
        chunk = {"choices": [{"index": 0, "delta": {"content": token}}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        counts["tokens"] += 1
        if MODE == "free":
            await asyncio.sleep(0.004 if HAS_DRAFTER else 0.012)
        elif place == 0:
            await until_released()
    if MODE == "free":
        await response.write(f"data: {json.dumps(last_chunk())}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def last_chunk():
    choice = {"index": 0, "delta": {}, "finish_reason": "length"}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": len(TOKENS)}}


async def until_released():
    release.clear()
    try:
        await release.wait()
    except asyncio.CancelledError:
        counts["aborted"] += 1
        raise


async def echo(request):
    body = (await request.read()).decode()
    found = {
        "method": request.method,
        "path": request.raw_path,
        "body": body,
        "headers": dict(request.headers),
    }
    return web.json_response(found, status=418, headers={"x-of-the-engine": "yes", "set-cookie": "a=b"})


async def do_release(request):
    release.set()
    return web.json_response(counts)


async def show_counts(request):
    return web.json_response(counts)


async def crash(request):
    say("(EngineCore pid=2) ERROR 11-15 13:00:00 [core.py:9] CUDA error: an illegal memory access")
    os.kill(os.getpid(), signal.SIGKILL)


async def metrics(request):
    labels = f'{{engine="0",model_name="{NAME}"}}'
    lines = [
        f"vllm:generation_tokens_total{labels} {counts['tokens']}",
        f"vllm:iteration_tokens_total_count{labels} {counts['tokens']}",
        f"vllm:num_requests_running{labels} 1.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0',
    ]
    if HAS_DRAFTER:
        steps = counts["completions"]
        lines += [
            f"vllm:spec_decode_num_drafts_total{labels} {steps}",
            f"vllm:spec_decode_num_drafts_created{labels} 1.7e9",
            f"vllm:spec_decode_num_accepted_tokens_total{labels} {1.5 * steps}",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {steps}',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {0.5 * steps}',
        ]
    return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


async def ok(request):
    return web.Response()


async def version(request):
    return web.json_response({"version": "0.32.0"})


def main():
    start()
    app = web.Application(middlewares=[guard], client_max_size=1 << 27)
    app.router.add_get("/health", ok)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_route("*", "/v1/echo/{tail:.*}", echo)
    app.router.add_post("/v1/release", do_release)
    app.router.add_get("/v1/counts", show_counts)
    app.router.add_post("/v1/crash", crash)
    app.router.add_post("/scale_elastic_ep", ok)
    say(f"(APIServer pid=1) INFO 11-15 12:56:16 [entry.py:140] Starting vLLM server on {FLAGS['--port']}")
    web.run_app(
        app,
        host="127.0.0.1",
        port=int(FLAGS["--port"]),
        print=None,
        handler_cancellation=True,
        shutdown_timeout=1,
    )


if __name__ == "__main__":
    main()
