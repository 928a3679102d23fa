"""`blockdraft bench` from end to end: against the stub, whose every figure is known, and our real server."""

import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from blockdraft.bench import fleet, served, session
from blockdraft.bench.report import load_report
from blockdraft.cli import bench as bench_command
from blockdraft.cli import main as main_module
from blockdraft.cli.main import main
from blockdraft.kernels.cpu import why_no_llvm
from tests.bench.stub import MODEL, OWN_ROUTES, Script, Stub
from tests.server.asking import listening
from tests.server.pair import NAME, PAIR, app_over, models
from tests.server.stub_install import install_stub

ROOT = Path(__file__).parents[2]
HAS_KERNELS = why_no_llvm(torch.float32, torch.device("cpu")) is None
KEY = "sk-very-secret"
SUFFIXES = (".json", ".md", ".html")
SMALL = ("--workload", "qa", "--num-prompts", "4", "--max-tokens", "8")
NO_HEADROOM = ("--no-headroom",)


@pytest.fixture
def stub():
    """One whose requests can do without speculation."""
    stub = Stub(owner="blockdraft", routes=dict(OWN_ROUTES))
    with stub.running():
        yield stub


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, quick_blocks):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLOCKDRAFT_API_KEY", raising=False)


def bench(*argv, out="x"):
    return main(["bench", *map(str, argv), *NO_HEADROOM, "--out", out])


def report(out="x"):
    assert all(Path(out + suffix).stat().st_size > 500 for suffix in SUFFIXES)
    return load_report(f"{out}.json")


def told(capsys):
    """The one line that says what is wrong."""
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    (line,) = [line for line in said.err.splitlines() if line.startswith("blockdraft: error:")]
    return line.removeprefix("blockdraft: error: ")


def is_plain(body):
    return not body.get("speculative", True)


# ---- the figures


BUSY = 0.4  # how far times may be off while other programs run


def test_every_figure_is_the_stubs(stub, capsys):
    """Each answer has 18 tokens in 6 deltas: 100 ms to the first and 100 ms for the rest, or 300 ms plain.

    A busy machine takes longer than the stub was told to.
    """
    gc.collect()
    gc.freeze()  # times are what it is about
    stub.script = lambda number, body: Script(
        ttft_s=0.1,
        gap_s=0.06 if is_plain(body) else 0.02,
        num_chunks=6,
        tokens_per_chunk=3,
        histogram=(1, 1, 1, 2),
        prompt_tokens=40,
    )
    assert bench(stub.url, "--workload", "qa", "--concurrency", "4", "--max-tokens", "64") == 0
    found = report()
    cell, plain = found["cells"]
    for one, rest_s in ((cell, 0.1), (plain, 0.3)):
        assert (one["num_requests"], one["num_failed"], one["num_prompts"]) == (16, 0, 8)
        assert (one["tokens_out"], one["tokens_in"], one["cached_tokens"]) == (16 * 18, 16 * 40, 0)
        assert one["ttft_s"]["p50"] == pytest.approx(0.1, rel=BUSY)
        assert one["tpot_s"]["p50"] == pytest.approx(rest_s / 17, rel=BUSY)
        assert one["itl_s"]["p50"] == pytest.approx(rest_s / 5, rel=BUSY)
        assert one["itl_s"]["count"] == 16 * 5
        assert one["latency_s"]["p50"] == pytest.approx(0.1 + rest_s, rel=BUSY)
        assert one["busy_s"] == pytest.approx(4 * (0.1 + rest_s), rel=BUSY)
        assert one["tokens_per_s"]["value"] == pytest.approx(4 * 18 / (0.1 + rest_s), rel=BUSY)
        assert one["request_tokens_per_s"]["p50"] == pytest.approx(18 / (0.1 + rest_s), rel=BUSY)
        assert one["send_lag_s"]["p50"] < 0.05
        low, high = one["tokens_per_s"]["interval"]
        assert low <= one["tokens_per_s"]["value"] <= high
    drafts = cell["speculation"]
    assert (drafts["acceptance"], drafts["steps"], drafts["drafted"]) == ("answers", 80, 240)
    assert drafts["committed_per_step"]["value"] == pytest.approx(2.8)
    assert drafts["acceptance_by_position"] == pytest.approx([0.8, 0.6, 0.4])
    assert plain["speculation"]["acceptance"] == "none"
    (pair,) = found["pairs"]
    assert pair["speedup"]["tokens_per_s"]["value"] == pytest.approx(0.4 / 0.2, rel=BUSY)
    assert pair["speedup"]["tpot"]["value"] == pytest.approx(3.0, rel=BUSY)
    assert pair["verdict"] == "pays"
    assert pair["agreement"]["first_turns"]["num_equal"] == 16
    assert found["output_throughput"] == cell["tokens_per_s"]["value"]  # vLLM's name for it
    assert found["warmup"]["num_requests"] == 10
    said = capsys.readouterr()
    assert "Speculation pays: qa at 4." in said.out
    assert re.search(r"qa +4 .* 2\.80 ", said.out)
    assert "written: x.json" in said.err
    gc.unfreeze()


def test_the_report_says_what_was_measured_and_how(stub):
    argv = ("--concurrency", "2", "--temperature", "0,0.5", "--depth", "0,50", "--ignore-eos")
    assert bench(stub.url, *SMALL, *argv) == 0
    found = report()
    assert found["endpoint"]["kind"] == "blockdraft"
    assert (found["endpoint"]["version"], found["endpoint"]["model"]) == ("1.2.3", MODEL)
    assert (found["endpoint"]["drafter"], found["endpoint"]["drafter_hash"]) == ("stub-drafter", "0123")
    assert found["endpoint"]["drafter_kind"] == "DFlash2"
    assert found["baseline"]["url"] == stub.url
    assert found["machine"]["num_cpus"] > 0
    assert found["startup"] == []
    assert found["options"]["max_tokens"] == 8
    assert found["options"]["ignores_eos"] is True
    assert found["notes"][0].startswith("qa: 4 prompts, built in, blockdraft ")
    keys = {(one["key"]["depth"], one["key"]["temperature"], one["arm"]) for one in found["cells"]}
    assert len(keys) == len(found["cells"]) == 8
    assert {one["key"]["concurrency"] for one in found["cells"]} == {2}


def test_failures_are_counted_and_are_no_trouble(stub, capsys):
    """Two of the plain arm's eight fail; the exit code says that there are figures."""

    def script(number, body):
        if number >= 6 and is_plain(body) and number % 4 == 0:
            return Script(status=500, error={"error": {"message": "out of pages"}})
        return Script(num_chunks=5, histogram=(0, 2))

    stub.script = script
    assert bench(stub.url, "--workload", "qa", "--max-tokens", "8") == 0
    cell, plain = report()["cells"]
    assert (cell["num_failed"], plain["num_requests"], plain["num_failed"]) == (0, 8, 2)
    assert plain["tokens_out"] == 6 * 5
    assert plain["errors"] == [{"kind": "HTTP 500", "count": 2, "example": "HTTP 500: out of pages"}]
    assert "qa at 1, plain: 2 of 8 requests failed: HTTP 500 (2)." in " ".join(
        capsys.readouterr().out.split()
    )


def test_json_is_all_that_is_printed_and_out_none_writes_nothing(stub, capsys, tmp_path):
    assert bench(stub.url, *SMALL, "--json", out="none") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "blockdraft-bench/1"
    assert list(tmp_path.iterdir()) == []


def test_files_are_named_by_the_time_or_by_out(stub, tmp_path):
    assert main(["bench", stub.url, *SMALL, *NO_HEADROOM]) == 0
    assert bench(stub.url, *SMALL, out="deep/er/y.json") == 0
    report("deep/er/y")
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert [re.sub(r"\d{8}-\d{6}", "TIME", name) for name in names] == [
        f"blockdraft-bench-TIME{suffix}" for suffix in sorted(SUFFIXES)
    ]


def test_a_table_decides_what_no_flag_says(stub, capsys):
    argv = ("--workload", "qa,prose", "--concurrency", "1,2", "--num-prompts", "2")
    assert bench(stub.url, "--table", "spark", *argv) == 0
    found = report()
    assert [one["key"]["concurrency"] for one in found["cells"]] == [1, 1, 2, 2] * 2
    assert {one["asked"]["max_tokens"] for one in found["cells"]} == {512}  # the table's
    assert [len(one["runs"]) for one in found["cells"]] == [3] * 8
    assert [one["num_requests"] for one in found["cells"]] == [6, 6, 24, 24] * 2
    for said in (capsys.readouterr().out, Path("x.md").read_text(), Path("x.html").read_text()):
        assert "By prompt style, one stream" in said
        assert len(re.findall("median per request", said)) == 2  # a table for each class
    assert "AEON-7/vllm-dflash" in " ".join(found["notes"])


PAGE = "<!DOCTYPE html>\n<html><canvas></canvas></html>"


@pytest.mark.parametrize(
    ("answer", "kept", "said"),
    [
        (f"Here it is:\n```html\n{PAGE}\n```\nOpen it.", f"{PAGE}\n", "written: x-page.html\n"),
        (f"Sure.\n{PAGE} Enjoy.", PAGE, "written: x-page.html\n"),
        ("```html\n<!DOCTYPE html>\n<html><can", "<!DOCTYPE html>\n<html><can", "which is cut: give more"),
        ("I would rather not.", None, "no page was kept: no answer has one."),
    ],
)
def test_the_page_of_a_table_of_one_page_is_kept(capsys, answer, kept, said):
    stub = Stub(Script(num_chunks=1, text=answer))
    with stub.running():
        assert bench(stub.url, "--table", "page") == 0
    told = capsys.readouterr()
    assert said in told.err
    assert re.search(r"A whole page *\n", told.out)
    assert "canvas" in stub.bodies[-1]["messages"][-1]["content"]
    page = Path("x-page.html")
    assert (page.read_text() if page.exists() else None) == kept
    assert report()["cells"][0]["asked"]["max_tokens"] == 8192


def test_the_baseline_is_a_second_server():
    first = Stub(Script(num_chunks=4, gap_s=0.005, histogram=(0, 0, 2)))
    second = Stub(Script(num_chunks=4, gap_s=0.03))
    with first.running(), second.running():
        assert bench(first.url, *SMALL, "--baseline", second.url) == 0
    assert len(first.bodies) == len(second.bodies) == 4 + 2 + 1
    found = report()
    assert (found["endpoint"]["url"], found["baseline"]["url"]) == (first.url, second.url)
    assert found["pairs"][0]["verdict"] == "pays"
    assert found["pairs"][0]["agreement"]["first_turns"]["num_equal"] == 4
    assert not any("speculative" in body for body in second.bodies)  # vLLM would not know it


@pytest.mark.parametrize("has_flag", [False, True])
def test_without_a_switch_or_with_no_baseline_there_is_one_arm(stub, has_flag):
    if not has_flag:
        stub.owner = "vllm"
    assert bench(stub.url, *SMALL, *(["--no-baseline"] if has_flag else [])) == 0
    found = report()
    assert [one["arm"] for one in found["cells"]] == ["speculative"]
    assert (found["baseline"], found["pairs"]) == (None, [])
    assert found["cells"][0]["speculation"]["acceptance"] == "unknown"


def test_a_server_that_always_drafts_is_told_how_to_get_a_speedup():
    counters = "vllm:spec_decode_num_drafts_total 1\n"
    stub = Stub(routes={"/metrics": counters})
    with stub.running():
        assert bench(stub.url, *SMALL) == 0
        assert any("--arms plain,speculative" in note for note in report()["notes"])
        assert bench(stub.url, *SMALL, "--no-baseline") == 0
    assert not any("--arms" in note for note in report()["notes"])


def test_our_server_without_a_drafter_is_the_plain_arm_alone(stub, capsys):
    stub.routes["/events"] = 'data: {"engine": {"draft": null}}\n\n'
    assert bench(stub.url, *SMALL) == 0
    assert [one["arm"] for one in report()["cells"]] == ["plain"]
    assert bench(stub.url, *SMALL, "--baseline", stub.url) == 0  # two servers may be compared all the same
    assert [one["arm"] for one in report()["cells"]] == ["speculative", "plain"]


def test_a_users_own_file_a_rate_and_turns(stub, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{i} {turn}"} for turn in "abc"]} for i in range(3)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ("--workload", "mine.jsonl", "--rate", "50", "--max-turns", "2", "--num-prompts", "3")
    assert bench(stub.url, *argv, "--thinking", "off") == 0
    cell = report()["cells"][0]
    assert (cell["key"]["workload"], cell["key"]["rate"], cell["num_requests"]) == ("mine", 50.0, 6)
    assert cell["asked"]["thinking"] is False


# ---- bad input


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1: Connection refused."),
        (["ftp://x"], "'ftp://x' is not an address: write http://HOST:PORT."),
        (["URL", "--name", "gpt-9"], "has no model 'gpt-9': it serves 'stub'."),
        (["URL", "--baseline", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1: Connection refused."),
        (["URL", "URL"], "bench measures one URL"),
        (["URL", "--workload", "cod"], "unknown workload 'cod': did you mean 'code'?"),
        (["URL", "--workload", ","], "--workload is empty"),
        (["URL", "--workload", "bad.jsonl"], "bad.jsonl, line 2:"),
        (["URL", "--table", "sparc"], "unknown table 'sparc': did you mean 'spark'?"),
        (["URL", "--concurrency", "1,x"], "--concurrency '1,x' is not a list of numbers"),
        (["URL", "--concurrency", "0"], "--concurrency '0': each must be between 1 and"),
        (["URL", "--temperature", "nan"], "--temperature 'nan': each must be between 0 and 100."),
        (["URL", "--depth", "-5"], "--depth '-5': each must be between 0 and"),
        (["URL", "--num-prompts", "0"], "--num-prompts 0 is not a positive number."),
        (["URL", "--max-tokens", "-1"], "--max-tokens -1 is not a positive number."),
        (["URL", "--max-tokens", "code=0"], "--max-tokens code=0 is not a positive number."),
        (
            ["URL", "--max-tokens", "cod=9"],
            "--max-tokens names 'cod', which is not measured: use one of code, reasoning",
        ),
        (["URL", "--runs", "0"], "--runs 0 is not a positive number."),
        (["URL", "--rate", "inf"], "--rate inf is not a positive number."),
        (
            ["URL", "--rate", "2", "--concurrency", "1"],
            "--rate cannot be combined with --concurrency or --table",
        ),
        (
            ["URL", "--rate", "2", "--table", "spark"],
            "--rate cannot be combined with --concurrency or --table",
        ),
        (["URL", "--timeout", "0"], "--timeout 0.0 is not a positive number."),
        (
            ["URL", "--baseline", "URL", "--no-baseline"],
            "--baseline contradicts --no-baseline: give one of them.",
        ),
        (["URL", "--model", "x"], "--model is for our own server, not for 127.0.0.1:"),
        (["URL", "--no-graphs"], "--no-graphs is for our own server, not for 127.0.0.1:"),
        (["URL", "--engine-python", "p"], "--engine-python is for our own server, not for 127.0.0.1:"),
        (
            ["--arms", "plain,fast"],
            "--arms 'plain,fast' is unknown: give plain, speculative or plain,speculative.",
        ),
        (["--arms", "plain,plain"], "--arms 'plain,plain' is unknown: give plain, speculative or"),
        (["URL", "--arms", "plain"], "--arms starts a server for each arm and cannot use a URL"),
        (["--arms", "plain", "--start", "x {port}"], "cannot use --start"),
        (["--arms", "plain", "--also-eager"], "cannot use --also-eager"),
        (
            ["--arms", "plain,speculative", "--model", "some/model"],
            "--arms plain,speculative: no drafter is known for 'some/model': give --draft.",
        ),
        (["--also-eager", "--no-graphs"], "this server runs without graphs already; add --graphs"),
        (["URL", "--also-eager"], "--also-eager is for our own server, not for 127.0.0.1:"),
        (["URL", "--start", "x {port}"], "--start starts a server, but 127.0.0.1:"),
        (["--start", "x {port}", "--width", "4"], "--width is for our own server, not for the server of"),
        (["--start", "x {port}", "--also-eager"], "--also-eager is for our own server"),
        (["--start", "x"], "--start must contain {port}"),
        (["--start", "'x {port}"], "is not a valid command: No closing quotation."),
        (["--start", "no-such-program {port}"], "cannot start 'no-such-program': No such file or directory."),
        (["compare", "a.json"], "compare takes two reports, not 1: blockdraft bench compare A.json B.json"),
        (["compare", "bad.jsonl", "none.json"], "'bad.jsonl' is not JSON"),
        (["compare", "none.json", "none.json"], "cannot read the report 'none.json'"),
        (
            ["compare", "no-report.json", "no-report.json"],
            "'no-report.json' is not a report of blockdraft bench",
        ),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_no_file(stub, capsys, tmp_path, argv, part):
    Path("bad.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n')
    Path("no-report.json").write_text("{}")
    before = set(tmp_path.iterdir())
    argv = [stub.url if word == "URL" else word for word in argv]
    assert main(["bench", *argv]) == 2
    assert part in told(capsys)
    assert set(tmp_path.iterdir()) == before
    assert stub.bodies == []


def test_where_nothing_can_be_written_nothing_is_measured(stub, capsys):
    Path("file").write_text("x")
    assert bench(stub.url, *SMALL, out="file/x") == 2
    assert told(capsys).startswith("--out: cannot write 'file")
    Path("y.md").mkdir()
    assert bench(stub.url, *SMALL, out="y") == 2
    assert told(capsys) == "--out: cannot write 'y.md': Is a directory."
    assert stub.bodies == []


@pytest.mark.parametrize("is_flag", [True, False])
def test_the_key_is_in_no_output_and_no_file(capsys, tmp_path, monkeypatch, is_flag):
    """Also where the server repeats it, in every answer, and where every answer is an error."""
    if not is_flag:
        monkeypatch.setenv("BLOCKDRAFT_API_KEY", KEY)
    stub = Stub(Script(status=403, error={"error": {"message": f"{KEY} may not"}}), api_key=KEY)
    with stub.running():
        assert bench(stub.url, *SMALL, *(["--api-key", KEY] if is_flag else [])) == 2
    said = capsys.readouterr()
    assert "every request failed: HTTP 403: *** may not" in said.err
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert len(texts) == 3
    assert not any(KEY in text for text in (said.out, said.err, *texts))


def test_the_key_is_not_repeated_from_a_servers_log(capsys):
    command = f"{shlex.quote(sys.executable)} -c 'import sys; sys.exit(\"args: {KEY} {{port}}\")'"
    assert bench("--start", command, "--api-key", KEY, "--start-timeout", "20") == 2
    assert re.search(r"ended with code 1 before it was ready: args: \*\*\* \d+$", told(capsys))


def test_a_password_in_the_address_is_shown_nowhere(stub, capsys, tmp_path):
    url = stub.url.replace("//", "//user:hunter2@")
    assert bench(url, *SMALL) == 0
    assert bench(url, "--model", "x") == 2
    said = capsys.readouterr()
    assert not any(
        "hunter2" in text for text in (said.out, said.err, *(p.read_text() for p in tmp_path.iterdir()))
    )


def test_the_report_says_what_the_client_itself_can_read(stub, capsys, monkeypatch):
    monkeypatch.setattr(fleet, "BURST_S", 0.1)
    assert main(["bench", stub.url, *SMALL, "--num-prompts", "2", "--no-baseline", "--out", "x"]) == 0
    (one,) = report()["generator"]
    assert (one["concurrency"], one["num_processes"]) == (1, 1)
    assert one["events_per_s"] > 1000
    assert 0 < one["used"] < 1
    said = capsys.readouterr()
    assert "The load generator itself can read, in events/s: " in " ".join(said.out.split())
    assert "client" in said.out


# ---- early ends


def test_a_server_that_dies_midway_leaves_files_and_exit_code_2(stub, capsys):
    def script(number, body):
        if number == 25:  # in the second cell
            threading.Thread(target=stub.die).start()
            return Script(ttft_s=30)
        return Script(num_chunks=2)

    stub.script = script
    assert bench(stub.url, "--workload", "qa,code", "--max-tokens", "8") == 2
    said = capsys.readouterr()
    host = stub.url.removeprefix("http://")
    assert f"blockdraft: error: the server at {host} has gone: " in said.err
    found = report()
    assert [(one["key"]["workload"], one["num_failed"]) for one in found["cells"][:2]] == [("qa", 0)] * 2
    last = found["cells"][2]
    assert last["key"]["workload"] == "code"
    assert last["num_requests"] + last["num_not_ended"] + last["num_not_sent"] == 4
    assert 0 < last["num_failed"] < 4
    assert any(note.startswith(f"ended early: the server at {host} has gone") for note in found["notes"])


@contextmanager
def running(*argv):
    command = [sys.executable, "-m", "blockdraft", "bench", *map(str, argv), *NO_HEADROOM]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGINT, ["--concurrency", "40", "--processes", "2"]),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_keeps_its_files(stub, number, flags):
    stub.script = Script(ttft_s=0.05, num_chunks=2)
    asked = ("--workload", "qa", "--num-prompts", "9000" if flags else "500")
    with running(stub.url, *asked, *flags, "--out", "x") as process:
        wait_for(lambda: len(stub.bodies) > (135 if flags else 9))
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "written: x.json" in err
    found = report()
    assert found["cells"][0]["num_requests"] - found["cells"][0]["num_failed"] > 0
    assert "ended early: interrupted: these are the results so far." in found["notes"]
    assert "interrupted" in out


def test_files_are_written_though_nobody_reads_the_table(stub, monkeypatch):
    def closed():
        raise BrokenPipeError

    monkeypatch.setattr(bench_command, "_stdout", closed)
    monkeypatch.setattr(main_module, "_forget_output", lambda: None)
    assert bench(stub.url, *SMALL) == main_module.EXIT_BROKEN_PIPE
    report()


# ---- servers that it starts


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_another_server_is_started_measured_and_ended(monkeypatch, capsys):
    """Its log names its FP4 kernels."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said = "Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM"
    command = f"sh -c 'echo {said}; exec {shlex.quote(sys.executable)} -m tests.bench.stub {{port}}'"
    assert bench("--start", command, *SMALL) == 0
    found = report()
    (start,) = found["startup"]
    assert (start["label"], start["phases"]) == ("sh", [])
    assert 0.05 < start["ready_s"] < 20
    assert start["first_ttft_s"] == found["warmup"]["first_ttft_s"] > 0
    assert found["endpoint"]["fp4_kernels"] == ["linear: Marlin (MARLIN)"]
    shown = capsys.readouterr()
    assert "FP4 kernels: linear: Marlin (MARLIN)." in shown.out
    assert "starting sh" in shown.err
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found["endpoint"]["url"] + "/v1/models", timeout=5)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_server_that_does_not_come_up_is_ended_with_its_children(capsys):
    Path("s.sh").write_text("sleep 100 & echo $! > child; echo loading...; echo $$ > parent; sleep 100")
    assert bench("--start", "sh s.sh {port}", "--start-timeout", "1") == 2
    assert told(capsys) == "the server was not ready within --start-timeout: loading..."
    wait_for(lambda: not any(is_alive(Path(name).read_text().strip()) for name in ("child", "parent")))


def test_a_signal_that_comes_while_the_server_is_being_started_leaves_nothing_behind(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # where a handler of Python's would run

    monkeypatch.setattr(served.subprocess, "Popen", Interrupted)
    assert bench("--start", "sh -c 'sleep 100' {port}") == 130
    (process,) = started
    try:
        assert process.poll() is not None
    finally:
        process.kill()


# ---- our real server, over the tiny pair


# On so small a pair it is chance whether drafts pay: the width has to be said.
PAIR_FLAGS = ("--model", PAIR / "target", "--draft", PAIR / "draft", "--width", 8, "--device", "cpu")
PAIR_FLAGS += ("--dtype", "float64")
PAIR_LOAD = ("--workload", "qa", "--num-prompts", "4", "--max-tokens", "24")


@pytest.fixture(scope="module")
def real_url():
    with app_over(models()) as app, listening(app) as (host, port):
        yield f"http://{host}:{port}"


def check_pair(found, num):
    """Lossless, and drafts are accepted."""
    (pair,) = found["pairs"]
    turns = pair["agreement"]["first_turns"]
    assert turns["num_equal"] == turns["num_compared"] == num
    speculative, plain = found["cells"]
    assert speculative["num_failed"] == plain["num_failed"] == 0
    assert speculative["tokens_out"] == plain["tokens_out"] > 0
    assert speculative["speculation"]["acceptance"] == "answers"
    assert speculative["speculation"]["committed_per_step"]["value"] > 1
    assert plain["speculation"]["acceptance"] == "none"
    assert speculative["cached_tokens"] == plain["cached_tokens"] == 0
    assert found["warnings"] == [] or all("late" in line for line in found["warnings"])


@pytest.mark.slow
def test_our_own_server_is_started_eager_and_not_and_paired_with_itself(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", KEY)  # of the server and of the client
    assert bench(*PAIR_FLAGS, *PAIR_LOAD, "--also-eager") == 0
    found = report()
    check_pair(found, num=4)
    usual, eager = found["startup"]
    assert (eager["label"], usual["label"]) == ("blockdraft serve --no-graphs", "blockdraft serve")
    for start, captures in ((eager, []), (usual, ["capture"] if HAS_KERNELS else [])):
        phases = {phase["name"]: phase["seconds"] for phase in start["phases"]}
        expected = ["process and imports", "fetch", "load", "allocate", *captures, "warm", "verify"]
        assert list(phases) == expected
        assert sum(phases.values()) == pytest.approx(start["ready_s"], abs=0.01)
        assert phases["process and imports"] > 0
        assert 0 < start["first_ttft_s"] <= start["first_latency_s"]  # one step may be all of an answer
    assert usual["first_ttft_s"] == found["warmup"]["first_ttft_s"]
    assert [one["arm"] for one in found["graph_gains"]] == ["speculative", "plain"]
    assert all(one["gain"]["tokens_per_s"]["value"] > 0 for one in found["graph_gains"])
    assert found["endpoint"]["drafter_hash"]
    assert found["endpoint"]["drafter_kind"] == "DFlash"
    said = capsys.readouterr()
    assert "Greedy answers with and without speculation: 4 of 4 equal." in said.out
    assert "Warm, without CUDA graphs and with them" in said.out
    assert not any(
        KEY in text for text in (said.out, said.err, *(Path(f"x{end}").read_text() for end in SUFFIXES))
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.slow  # a busy machine makes its three times unclear
def test_arms_of_another_engine_are_started_measured_and_ended_in_turn(monkeypatch, capsys, tmp_path):
    """The stand-in for vLLM takes three times as long without a drafter."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STUB", "free")
    monkeypatch.setenv("STUB_SAYS", "Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM\n")
    monkeypatch.setenv("STUB_PIDS", str(tmp_path / "pids"))
    python = install_stub(tmp_path / "engine")
    engine = ("--engine", "vllm", "--engine-python", python, *PAIR_FLAGS[:6])
    assert bench(*engine, "--arms", "plain,speculative", *PAIR_LOAD) == 0
    found = report()
    assert [start["label"] for start in found["startup"]] == [
        "blockdraft serve, plain",
        "blockdraft serve, speculative",
    ]
    assert [one["arm"] for one in found["cells"]] == ["plain", "speculative"]
    assert (found["endpoint"]["is_speculative"], found["baseline"]["is_speculative"]) == (True, False)
    (pair,) = found["pairs"]
    assert pair["verdict"] == "pays"
    assert pair["speedup"]["tpot"]["value"] == pytest.approx(3.0, rel=0.4)
    assert "one server after the other, plain,speculative: changes" in " ".join(found["notes"])
    said = capsys.readouterr().out
    assert "Speculation pays: qa at 1." in said
    assert "FP4 kernels: linear: CUTLASS (FlashInferCutlassNvFp4LinearKernel)." in said
    assert found["endpoint"]["drafter"].endswith("draft")
    wait_for(lambda: not any(is_alive(pid) for pid in (tmp_path / "pids").read_text().split()))


@pytest.mark.slow
def test_an_arm_that_does_not_start_leaves_the_other_one(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started = session.Session._started

    def fails_later(self, label, flags):
        return started(self, label, [*flags, "--no-such-flag"] if "speculative" in label else flags)

    monkeypatch.setattr(session.Session, "_started", fails_later)
    assert bench(*PAIR_FLAGS, *PAIR_LOAD, "--arms", "plain,speculative") == 2
    assert "the speculative arm is missing: the server ended with code 2" in told(capsys)
    assert [one["arm"] for one in report()["cells"]] == ["plain"]


def test_a_failed_start_says_why(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert bench("--model", "no/such/folder", "--start-timeout", "60") == 2
    line = told(capsys)
    assert "the server ended with code 2 before it was ready" in line
    assert "no/such/folder" in line


@pytest.mark.slow  # tests/bench/test_client.py measures the same server in every run
def test_a_report_of_the_real_server_compares_with_itself(real_url, capsys):
    assert bench(real_url, *PAIR_LOAD) == 0
    found = report()
    check_pair(found, num=4)
    assert found["endpoint"]["model"] == NAME
    capsys.readouterr()
    assert main(["bench", "compare", "x.json", "x.json"]) == 0
    said = capsys.readouterr().out
    assert "NOT COMPARABLE" not in said
    assert re.search(r"qa.*1.*speculative", said)
    assert main(["bench", "compare", "x.json", "x.json", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert (len(comparison["matches"]), comparison["only_a"], comparison["only_b"]) == (2, [], [])
