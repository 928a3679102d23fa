"""The report: its JSON, its tables, the names of others, and files that are no reports."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from blockdraft.bench.compare import compare
from blockdraft.bench.figures import ArmPair, BenchReport, Cell
from blockdraft.bench.html_page import render
from blockdraft.bench.layout import (
    FIGURES,
    details,
    grid,
    headline,
    markdown,
    terminal,
    verdict_lines,
)
from blockdraft.bench.machine_facts import machine_facts
from blockdraft.bench.records import PLAIN, SPECULATIVE, Speculation
from blockdraft.bench.report import (
    SCHEMA,
    build,
    load_report,
    to_json,
    vllm_keys,
)
from blockdraft.bench.report_rows import rows_of
from blockdraft.bench.sheet import number
from blockdraft.errors import BenchError
from tests.bench.answers import HOSTILE, answer, arms, facts, group, prompt, prompts, workloads

STARTUP = {
    "label": "captured",
    "phases": [{"name": "load", "seconds": 3.0}, {"name": "capture", "seconds": 2.5}],
    "ready_s": 5.5,
    "first_ttft_s": None,
    "first_latency_s": None,
}
SCHEMA_PAGE = Path(__file__).parents[2] / "docs" / "bench-schema.md"


def shown(renderable, width=160):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def keys_of(value, *, inside=()):
    """Every key of a JSON value, but for those that a user chooses."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield name
            if name != "options":
                yield from keys_of(entry, inside=(*inside, name))
    elif isinstance(value, list):
        for entry in value:
            yield from keys_of(entry, inside=inside)


@pytest.fixture
def full():
    """A report in which every field occurs."""
    groups = workloads()
    groups[0].answers[1].text = "something else"
    return build(
        groups,
        **facts(
            baseline=facts()["endpoint"],
            startup=[STARTUP],
            warmup=[answer(prompt("w0"), latency_s=9.0), answer(prompt("w1"), sent_s=9.0)],
            notes=["a note"],
            machine=machine_facts()
            | {"gpus": [dict.fromkeys(("name", "driver", "memory", "power_limit", "max_clock"), "x")]},
        ),
    )


def test_every_key_of_a_report_is_documented(full):
    one = build([arms(4)[0]], **facts())
    documented = set(re.findall(r"`([\w.]+)`", SCHEMA_PAGE.read_text()))
    found = {*keys_of(full), *keys_of(one)}
    assert len(found) > 100
    assert found - documented == set()


def test_the_documented_fields_of_a_report_and_its_cells_exist():
    """The first column of the tables: a field that went away must go there as well."""
    names = set()
    for line in SCHEMA_PAGE.read_text().splitlines():
        if line.startswith("| `"):
            names |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert names == {*BenchReport.__annotations__, *Cell.__annotations__, *ArmPair.__annotations__}


def test_a_report_survives_being_written_and_read(full, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(to_json(full))
    assert load_report(path) == json.loads(json.dumps(full))
    assert full["schema"] == SCHEMA


def test_cells_are_paired_by_their_keys(full):
    assert len(full["cells"]) == 8
    assert [(pair["key"]["workload"], pair["key"]["concurrency"]) for pair in full["pairs"]] == [
        ("code", 1),
        ("code", 8),
        ("prose", 1),
        ("prose", 8),
    ]
    for row in rows_of(full):
        ratio = row.speculative["tokens_per_s"]["value"] / row.plain["tokens_per_s"]["value"]
        assert row.pair["speedup"]["tokens_per_s"]["value"] == pytest.approx(ratio)


def test_without_a_baseline_there_are_no_pairs():
    report = build([arms(4)[0]], **facts())
    assert (report["pairs"], report["baseline"]) == ([], None)
    assert headline(report).rows[0][3] == "-"


def test_the_cold_request_and_the_start_are_numbers_of_their_own(full):
    warm = full["warmup"]
    assert (warm["num_requests"], warm["first_latency_s"], warm["rest_latency_s"]) == (2, 9.0, 2.5)
    assert full["startup"] == [STARTUP]
    assert "ready after 5.50 s (load 3.00 s, capture 2.50 s)" in shown(terminal(full))


def test_the_cold_request_is_compared_with_its_own_arm_only():
    later = [answer(prompt(), sent_s=9.0, ttft_s=0.2), answer(prompt(), arm=PLAIN, sent_s=9.0, ttft_s=2.0)]
    report = build([], **facts(warmup=[answer(prompt(), ttft_s=5.0, latency_s=9.0), *later]))
    assert (report["warmup"]["num_requests"], report["warmup"]["rest_ttft_s"]) == (3, pytest.approx(0.2))
    assert "after 5,000 ms (the others of its arm, p50: 200), 1.22 tok/s." in shown(terminal(report))
    assert "rest_tokens_per_s" not in report["warmup"]


def test_a_cold_request_that_failed_is_not_replaced_by_the_next():
    report = build([], **facts(warmup=[answer(prompt(), error="HTTP 500"), answer(prompt(), sent_s=1.0)]))
    assert (report["warmup"]["num_failed"], report["warmup"]["first_ttft_s"]) == (1, None)


def test_classes_of_a_workload_become_cells_unless_given():
    mixed = [answer(one) for one in (*prompts(3, category="code"), *prompts(3, category="prose"))]
    report = build([group(mixed, workload="mt")], **facts())
    assert [cell["key"]["category"] for cell in report["cells"]] == ["all", "code", "prose"]
    assert [row[0] for row in headline(report).rows] == ["mt", "mt / code", "mt / prose"]
    given = build([group(mixed, workload="mt"), group(mixed[:3], category="code")], **facts())
    assert [cell["key"]["category"] for cell in given["cells"]] == ["all", "code"]


def test_the_headline_table_reads_as_it_was_measured():
    sheet = headline(build(workloads(), **facts()))
    assert sheet.header == (
        *("workload", "conc", "tok/s\n(±)", "speedup\n(±)", "commit\n/step"),
        *("TTFT ms\np50/p99", "TPOT ms\np50", "failed"),
    )
    first, third = sheet.rows[0], sheet.rows[2]
    assert first[:2] == ("code", "1")
    assert re.fullmatch(r"4\.\d\d ±0\.\d\d", first[2])
    assert re.fullmatch(r"1\.8\dx ±0\.\d\d", first[3])
    assert first[4:] == ("2.50", "500/500", "210", "0")
    assert third[7] == "2/12"


def test_depth_and_temperature_are_columns_only_where_they_vary():
    groups = [group([answer(prompt())], depth=depth) for depth in (0, 4096)]
    sheet = headline(build(groups, **facts()))
    assert sheet.header[:3] == ("workload", "conc", "depth")
    assert [row[2] for row in sheet.rows] == ["0", "4096"]


def test_unknown_acceptance_is_said_in_words():
    report = build([group([answer(prompt(), speculation=None)])], **facts())
    assert headline(report).rows[0][4] == "unknown"
    assert "unknown" in markdown(report)
    assert "spec_decode_acceptance_length" not in report["cells"][0]["vllm"]


def test_a_server_in_which_no_speculation_was_seen_is_not_called_speculative():
    silent = [answer(one, speculation=None) for one in prompts(4)]
    silent[0].error = "HTTP 500: full"
    report = build([group(silent)], **facts())
    assert report["cells"][0]["arm"] == SPECULATIVE
    assert details(report).rows[0][1] == "as served"
    assert report["warnings"][0].startswith("code at 1, as served: 1 of 4")
    page = render(report)
    assert "as served: " in page
    assert "with speculation" not in page.split("What the figures mean")[0]
    assert compare(report, report).matches[0].arm == "as served"


def test_the_servers_counters_name_the_classes_of_a_workload_as_well():
    mixed = [answer(one, speculation=None) for name in ("code", "prose") for one in prompts(3, category=name)]
    report = build([group(mixed, metered=Speculation(100, 300, (50,)))], **facts())
    assert [row[1] for row in details(report).rows] == ["speculative"] * 3
    assert "with speculation" in render(report)


def test_vllms_names_carry_its_units_and_conventions():
    cell = build([group([answer(one) for one in prompts(4)], busy_s=8.0, concurrency=2)], **facts())["cells"][
        0
    ]
    keys = cell["vllm"]
    assert keys == vllm_keys(cell, model="a/model", kind="blockdraft", date="2026-11-15T12:00:00Z")
    expected = {
        "duration": 8.0,
        "completed": 4,
        "failed": 0,
        "num_prompts": 4,
        "total_input_tokens": 400,
        "total_output_tokens": 44,
        "request_throughput": 0.5,
        "output_throughput": 5.5,
        "total_token_throughput": 444 / 8,
        "mean_ttft_ms": 500,
        "median_tpot_ms": 200,
        "p99_itl_ms": 400,
        "p90_e2el_ms": 2500,
        "std_ttft_ms": 0,
        "max_concurrency": 2,
        "request_rate": "inf",
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 16,
        "spec_decode_draft_tokens": 48,
        "spec_decode_accepted_tokens": 24,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5, 0.0],
        "model_id": "a/model",
        "endpoint_type": "openai-chat",
    }
    for name, value in expected.items():
        assert keys[name] == (value if isinstance(value, str | list) else pytest.approx(value)), name


def test_a_report_of_one_load_has_vllms_names_at_the_top_and_others_do_not():
    one = build(arms(4), **facts())
    assert one["output_throughput"] == pytest.approx(rows_of(one)[0].speculative["tokens_per_s"]["value"])
    assert one["date"] == facts()["date"]
    assert "output_throughput" not in build(workloads(), **facts())


def test_a_rate_is_written_as_one():
    report = build([group([answer(one) for one in prompts(3)], rate=2.5)], **facts())
    keys = report["cells"][0]["vllm"]
    assert (keys["request_rate"], keys["max_concurrency"]) == (2.5, None)
    assert headline(report).rows[0][1] == "2.5/s"


def test_at_a_rate_the_headline_is_the_speedup_of_tpot():
    both = arms(8, gain=2.0, rate=0.5)
    both[0].busy_s = both[1].busy_s = 50.0
    report = build(both, **facts())
    assert headline(report).rows[0][3] == "2.00x ±0.00"
    assert "the speedup is that of TPOT" in shown(terminal(report))
    assert "2.00x" in render(report)
    (change,) = (one for one in compare(report, report).matches[0].changes if one.figure == "speedup")
    assert change.a["value"] == pytest.approx(2.0)
    assert "of TPOT" not in shown(terminal(build(arms(8), **facts())))


def test_a_grid_has_the_shape_that_was_asked_for():
    report = build(workloads(), **facts())
    sheet = grid(report, rows=["prose", "code", "other"], columns=[1, 8, 32], figure="card")
    assert sheet.header == ("workload", "concurrency 1", "concurrency 8", "concurrency 32")
    assert [row[0] for row in sheet.rows] == ["prose", "code", "other"]
    assert all(re.fullmatch(r"\d\.\d\d \(\d\.\d\dx\)", entry) for entry in sheet.rows[1][1:3])
    assert sheet.rows[2][1:] == ("-", "-", "-")
    for figure in FIGURES:
        assert grid(report, rows=["code"], columns=[1], figure=figure).title == FIGURES[figure][0]
    with pytest.raises(BenchError, match=r"'speed'.*speedup"):
        grid(report, rows=["code"], columns=[1], figure="speed")


def test_warnings_name_what_spoils_the_numbers():
    both = arms(4)
    speculative, plain = both
    plain.answers[0].text = "another"
    plain.answers[1].speculation = Speculation(4, 12, (3,))
    speculative.answers[2].cached_tokens = 90
    speculative.answers[1].error = "HTTP 503: busy"
    speculative.answers[3].planned_s -= 0.1
    speculative.answers.append(answer(prompt("alone")))
    away = facts()["endpoint"] | {"url": "http://user:secret@gpu.example:8000/v1"}
    report = build(both, **facts(endpoint=away))
    text = "\n".join(report["warnings"])
    for part in (
        "1 of 5 requests failed: HTTP 503 (1)",
        "the baseline speculated",
        "of first turns came from a cache",
        "ms late",
        "1 prompts are in one arm only",
        "1 of 3 greedy answers differ",
        "the server is at gpu.example",
    ):
        assert part in text
    assert "secret" not in to_json(report)
    assert report["endpoint"]["url"] == "http://gpu.example:8000/v1"
    assert build(arms(4), **facts())["warnings"] == []


def test_a_run_that_was_stopped_says_what_is_missing():
    both = arms(4)
    both[0].answers[2].error = "not ended: the run was stopped."
    both[0].answers[3].error = "not sent: the run was stopped."
    report = build(both, **facts())
    assert report["warnings"][:2] == [
        "code at 1, speculative: the run was stopped; 1 requests were given up.",
        "code at 1, speculative: 1 requests were never sent.",
    ]
    assert headline(report).rows[0][7] == "0"
    assert details(report).rows[0][6] == "0 +1 not sent +1 given up"


def test_drafts_past_the_end_of_answers_are_warned_of():
    """The four steps of each answer committed ten tokens."""
    for tokens, is_warned in ((10, False), (8, True)):
        warnings = build([group([answer(one, tokens=tokens) for one in prompts(4)])], **facts())["warnings"]
        assert ["steps committed 40 tokens" in line for line in warnings] == [True] * is_warned
    metered = group([answer(prompt(), speculation=None)], metered=Speculation(100, 300, (50,)))
    assert "not ours" in build([metered], **facts())["warnings"][0]


def test_keys_stay_out_of_the_report():
    options = {"seed": 1, "api_key": "sk-1234", "baseline_api_key": "sk-1234", "max_tokens": 64}
    report = build(arms(4), **facts(options=options))
    assert "sk-1234" not in to_json(report)
    assert report["options"] == {"seed": 1, "max_tokens": 64}


def test_the_seed_is_the_options():
    one, same, other = (build(arms(6), **facts(options={"seed": seed})) for seed in (1, 1, 2))
    assert one["pairs"] == same["pairs"]
    assert one["pairs"] != other["pairs"]


def test_hostile_names_reach_neither_the_terminal_nor_markdown():
    both = arms(4, workload=HOSTILE)
    both[1].answers[0].text = HOSTILE
    both[0].answers[1].error = HOSTILE
    report = build(both, **facts(endpoint=facts()["endpoint"] | {"model": HOSTILE}, notes=[HOSTILE]))
    terminal_text, markdown_text = shown(terminal(report)), markdown(report)
    assert "\x1b" not in terminal_text + markdown_text
    assert "alert(1)" in terminal_text
    assert "<script>" not in markdown_text.replace("\\<", "")
    rows = [line for line in markdown_text.splitlines() if line.startswith("| \\<script")]
    assert rows
    header = markdown_text.splitlines()[2]
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == len(re.findall(r"(?<!\\)\|", header))


def test_the_terminal_fits_eighty_columns_and_says_whether_it_pays():
    text = shown(terminal(build(workloads(), **facts())), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "Speculation pays: code at 1, 8; prose at 1, 8." in text
    assert "22 of 22 equal" in shown(terminal(build(workloads(), **facts())))


def test_a_server_that_queues_is_named_with_the_load_from_which_it_does():
    loads = ((1, 0.1), (2, 0.5), (24, 2.4))
    groups = [group([answer(prompt(), ttft_s=ttft_s)], concurrency=load) for load, ttft_s in loads]
    (line,) = build(groups, **facts())["warnings"]
    assert line.startswith("code, speculative: TTFT saturates from 24 at a time on: p50 2,400 ms, 24 times")
    assert "--max-num-seqs" in line
    (alone,) = build(groups[2:], **facts())["warnings"]
    assert "TTFT p50 is 2,400 ms, most of an answer's time" in alone


def test_a_load_generator_near_its_limit_is_told():
    """Six answers of six events in about 15 s: 2.3 events a second with speculation, less without."""
    generators = [
        {"concurrency": 1, "rate": None, "num_processes": 1, "events_per_s": 25_000.0, "used": None},
        {"concurrency": 8, "rate": None, "num_processes": 2, "events_per_s": 3.0, "used": None},
    ]
    report = build(workloads(), **facts(generator=generators))
    few, many = (one["used"] for one in report["generator"])
    assert few < 0.001
    assert 0.6 < many < 1.0
    (line,) = [line for line in report["warnings"] if "load generator" in line]
    assert line.startswith(f"at 8 the load generator read {many:.0%} of what it can")
    text = shown(terminal(report), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "client\n" in headline(report).header[-1]
    assert "25,000 at 1 (1 process, 0.0% used)" in " ".join(text.split())
    assert "25,000 at 1" in render(report)


def test_a_report_from_before_the_load_generator_was_measured_is_read(tmp_path):
    report = build(workloads(), **facts())
    del report["generator"]
    path = tmp_path / "old.json"
    path.write_text(to_json(report))
    assert "client" not in "".join(headline(load_report(path)).header)


def test_verdicts_name_depth_and_temperature():
    groups = [
        one
        for setting in ({}, {"depth": 4096}, {"depth": 4096, "temperature": 0.7})
        for load in ({"concurrency": 1}, {"concurrency": 8})
        for one in arms(6, **setting, **load)
    ]
    report = build([*groups, *arms(2, workload="prose")], **facts())
    assert verdict_lines(report) == [
        "Speculation pays: code at 1, 8; code, depth 4096 at 1, 8; code, depth 4096, T 0.7 at 1, 8.",
        "Too little to say: prose at 1.",
    ]
    assert 'class="too little"' not in render(report)
    groups[4].answers[0].error = "HTTP 500"
    assert build(groups, **facts())["warnings"][0].startswith("code, depth 4096 at 1, speculative: 1 of 6")


def test_nothing_measured_is_still_a_report():
    report = build([], **facts())
    assert report["cells"] == []
    assert shown(terminal(report))
    assert markdown(report)
    failed = build([group([answer(prompt(), error="refused")], busy_s=0.0)], **facts())
    assert headline(failed).rows[0][2:] == ("-", "-", "unknown", "-/-", "-", "1/1")
    assert failed["mean_ttft_ms"] == 0
    assert to_json(failed)


def test_both_arms_stand_in_the_table_of_all_cells():
    report = build(arms(4), **facts())
    assert [row[1] for row in details(report).rows] == [SPECULATIVE, PLAIN]
    assert {len(row) for row in details(report).rows} == {len(details(report).header)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "cannot read"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema": NaN}', "is not JSON"),
        (b"[]", "has no 'schema'"),
        (b'{"mean_ttft_ms": 1}', "has no 'schema'"),
        (b'{"schema": "other/1"}', "has the schema 'other/1'"),
        (b'{"schema": "blockdraft-bench/x"}', "has the schema"),
        (b'{"schema": "blockdraft-bench/2"}', "newer blockdraft"),
        (b'{"schema": "blockdraft-bench/1", "cells": []}', "damaged: 'date' is missing"),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_its_reason(tmp_path, text, message):
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(BenchError, match=message):
        load_report(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("cells", 0, "key", "depth"), "<b>"),
        (("cells", 0, "busy_s"), True),
        (("cells", 0, "tokens_per_s", "interval"), [1.0, "2"]),
        (("cells", 0, "ttft_s", "p50"), []),
        (("pairs",), None),
        (("pairs", 0, "verdict"), "perhaps"),
        (("warnings", 0), 1),
        (("cells", 1, "ttft_s"), None),
    ],
)
def test_a_field_of_another_kind_is_refused_and_named(tmp_path, where, value):
    report = build([*arms(4), group([answer(prompt(), error="x")], workload="w")], **facts())
    *parents, last = where
    inner = report
    for name in parents:
        inner = inner[name]
    inner[last] = value
    path = tmp_path / "file.json"
    path.write_text(json.dumps(report))
    name = where[0] + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where[1:])
    with pytest.raises(BenchError, match=rf"damaged: '{re.escape(name)}"):
        load_report(path)
    with pytest.raises(BenchError, match="cannot read"):
        load_report(tmp_path / "nothing.json")


def test_classes_alone_are_reported_in_full():
    """Without a group of the whole workload, nothing stands in for its classes."""
    both = [replace(one, key={**one.key, "workload": "w", "category": "code"}) for one in arms(4)]
    both[0].answers[0].error = "HTTP 500"
    report = build(both, **facts())
    assert "1 of 4 requests failed" in report["warnings"][0]
    assert "w / code at 1" in shown(terminal(report))
    assert "3 of 3 equal" in shown(terminal(report))


def test_the_machine_is_described_with_and_without_a_gpu(monkeypatch):
    found = machine_facts()
    assert found["num_cpus"] >= 1
    assert found["cpu"]
    assert found["memory_available_bytes"] > 0
    monkeypatch.setattr("blockdraft.machine.nvml.output_of", lambda *command: "")
    assert machine_facts()["gpus"] == []
    line = "NVIDIA H200, 570.1, 143771 MiB, 700.00 W, 1980 MHz\n"
    monkeypatch.setattr("blockdraft.machine.nvml.output_of", lambda *command: line)
    assert machine_facts()["gpus"] == [
        {
            "name": "NVIDIA H200",
            "driver": "570.1",
            "memory": "143771 MiB",
            "power_limit": "700.00 W",
            "max_clock": "1980 MHz",
        }
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_figures_are_short_and_without_exponents(value, text):
    assert number(value) == text


def test_a_group_is_not_changed_by_being_reported():
    groups = workloads()
    copies = [replace(one, answers=list(one.answers)) for one in groups]
    build(groups, **facts())
    assert groups == copies
