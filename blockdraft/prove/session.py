"""Runs a proof from end to end: find or start the servers, ask in every way, report."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from blockdraft.bench.endpoint import Endpoint, probe
from blockdraft.bench.machine_facts import machine_facts
from blockdraft.bench.served import Started, our_command, served
from blockdraft.errors import BenchError
from blockdraft.prove.asking import Asker
from blockdraft.prove.progress import ProveProgress
from blockdraft.prove.questions import make_questions
from blockdraft.prove.report import ProveReport
from blockdraft.prove.ways import Gone, Prover

INTERRUPTED = "interrupted."
POLL_S = 0.5
RESTART_S = 600.0  # limit for a server to start and answer; arbitrary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveOptions:
    """The flags of `blockdraft prove`."""

    url: str | None = None  # None to start our own server
    plain_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 64
    max_tokens: int = 128
    restart: str | None = None
    timeout_s: float = 600.0
    server_flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BenchError(f"--max-tokens {self.max_tokens} is not a positive number.")
        if not 0 < self.timeout_s < float("inf"):
            raise BenchError(f"--timeout {self.timeout_s} is not a positive number.")
        if self.url is None and (self.restart is not None or self.plain_url is not None):
            name = "--restart" if self.restart is not None else "--plain-url"
            raise BenchError(f"{name} is for a server that runs: give its URL.")
        self.restart_command()

    def restart_command(self) -> list[str]:
        try:
            return shlex.split(self.restart or "")
        except ValueError as error:
            raise BenchError(f"--restart '{self.restart}' is not a valid command: {error}.") from None


async def prove(options: ProveOptions, console: Console) -> ProveReport:
    """Ask all questions in all ways. Raise BenchError if the server cannot be reached or started."""
    questions = make_questions(options.num_prompts, options.max_tokens)
    async with contextlib.AsyncExitStack() as stack:
        own = None if options.url is not None else _OwnServer(options.server_flags, console, stack)
        url = options.url or await own.start()  # type: ignore[union-attr]
        endpoint = await probe(url, options.api_key, options.model)
        asker = await stack.enter_async_context(Asker(endpoint, options.api_key, options.timeout_s))
        plain = None
        if options.plain_url is not None:
            other = await probe(options.plain_url, options.api_key, options.model)
            plain = await stack.enter_async_context(Asker(other, options.api_key, options.timeout_s))
        view = stack.enter_context(ProveProgress(console))
        prover = Prover(questions, asker, plain, declared=endpoint.sampling, watcher=view)
        trouble = None
        try:
            await prover.run(_restart(options, own, asker))
        except Gone as gone:
            trouble = f"the server stopped answering ({gone})."
        except asyncio.CancelledError:
            if not prover.findings:
                raise
            trouble = INTERRUPTED
    return ProveReport(
        prover.findings,
        endpoint,
        machine=machine_facts(),
        options={
            "questions": f"{options.num_prompts}, each greedy and with a seed",
            "max_tokens": options.max_tokens,
            "plain_url": options.plain_url,
            "restart": options.restart,
        },
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        trouble=trouble,
    )


class _OwnServer:
    """Our own server, which we can restart."""

    def __init__(self, flags: Sequence[str], console: Console, stack: contextlib.AsyncExitStack) -> None:
        self._flags = flags
        self._console = console
        self._running = contextlib.AsyncExitStack()
        stack.push_async_callback(self._close)

    async def start(self) -> str:
        self._console.print("starting blockdraft serve …")
        context = served(our_command(self._flags), "blockdraft serve", RESTART_S)
        started: Started = await self._running.enter_async_context(context)
        return started.url

    async def start_again(self) -> str:
        await self._close()
        return await self.start()

    async def _close(self) -> None:
        await self._running.aclose()


def _restart(
    options: ProveOptions, own: _OwnServer | None, asker: Asker
) -> Callable[[], Awaitable[None]] | None:
    """Return a function that restarts the server; None if we neither started it nor have a command."""
    if own is not None:

        async def start_again() -> None:
            asker.endpoint = await probe(await own.start_again(), options.api_key, options.model)

        return start_again
    command = options.restart_command()
    if not command:
        return None

    async def run_command() -> None:
        try:
            process = await asyncio.create_subprocess_exec(*command)
        except OSError as error:
            raise Gone(f"--restart: cannot run '{command[0]}': {error.strerror}") from None
        if code := await process.wait():
            raise Gone(f"--restart: '{command[0]}' ended with code {code}")
        await _until_answering(asker.endpoint, options)

    return run_command


async def _until_answering(endpoint: Endpoint, options: ProveOptions) -> None:
    try:
        async with asyncio.timeout(RESTART_S):
            while True:
                with contextlib.suppress(BenchError):
                    await probe(endpoint.url, options.api_key, endpoint.model)
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Gone(f"it did not answer within {RESTART_S:g} s of --restart") from None
