"""Replicas behind a balancer restart one after the other, under load: how many requests fail?

    python -m benchmarks.rolling [--balancer nginx|router] [--streams 8] [--rounds 1] [-- FLAGS OF SERVE]

Two servers behind nginx or SGLang's router as deploy/ has them. All streams ask all the time, half of the
requests for whole answers, half greedy and half with a seed; every answer has to be == to the one that the
first server gave before the load. Each server gets SIGTERM, has to end with code 0, is started again and
waited for. Exits with 1 when a request fails, a stream breaks off or an answer differs.
"""

import argparse
import asyncio
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.balanced import BALANCERS, NAME, Replica, balanced
from benchmarks.record import context, save, table
from benchmarks.soak import CHAT, text_of, words

NUM_PROMPTS = 24
TEMPERATURES = (0.0, 0.8)
STEADY_S = 3.0  # load before, between and after restarts; arbitrary


@dataclass(slots=True)
class Load:
    """Streams that ask all the time; `expected` has each body's text, by the body's number."""

    url: str
    bodies: list[dict[str, Any]]
    expected: list[str] = field(default_factory=list)
    num_answers: int = 0
    slowest_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, num_streams: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self.stream(client, number) for number in range(num_streams)))

    async def stream(self, client: httpx.AsyncClient, seed: int) -> None:
        chance = random.Random(seed)
        while not self.is_over:
            number, start_s = chance.randrange(len(self.bodies)), time.monotonic()
            body = self.bodies[number] | {"stream": chance.random() < 0.5}
            failure = await self.ask(client, body, self.expected[number])
            self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
            self.num_answers += 1
            if failure is not None:
                self.failures[failure] += 1
                await asyncio.sleep(0.1)

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> str | None:
        """Return why the request failed; None if its answer is the expected one."""
        try:
            response = await client.post(CHAT, json=body)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code != 200:
            return f"status {response.status_code}: {response.text[:200]}"
        if body["stream"] and not response.text.rstrip().endswith("data: [DONE]"):
            return "a stream broke off"
        if '"error"' in response.text[-1000:]:
            return f"an error within a stream: {response.text[-300:]}"
        text = text_of(response.text)
        return None if text == expected else f"an answer differs: {text[:60]!r}, expected {expected[:60]!r}"


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers can be repeated."""
    chance = random.Random(0)
    return [
        {
            "model": NAME,
            "messages": [{"role": "user", "content": words(chance, 12)}],
            "temperature": TEMPERATURES[number % 2],
            "seed": number,
            "max_tokens": 1 + chance.randrange(max_tokens),
        }
        for number in range(NUM_PROMPTS)
    ]


async def roll(load: Load, replicas: list[Replica], args: argparse.Namespace) -> None:
    """Restart all replicas one after the other while the load runs."""
    running = asyncio.create_task(load.run(args.streams))
    await asyncio.sleep(STEADY_S)
    for replica in replicas * args.rounds:
        await asyncio.to_thread(replica.end, signal.SIGKILL if args.kill else signal.SIGTERM)
        replica.start()
        await asyncio.to_thread(replica.wait)
        await asyncio.sleep(STEADY_S)
    load.is_over = True
    await running


def run(args: argparse.Namespace, folder: Path) -> tuple[Load, list[Replica]]:
    with balanced(args.balancer, folder, args.flags) as (url, replicas):
        load = Load(url, bodies(args.max_tokens))
        load.expected = [expected(replicas[0].port, body) for body in load.bodies]
        asyncio.run(roll(load, replicas, args))
    return load, replicas


def expected(port: int, body: dict[str, Any]) -> str:
    answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, timeout=120)
    answer.raise_for_status()
    return text_of(answer.text)


def num_repeated(folder: Path) -> int | None:
    """Return how many requests nginx gave to a second replica; None behind the router."""
    log = folder / "access.log"
    return len(re.findall(r"upstream=\S+, ", log.read_text())) if log.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--balancer", choices=BALANCERS, default="nginx")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="restarts of each server")
    parser.add_argument("--kill", action="store_true", help="SIGKILL: streams that have begun break off")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all logs there")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of serve, behind --")
    args = parser.parse_args()
    result = context()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        load, replicas = run(args, folder)
        repeated = num_repeated(folder)
    result |= {
        "balancer": args.balancer,
        "streams": args.streams,
        "requests": load.num_answers,
        "failed": sum(load.failures.values()),
        "failures": dict(load.failures),
        "slowest_s": load.slowest_s,
        "repeated_by_nginx": repeated,
        "exit_codes": [replica.codes for replica in replicas],
    }
    shown = ("requests", "failed", "slowest_s", "repeated_by_nginx", "exit_codes")
    print(table(["rolling restart", args.balancer], [[name, result[name]] for name in shown]))
    for text, count in load.failures.most_common(5):
        print(f"{count} x {text}", file=sys.stderr)
    save(args.json, result)
    codes = {code for replica in replicas for code in replica.codes}
    sys.exit(0 if load.num_answers and not load.failures and codes == {0} else 1)


if __name__ == "__main__":
    main()
