"""Another engine as a process: its output, and that nothing of it is left behind."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from blockdraft.errors import SettingsError
from blockdraft.launch.installed import find_engine
from blockdraft.launch.process import EngineProcess, shown_exit
from tests.launch.golden import machine_with
from tests.server.stub_install import install_stub, is_alive, write_program

PATIENCE_S = 20
# Writes the ids of its processes, one of which is in a session of its own, and then waits.
FAMILY = """
import os, signal, subprocess, sys, time
{before}
child = [sys.executable, "-c", "import signal, time; {child}; print(1, flush=True); time.sleep(600)"]
found = [subprocess.Popen(child, start_new_session=apart, stdout=subprocess.PIPE) for apart in (False, True)]
for one in found:
    one.stdout.readline()
print("pids", os.getpid(), *(one.pid for one in found), flush=True)
{after}
"""


@pytest.fixture
def start():
    started = []

    def run(program, **options):
        lines = []
        argv = [sys.executable, "-c", textwrap.dedent(program)]
        process = EngineProcess(argv, os.environ, on_line=lines.append, **options)
        process.lines = lines
        started.append(process)
        return process

    yield run
    for process in started:
        process.close()


def wait_for(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def family(process):
    line = wait_for(lambda: next((line for line in process.lines if line.startswith("pids")), None))
    return [int(word) for word in line.split()[1:]]


def test_output_comes_in_lines_without_colours_bars_and_secrets(start):
    program = r"""
    import sys
    sys.stdout.write("\x1b[36mone\x1b[0m\r\nbar:  50%|##|\rbar: 100%|####|\n")
    sys.stdout.write("the key is s3cret\n\xe9 and an end")
    """
    process = start(program, secrets=["s3cret"])
    wait_for(lambda: process.exit_code is not None)
    process.wait_output(PATIENCE_S)
    assert process.lines == ["one", "bar:  50%|##|", "bar: 100%|####|", "the key is ***", "é and an end"]
    assert process.last_lines(3) == ["one", "the key is ***", "é and an end"]
    assert process.last_lines(1) == ["é and an end"]
    process = start("import sys; sys.stdout.write('x' * 300_000)")  # must not fill the memory
    wait_for(lambda: process.exit_code is not None)
    process.wait_output(PATIENCE_S)
    assert [len(line) for line in process.last_lines(5)] == [4000]


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import sys; sys.exit(7)", 7, "ended with code 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
    ],
)
def test_exit_codes_are_told(start, program, code, words):
    process = start(program)
    assert wait_for(lambda: (found := process.exit_code) is not None and (found,)) == (code,)
    assert shown_exit(code) == words


def test_a_program_that_is_not_there(start):
    process = EngineProcess(["/nowhere/vllm"], os.environ, on_line=lambda line: None)
    wait_for(lambda: process.exit_code is not None)
    process.close()
    assert process.exit_code == 127
    assert "cannot start '/nowhere/vllm'" in process.last_lines(1)[0]


def test_the_end_of_a_good_engine_is_its_own(start):
    before = "signal.signal(signal.SIGTERM, lambda *_: (print('good bye', flush=True), sys.exit(0)))"
    process = start(FAMILY.format(before=before, child="0", after="time.sleep(600)"))
    pids = family(process)
    process.close()
    assert process.exit_code == 0
    assert process.lines[-1] == "good bye"
    assert not any(map(is_alive, pids))


def test_one_that_is_deaf_is_killed_with_all_it_started(start):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = FAMILY.format(before=deaf, child=deaf, after="time.sleep(600)")
    process = start(program, grace_s=0.3)
    pids = family(process)
    process.close()
    assert process.exit_code == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_workers_do_not_outlive_an_engine_that_crashes(start):
    process = start(FAMILY.format(before="", child="0", after="os.kill(os.getpid(), signal.SIGKILL)"))
    pids = family(process)
    wait_for(lambda: process.exit_code is not None)
    assert not any(map(is_alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="a death signal is Linux's")
def test_an_engine_dies_even_with_its_keeper(start):
    process = start(FAMILY.format(before="", child="0", after="time.sleep(600)"))
    pids = family(process)
    os.kill(process._process.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pids[0]))
    for pid in pids[1:]:  # out of anybody's reach now
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_in_a_terminal_does_not_reach_it(start):
    """It is for the server, which drains before it ends the engine."""
    process = start(FAMILY.format(before="", child="0", after="time.sleep(600)"))
    pid = family(process)[0]
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert os.getpgid(pid) != os.getpgid(0)


# ---- where it is installed


def test_an_engine_is_found_on_the_path_by_its_programs_python(tmp_path, monkeypatch):
    python = install_stub(tmp_path / "engine", version="0.32.0+cpu")
    script = tmp_path / "vllm"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = find_engine("vllm")
    assert (found.python, found.version) == (python, "0.32.0+cpu")
    assert found.argv(["vllm", "serve", "m"]) == [str(python.with_name("vllm")), "serve", "m"]
    assert found.argv(["python3", "-m", "x"]) == [str(python), "-m", "x"]
    python.rename(tmp_path / "vllm-python")  # a name on PATH, without its folder
    assert find_engine("vllm", "vllm-python").version == "0.32.0+cpu"


def test_one_that_is_nowhere_is_named_with_what_to_do(monkeypatch, tmp_path):
    write_program(tmp_path / "sglang", "exit 1")  # no script of Python's
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SettingsError, match=r"SGLang is not installed: run '.*install sglang==.*--engine-python"
    ):
        find_engine("sglang")


@pytest.mark.parametrize(("card", "is_built"), [("gb10", True), ("h200", False)])
def test_on_a_spark_the_build_for_its_card_is_named_first(monkeypatch, tmp_path, card, is_built):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("blockdraft.launch.installed.read_machine", lambda: machine_with(card))
    for engine, expected in (("vllm", is_built), ("sglang", False)):
        with pytest.raises(SettingsError, match="--dry-run docker") as refused:
            find_engine(engine)
        assert ("--target spark" in str(refused.value)) == expected


def test_a_folder_of_that_name_is_not_the_engine(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingsError, match="vLLM is not installed"):
        find_engine("vllm", str(Path(sys.executable)))
