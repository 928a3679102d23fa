"""The benchmark of a real vLLM, beside our own server on the same weights and prompts.

Optional: tests/bench/vllm_venv.py says how it is asked for. What both servers did is printed (pytest -s).
"""

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.bench.served import our_command, served
from tests.bench.vllm_models import write_default_model
from tests.bench.vllm_venv import VARIABLE, VERSION, is_wanted, vllm_python, vllm_variables

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_wanted(), reason=f"wants vLLM: set {VARIABLE}=1, or to a Python that has it"),
]
NUM_PROMPTS = 6
DRAFTER = Path(__file__).parents[2] / "blockdraft/drafters/smollm2-135m-instruct"
OURS = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def vllm():
    return vllm_python().parent / "vllm"


def vllm_command(vllm, model, *flags):
    """Without compilation, which takes minutes; float32, since some CPUs have no bfloat16 instructions."""
    shape = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    words = [vllm, "serve", model, "--host", "127.0.0.1", "--port", "{port}", *shape, *flags]
    return shlex.join(map(str, words))


def bench(out, *flags):
    """The report of `blockdraft bench` with these flags."""
    command = [sys.executable, "-m", "blockdraft", "bench", "--out", out, *flags]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **vllm_variables(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    sys.stdout.write(done.stdout)  # the table
    assert done.returncode == 0, done.stderr
    return json.loads(out.with_suffix(".json").read_text())


@contextlib.contextmanager
def our_server(*flags):
    """Its address; it runs in a process of its own."""
    with asyncio.Runner() as runner:
        context = served(our_command(flags), "blockdraft serve", 300)
        started = runner.run(context.__aenter__())
        try:
            yield started.url
        finally:
            runner.run(context.__aexit__(None, None, None))


def assert_complete(cell):
    """Every figure that does not depend on speculation is there."""
    assert (cell["num_failed"], cell["num_not_sent"]) == (0, 0)
    assert cell["num_requests"] == cell["num_prompts"] == NUM_PROMPTS
    for name in ("ttft_s", "tpot_s", "itl_s", "latency_s", "request_tokens_per_s"):
        assert cell[name]["count"] >= NUM_PROMPTS, name
        assert cell[name]["p50"] > 0, name
    assert cell["ttft_s"]["p50"] < cell["latency_s"]["p50"]
    assert cell["tokens_per_s"]["value"] > 0


def num_equal_answers(report):
    """Greedy answers that both servers gave alike. In float32 all should be; a near tie may part one."""
    turns = report["pairs"][0]["agreement"]["first_turns"]
    assert turns["num_compared"] == NUM_PROMPTS
    return turns["num_equal"]


def test_vllm_and_ours_are_measured_alike_on_the_same_prompts(vllm, tmp_path):
    folder = write_default_model(tmp_path / "smollm2")
    with our_server("--model", str(folder), *OURS) as url:
        report = bench(
            tmp_path / "report",
            *("--start", vllm_command(vllm, folder), "--baseline", url),
            *("--workload", "qa", "--num-prompts", NUM_PROMPTS, "--max-tokens", 32),
        )
    endpoint, baseline = report["endpoint"], report["baseline"]
    assert (endpoint["kind"], endpoint["max_model_len"]) == ("vllm", 512)
    assert endpoint["version"].startswith(VERSION)
    assert (endpoint["is_metered"], endpoint["is_speculative"]) == (False, False)
    assert baseline["kind"] == "blockdraft"
    assert report["startup"][0]["ready_s"] > 1
    assert report["startup"][0]["first_ttft_s"] > 0
    assert report["warmup"]["num_failed"] == 0

    theirs, ours = report["cells"]
    for cell in (theirs, ours):
        assert_complete(cell)
    assert theirs["asked"]["prompts_hash"] == ours["asked"]["prompts_hash"]
    assert theirs["tokens_in"] == ours["tokens_in"]  # one tokenizer, one template
    assert not theirs["cached_tokens"]  # salted
    assert theirs["speculation"]["acceptance"] == "unknown"
    assert num_equal_answers(report) >= NUM_PROMPTS - 1


@pytest.mark.skipif(not DRAFTER.exists(), reason="the default drafter is not in this checkout")
@pytest.mark.parametrize(
    ("metrics", "source"),
    [([], "metered"), (["--per-request-spec-decode-metrics", "summary"], "answers")],
    ids=["counters", "answers"],
)
def test_vllm_commits_as_much_per_step_with_our_default_drafter(vllm, tmp_path, metrics, source):
    folder = write_default_model(tmp_path / "smollm2")
    load = ["--workload", "code", "--num-prompts", 12, "--max-tokens", 96]
    speculation = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15}
    command = vllm_command(vllm, folder, "--speculative-config", json.dumps(speculation), *metrics)
    theirs = bench(tmp_path / "theirs", "--start", command, "--no-baseline", *load)
    with our_server("--model", str(folder), "--draft", str(DRAFTER), "--width", "16", *OURS) as url:
        ours = bench(tmp_path / "ours", url, "--no-baseline", *load)
    drafts = [report["cells"][0]["speculation"] for report in (theirs, ours)]
    assert [one["acceptance"] for one in drafts] == [source, "answers"]
    assert drafts[0]["drafted"] == 15 * drafts[0]["steps"]
    assert len(drafts[0]["acceptance_by_position"]) == 15
    found = [one["committed_per_step"]["value"] for one in drafts]
    sys.stdout.write(f"committed per step: vLLM {found[0]:.3f}, ours {found[1]:.3f}\n")
    assert found[1] > 2
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.skipif(not DRAFTER.exists(), reason="the default drafter is not in this checkout")
def test_two_runs_of_vllm_with_the_default_pair_become_speedups_over_plain(vllm, tmp_path):
    """One after the other, as on one card; then both files joined."""
    folder = write_default_model(tmp_path / "smollm2")
    engine = ["--engine", "vllm", "--engine-python", vllm.parent / "python", "--model", folder]
    engine += ["--draft", DRAFTER, "--width", 8, "--no-graphs", "--max-num-seqs", 4, *OURS]
    load = ["--workload", "code", "--num-prompts", NUM_PROMPTS, "--max-tokens", 48]
    for arm in ("plain", "speculative"):
        report = bench(tmp_path / arm, *engine, "--arms", arm, *load)
        assert (report["endpoint"]["kind"], report["pairs"]) == ("vllm", [])
        assert report["endpoint"]["is_speculative"] is (arm == "speculative")
        assert_complete(report["cells"][0])
    both = bench(tmp_path / "both", "compare", tmp_path / "plain.json", tmp_path / "speculative.json")
    assert num_equal_answers(both) >= NUM_PROMPTS - 1
    (pair,) = both["pairs"]
    low, high = pair["speedup"]["tokens_per_s"]["interval"]
    assert low <= pair["speedup"]["tokens_per_s"]["value"] <= high
    assert both["cells"][0]["speculation"]["committed_per_step"]["value"] > 2
