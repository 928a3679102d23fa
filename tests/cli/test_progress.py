"""What a terminal shows of a start, and what stays there."""

import argparse
import io
import logging
import re
import socket
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from blockdraft.cli import server_terminal
from blockdraft.cli.progress import draw
from blockdraft.phases import PHASES, StartProgress
from blockdraft.server.http import lifetime

SENTENCE = "speculation: on, 2 tokens tried per step to begin with; expected 1.3x (1.2x on qa)"


def started():
    startup = StartProgress()
    for name in PHASES:
        with startup.phase(name):
            startup.note(f"[{name}] a long story " * 12)
    startup.tell_speculation(SENTENCE)
    startup.warn("the machine was busy")
    startup.ready()
    return startup


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_name_of_a_phase_is_never_cut(width):
    file = io.StringIO()
    draw(started(), Console(file=file, force_terminal=True, width=width, color_system=None))
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", " ", file.getvalue())
    lines = [line for line in shown.splitlines() if "a long" in line]
    names = {word for line in lines for word in line.split() if word in PHASES}
    assert names == set(PHASES)
    assert all(line.rstrip().endswith("…") for line in lines)


def test_what_the_start_found_stays_under_the_line_that_says_ready(capsys, monkeypatch):
    class Server:
        def __init__(self, *_, **__): ...

        def serve_on(self, listener, *, show_start, on_ready):
            show_start()
            on_ready()

    monkeypatch.setattr(lifetime, "DrainingServer", Server)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    args = argparse.Namespace(json_logs=False, log_level="info", drain_timeout=1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = SimpleNamespace(startup=started())
        server_terminal.serve_until_told(args, service, None, None, name="x", listener=listener)
    shown = capsys.readouterr()
    assert shown.out.startswith("'x' is ready: ")
    assert shown.err.rstrip().endswith(f"{SENTENCE}\nwarning: the machine was busy")
    assert shown.err.count("warning: ") == 1


def test_a_warning_is_logged_as_one(monkeypatch, caplog):
    monkeypatch.setattr("blockdraft.server.http.logs.set_up", lambda **_: None)
    report = server_terminal.set_up_logs(
        argparse.Namespace(json_logs=True, log_level="info", access_log=False), ()
    )
    with caplog.at_level(logging.INFO, "blockdraft"):
        StartProgress(report).warn("busy")
        report("ready in 1 s")
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [("WARNING", "busy"), ("INFO", "ready in 1 s")]
