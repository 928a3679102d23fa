"""/metrics: a Snapshot as Prometheus text, under vLLM's names where it counts the same thing.

    acceptance rate      vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_draft_tokens_total
    committed per block  1 + vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total

What only this engine has begins with `blockdraft:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from blockdraft.engine.histogram import Histogram
from blockdraft.engine.stats import Snapshot

ENGINE = "0"  # vLLM numbers its engines; here is one
FINISH_REASONS = ("stop", "length", "abort", "error")

_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two steps that bring tokens to one answer.",
    "request_time_per_output_token_seconds": "Mean time per token of an answer, after its first.",
    "e2e_request_latency_seconds": "From a request's arrival to its last token.",
    "request_queue_time_seconds": "From a request's arrival until it has a row.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of a request's answer.",
    "iteration_tokens_total": "Tokens of a step, of prompts or of answers.",
}


class ShownInfo(Protocol):
    """What is shown of an EngineInfo."""

    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def num_cache_bytes(self) -> int: ...
    @property
    def is_dummy(self) -> bool: ...
    @property
    def synthetic_acceptance(self) -> str | None: ...


def render(
    snapshot: Snapshot, info: ShownInfo | None, name: str, startup: Mapping[str, object] | None = None
) -> tuple[bytes, str]:
    """The text and its content type. `startup` is Startup.snapshot(); `info` is None before there is one."""
    registry = CollectorRegistry(auto_describe=False)
    families = [
        *_engine(snapshot, name),
        *_cache_info(info),
        *_width(info, name),
        *_timing_only(info, name),
        *_startup(startup, name),
    ]
    registry.register(_Families(families))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine(snapshot: Snapshot, name: str) -> Iterator[Metric]:
    labels = {"model_name": name, "engine": ENGINE}
    used = snapshot.num_pages_used / snapshot.num_pages if snapshot.num_pages else 0.0
    yield _gauge("vllm:num_requests_running", "Choices that have a row.", snapshot.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Choices that wait for a row.", snapshot.num_waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "Pages in use; 1 is all of them.", used, labels)
    for counter, text, value in (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", snapshot.prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens found there.", snapshot.num_cached_tokens),
        ("vllm:prompt_tokens", "Prompt tokens, found or computed.", snapshot.prompt_tokens),
        ("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", snapshot.num_cached_tokens),
        ("vllm:generation_tokens", "Tokens of answers.", snapshot.generation_tokens),
        ("vllm:num_preemptions", "Choices that lost their row for want of pages.", snapshot.num_preemptions),
        ("vllm:spec_decode_num_drafts", "Blocks of drafts verified.", snapshot.num_drafts),
        ("vllm:spec_decode_num_draft_tokens", "Drafts verified.", snapshot.num_drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", snapshot.num_accepted),
        ("blockdraft:decode_steps", "Steps that decoded.", snapshot.num_decode_steps),
        ("blockdraft:prefill_steps", "Steps that read prompts.", snapshot.num_prefill_steps),
        ("blockdraft:prefill_tokens", "Prompt tokens computed.", snapshot.num_prefill_tokens),
        ("blockdraft:blocks", "Rows verified, with drafts or without.", snapshot.num_blocks),
    ):
        yield _counter(counter, text, value, labels)
    yield _by_label(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by their place in the block.",
        {str(position): count for position, count in enumerate(snapshot.accepted)},
        labels,
        label="position",
    )
    yield _by_label(
        "vllm:request_success",
        "Choices that have ended, by reason.",
        {
            reason: snapshot.finished.get(reason, 0)
            for reason in {**dict.fromkeys(FINISH_REASONS), **snapshot.finished}
        },
        labels,
        label="finished_reason",
    )
    for histogram, text in _HISTOGRAMS.items():
        yield _histogram(f"vllm:{histogram}", text, snapshot.histograms[histogram], labels)
    per_block = snapshot.generation_tokens / snapshot.num_blocks if snapshot.num_blocks else 0.0
    yield _gauge(
        "blockdraft:tokens_per_block", "Mean tokens of an answer per verified row.", per_block, labels
    )


def _cache_info(info: ShownInfo | None) -> Iterator[Metric]:
    if info is None:
        return
    labels = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "cache_dtype": info.dtype,
        "num_cache_bytes": str(info.num_cache_bytes),
        "engine": ENGINE,
    }
    yield _gauge("vllm:cache_config_info", "The cache, in vLLM's words: its blocks are pages.", 1, labels)


def _width(info: ShownInfo | None, name: str) -> Iterator[Metric]:
    if info is None:
        return
    text = "Tokens verified in the first steps of a request that does not ask for a width; 1: plain."
    yield _gauge("blockdraft:width", text, info.width, {"model_name": name, "engine": ENGINE})


def _timing_only(info: ShownInfo | None, name: str) -> Iterator[Metric]:
    if info is None:
        return
    labels = {
        "model_name": name,
        "engine": ENGINE,
        "weights": "dummy" if info.is_dummy else "checkpoint",
        "acceptance": info.synthetic_acceptance or "real",
    }
    text = "1 where weights or acceptance are not real: what is measured then is time, and nothing else."
    is_timing_only = info.is_dummy or info.synthetic_acceptance is not None
    yield _gauge("blockdraft:timing_only", text, is_timing_only, labels)


def _startup(startup: Mapping[str, object] | None, name: str) -> Iterator[Metric]:
    if startup is None:
        return
    labels = {"model_name": name, "engine": ENGINE}
    is_ready = float(startup["state"] == "ready")
    yield _gauge("blockdraft:ready", "1 when warm and verified.", is_ready, labels)
    family = GaugeMetricFamily(
        "blockdraft:startup_phase_seconds",
        "How long each phase of the start took.",
        labels=[*labels, "phase"],
    )
    phases = startup["phases"]
    assert isinstance(phases, list)
    for phase in phases:
        if phase["seconds"] is not None:
            family.add_metric([*labels.values(), phase["name"]], phase["seconds"])
    yield family


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_label(
    name: str, text: str, values: Mapping[str, int], labels: Mapping[str, str], *, label: str
) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for value_label, value in values.items():
        family.add_metric([*labels.values(), value_label], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(str(float(bucket)) for bucket in histogram.buckets), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
    family.add_metric(list(labels.values()), buckets, histogram.sum)
    return family
