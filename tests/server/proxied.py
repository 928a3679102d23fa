"""`blockdraft serve --engine vllm` over a stand-in for vLLM, for the tests that need one."""

import contextlib
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from blockdraft.cli.main import main
from tests.server.stub_install import install_stub, is_alive
from tests.server.test_life import PAIR, Process, wait_for

CHAT = "/v1/chat/completions"
KEY = "sk-of-the-client"
MODEL = str(PAIR / "target")
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
STREAM = {**HELLO, "stream": True}


class Server:
    """One `blockdraft serve`, with the processes of its engine."""

    def __init__(self, process, pids):
        self.process = process
        self._pids = pids

    @property
    def pids(self):
        return [int(word) for word in self._pids.read_text().split()]

    def url(self):
        return self.process.ready()

    def early_url(self):
        return self.process.address(self.process.errors, "listening on")

    def end(self, sig=None):
        return self.process.end(sig)

    @property
    def error(self):
        (found,) = [line for line in self.process.errors if line.startswith("blockdraft: error:")]
        return found

    def assert_nothing_is_left(self):
        wait_for(lambda: not any(map(is_alive, self.pids)), "the engine outlives us")


@contextlib.contextmanager
def running(folder, *flags, mode="", environment=None, python=None):
    python = python or install_stub(folder / "engine")
    pids = folder / "pids"
    command = [sys.executable, "-m", "blockdraft", "serve", MODEL, "--engine", "vllm", "--port", "0"]
    command += ["--engine-python", str(python), *flags]
    process = Process(command, {"STUB": mode, "STUB_PIDS": str(pids), **(environment or {})})
    server = Server(process, pids)
    try:
        yield server
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.end()
        if pids.exists():
            server.assert_nothing_is_left()


def events(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def texts(found):
    return [json.loads(text)["choices"][0]["delta"]["content"] for text in found if text != "[DONE]"]


def serve(*flags):
    """Exit code, output and errors of a command that ends before it serves, run in this process."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = main(["serve", *map(str, flags)])
    return code, output.getvalue(), errors.getvalue()
