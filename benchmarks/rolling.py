"""Replicas behind a balancer restart one after the other, under load: how many requests fail?

    python -m benchmarks.rolling [--balancer nginx|router] [--streams 8] [--rounds 1] [-- FLAGS OF SERVE]

Two servers in processes of their own, behind nginx with deploy/nginx.conf or behind SGLang's router with the
flags of deploy/systemd/sglang-router.service; only ports and folders are replaced. All streams ask all the
time, half of the requests for whole answers, half greedy and half with a seed; every answer has to be == to
the one that the first server gave before the load. Each server gets SIGTERM, has to end with code 0, is
started again and waited for. Exits with 1 when a request fails, a stream breaks off or an answer differs.
"""

import argparse
import asyncio
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from benchmarks.record import context, save, table
from benchmarks.soak import CHAT, STORY, text_of, wait_until_ready
from blockdraft.machine.machine import free_port

DEPLOY = Path(__file__).parents[1] / "deploy"
NGINX, ROUTER = DEPLOY / "nginx.conf", DEPLOY / "systemd/sglang-router.service"
REPLICAS, PORT = ("127.0.0.1:8001", "127.0.0.1:8002"), "8000"  # as those files have them
NUM_PROMPTS = 24
TEMPERATURES = (0.0, 0.8)
STEADY_S = 3.0  # load before, between and after restarts; arbitrary
END_S = 60


@dataclass(slots=True)
class Replica:
    """A server that is started and ended again on one port."""

    port: int
    flags: list[str]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(self.port), *self.flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        assert self.process is not None
        wait_until_ready(self.port, self.process)

    def end(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.codes.append(self.process.wait(END_S))


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


def bodies(name: str, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers can be repeated. The router wants the model's name in each."""
    chance = random.Random(0)
    return [
        {
            "model": name,
            "messages": [{"role": "user", "content": " ".join(chance.choices(STORY.split(), k=12))}],
            "temperature": TEMPERATURES[number % 2],
            "seed": number,
            "max_tokens": 1 + chance.randrange(max_tokens),
        }
        for number in range(NUM_PROMPTS)
    ]


# ---- the balancer


def nginx_conf(folder: Path, own_port: int, ports: list[int]) -> str:
    """Return deploy/nginx.conf with these ports, and with all that it writes in `folder`."""
    text = NGINX.read_text().replace(f"listen {PORT};", f"listen 127.0.0.1:{own_port};")
    for address, port in zip(REPLICAS, ports, strict=True):
        text = text.replace(address, f"127.0.0.1:{port}")
    text = text.replace("/var/log/nginx", str(folder)).replace(
        "worker_processes auto;", "worker_processes 2;"
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return f"pid {folder}/pid;\ndaemon off;\n" + text.replace("http {\n", f"http {{\n{paths}", 1)


def router_command(program: str, own_port: int, ports: list[int]) -> list[str]:
    """Return the command of deploy/systemd/sglang-router.service with these ports."""
    unit = ROUTER.read_text().replace("\\\n", " ")
    _, *words = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart="))[10:])
    addresses = dict(zip(REPLICAS, ports, strict=True))
    new = {PORT: str(own_port), "29000": str(free_port())}
    new |= {f"http://{address}": f"http://127.0.0.1:{port}" for address, port in addresses.items()}
    return [program, *(new.get(word, word) for word in words)]


def balancer_command(kind: str, folder: Path, own_port: int, ports: list[int]) -> list[str]:
    program = find_program(kind)
    if program is None:
        raise SystemExit(f"{kind} is not on PATH")
    if kind == "router":
        return router_command(program, own_port, ports)
    (folder / "nginx.conf").write_text(nginx_conf(folder, own_port, ports))
    return [program, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def find_program(kind: str) -> str | None:
    """Return nginx (Debian keeps it in /usr/sbin) or sglang-router, here or in this Python's environment."""
    name = "nginx" if kind == "nginx" else "sglang-router"
    folders = (os.environ.get("PATH", ""), "/usr/sbin", str(Path(sys.executable).parent))
    return shutil.which(name, path=os.pathsep.join(folders))


@contextmanager
def running_balancer(command: list[str], url: str, log: IO[bytes]) -> Iterator[None]:
    """The balancer; it serves once an answer of a replica comes through."""
    with subprocess.Popen(command, stdout=log, stderr=log) as balancer:
        try:
            end_s = time.monotonic() + END_S
            while not answers(url):
                if balancer.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"the balancer does not answer:\n{Path(log.name).read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            balancer.terminate()


def answers(url: str) -> bool:
    try:
        models = httpx.get(f"{url}/v1/models", timeout=5)
    except httpx.HTTPError:
        return False
    return models.status_code == 200 and bool(models.json()["data"])


# ---- the run


async def roll(load: Load, replicas: list[Replica], *, num_streams: int, num_rounds: int) -> None:
    """Restart all replicas one after the other, `num_rounds` times, while the load runs."""
    running = asyncio.create_task(load.run(num_streams))
    await asyncio.sleep(STEADY_S)
    for replica in replicas * num_rounds:
        await asyncio.to_thread(replica.end)
        replica.start()
        await asyncio.to_thread(replica.wait)
        await asyncio.sleep(STEADY_S)
    load.is_over = True
    await running


def run(args: argparse.Namespace, folder: Path) -> tuple[Load, list[Replica]]:
    own_port, ports = free_port(), [free_port() for _ in REPLICAS]
    flags = ["--served-model-name", "rolling", *args.flags]
    with ExitStack() as opened:
        logs = [opened.enter_context((folder / f"replica-{n}.log").open("wb")) for n in range(len(ports))]
        replicas = [Replica(port, flags, log) for port, log in zip(ports, logs, strict=True)]
        for replica in replicas:
            replica.start()
            assert replica.process is not None
            opened.callback(replica_killed, replica)
        for replica in replicas:
            replica.wait()
        load = Load(f"http://127.0.0.1:{own_port}", bodies("rolling", args.max_tokens))
        load.expected = [expected(ports[0], body) for body in load.bodies]
        log = opened.enter_context((folder / "balancer.log").open("wb"))
        command = balancer_command(args.balancer, folder, own_port, ports)
        opened.enter_context(running_balancer(command, load.url, log))
        asyncio.run(roll(load, replicas, num_streams=args.streams, num_rounds=args.rounds))
    return load, replicas


def replica_killed(replica: Replica) -> None:
    if replica.process is not None and replica.process.poll() is None:
        replica.process.terminate()
        replica.process.wait()


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
    parser.add_argument("--balancer", choices=("nginx", "router"), default="nginx")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="restarts of each server")
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
