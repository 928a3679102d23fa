"""Starts another engine, warms it up, checks and watches it, and ends it when our process ends.

The proxy gets the engine's state for clients and the live page from here.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from blockdraft.errors import LaunchError
from blockdraft.fp4_kernels import FALLBACK, is_fp4_fallback, read_fp4_kernel
from blockdraft.jsonl import as_object
from blockdraft.launch.engine_versions import TITLES
from blockdraft.launch.launch_request import HOST, Command
from blockdraft.launch.log_signs import PHASES, PhaseTracker, is_error, read_sign
from blockdraft.launch.process import GRACE_S, EngineProcess, shown_exit
from blockdraft.phases import StartProgress
from blockdraft.prometheus_text import samples
from blockdraft.settings.settings import child_environment

POLL_S = 0.2
ASK_S = 10.0  # limit of an answer that needs no model
WARM_S = 600.0  # limit of the first answer: some kernels are compiled for it
EXIT_S = 2.0  # wait for an engine's end: when it fails, it first closes its connections
UNHEALTHY_S = 30.0  # a ready engine's /health may fail for this long
HEALTH_S = 5.0  # between two requests for /health
SHOWN_LINES = 8
WARM_TOKENS = 24
_SPECULATION = {"vllm": "vllm:spec_decode_num_drafts", "sglang": "sglang:spec_"}

output_log = logging.getLogger("blockdraft.engine")


@dataclass(frozen=True, slots=True)
class Launch:
    """An engine to start: the command on this machine, and the checks after its start."""

    command: Command
    argv: tuple[str, ...]  # the command's argv, with the program's path
    name: str  # the model's name for clients
    has_drafter: bool
    api_key: str | None = field(default=None, repr=False)  # the key that the engine expects from us
    start_timeout_s: float = 3600.0
    grace_s: float = GRACE_S
    head_address: str | None = None  # the node with the API, if it is not this one


class Unanswered(LaunchError):
    """The engine did not answer an HTTP request."""


class Supervisor:
    """One engine, watched by a thread. `startup` is its progress, `error` the reason why it is lost.

    The live page shows `facts` in addition to the engine's own information.
    """

    def __init__(
        self,
        launch: Launch,
        facts: Mapping[str, object],
        report: Callable[[str], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.launch = launch
        self.url = f"http://{HOST}:{launch.command.port}"
        self._facts = facts
        self.startup = StartProgress(report, names=PHASES)
        self.is_ready = False  # stays True once the engine was ready
        self.version: str | None = None  # the version that the engine reports
        self.max_model_len: int | None = None
        self.error: str | None = None
        self.fp4_kernels: list[str] = []  # the kernels for four-bit weights that its log names
        self._on_line = on_line
        self._phases = PhaseTracker(self.startup)
        self._stop = threading.Event()
        self._process: EngineProcess | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def title(self) -> str:
        return TITLES[self.launch.command.engine]

    @property
    def headers(self) -> dict[str, str]:
        key = self.launch.api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def info(self) -> dict[str, object] | None:
        """Return facts for the live page; None if the engine is not ready or another machine has its API."""
        if not self.is_ready or self.launch.head_address is not None:
            return None
        engine = f"{self.title} {self.versions()['version']}"
        more = {"max_model_len": self.max_model_len, "fp4_kernels": list(self.fp4_kernels)}
        return {"engine": engine, **self._facts, **more}

    def versions(self) -> dict[str, str]:
        command = self.launch.command
        return {"version": self.version or command.version, "engine": command.engine}

    def last_lines(self) -> list[str]:
        return [] if self._process is None else self._process.last_lines(SHOWN_LINES)

    def close(self) -> None:
        """End the engine and all its processes. May be called repeatedly."""
        self._stop.set()
        if self._process is not None:
            self._process.close()  # also ends a request that the thread waits for
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            self._start()
            self._watch()
        except LaunchError as error:
            self._phases.fail(error)
            if not self._stop.is_set():
                self.error = str(error)
                self.startup.fail(self.error)
        if self._process is not None:
            self._process.close()

    def _start(self) -> None:
        launch = self.launch
        deadline_s = time.monotonic() + launch.start_timeout_s
        self._phases.enter("launch")
        self._process = EngineProcess(
            launch.argv,
            child_environment(launch.command.env),
            on_line=self._take_line,
            secrets=() if launch.api_key is None else (launch.api_key,),
            grace_s=launch.grace_s,
        )
        if launch.head_address is None:
            self._wait_until_ready(deadline_s)
            self._try_out()
        else:
            self.startup.note(f"part of the engine whose API is on {launch.head_address}")
        self._phases.close()
        self.is_ready = True
        self.startup.ready()

    def _wait_until_ready(self, deadline_s: float) -> None:
        while True:
            self._check_alive()
            if self._status("/health") == 200 and self._status("/v1/models") == 200:
                return
            if time.monotonic() > deadline_s:
                limit = f"was not ready within {self.launch.start_timeout_s:g} s"
                raise self._lost(f"{limit}: allow more with --start-timeout, or see what it did last")
            self._stop.wait(POLL_S)

    def _watch(self) -> None:
        """Watch until the engine is lost or `close` is called. /health may fail while the process lives."""
        well_s = looked_s = time.monotonic()
        while not self._stop.wait(POLL_S):
            self._check_alive()
            now_s = time.monotonic()
            if self.launch.head_address is not None or now_s - looked_s < HEALTH_S:
                continue
            looked_s = now_s
            if self._status("/health") == 200:
                well_s = time.monotonic()
            elif now_s - well_s > UNHEALTHY_S:
                raise self._lost(f"runs, but its /health has failed for {UNHEALTHY_S:g} s")

    # ---- warm-up and checks

    def _try_out(self) -> None:
        try:
            self._phases.enter("warm")
            usage = self._warm()
            self._phases.enter("verify")
            self._verify(usage)
        except Unanswered:
            self._stop.wait(EXIT_S)
            self._check_alive()  # an exit code says more than a broken connection
            raise

    def _warm(self) -> Mapping[str, object]:
        """Request one short answer, so that no client waits for compilation; return its token usage."""
        body = {"model": self.launch.name, "prompt": "One, two, three, four,", "max_tokens": WARM_TOKENS}
        body["temperature"] = 0
        status, answer = self._ask("POST", "/v1/completions", body, WARM_S)
        found = as_object(answer)
        choices, usage = found.get("choices"), found.get("usage")
        if status != 200 or not isinstance(choices, list) or not choices or not isinstance(usage, dict):
            said = " ".join(answer.decode("utf-8", "replace").split())[:500] or "nothing"
            raise LaunchError(f"{self.title} starts, but does not answer: HTTP {status}, {said}")
        return usage

    def _verify(self, usage: Mapping[str, object]) -> None:
        if not usage.get("completion_tokens"):
            raise LaunchError(f"{self.title} starts, but its first answer is empty: the model is broken.")
        self._check_name()
        self._check_version()
        drafts = ", with drafts" if self.launch.has_drafter and self._has_drafted() else ""
        kernels = f"; FP4 kernels, {', '.join(self.fp4_kernels)}" if self.fp4_kernels else ""
        self.startup.note(f"{usage['completion_tokens']} tokens{drafts}{kernels}")

    def _has_drafted(self) -> bool:
        """Return whether the engine's counters show drafts for the first answer; warn if not."""
        engine = self.launch.command.engine
        status, body = self._ask("GET", "/metrics")
        counters = [
            value
            for name, _, value in samples(body.decode("utf-8", "replace"))
            if name.startswith(_SPECULATION[engine]) and not name.endswith("_created")
        ]
        why = None
        if status != 200:
            why = f"{self.title} has no /metrics (HTTP {status}): it is unknown if it drafts."
        elif not counters:
            why = f"a drafter was requested, but {self.title} counts no drafts: it runs without one."
        elif not any(counters) and engine == "vllm":  # SGLang updates its counters a little later
            why = f"{self.title} has a drafter, but drafted nothing for a first answer."
        if why is not None:
            self.startup.warn(why)
        return why is None

    def _check_name(self) -> None:
        status, body = self._ask("GET", "/v1/models")
        cards = as_object(body).get("data")
        found = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        mine = [card for card in found if card.get("id") == self.launch.name]
        if not mine:
            names = ", ".join(f"'{card.get('id')}'" for card in found) or "nothing"
            raise LaunchError(
                f"{self.title} serves {names} (HTTP {status}), but was asked for '{self.launch.name}': "
                "another server may have its port."
            )
        length = mine[0].get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None

    def _check_version(self) -> None:
        for path in ("/version", "/get_server_info"):
            status, body = self._ask("GET", path)
            version = as_object(body).get("version") if status == 200 else None
            if isinstance(version, str):
                self.version = version
                break
        asked = self.launch.command.version
        # The first two numbers must agree: 0.33.1 takes the flags of 0.33.
        if self.version is not None and self.version.split(".")[:2] != asked.split(".")[:2]:
            flags = f"its flags were written for {asked}: set --engine-version"
            self.startup.warn(f"this is {self.title} {self.version}, and {flags}.")

    # ---- the engine

    def _check_alive(self) -> None:
        assert self._process is not None
        if self._stop.is_set():
            raise LaunchError("told to end")
        code = self._process.exit_code
        if code is not None:
            self._process.wait_output(ASK_S)
            when = "" if self.is_ready else " before it was ready"
            raise self._lost(f"{shown_exit(code)}{when}")

    def _lost(self, why: str, kind: type[LaunchError] = LaunchError) -> LaunchError:
        """Return an error that says why the engine is lost, with its last lines."""
        lines = self.last_lines()
        shown = f"Its last lines: {' | '.join(lines)}" if lines else "It said nothing."
        return kind(f"{self.title} {why}. {shown}")

    def _take_line(self, line: str) -> None:
        self._on_line(line)
        if is_error(line):
            output_log.warning("%s: %s", self.title, line)
        if self.is_ready:
            return
        kernel = read_fp4_kernel(line)
        if kernel is not None and kernel not in self.fp4_kernels:  # every worker logs it
            self.fp4_kernels.append(kernel)
        if is_fp4_fallback(line) and FALLBACK not in self.startup.warnings:
            self.startup.warn(FALLBACK)
        sign = read_sign(self.launch.command.engine, line)
        if sign is not None:
            self._phases.take(sign)

    def _status(self, path: str) -> int | None:
        """Return the HTTP status of a path; None if there is no answer."""
        try:
            return self._ask("GET", path)[0]
        except Unanswered:
            return None

    def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None, timeout_s: float = ASK_S
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.launch.command.port, timeout=timeout_s)
        headers = {**self.headers, "content-type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            why = f"does not answer {path} ({error or type(error).__name__})"
            raise self._lost(why, Unanswered) from None
        finally:
            connection.close()
