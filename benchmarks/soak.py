"""The server under a load that changes: no failure, the same answers, and memory that stays flat.

    python -m benchmarks.soak [--minutes 2] [--widths each] [--kill-every S] [--json FILE] [-- FLAGS OF SERVE]

A real server with the default model in a process of its own. The load goes round four times, a quarter of
the time each: 1, 8 and 64 streams, bursts of 32 with pauses, 2 streams. Prompts are long and short, answers
of mixed lengths, streamed or not; a quarter of the clients hang up, and all that still run when a phase
ends. Every few seconds the prompts change between random words, code, prose, qa and all of them, so drafts
turn better and worse; a fifth of the requests have a width of their own. `--widths each` gives every row its
own width where the engine would not (benchmarks/dealt.py). Half of the requests were asked before, alone and
without drafts, greedy or with a seed: their answers have to be == to those. Exits with 1 when a request
fails, an answer differs, or the memory of the last quarter is above that of the second by more than the
tolerance. The cache is small, so that all of its pages are touched in the first quarter. With --kill-every
and `--replicas 2` among the flags, a replica chosen at random is killed every S seconds on average, and
nothing else may change.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import dealt
from benchmarks.record import context, save, table
from benchmarks.start import ready
from blockdraft.bench import workloads
from blockdraft.machine.machine import free_port

CHAT = "/v1/chat/completions"
STORY = "the sea was calm and a small boat went out to look for what had been lost there long ago"
START_S = 300  # to load the model, and fetch it before the first time
NUM_ROUNDS = 4  # as quarters of the time are compared
PAUSE_S = 1.0  # between two bursts
NUM_WORDS = (5, 9, 14, 20, 60, 120, 200, 300)  # of the prompts whose answers are known
CLASSES = ("code", "prose", "qa")
NUM_PROMPTS = 4  # of each class, whose answers are known
WORDS = "words"
TURNS = ((WORDS,), ("code",), ("qa",), (WORDS, *CLASSES), ("prose",))  # kinds of prompts, one after another
TURN_S = 4.0
WIDTHS = (1, 2, 3, 5, 8)  # of the requests that set one
TOLERANCE = 0.02
TOLERANCE_MB = 16.0  # arbitrary: an allocator's moods


@dataclass(frozen=True)
class Phase:
    """A load of N streams at a time; bursts begin at once, with a pause between them."""

    name: str
    num_streams: int
    is_burst: bool = False


PHASES = (
    Phase("1 stream", 1),
    Phase("8 streams", 8),
    Phase("64 streams", 64),
    Phase("bursts of 32", 32, is_burst=True),
    Phase("2 streams", 2),
)


class Soak:
    def __init__(self, client: httpx.AsyncClient, pid: int) -> None:
        self.client = client
        self.pid = pid
        self.answers = dict.fromkeys((phase.name for phase in PHASES), 0)
        self.num_compared = 0
        self.num_left = 0
        self.num_killed = 0
        self.errors: list[str] = []
        self.expected: dict[str, str] = {}  # by prompt
        self.known: dict[str, list[str]] = {}  # its prompts, by kind
        self.start_s = time.monotonic()
        self.memory_mb: list[tuple[float, float]] = []  # seconds since the start, resident

    async def run(self, seconds: float, kill_every_s: float | None = None) -> None:
        await self.ask_alone()
        watching = [asyncio.create_task(self.watch())]
        if kill_every_s is not None:
            watching.append(asyncio.create_task(self.kill_replicas(kill_every_s)))
        for _ in range(NUM_ROUNDS):
            for phase in PHASES:
                await self.go_through(phase, seconds / NUM_ROUNDS / len(PHASES))
        for task in watching:
            task.cancel()
        for result in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def kill_replicas(self, every_s: float) -> None:
        """Kill a replica that is ready, again and again."""
        chance = random.Random(1)
        while True:
            await asyncio.sleep(every_s * chance.uniform(0.5, 1.5))
            replicas = (await self.client.get("/ready")).json()["replicas"]
            ready = [one["pid"] for one in replicas if one["state"] == "ready"]
            if ready:
                os.kill(chance.choice(ready), signal.SIGKILL)
                self.num_killed += 1

    async def ask_alone(self) -> None:
        """Keep the expected answers, asked one at a time without drafts."""
        chance = random.Random(0)
        self.known = {WORDS: [words(chance, num_words) for num_words in NUM_WORDS]}
        self.known |= {name: prompts_of(name)[:NUM_PROMPTS] for name in CLASSES}
        for prompt in [prompt for prompts in self.known.values() for prompt in prompts]:
            body = known_body(prompt) | {"speculative": False}
            response = await self.client.post(CHAT, json=body)
            response.raise_for_status()
            self.expected[prompt] = text_of(response.text)

    async def watch(self) -> None:
        start_s = time.monotonic()
        while True:
            self.memory_mb.append((time.monotonic() - start_s, resident_mb(self.pid)))
            await asyncio.sleep(1)

    async def go_through(self, phase: Phase, seconds: float) -> None:
        """Keep the streams of a phase busy; those that run at its end hang up."""
        if phase.is_burst:
            work = [self.burst(phase)]
        else:
            work = [self.work(phase, number) for number in range(phase.num_streams)]
        clients = [asyncio.create_task(one) for one in work]
        _, running = await asyncio.wait(clients, timeout=seconds)
        for client in running:
            client.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                raise result  # a bug of ours; hanging up is no Exception

    async def burst(self, phase: Phase) -> None:
        chances = [random.Random(number) for number in range(phase.num_streams)]
        while True:
            await asyncio.gather(*(self.try_to_ask(phase, chance) for chance in chances))
            await asyncio.sleep(PAUSE_S)

    async def work(self, phase: Phase, number: int) -> None:
        chance = random.Random(number)
        while True:
            await self.try_to_ask(phase, chance)

    async def try_to_ask(self, phase: Phase, chance: random.Random) -> None:
        try:
            is_answered = await self.ask(chance)
            self.answers[phase.name] += is_answered
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        except httpx.HTTPError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)

    async def ask(self, chance: random.Random) -> bool:
        """Ask something; whether it was answered, that is, nobody hung up and nothing failed."""
        kind = chance.choice(kinds_at(time.monotonic() - self.start_s))
        if is_known := chance.random() < 0.5:
            body = known_body(chance.choice(self.known[kind]))
        else:
            body = mixed_body(chance, kind)
        if chance.random() < 0.2:
            body["speculative"] = {"width": chance.choice(WIDTHS)}
        body["stream"] = chance.random() < 0.6
        num_pieces = chance.randrange(20) if chance.random() < 0.25 else None
        lines = []
        async with self.client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                self.errors.append(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return False
            async for line in response.aiter_lines():
                lines.append(line)
                if num_pieces is not None and len(lines) > num_pieces:
                    self.num_left += 1
                    return False
        if is_known:
            self.compare(body["messages"][0]["content"], text_of("\n".join(lines)))
        return True

    def compare(self, prompt: str, text: str) -> None:
        self.num_compared += 1
        if text != self.expected[prompt]:
            shown = f"{text[:80]!r}, alone {self.expected[prompt][:80]!r}"
            self.errors.append(f"an answer differs: {prompt[:40]!r}…: {shown}")

    def growth_mb(self) -> tuple[float, float]:
        """Medians of the second and the last quarter."""
        quarter = len(self.memory_mb) // 4
        if quarter == 0:
            raise SystemExit("too short to say anything about memory: give it at least a minute")
        values = [value for _, value in self.memory_mb]
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def kinds_at(seconds: float) -> tuple[str, ...]:
    return TURNS[int(seconds / TURN_S) % len(TURNS)]


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(STORY.split(), k=count))


def known_body(prompt: str) -> dict[str, Any]:
    """Return a request that always gets the same answer: greedy, or sampled with a seed."""
    message = {"role": "user", "content": prompt}
    how = {"temperature": float(len(prompt) % 2), "seed": len(prompt)}
    return {"messages": [message], "max_tokens": 8 + len(prompt) % 25, **how}


def prompts_of(name: str) -> list[str]:
    """Return the first turns of a class of `bench`."""
    return [one.turns[0] for one in workloads.load(name).prompts]


def mixed_body(chance: random.Random, kind: str) -> dict[str, Any]:
    prompt = words(chance, chance.randrange(5, 300))
    if kind != WORDS:
        prompt = f"{chance.choice(prompts_of(kind))}\n\n{words(chance, 5)}"
    message = {"role": "user", "content": prompt}
    return {"messages": [message], "max_tokens": chance.choice((1, 8, 32, 100)), "temperature": 1.0}


def text_of(answer: str) -> str:
    """Return the text of an answer, whole or as events."""
    if not answer.startswith("data:"):
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [line[5:] for line in answer.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise SystemExit("the server has ended")
    return int(found[1]) / 1024


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while ready(port).get("state") != "ready":
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        if time.monotonic() > end_s:
            raise SystemExit(f"the server was not ready within {START_S} s")
        time.sleep(0.5)


async def soak_server(url: str, pid: int, seconds: float, kill_every_s: float | None) -> Soak:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        soak = Soak(client, pid)
        await soak.run(seconds, kill_every_s)
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--widths", choices=dealt.RULES, help="default: as the engine deals them")
    parser.add_argument("--kill-every", type=float, metavar="S")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of serve, behind --")
    options = parser.parse_args()
    result = context()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--max-model-len", "2048", "--cache-bytes", str(128 << 20), *options.flags]
    command = [*dealt.command(options.widths), "serve", "--port", str(port), *flags]
    with subprocess.Popen(command) as server:
        try:
            wait_until_ready(port, server)
            soak = asyncio.run(soak_server(url, server.pid, options.minutes * 60, options.kill_every))
            has_survived = server.poll() is None
        finally:
            server.terminate()
    early, late = soak.growth_mb()
    limit = early + max(early * TOLERANCE, TOLERANCE_MB)
    result |= {
        "minutes": options.minutes,
        "widths": options.widths,
        "answers": soak.answers,
        "compared": soak.num_compared,
        "hung_up": soak.num_left,
        "killed": soak.num_killed,
        "errors": soak.errors,
        "resident_mb": {"second_quarter": early, "last_quarter": late, "limit": limit},
        "exit_code": server.returncode,
        "samples_mb": soak.memory_mb[:: max(1, len(soak.memory_mb) // 100)],
    }
    rows: list[list[object]] = [
        *([f"answers, {name}", count] for name, count in soak.answers.items()),
        ["answers compared", soak.num_compared],
        ["replicas killed", soak.num_killed],
        ["clients that hung up", soak.num_left],
        ["errors", len(soak.errors)],
        ["resident MB, second quarter", early],
        ["resident MB, last quarter", late],
        ["resident MB, at most", limit],
    ]
    print(table(["soak", f"{options.minutes:g} min"], rows))
    for error in soak.errors[:5]:
        print(error, file=sys.stderr)
    save(options.json, result)
    is_well = has_survived and not soak.errors and soak.num_compared > 0 and late <= limit
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
