"""A server that is stopped and started again, with its prefixes on disk and without: the first token's time.

    python -m benchmarks.restart [--tokens 512 2048 6000] [--json FILE] [FLAGS OF SERVE]

One server answers prompts of these lengths and gets SIGTERM. The next two get each prompt with its answer
and a few tokens more, the shortest first, one after the other: one has read the prefixes, the other has none.
Exits with 1 if their answers differ, or if nothing was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks import record
from benchmarks.start import ready
from blockdraft.machine.machine import free_port

NUM_NEW = 20  # tokens of the second turn; arbitrary
NUM_ANSWER = 16
TOLD = re.compile(r"prefixes (?:restored|are kept).*: (.* in [0-9.]+ s)")


@contextmanager
def server(folder: Path, flags: list[str], found: dict[str, object]) -> Iterator[str]:
    """A server's address; afterwards `found` has its start's and its end's seconds, and what it told."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(port), *flags]
    begun_s = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, env=dict(os.environ), stdout=out, stderr=out)
        try:
            while ready(port).get("state") != "ready":
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.02)
            found["start_s"] = time.perf_counter() - begun_s
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            begun_s = time.perf_counter()
            process.terminate()
            process.wait()
            found["end_s"] = time.perf_counter() - begun_s
    found["told"] = TOLD.findall(log.read_text())


def ask(client: httpx.Client, url: str, prompt: list[int]) -> dict[str, object]:
    """Ask for a greedy answer. Return its tokens, its first token's time, and how many tokens were found."""
    body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": NUM_ANSWER}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    begun_s, first_s, token_ids, cached = time.perf_counter(), 0.0, list[int](), 0
    with client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                first_s = first_s or time.perf_counter() - begun_s
                token_ids += event["choices"][0].get("token_ids") or []
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {"tokens": len(prompt), "ttft_s": first_s, "cached": cached, "token_ids": token_ids}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 6000])
    parser.add_argument("--json")
    args, flags = parser.parse_known_args()
    chance = random.Random(0)
    prompts = [[chance.randrange(100, 20_000) for _ in range(count)] for count in sorted(args.tokens)]
    warm = [chance.randrange(100, 20_000) for _ in range(2 * NUM_NEW)]
    runs: dict[str, dict[str, object]] = {}
    answers: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as name, httpx.Client(timeout=600) as client:
        kept = [*flags, "--prefix-disk", f"{name}/prefixes"]
        for run, its_flags in (("before", kept), ("with", kept), ("without", flags)):
            runs[run] = {}
            with server(Path(name), its_flags, runs[run]) as url:
                ask(client, url, warm)
                answers[run] = [ask(client, url, prompt) for prompt in prompts]
            if run == "before":
                turn = [chance.randrange(100, 20_000) for _ in range(NUM_NEW)]
                replies = [one["token_ids"] for one in answers[run]]
                prompts = [[*prompt, *reply, *turn] for prompt, reply in zip(prompts, replies, strict=True)]
    pairs = list(zip(answers["with"], answers["without"], strict=True))
    result = {
        "what": "a restart",
        **record.context(),
        "settings": vars(args),
        "runs": runs,
        "answers": answers,
    }
    record.save(args.json, result, scratch=name)
    rows = [[one["tokens"], one["cached"], one["ttft_s"], other["ttft_s"]] for one, other in pairs]
    print(record.table(["prompt", "found", "TTFT with, s", "without, s"], rows))
    for run, told in runs.items():
        print(f"{run}: start {told['start_s']:.1f} s, end {told['end_s']:.1f} s; {'; '.join(told['told'])}")
    is_equal = all(one["token_ids"] == other["token_ids"] for one, other in pairs)
    print("answers are equal" if is_equal else "ANSWERS DIFFER")
    return 0 if is_equal and all(one["cached"] for one, _ in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
