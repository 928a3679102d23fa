"""Builds the report of a run from its answers, writes it, and reads it again."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from pydantic import TypeAdapter, ValidationError

from blockdraft import __version__
from blockdraft.bench.figures import (
    DEFINITIONS,
    BenchReport,
    Cell,
    Distribution,
    GeneratorFigures,
    GraphGain,
    RunFigures,
    Startup,
    Warmup,
)
from blockdraft.bench.records import PLAIN, SPECULATIVE, Answer, Group
from blockdraft.bench.report_rows import ReportRow, key_text, whole_rows
from blockdraft.bench.report_warnings import warnings_of
from blockdraft.bench.speculation import total_of
from blockdraft.bench.statistics import pair, speedup, split_by_category, summarise
from blockdraft.bench.wire import shown_host
from blockdraft.errors import BenchError

SCHEMA_NAME = "blockdraft-bench"
SCHEMA_VERSION = 1
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
NO_BASELINE = (
    "plain decoding was not measured: use --arms plain,speculative, which starts a server for each, or "
    "measure a server without drafts and join both reports with `blockdraft bench compare`."
)

Facts = Mapping[str, object]


def build(  # noqa: PLR0913  # the sections of a report
    groups: Sequence[Group],
    *,
    endpoint: Facts,
    baseline: Facts | None = None,
    options: Facts,
    machine: Facts,
    startup: Sequence[Startup] = (),
    warmup: Sequence[Answer] = (),
    generator: Sequence[GeneratorFigures] = (),
    eager: Sequence[Group] = (),
    notes: Sequence[str] = (),
    date: str,
) -> BenchReport:
    """Compute all figures of a run. Each class of a workload gets a cell too, unless `groups` has them.

    `eager` has the groups of a server without CUDA graphs.
    """
    seed = options.get("seed")
    seed = seed if isinstance(seed, int) else 0
    if all(group.key["category"] == "all" for group in groups):
        groups = [part for group in groups for part in (group, *split_by_category(group))]
    facts = _endpoint(endpoint)
    runs = _by_cell(groups)
    groups = [_merged(parts) for parts in runs]
    cells = [summarise(group, seed=seed) for group in groups]
    for cell, parts in zip(cells, runs, strict=True):
        cell["runs"] = [_run_figures(summarise(part, seed=seed)) for part in parts] if len(parts) > 1 else []
        cell["vllm"] = vllm_keys(cell, model=facts["model"], kind=facts["kind"], date=date)
    plain = {key_text(group.key): group for group in groups if group.arm == PLAIN}
    speculative = [group for group in groups if group.arm == SPECULATIVE and key_text(group.key) in plain]
    pairs = [pair(group, plain[key_text(group.key)], seed=seed) for group in speculative]
    report: BenchReport = {
        "schema": SCHEMA,
        "date": date,
        "versions": {"blockdraft": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "machine": dict(machine),
        "endpoint": facts,
        "baseline": None if baseline is None else _endpoint(baseline),
        "options": {name: value for name, value in options.items() if not name.endswith("api_key")},
        "startup": list(startup),
        "warmup": _warmup(warmup),
        "generator": [one | {"used": _most_used(one, cells)} for one in generator],
        "cells": cells,
        "pairs": pairs,
        "graph_gains": _graph_gains(groups, eager, seed=seed),
        "warnings": [],
        "notes": list(notes),
        "definitions": dict(DEFINITIONS),
    }
    report["warnings"] = warnings_of(report, groups)
    whole = whole_rows(report)
    if len(whole) == 1:  # our own keys win; "date" is the only name in both
        report = cast("BenchReport", {**whole[0].cell["vllm"], **report})
    return report


def vllm_keys(cell: Cell, *, model: object = None, kind: object = None, date: str = "") -> dict[str, object]:
    """Return the figures under the names that `vllm bench serve --save-result` writes.

    Follow its conventions: 0 if nothing was measured, acceptance in percent, and no `spec_decode_` keys if
    acceptance is unknown.
    """
    key = cell["key"]
    completed = cell["num_requests"] - cell["num_failed"]
    busy_s = cell["busy_s"]
    tokens_in, tokens_out = cell["tokens_in"] or 0, cell["tokens_out"] or 0
    return {
        "date": date,
        "endpoint_type": "openai" if cell["asked"]["is_raw"] else "openai-chat",
        "backend": kind,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": cell["num_requests"],
        "request_rate": "inf" if key["rate"] is None else key["rate"],
        "burstiness": 1.0,
        "max_concurrency": key["concurrency"] if key["rate"] is None else None,
        "duration": busy_s,
        "completed": completed,
        "failed": cell["num_failed"],
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": completed / busy_s if busy_s > 0 else 0.0,
        "output_throughput": tokens_out / busy_s if busy_s > 0 else 0.0,
        "total_token_throughput": (tokens_in + tokens_out) / busy_s if busy_s > 0 else 0.0,
        **_vllm_times("ttft", cell["ttft_s"]),
        **_vllm_times("tpot", cell["tpot_s"]),
        **_vllm_times("itl", cell["itl_s"]),
        **_vllm_times("e2el", cell["latency_s"]),
        **_vllm_speculation(cell),
    }


def to_json(report: BenchReport) -> str:
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def output_paths(out: str | None) -> list[Path]:
    """Return the paths of JSON, Markdown and HTML for --out; raise BenchError if they cannot be written."""
    out = out or f"blockdraft-bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if out == "none":
        return []
    paths = [Path(out.removesuffix(".json") + suffix) for suffix in (".json", ".md", ".html")]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if path.stat().st_size == 0:
                path.unlink()
    except OSError as error:
        raise BenchError(f"--out: cannot write '{error.filename}': {error.strerror}.") from None
    return paths


def load_report(path: Path | str) -> BenchReport:
    """Read a report from a file. Raise BenchError if the file is not a report that we can read."""
    name = repr(str(path))
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the report {name}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{name} is not JSON: {error}. Was the run that wrote it cut short?") from error
    fact = _not_a_report(found)
    if fact is not None:
        raise BenchError(f"{name} {fact}")
    return cast("BenchReport", found)


def generator_used(report: BenchReport, row: ReportRow) -> float | None:
    """Return the share of the load generator's speed that the busier arm needed; None if unknown."""
    for one in report.get("generator", []):
        if (one["concurrency"], one["rate"]) == (row.key["concurrency"], row.key["rate"]):
            return _most_used(one, row.cells)
    return None


def _most_used(generator: GeneratorFigures, cells: Sequence[Cell]) -> float | None:
    """Return the largest share of the load generator's speed that a cell of this load needed."""
    at = (generator["concurrency"], generator["rate"])
    shares = [
        (cell["itl_s"]["count"] + cell["ttft_s"]["count"]) / cell["busy_s"] / generator["events_per_s"]
        for cell in cells
        if (cell["key"]["concurrency"], cell["key"]["rate"]) == at
        and cell["key"]["category"] == "all"
        and cell["busy_s"] > 0
        and generator["events_per_s"] > 0
    ]
    return max(shares, default=None)


def _by_cell(groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups of each cell and arm, run by run, in the order in which cells first appear."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((key_text(group.key), group.arm), []).append(group)
    return list(found.values())


def _merged(runs: Sequence[Group]) -> Group:
    """Return all runs of a cell as one group, so that a prompt is resampled with its answers of all runs."""
    if len(runs) == 1:
        return runs[0]
    metered = [run.metered for run in runs if run.metered is not None]
    return Group(
        key=runs[0].key,
        arm=runs[0].arm,
        answers=[answer for run in runs for answer in run.answers],
        busy_s=sum(run.busy_s for run in runs),
        metered=total_of(metered) if metered else None,
        blocks=[block for run in runs for block in run.blocks],
    )


def _graph_gains(graphs: Sequence[Group], eager: Sequence[Group], *, seed: int) -> list[GraphGain]:
    """Pair each cell of a server without graphs with that of the usual server, over the same prompts."""
    usual = {(key_text(group.key), group.arm): group for group in graphs}
    merged = {(key_text(parts[0].key), parts[0].arm): _merged(parts) for parts in _by_cell(eager)}
    pairs = [(usual[place], group) for place, group in merged.items() if place in usual]
    return [
        {
            "key": one.key,
            "arm": one.arm,
            "eager_tokens_per_s": summarise(other, seed=seed)["tokens_per_s"],
            "graphs_tokens_per_s": summarise(one, seed=seed)["tokens_per_s"],
            "gain": speedup(one, other, seed=seed),
        }
        for one, other in pairs
    ]


def _run_figures(cell: Cell) -> RunFigures:
    """Return the figures of one run."""
    return {
        "tokens_per_s": cell["tokens_per_s"]["value"],
        "ttft_s": cell["ttft_s"]["p50"],
        "tpot_s": cell["tpot_s"]["p50"],
        "latency_s": cell["latency_s"]["p50"],
        "committed_per_step": cell["speculation"]["committed_per_step"]["value"],
    }


def _vllm_times(name: str, times: Distribution) -> dict[str, object]:
    kinds = {"mean": times["mean"], "median": times["p50"], "std": times["std"]}
    kinds |= {"p90": times["p90"], "p99": times["p99"]}
    return {f"{kind}_{name}_ms": (value or 0.0) * 1000 for kind, value in kinds.items()}


def _vllm_speculation(cell: Cell) -> dict[str, object]:
    figures = cell["speculation"]
    if figures["steps"] is None:
        return {}
    return {
        "spec_decode_acceptance_rate": (figures["draft_acceptance_rate"] or 0.0) * 100,
        "spec_decode_acceptance_length": figures["committed_per_step"]["value"],
        "spec_decode_num_drafts": figures["steps"],
        "spec_decode_draft_tokens": figures["drafted"],
        "spec_decode_accepted_tokens": figures["accepted"],
        "spec_decode_per_position_acceptance_rates": figures["acceptance_by_position"],
    }


def _endpoint(facts: Facts) -> dict[str, object]:
    """Return the endpoint's facts, without a password in the address."""
    url = str(facts["url"])
    return {**facts, "url": urlunsplit(urlsplit(url)._replace(netloc=shown_host(url)))}


def _warmup(answers: Sequence[Answer]) -> Warmup:
    """Return the times of the first request, which includes compilation, and of later warm-up requests."""
    ordered = sorted(answers, key=lambda answer: answer.sent_s)
    first = next((answer for answer in ordered[:1] if answer.is_ok), None)
    rest = [answer for answer in ordered[1:] if answer.is_ok and answer.ask.arm == ordered[0].ask.arm]
    return {
        "num_requests": len(ordered),
        "num_failed": sum(not answer.is_ok for answer in ordered),
        "first_ttft_s": first.ttft_s if first else None,
        "first_latency_s": first.latency_s if first else None,
        "first_tokens_per_s": first.tokens_per_s if first else None,
        "rest_ttft_s": _median(answer.ttft_s for answer in rest),
        "rest_latency_s": _median(answer.latency_s for answer in rest),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _not_a_report(found: object) -> str | None:
    """Return why a value is not a report that we can read; None if it is."""
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, str):
        return "is not a report of blockdraft bench: it has no 'schema'."
    name, _, version = schema.partition("/")
    if name != SCHEMA_NAME or not version.isdecimal():
        return f"has the schema {schema!r}, not {SCHEMA!r}."
    if int(version) > SCHEMA_VERSION:
        return f"was written by a newer blockdraft ({schema}): update this one."
    try:
        TypeAdapter(BenchReport).validate_python(found, strict=True)
    except ValidationError as error:
        names = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in error.errors()[0]["loc"])
        return f"is damaged: '{''.join(names)[1:]}' is missing or is not what it should be."
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
