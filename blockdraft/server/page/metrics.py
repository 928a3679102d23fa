"""/metrics: a Snapshot as Prometheus text, with vLLM's names for metrics that vLLM has, too.

    acceptance rate      vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_draft_tokens_total
    committed per block  1 + vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total

Drafts past the end of an answer are not counted. A block commits its accepted drafts and one more token.
Metrics that only this engine has begin with `blockdraft:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from blockdraft.engine.histogram import Histogram
from blockdraft.engine.stats import Snapshot

if TYPE_CHECKING:  # a proxy needs neither
    from blockdraft.engine.info import EngineInfo
    from blockdraft.server.engine_link.replica import ReplicaStatus

ENGINE = "0"  # vLLM numbers its engines, and so do we our replicas; this is the first
FINISH_REASONS = ("stop", "length", "abort", "error")

Labels = Mapping[str, str]
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Seconds between two steps of one answer.",
    "request_time_per_output_token_seconds": "Mean seconds per token of an answer, without the first.",
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its last token.",
    "request_queue_time_seconds": "Seconds that a request waits before it runs.",
    "request_prefill_time_seconds": "Seconds from the begin of a request's run to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its last.",
    "request_inference_time_seconds": "Seconds from the begin of a request's run to its last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a choice.",
    "request_max_num_generation_tokens": "Generated tokens of a request's longest choice.",
    "request_params_max_tokens": "Most tokens that a request allows.",
    "request_params_n": "Choices per request (n).",
    "iteration_tokens_total": "Prompt or generated tokens per step.",
}


@dataclass(frozen=True, slots=True)
class Served:
    """The replicas behind the server, and what the server itself counts."""

    replicas: Items[ReplicaStatus]
    num_repeated: int = 0  # requests that one replica continued for another
    num_refused: int = 0  # requests beyond the limit of requests at once


def render(
    snapshots: Items[Snapshot],
    info: EngineInfo | None,
    name: str,
    start: Mapping[str, object] | None = None,
    served: Served | None = None,
) -> tuple[bytes, str]:
    """Return text and content type, with samples for each replica's snapshot.

    `start` is StartProgress.snapshot(), `info` None until it is ready.
    """
    families: dict[str, Metric] = {}
    for number, snapshot in enumerate(snapshots):
        labels = {"model_name": name, "engine": str(number)}
        for family in (*_engine(snapshot, labels), *(() if info is None else _info(info, labels))):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    found = [*families.values()]
    if served is not None:
        found += _replicas(served, name)
    if start is not None:
        found += _start(start, {"model_name": name, "engine": ENGINE})
    return _exposition(found)


def render_proxy(
    start: Mapping[str, object], name: str, answers: Mapping[int, int], num_live: int
) -> tuple[bytes, str]:
    """Return text and content type for a proxy; `answers` counts answers by HTTP status."""
    labels = {"model_name": name}
    live = _gauge("blockdraft:proxy_requests_live", "Requests that are running.", num_live, labels)
    by_status = {str(status): count for status, count in sorted(answers.items())}
    text = "Requests that were passed on to the engine."
    ended = _counter("blockdraft:proxy_requests", text, by_status, labels, "status")
    return _exposition([*_start(start, labels), live, ended])


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    families: list[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _exposition(families: list[Metric]) -> tuple[bytes, str]:
    return generate_latest(_Families(families)), CONTENT_TYPE_LATEST


def _chosen(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    text = "Mean tokens of a row in the last step whose widths were chosen; 1: plain decoding, 0: none yet."
    yield _gauge("blockdraft:governed_width", text, snapshot.chosen_width, labels)
    text = "Tokens of all rows together in the last step whose widths were chosen."
    yield _gauge("blockdraft:governed_tokens", text, snapshot.chosen_tokens, labels)


def _trees(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    yield _counter("blockdraft:trees", "Blocks whose drafts were trees.", snapshot.num_trees, labels)
    text = "Tokens of trees that were verified."
    yield _counter("blockdraft:tree_tokens", text, snapshot.num_tree_tokens, labels)


def _engine(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    yield _gauge("vllm:num_requests_running", "Choices that are running.", snapshot.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Choices that are waiting.", snapshot.num_waiting, labels)
    # This engine defers nothing: requests wait only for rows or pages.
    waiting = {"capacity": snapshot.num_waiting, "deferred": 0}
    yield _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting choices, by reason.",
        waiting,
        labels,
        "reason",
    )
    yield from _cache(snapshot, labels)
    yield from _overload(snapshot, labels)
    for counter, text, value in (
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            snapshot.prompt_tokens,
        ),
        (
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            snapshot.num_cached_tokens,
        ),
        ("vllm:prompt_tokens", "Prompt tokens, cached or computed.", snapshot.prompt_tokens),
        (
            "vllm:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache.",
            snapshot.num_cached_tokens,
        ),
        ("vllm:generation_tokens", "Generated tokens.", snapshot.generation_tokens),
        ("vllm:num_preemptions", "Preemptions, for lack of cache pages.", snapshot.num_preemptions),
        ("vllm:spec_decode_num_drafts", "Blocks with drafts that were verified.", snapshot.num_drafts),
        ("vllm:spec_decode_num_draft_tokens", "Drafts, or depths of trees, tried.", snapshot.num_drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", snapshot.num_accepted),
        ("blockdraft:decode_steps", "Decode steps.", snapshot.num_decode_steps),
        ("blockdraft:prefill_steps", "Prefill steps.", snapshot.num_prefill_steps),
        ("blockdraft:prefill_tokens", "Prompt tokens that were computed.", snapshot.num_prefill_tokens),
        ("blockdraft:blocks", "Blocks that were verified, with drafts or without.", snapshot.num_blocks),
        ("blockdraft:recheck", "Answers that were computed again by plain decoding.", snapshot.num_rechecked),
        ("blockdraft:recheck_different", "Answers that differ from plain decoding.", snapshot.num_different),
    ):
        yield _counter(counter, text, value, labels)
    by_position = {str(position): count for position, count in enumerate(snapshot.accepted)}
    name, text = "accepted_tokens_per_pos", "Accepted drafts, by position in the block."
    yield _counter(f"vllm:spec_decode_num_{name}", text, by_position, labels, "position")
    finished = {**dict.fromkeys(FINISH_REASONS, 0), **snapshot.finished}
    text = "Choices that have ended, by reason."
    yield _counter("vllm:request_success", text, finished, labels, "finished_reason")
    for histogram, text in _HISTOGRAMS.items():
        yield _histogram(f"vllm:{histogram}", text, snapshot.histograms[histogram], labels)
    per_block = snapshot.generation_tokens / snapshot.num_blocks if snapshot.num_blocks else 0.0
    text = "Mean generated tokens per verified block."
    yield _gauge("blockdraft:tokens_per_block", text, per_block, labels)
    yield from _chosen(snapshot, labels)
    yield from _trees(snapshot, labels)
    if snapshot.speedup is not None:
        text = "Speed of the last ten seconds relative to plain decoding of as many rows."
        yield _gauge("blockdraft:speculation_speedup", text, snapshot.speedup, labels)


def _cache(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    used = snapshot.num_pages_used / snapshot.num_pages if snapshot.num_pages else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all.", used, labels)
    text = "Recurrent states saved for prefix hits, and slots for them."
    states = {"saved": snapshot.num_states_saved, "slots": snapshot.num_states}
    yield _gauge("blockdraft:states", text, states, labels, "kind")
    text = "Recurrent states evicted for others."
    yield _counter("blockdraft:states_evicted", text, snapshot.num_states_evicted, labels)
    text = "Pages of prefixes that the start found on disk, by what became of them."
    pages = {"restored": snapshot.num_pages_restored, "damaged": snapshot.num_pages_damaged}
    yield _gauge("blockdraft:prefix_disk_pages", text, pages, labels, "kind")


def _overload(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    text = "Requests that were answered with 429, by reason."
    refused = {"queue_full": snapshot.num_refused_full, "long_wait": snapshot.num_refused_wait}
    yield _counter("blockdraft:requests_refused", text, refused, labels, "reason")
    text = "Seconds that a new request would wait for a row."
    yield _gauge("blockdraft:expected_wait_seconds", text, snapshot.expected_wait_s, labels)


def _info(info: EngineInfo, labels: Labels) -> Iterator[Metric]:
    cache = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "cache_dtype": info.kv_dtype,
        "num_cache_bytes": str(info.num_cache_bytes),
        "engine": labels["engine"],
    }
    yield _gauge("vllm:cache_config_info", "Sizes of the cache in vLLM's names: a block is a page.", 1, cache)
    text = "Cache bytes per token, of target and drafter together."
    yield _gauge("blockdraft:kv_bytes_per_token", text, info.kv_bytes_per_token, labels)
    text = "Block width of a request's first steps, if it sets none; 1: plain decoding."
    yield _gauge("blockdraft:width", text, info.width, labels)
    if info.fingerprint.id is not None:
        same = {**labels, "fingerprint": info.fingerprint.id}
        text = "1; servers with equal fingerprints give equal tokens."
        yield _gauge("blockdraft:fingerprint_info", text, 1, same)
    text = "1 if weights or acceptance are synthetic, so that only times are meaningful."
    is_timing_only = info.is_dummy or info.synthetic_acceptance is not None
    faked = {
        "weights": "dummy" if info.is_dummy else "checkpoint",
        "acceptance": info.synthetic_acceptance or "real",
    }
    yield _gauge("blockdraft:timing_only", text, is_timing_only, {**labels, **faked})


def _replicas(served: Served, name: str) -> Iterator[Metric]:
    labels = ["model_name", "engine", "device"]
    ready = GaugeMetricFamily("blockdraft:replica_ready", "1 if the replica is ready.", labels=labels)
    text = "Requests that the replica has."
    live = GaugeMetricFamily("blockdraft:replica_requests_live", text, labels=labels)
    text = "Times that the replica was lost and started again."
    restarts = CounterMetricFamily("blockdraft:replica_restarts", text, labels=labels)
    for one in served.replicas:
        values = [name, str(one["replica"]), one["device"]]
        ready.add_metric(values, one["state"] == "ready")
        live.add_metric(values, one["requests"])
        restarts.add_metric(values, one["restarts"])
    yield from (ready, live, restarts)
    text = "Requests of lost replicas that others continued."
    yield _counter("blockdraft:repeated_requests", text, served.num_repeated, {"model_name": name})
    text = "Requests that were answered with 503, because too many were being answered."
    first = {"model_name": name, "engine": ENGINE}
    yield _counter("blockdraft:connections_refused", text, served.num_refused, first)


def _start(start: Mapping[str, object], labels: Labels) -> Iterator[Metric]:
    is_ready = float(start["state"] == "ready")
    yield _gauge("blockdraft:ready", "1 if the server is ready.", is_ready, labels)
    phases = start["phases"]
    assert isinstance(phases, list)
    ended = {phase["name"]: phase["seconds"] for phase in phases if phase["seconds"] is not None}
    text = "Seconds of each phase of the start."
    yield _gauge("blockdraft:startup_phase_seconds", text, ended, labels, "phase")


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float], labels: Labels
) -> Metric:
    """Return the family with its value, or with a sample for each value of its last label."""
    if not isinstance(value, Mapping):
        family.add_metric(list(labels.values()), value)
        return family
    for last, number in value.items():
        family.add_metric([*labels.values(), last], number)
    return family


def _gauge(name: str, text: str, value: float | Mapping[str, float], labels: Labels, *by: str) -> Metric:
    return _family(GaugeMetricFamily(name, text, labels=[*labels, *by]), value, labels)


def _counter(name: str, text: str, value: float | Mapping[str, float], labels: Labels, *by: str) -> Metric:
    return _family(CounterMetricFamily(name, text, labels=[*labels, *by]), value, labels)


def _histogram(name: str, text: str, histogram: Histogram, labels: Labels) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(str(float(bucket)) for bucket in histogram.buckets), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
    family.add_metric(list(labels.values()), buckets, histogram.sum)
    return family
