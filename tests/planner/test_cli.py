"""blockdraft plan as a user runs it: in a process of its own, without torch, and quick to refuse."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.cli.main import main
from blockdraft.cli.plan import published_line, published_lines
from blockdraft.planner.known_pairs import published_runs, read_file
from blockdraft.settings.recipe import Expectation
from blockdraft.settings.settings import cache_dir
from tests import tiny
from tests.planner.shapes import folders

GEMMA = ("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash")
_RUN = """
import sys, time
begin = time.process_time()
from blockdraft.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
print(f"torch={'torch' in sys.modules} seconds={time.process_time() - begin:.3f}", file=sys.stderr)
sys.exit(code)
"""


def process(*words, **environment):
    """Exit code, stdout, stderr, whether torch was imported, and seconds of processor time."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "plan", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        cwd=Path(__file__).parents[2],
    )
    *errors, last = done.stderr.splitlines()
    facts = dict(word.split("=") for word in last.split())
    return done.returncode, done.stdout, "\n".join(errors), facts["torch"] == "True", float(facts["seconds"])


@pytest.fixture
def plan(capsys, monkeypatch):
    """Run the command here, without a network; return its exit code, stdout and stderr."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*words):
        code = main(["plan", *words])
        return code, *capsys.readouterr()

    return run


def dummy(shape, *words):
    target, draft = folders(shape)
    return (target, "--draft", draft, "--load-format", "dummy", *words)


def test_planning_imports_no_torch_and_answers_in_under_a_second():
    code, text, _, has_torch, seconds = process(tiny.TARGET, "--draft", tiny.DRAFT, "--card", "h200")
    assert code == 0
    assert "FITS" in text
    assert not has_torch
    assert seconds < 1.0


def test_the_table_says_what_fits_and_that_speeds_are_estimates(plan):
    code, text, _ = plan(*dummy("qwen3-8b"), "--card", "h200")
    assert code == 0
    assert "FITS: 16 sequences of 40,960 tokens at once" in text
    assert "target 16.4 GB, drafter 2.1 GB" in text
    assert "ESTIMATE" in text
    for who in ("one user", "4-16 users", "agent fleet", "long context", "out of memory"):
        assert who in text
    assert len(text.splitlines()) < 30


@pytest.mark.skipif(not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched")
def test_the_drafter_that_comes_with_the_default_model_is_named_as_such(plan):
    code, text, _ = plan("--card", "h100")
    assert code == 0
    assert text.startswith("default + the drafter that comes with it (causal DFlash2), native on H100 SXM\n")
    assert "  acceptance: measured here on HumanEval and MBPP, GSM8K and MT-Bench" in text
    assert "  counted: tokens of all users together, over HTTP: greedy answers of 200 tokens" in text
    assert "--width" not in text, "our engine chooses its widths itself"
    _, text, _ = plan("--card", "h100", "--json")
    assert json.loads(text)["estimate"]["counted"].startswith("tokens of all users together, over HTTP")


def test_a_recipe_brings_its_published_numbers(plan):
    code, text, _ = plan(*dummy("qwen3-8b"), "--recipe", "qwen3-8b", "--card", "h100")
    assert code == 0
    assert "published: dialogue, 1 user, vllm: 422 tok/s" in text
    _, text, _ = plan(*dummy("qwen3-8b"), "--recipe", "qwen3-8b", "--card", "h100", "--json")
    assert [one["tokens_per_second"] for one in json.loads(text)["published"]] == [422]
    _, text, _ = plan(*dummy("qwen3-8b"), "--recipe", "qwen3-8b", "--card", "rtx-5090")
    assert "published:" not in text


def test_of_many_published_runs_the_ends_are_shown_and_all_when_explained():
    found = [one for one in published_runs(*GEMMA) if one.card == "b300"]
    shown = list(published_lines(found, shows_all=False))
    assert len(shown) == 11
    assert "reasoning, Math500, 32 users, vllm: 4,962 tok/s, 1,308 tok/s without a drafter" in shown[1]
    assert shown[-1] == "  published: 5 more runs with other numbers of users, contexts or caches (--explain)"
    explained = list(published_lines(found, shows_all=True))
    assert len(explained) == 15
    assert "pull request 41703" in explained[0]


def test_every_published_run_has_a_number_in_its_line():
    for entry in read_file()["published"]:
        for one in published_runs(entry["target"], entry["drafter"]):
            numbers = published_line(one).partition(": ")[2]
            assert re.match(r"[\d.,]+ [a-z]", numbers), one


def test_explain_shows_the_arithmetic(plan):
    _, text, _ = plan(*dummy("qwen3-8b"), "--card", "h200", "--explain")
    assert "16,381,470,720 bytes" in text
    assert "147,456 bytes a token" in text
    assert "all the positions that the model knows" in text


def test_json_is_one_object_with_everything(plan):
    code, text, _ = plan(*dummy("qwen3-8b"), "--card", "h200", "--json", "--context", "8192")
    found = json.loads(text)
    assert code == 0
    assert found["verdict"] == "fits"
    assert found["plan"]["max_model_len"] == found["capacity"]["max_model_len"] == 8192
    assert found["memory"]["total_bytes"] == sum(item["num_bytes"] for item in found["memory"]["items"])
    assert found["estimate"]["is_estimate"] is True
    assert found["known_problems"] == []
    assert {choice["name"] for choice in found["choices"]} >= {"width", "max_num_seqs", "quantization"}


@pytest.mark.parametrize(
    ("shape", "flags", "note"),
    [
        ("qwen3-8b", (), "167.9 kB a token, 20.5 kB of them the drafter's; 6.9 GB for 40,960 tokens"),
        (
            "qwen3-8b",
            ("--engine", "vllm", "--tensor-parallel", "2"),
            "84.0 kB a token, 10.2 kB of them the drafter's; 3.4 GB for 40,960 tokens",
        ),
        (
            "gpt-oss-20b",
            ("--engine", "vllm", "--draft", "none"),
            "24.6 kB a token past the windows; 3.2 GB for 131,072 tokens",
        ),
        ("gpt-oss-20b", ("--draft", "none"), "49.2 kB a token; 6.4 GB for 131,072 tokens"),
    ],
)
def test_a_token_costs_what_it_costs_on_one_card(shape, flags, note, plan):
    target, draft = folders(shape)
    words = (target, "--draft", draft, "--load-format", "dummy", "--card", "h200", *flags)
    _, text, _ = plan(*words)
    assert note in text


def test_what_does_not_fit_ends_with_code_1_and_a_way_out(plan):
    code, text, _ = plan(*dummy("qwen3-8b"), "--card", "rtx-4080")
    assert code == 1
    assert "DOES NOT FIT" in text
    assert "--tensor-parallel" in text
    assert "0 tokens" not in text.replace("0,960 tokens", "")


def test_known_bad_combinations_are_refused_with_their_thread(plan):
    flags = ("--engine", "vllm", "--card", "dgx-spark")
    code, text, _ = plan(*dummy("qwen3-8b"), *flags, "--gpu-memory-utilization", "0.95")
    assert code == 1
    assert "FITS, BUT IS KNOWN TO FAIL" in text
    assert "REFUSE unified-memory-freeze" in text
    assert "https://github.com/vllm-project/vllm/issues/46307" in text
    code, text, _ = plan(*dummy("qwen3-8b"), *flags)
    assert code == 0
    assert "(0.8 of 128.5 GB)" in text
    assert "REFUSE" not in text
    assert "KNOWN TO FAIL" not in text
    assert "interval: a factor of 1.25, which holds for 98% of 321 published numbers" in text


def test_a_plan_for_another_engine_leads_with_published_runs_and_gives_an_interval(plan):
    flags = ("--recipe", "qwen3-8b", "--engine", "vllm", "--card", "h100")
    code, text, _ = plan(*dummy("qwen3-8b"), *flags)
    assert code == 0
    assert text.index("  published: dialogue, 1 user, vllm: 422 tok/s") < text.index("tok/s, ESTIMATE")
    low, high = re.search(r"^  1 user +[\d,]+ \((\d+)-(\d+)\)", text, re.M).groups()
    assert int(low) < 422 < int(high)
    assert "as in the published runs" in text
    assert "none was of this card" not in text
    _, text, _ = plan(*dummy("qwen3-8b"), "--engine", "vllm", "--card", "a40")
    assert "none was of this card" in text
    _, text, _ = plan(*dummy("qwen3-8b"), *flags, "--tensor-parallel", "2")
    assert "interval: none: no published run with several GPUs was compared" in text
    assert "speed, ESTIMATE" in text
    _, text, _ = plan(*dummy("qwen3-8b"), *flags, "--explain")
    assert re.search(r"TFLOP, weights [\d.]+ ms, keys, values and states [\d.]+ ms, dense", text)


def test_published_runs_of_the_planned_engine_come_first(plan, monkeypatch):
    shared = {"source": "somewhere", "card": "b200", "baseline_tokens_per_second": 1}
    runs = [Expectation(engine=engine, **shared) for engine in ("vllm", "sglang", "vllm")]
    monkeypatch.setattr("blockdraft.cli.plan.published_runs", lambda target, drafter: runs)
    for engine, first in (("sglang", ["sglang", "vllm", "vllm"]), ("vllm", ["vllm", "vllm", "sglang"])):
        _, text, _ = plan(*dummy("qwen3-8b"), "--engine", engine, "--card", "b200", "--json")
        found = json.loads(text)["published"]
        assert [one["engine"] for one in found] == first
        assert [one["plain_times_estimate"] is None for one in found] == [name != engine for name in first]
        assert {one["times_estimate"] for one in found} == {None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("models/target",), "looks like a path, but there is no such folder"),
        (("/models/target",), "is the volume mounted?"),
        (("nobody/such-a-model",), "the hub cannot be reached"),
        ((tiny.TARGET, "--card", "dgx-sparc"), "did you mean dgx-spark?"),
        ((tiny.TARGET, "--context", "100", "--max-model-len", "200"), "give one"),
        ((tiny.TARGET, "--context", "1000000"), "knows 512 positions"),
        ((tiny.TARGET, "--draft", tiny.TARGET), "is not a supported DFlash drafter"),
        ((tiny.TARGET, "--engine", "vllm"), "no GPU"),
        ((tiny.TARGET, "--device", "cuda"), "no GPU"),
        ((tiny.TARGET, "--tensor-parallel", "2"), "not for the native engine"),
    ],
)
def test_bad_input_is_named_before_anything_starts(words, message, plan, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, text, errors = plan(*words)
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert text == ""


def test_a_pair_that_does_not_match_is_refused(plan):
    code, _, errors = plan(
        folders("qwen3-8b")[0], "--draft", folders("smollm2-135m")[1], "--load-format", "dummy"
    )
    assert code == 2
    assert "the pair does not match" in errors


# ---- a hub


@contextmanager
def hub(folder, repo):
    """A hub that serves one folder, with ranges; it notes what was asked of it and how much it gave."""
    given = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(has_body=False)

        def do_GET(self):
            self.answer(has_body=True)

        def answer(self, *, has_body):
            prefix, name = f"/{repo}/resolve/main/", self.path.partition("?")[0].rpartition("/")[2]
            path = folder / name
            is_known = self.path.startswith(prefix) and path.exists()
            data = path.read_bytes() if is_known else b""
            self.send_response(206 if "Range" in self.headers and is_known else 200 if is_known else 404)
            if not is_known:
                self.send_header("X-Error-Code", "EntryNotFound")
            first, last = 0, len(data) - 1
            if "Range" in self.headers and is_known:
                ends = self.headers["Range"].removeprefix("bytes=").split("-")
                first, last = int(ends[0]), min(int(ends[1]), last)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            body = data[first : last + 1]
            self.send_header("ETag", f'"{name}-etag"')
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                given.append((name, len(body)))
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", given
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def big_folder(tmp_path):
    """A model whose weights are far larger than their header."""
    header = json.loads(Path(folders("smollm2-135m")[0], "config.json").read_text())
    small = header | {"num_hidden_layers": 1, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(small))
    hidden, inner = small["hidden_size"], small["intermediate_size"]
    shapes = {
        "model.embed_tokens.weight": [4096, hidden],
        "model.norm.weight": [hidden],
        "model.layers.0.input_layernorm.weight": [hidden],
        "model.layers.0.post_attention_layernorm.weight": [hidden],
        "model.layers.0.self_attn.q_proj.weight": [hidden, hidden],
        "model.layers.0.self_attn.k_proj.weight": [192, hidden],
        "model.layers.0.self_attn.v_proj.weight": [192, hidden],
        "model.layers.0.self_attn.o_proj.weight": [hidden, hidden],
        "model.layers.0.mlp.gate_proj.weight": [inner, hidden],
        "model.layers.0.mlp.up_proj.weight": [inner, hidden],
        "model.layers.0.mlp.down_proj.weight": [hidden, inner],
    }
    entries, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(position)
    (tmp_path / "model.safetensors").write_bytes(data)
    return len(data), position


def test_a_hub_id_is_planned_from_headers_alone(tmp_path):
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    remote.mkdir()
    file_bytes, weight_bytes = big_folder(remote)
    with hub(remote, "some/model") as (address, given):
        code, text, errors, has_torch, _ = process(
            "some/model",
            "--card",
            "h200",
            "--json",
            HF_ENDPOINT=address,
            HF_HOME=str(cache),
            HF_HUB_OFFLINE="0",
        )
    assert code == 0, errors
    found = json.loads(text)
    weights = next(item for item in found["memory"]["items"] if item["name"] == "target weights")
    assert weights["num_bytes"] == weight_bytes
    assert sum(count for name, count in given if name.endswith(".safetensors")) <= 100_001 < file_bytes
    assert not list(cache.rglob("*.safetensors"))
    assert not has_torch


def test_a_hub_without_the_model_says_so(tmp_path):
    with hub(tmp_path, "some/model") as (address, _):
        code, _, errors, _, _ = process(
            "other/model", HF_ENDPOINT=address, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0"
        )
    assert code == 2
    assert "other/model" in errors
