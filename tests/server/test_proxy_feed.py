"""The live page's figures, from the metrics of other engines."""

import pytest

from blockdraft.server.page.metrics import render_proxy
from blockdraft.server.proxy.proxy_feed import MetricsFeed, read_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="400"}} 1.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 10.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="m"}} 7.0
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} 10.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 30.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 6.0
python_gc_objects_collected_total{{generation="0"}} 1234.0
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.5
sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 1000.0
sglang:gen_throughput{engine_type="unified",model_name="m",tp_rank="0"} 220.5
sglang:generation_tokens_total{engine_type="unified",model_name="m"} 90.0
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 3.74
"""


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def feed():
    clock = Clock()
    feed = MetricsFeed(clock)

    def take(tokens, steps=0, running=1, after_s=1.0):
        clock.now_s += after_s
        feed.take(VLLM.format(tokens=tokens, steps=steps, running=running))

    feed.look, feed.clock = take, clock
    return feed


def test_a_reading_of_vllm(feed):
    feed.look(tokens=5, steps=4)
    assert feed.now() == {
        "tokens_per_second": 0.0,
        "steps_per_second": 0.0,
        "lately_s": 10,
        "tokens_per_step": None,  # of drafts before the first look nobody knows when they were
        "acceptance": [],
        "num_drafts": 10,
        "running": 1,
        "waiting": 3,
        "pages_used": 100,
        "num_pages": 400,
    }


def test_drafts_are_those_of_the_last_seconds(feed):
    """The totals of an hour ago must not hide what happens now."""

    def look(drafts, first, second, after_s=1.0):
        feed.clock.now_s += after_s
        counts = {"drafts": drafts, "accepted_tokens": first + second}
        text = "".join(f"vllm:spec_decode_num_{name}_total {count}\n" for name, count in counts.items())
        for place, count in enumerate((first, second)):
            text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'
        feed.take(text)

    look(1000, 900, 900)
    look(1010, 905, 901)
    now = feed.now()
    assert (now["tokens_per_step"], now["acceptance"]) == (1.6, [0.5, 0.1])
    look(1010, 905, 901, after_s=11.0)
    now = feed.now()
    assert (now["tokens_per_step"], now["acceptance"]) == (None, [])


def test_engines_side_by_side_are_added_up():
    one = VLLM.format(tokens=5, steps=4, running=1)
    reading = read_metrics(one + one.replace('engine="0"', 'engine="1"'))
    assert (reading.tokens, reading.running, reading.num_pages, reading.cache_share) == (10, 2, 800, 0.25)
    assert reading.by_position == (18.0, 12.0)


def test_a_reading_of_sglang_trusts_its_own_rate():
    clock = Clock()
    feed = MetricsFeed(clock)
    for _ in range(2):
        feed.take(SGLANG)
        clock.now_s += 1
    now = feed.now()
    assert (now["tokens_per_second"], now["steps_per_second"], now["tokens_per_step"]) == (220.5, None, 3.74)
    assert (now["running"], now["waiting"], now["pages_used"], now["num_pages"]) == (2, 1, 500, 1000)
    clock.now_s += 10_000
    assert feed.stalled_s == 0  # its counters move when an answer ends


def test_nothing_of_an_engine_is_nothing():
    feed = MetricsFeed()
    feed.take("python_gc_objects_collected_total 3.0\n")
    feed.take(None)
    assert (feed.now(), feed.history(-1.0), feed.stalled_s) == (None, [], 0.0)


def test_rates_are_over_the_last_seconds_and_history_over_each(feed):
    for tokens in (0, 10, 30, 60, 100):
        feed.look(tokens=tokens, steps=tokens // 2)
    assert feed.now()["tokens_per_second"] == 30.0  # (100 - 10) / 3
    assert feed.now()["steps_per_second"] == 15.0
    assert [rate for _, rate in feed.history(-1.0)] == [10.0, 20.0, 30.0, 40.0]
    sent_s = feed.history(-1.0)[2][0]
    assert feed.history(sent_s) == [(105.0, 40.0)]


def test_a_restart_of_the_counters_is_no_negative_speed(feed):
    feed.look(tokens=100)
    feed.look(tokens=3)
    assert feed.now()["tokens_per_second"] == 0.0


def test_an_engine_with_requests_that_does_nothing_stands_still(feed):
    feed.look(tokens=5, steps=1)
    feed.look(tokens=5, steps=1, after_s=50)
    assert feed.stalled_s == 50
    feed.clock.now_s += 25  # no answer at all
    assert feed.stalled_s == 75
    feed.look(tokens=5, steps=2)  # a step of a long prompt
    assert feed.stalled_s == 0
    feed.look(tokens=5, steps=2, running=0, after_s=500)
    assert feed.stalled_s == 0
    feed.look(tokens=5, steps=2)  # a request has just come
    assert feed.stalled_s == 1


def test_our_own_metrics():
    start = {
        "state": "ready",
        "phases": [{"name": "load", "seconds": 1.5}, {"name": "warm", "seconds": None}],
    }
    text = render_proxy(start, "m", {200: 3, 502: 1}, 2)[0].decode()
    assert 'blockdraft:ready{model_name="m"} 1.0' in text
    assert 'blockdraft:startup_phase_seconds{model_name="m",phase="load"} 1.5' in text
    assert 'phase="warm"' not in text
    assert 'blockdraft:proxy_requests_total{model_name="m",status="502"} 1.0' in text
    assert 'blockdraft:proxy_requests_live{model_name="m"} 2.0' in text
