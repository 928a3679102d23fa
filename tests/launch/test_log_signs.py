"""Starts of other engines, read from lines that they really wrote."""

import pytest

from blockdraft.launch.log_signs import PHASES, PhaseTracker, Sign, is_bar, is_error, read_sign
from blockdraft.phases import StartProgress

VLLM = "(Worker pid=28061) INFO 11-15 12:56:10 "
SGLANG = "[2026-03-11 13:53:21 TP0] "


DOWNLOAD = "model-00002-of-00004.safetensors"


@pytest.mark.parametrize(
    ("engine", "line", "sign"),
    [
        ("vllm", "Fetching 12 files:  25%|##5       | 3/12 [00:10<00:30]", Sign("fetch", None, 0.25)),
        ("vllm", f"{DOWNLOAD}:  40%|####   | 2.0G/4.9G [00:10<00:15, 200MB/s]", Sign("fetch", DOWNLOAD, 0.4)),
        ("vllm", f"{VLLM}[utils.py:5] Time spent downloading weights for m: 9.5 seconds", Sign("fetch")),
        ("vllm", "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 1.2it/s]",
         Sign("load", None, 0.5)),
        ("vllm", f"{VLLM}[cpu_model_runner.py:75] Loading drafter model...",
         Sign("load", "Loading drafter model")),
        ("vllm", f"{VLLM}[gpu_model_runner.py:5150] Model loading took 55.22 GiB memory and 20.3 seconds",
         Sign("load", "Model loading took 55.22 GiB")),
        ("vllm", f"{VLLM}[monitor.py:40] Starting torch.compile", Sign("compile")),
        ("vllm", f"{VLLM}[cpu_model_runner.py:87] Warming up model for the compilation...", Sign("compile")),
        ("vllm", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  72%|#####| 8/11 [00:01<00:01]",
         Sign("capture", None, 0.72)),
        ("vllm", "Capturing dflash2 CUDA graphs (FULL):  50%|#####| 4/8 [00:01<00:01]",
         Sign("capture", None, 0.5)),
        ("vllm", f"{VLLM}[gpu_model_runner.py:3480] Graph capturing finished in 8 secs, took 0.31 GiB",
         Sign("capture", "Graph capturing finished in 8 secs")),
        ("vllm", f"{VLLM}[kv_cache_utils.py:2327] CPU KV cache size: 349,440 tokens, Maximum concurrency ...",
         Sign(None, "KV cache size: 349,440 tokens")),
        ("sglang", f"{SGLANG}Load weight begin. avail mem=60.81 GB", Sign("load")),
        ("sglang", f"{SGLANG}Load weight end. elapsed=23.18 s, type=X, avail mem=32.02 GB", Sign("load")),
        ("sglang", "Multi-thread loading shards:  20% Completed | 1/5", Sign("load", None, 0.2)),
        ("sglang", f"{SGLANG}KV Cache is allocated. #tokens: 383872, KV size: 19.36 GB",
         Sign(None, "KV Cache is allocated. #tokens: 383872")),
        ("sglang", f"{SGLANG}Capture cuda graph begin. This can take several minutes.", Sign("capture")),
        ("sglang", "Capturing batches (bs=8 avail_mem=9.76 GB):  25%|##   | 1/4 [00:00<00:01]",
         Sign("capture", None, 0.25)),
    ],
)  # fmt: skip
def test_lines_tell_of_the_start(engine, line, sign):
    assert read_sign(engine, line) == sign


@pytest.mark.parametrize(
    "line",
    [
        f"{VLLM}[model.py:733] Resolved architecture: LlamaForCausalLM",
        f"{VLLM}[api_server.py:5] Engine 000: Avg prompt throughput: 0.0 tokens/s, GPU KV cache usage: 25.0%",
        'INFO:     127.0.0.1:58310 - "POST /v1/completions HTTP/1.1" 200 OK',
        "",
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_lines_tell_nothing(engine, line):
    assert read_sign(engine, line) is None


def test_errors_and_bars_are_known():
    assert is_error("(EngineCore pid=2) ERROR 11-15 12:56:10 [core.py:9] out of memory")
    assert is_error("torch.OutOfMemoryError: CUDA out of memory".removeprefix("torch."))
    assert not is_error(f"{VLLM}[core.py:9] ERROR is a word here")
    assert is_bar("Fetching 12 files:  25%|##5       | 3/12 [00:10<00:30]")
    assert is_bar("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 1.2it/s]")
    assert not is_bar(f"{VLLM}[kv.py:1] 25% of the cache is used")


def walked(*signs):
    startup = StartProgress(names=PHASES)
    walk = PhaseTracker(startup)
    walk.enter("launch")
    for sign in signs:
        walk.take(sign)
    return walk, {phase.name: phase for phase in startup.phases()}


def test_phases_that_are_left_out_are_skipped():
    _, phases = walked(Sign("load"), Sign("capture", None, 0.5))
    states = [phases[name].state for name in PHASES]
    assert states == ["done", "skipped", "done", "skipped", "running", "waiting", "waiting"]
    assert phases["capture"].progress == 0.5


def test_a_start_never_goes_back():
    """A drafter is loaded, or even fetched, after its target."""
    _, phases = walked(Sign("capture"), Sign("load", "Loading drafter model", 0.1))
    assert (phases["load"].state, phases["capture"].state) == ("skipped", "running")
    assert (phases["capture"].detail, phases["capture"].progress) == ("Loading drafter model", 0.1)


def test_what_an_engine_says_during_our_own_phases_is_not_theirs():
    walk, _ = walked(Sign("load"))
    walk.enter("warm")
    walk.take(Sign(None, "KV cache size: 1 tokens"))
    walk.take(Sign("capture"))
    phases = {phase.name: phase for phase in walk._startup.phases()}
    assert (phases["warm"].state, phases["warm"].detail, phases["capture"].state) == (
        "running",
        None,
        "skipped",
    )


def test_a_failure_is_that_of_the_phase_that_runs():
    walk, _ = walked(Sign("load"))
    walk.fail(ValueError())
    phases = {phase.name: phase for phase in walk._startup.phases()}
    assert (phases["launch"].state, phases["load"].state) == ("done", "failed")
