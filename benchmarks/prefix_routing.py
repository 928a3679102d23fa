"""Prompts with shared beginnings behind a balancer: how much of them do the replicas find in their caches?

    python -m benchmarks.prefix_routing [--balancer nginx|router] [--prefixes 64] [-- FLAGS OF SERVE]

Two servers behind nginx, which does not look at prompts, or SGLang's router, which does, as deploy/ has them.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import httpx

from benchmarks.balanced import BALANCERS, NAME, balanced
from benchmarks.record import context, save, table
from benchmarks.soak import CHAT, words
from blockdraft.prometheus_text import samples

SHARED_WORDS, OWN_WORDS = 200, 8
MAX_TOKENS = 24


async def ask_all(url: str, prompts: list[str], num_streams: int) -> None:
    waiting = iter(prompts)

    async def stream(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            body = {
                "model": NAME,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": MAX_TOKENS,
            }
            (await client.post(CHAT, json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(stream(client) for _ in range(num_streams)))


def count(port: int, name: str) -> int:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return int(sum(value for found, _, value in samples(page) if found == name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--balancer", choices=BALANCERS, default="router")
    parser.add_argument("--prefixes", type=int, default=64, help="different beginnings")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of serve, behind --")
    args = parser.parse_args()
    chance = random.Random(0)
    prefixes = [words(chance, SHARED_WORDS) for _ in range(args.prefixes)]
    prompts = [f"{chance.choice(prefixes)} {words(chance, OWN_WORDS)}" for _ in range(args.requests)]
    result = context() | {"balancer": args.balancer, "prefixes": args.prefixes, "streams": args.streams}
    with (
        tempfile.TemporaryDirectory() as folder,
        balanced(args.balancer, Path(folder), args.flags) as (url, replicas),
    ):
        asyncio.run(ask_all(url, prompts, args.streams))
        hits = [count(replica.port, "vllm:prefix_cache_hits_total") for replica in replicas]
        looked_up = [count(replica.port, "vllm:prefix_cache_queries_total") for replica in replicas]
    result |= {"prompt_tokens": looked_up, "found": hits, "share": sum(hits) / sum(looked_up)}
    shown = ("prompt_tokens", "found", "share")
    print(table([f"{args.prefixes} beginnings", args.balancer], [[name, result[name]] for name in shown]))
    save(args.json, result)


if __name__ == "__main__":
    main()
