"""/metrics as a scraper reads it, after real requests."""

from dataclasses import dataclass

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from blockdraft.engine.info import Fingerprint
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.stats import Load, Stats
from blockdraft.server.page.metrics import FINISH_REASONS, Served, render
from tests import tiny

NAME = 'pair "with quotes"\n'  # a name may be any text
FINGERPRINT = Fingerprint("bd-1")


@dataclass(frozen=True)
class Info:
    page_size: int = 16
    num_pages: int = 512
    width: int = 8
    kv_dtype: str = "float64"
    kv_bytes_per_token: int = 2048
    num_cache_bytes: int = 1 << 20
    is_dummy: bool = False
    synthetic_acceptance: str | None = None
    fingerprint: Fingerprint = FINGERPRINT


def scrape(snapshot, **kwargs):
    """{(sample name, labels without model and engine): value}, and the families by name."""
    text, kind = render([snapshot], kwargs.pop("info", Info()), NAME, **kwargs)
    assert kind.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    samples = {}
    for family in families.values():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine", "0") == "0"
            assert labels.pop("model_name", NAME) == NAME
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples, families


def test_figures_that_are_for_timing_only_are_labelled():
    snapshot = Stats().snapshot(Load())

    def found(**fields):
        samples, _ = scrape(snapshot, info=Info(**fields))
        return {labels: value for (name, labels), value in samples.items() if "timing_only" in name}

    assert found() == {(("acceptance", "real"), ("weights", "checkpoint")): 0}
    assert found(is_dummy=True) == {(("acceptance", "real"), ("weights", "dummy")): 1}
    labels = (("acceptance", "0.9,0.5"), ("weights", "checkpoint"))
    assert found(synthetic_acceptance="0.9,0.5") == {labels: 1}


def test_the_width_of_a_step_is_the_mean_of_its_rows():
    """Rows also get the tokens that would pad the step, so it is no width that was chosen from."""
    samples, _ = scrape(Stats().snapshot(Load(chosen_rows=3, chosen_tokens=13)))
    assert samples["blockdraft:governed_width", ()] == pytest.approx(13 / 3)
    assert samples["blockdraft:governed_tokens", ()] == 13


@pytest.fixture(scope="module")
def served():
    """The engine after six answers, one abort, and with one request half done; and all deltas."""
    engine = tiny.engine(width=tiny.BLOCK, num_pages=64)
    prompt = [1 + i % 50 for i in range(40)]
    deltas = []
    for seed in range(6):
        width = 1 if seed == 5 else None
        params = SamplingParams(seed=seed, max_tokens=10 + seed, ignore_eos=True, width=width)
        engine.add(prompt, params)
        if seed == 0:
            while engine.has_work:
                deltas += engine.step()
    while engine.has_work:
        deltas += engine.step()
    engine.add(prompt, SamplingParams(max_tokens=50, ignore_eos=True), "aborted")
    engine.step()
    engine.abort("aborted")
    engine.add(prompt, SamplingParams(max_tokens=50, ignore_eos=True), "half")
    engine.step()
    return engine, deltas


def test_counters_add_up_to_what_the_answers_say(served):
    engine, deltas = served
    samples, _ = scrape(engine.snapshot())
    metrics = [delta.metrics for delta in deltas if delta.metrics]
    accepted = sum(sum(m.accepted) for m in metrics)
    drafted = sum(m.drafted for m in metrics)
    drafts = sum(m.steps for m in metrics if m.drafted)
    assert samples["vllm:generation_tokens_total", ()] == sum(m.num_tokens for m in metrics) == 75
    assert samples["vllm:prompt_tokens_total", ()] == 6 * 40
    assert samples["vllm:prefix_cache_hits_total", ()] == sum(m.num_cached_tokens for m in metrics) == 5 * 32
    assert samples["vllm:prefix_cache_queries_total", ()] == 6 * 40
    assert samples["vllm:spec_decode_num_drafts_total", ()] == drafts
    assert samples["vllm:spec_decode_num_draft_tokens_total", ()] == drafted == drafts * (tiny.BLOCK - 1)
    assert samples["vllm:spec_decode_num_accepted_tokens_total", ()] == accepted > 0
    assert samples["blockdraft:blocks_total", ()] == sum(m.steps for m in metrics)


def test_acceptance_per_position_adds_up_and_falls(served):
    samples, _ = scrape(served[0].snapshot())
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [samples[name, (("position", str(i)),)] for i in range(tiny.BLOCK - 1)]
    assert sum(by_position) == samples["vllm:spec_decode_num_accepted_tokens_total", ()]
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] <= samples["vllm:spec_decode_num_drafts_total", ()]
    assert (name, (("position", str(tiny.BLOCK - 1)),)) not in samples


def test_ends_are_counted_by_reason_and_every_reason_is_there(served):
    samples, _ = scrape(served[0].snapshot())
    ends = [
        samples["vllm:request_success_total", (("finished_reason", reason),)] for reason in FINISH_REASONS
    ]
    assert ends == [0, 6, 1, 0]


def test_gauges_show_what_is_in_the_engine(served):
    samples, _ = scrape(served[0].snapshot())
    assert samples["vllm:num_requests_running", ()] == 1
    assert samples["vllm:num_requests_waiting", ()] == 0
    used = served[0].scheduler.pages.num_pages - served[0].scheduler.pages.num_free
    assert samples["vllm:kv_cache_usage_perc", ()] == used / 64 > 0


def test_histograms_are_cumulative_and_whole(served):
    engine, _ = served
    samples, families = scrape(engine.snapshot())
    for name in engine.snapshot().histograms:
        family = families[f"vllm:{name}"]
        assert family.type == "histogram"
        buckets = [s for s in family.samples if s.name.endswith("_bucket")]
        counts = [s.value for s in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        assert counts[-1] == samples[f"vllm:{name}_count", ()]
    assert samples["vllm:e2e_request_latency_seconds_count", ()] == 6
    assert samples["vllm:request_generation_tokens_sum", ()] == 75
    assert samples["vllm:request_generation_tokens_bucket", (("le", "10.0"),)] == 1
    assert samples["vllm:request_generation_tokens_bucket", (("le", "20.0"),)] == 6


def test_histograms_that_boards_made_for_vllm_read(served):
    engine, deltas = served
    samples, _ = scrape(engine.snapshot())
    metrics = [delta.metrics for delta in deltas if delta.metrics]

    def total(name):
        assert samples[f"vllm:{name}_count", ()] == 6
        return samples[f"vllm:{name}_sum", ()]

    assert total("request_prefill_time_seconds") == pytest.approx(
        sum(m.first_token_s - m.queue_s for m in metrics)
    )
    assert total("request_decode_time_seconds") == pytest.approx(
        sum(m.seconds - m.first_token_s for m in metrics)
    )
    assert total("request_inference_time_seconds") == pytest.approx(
        sum(m.seconds - m.queue_s for m in metrics)
    )
    assert total("request_max_num_generation_tokens") == 75
    assert total("request_params_max_tokens") == 75
    assert total("request_params_n") == 6
    bounds = {dict(labels)["le"] for name, labels in samples if name == "vllm:request_params_n_bucket"}
    assert bounds == {"1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"}


def test_waiting_is_told_by_its_reason():
    samples, families = scrape(Stats().snapshot(Load(num_waiting=3)))
    assert families["vllm:num_requests_waiting_by_reason"].type == "gauge"
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 3
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "deferred"),)] == 0


def test_refusals_are_told_by_their_reason():
    load = Load(num_refused_full=2, num_refused_wait=3, expected_wait_s=4.5)
    samples, _ = scrape(Stats().snapshot(load), served=Served((), num_refused=1))
    assert samples["blockdraft:requests_refused_total", (("reason", "queue_full"),)] == 2
    assert samples["blockdraft:requests_refused_total", (("reason", "long_wait"),)] == 3
    assert samples["blockdraft:connections_refused_total", ()] == 1
    assert samples["blockdraft:expected_wait_seconds", ()] == 4.5


def test_types_are_those_a_scraper_expects(served):
    _, families = scrape(served[0].snapshot())
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["vllm:num_requests_running"] == "gauge"
    assert kinds["vllm:generation_tokens"] == "counter"
    assert kinds["vllm:spec_decode_num_accepted_tokens_per_pos"] == "counter"


def test_the_cache_and_the_start_are_described(served):
    phases = [{"name": "load", "seconds": 2.5}, {"name": "warm", "seconds": None}]
    samples, _ = scrape(served[0].snapshot(), start={"state": "ready", "phases": phases})
    assert samples["blockdraft:startup_phase_seconds", (("phase", "load"),)] == 2.5
    assert ("blockdraft:startup_phase_seconds", (("phase", "warm"),)) not in samples
    assert samples["blockdraft:ready", ()] == 1
    info = next(dict(labels) for name, labels in samples if name == "vllm:cache_config_info")
    assert (info["block_size"], info["num_gpu_blocks"], info["cache_dtype"]) == ("16", "512", "float64")
    assert samples["blockdraft:kv_bytes_per_token", ()] == 2048


def test_replicas_can_be_told_apart_by_what_decides_their_tokens(served):
    key = "blockdraft:fingerprint_info", (("fingerprint", "bd-1"),)
    assert scrape(served[0].snapshot())[0][key] == 1
    unknown, _ = scrape(served[0].snapshot(), info=Info(fingerprint=Fingerprint(reason="no equal bits")))
    assert not any(name == key[0] for name, _ in unknown)


def test_a_compressed_cache_is_told_by_its_dtype(served):
    samples, _ = scrape(served[0].snapshot(), info=Info(kv_dtype="tq4", kv_bytes_per_token=528))
    info = next(dict(labels) for name, labels in samples if name == "vllm:cache_config_info")
    assert info["cache_dtype"] == "tq4"
    assert samples["blockdraft:kv_bytes_per_token", ()] == 528


def test_before_the_engine_is_there_everything_is_zero():
    samples, _ = scrape(Stats().snapshot(Load()), info=None, start={"state": "starting", "phases": []})
    assert set(samples.values()) == {0.0}


def test_nothing_is_registered_globally(served):
    before = list(REGISTRY._collector_to_names)
    render([served[0].snapshot()], Info(), NAME)
    assert list(REGISTRY._collector_to_names) == before
