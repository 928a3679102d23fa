"""Two servers in processes of their own behind nginx or SGLang's router, for benchmarks and tests.

nginx has deploy/nginx.conf and the router the flags of deploy/systemd/sglang-router.service; only ports and
folders are replaced.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

from benchmarks.soak import wait_until_ready
from blockdraft.machine.machine import free_port

DEPLOY = Path(__file__).parents[1] / "deploy"
NGINX, ROUTER = DEPLOY / "nginx.conf", DEPLOY / "systemd/sglang-router.service"
REPLICAS, PORT = ("127.0.0.1:8001", "127.0.0.1:8002"), "8000"  # as those files have them
BALANCERS = ("nginx", "router")
NAME = "balanced"  # the model's name; the router wants it in each request
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

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.codes.append(self.process.wait(END_S))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


@contextmanager
def balanced(kind: str, folder: Path, flags: list[str]) -> Iterator[tuple[str, list[Replica]]]:
    """The balancer's address and the replicas, all of which are ready; their logs are in `folder`."""
    own_port, ports = free_port(), [free_port() for _ in REPLICAS]
    url, flags = f"http://127.0.0.1:{own_port}", ["--served-model-name", NAME, *flags]
    with ExitStack() as opened:
        logs = [opened.enter_context((folder / f"replica-{n}.log").open("wb")) for n in range(len(ports))]
        replicas = [Replica(port, flags, log) for port, log in zip(ports, logs, strict=True)]
        for replica in replicas:
            replica.start()
            opened.callback(replica.close)
        for replica in replicas:
            replica.wait()
        log = opened.enter_context((folder / "balancer.log").open("wb"))
        command = balancer_command(kind, folder, own_port, ports)
        opened.enter_context(running_balancer(command, url, log))
        yield url, replicas


# ---- the balancer


def nginx_conf(folder: Path, own_port: int, ports: list[int]) -> str:
    """Return deploy/nginx.conf with these ports, and with all that it writes in `folder`."""
    text = NGINX.read_text().replace(f"listen {PORT};", f"listen 127.0.0.1:{own_port};")
    for address, port in zip(REPLICAS, ports, strict=True):
        text = text.replace(address, f"127.0.0.1:{port}")
    text = text.replace("/var/log/nginx", str(folder))
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
