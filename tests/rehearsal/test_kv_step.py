"""The benchmark of compressed attention goes on after a kernel that fails, and ends with a bug of ours."""

import time

import pytest

from benchmarks.kv_step import Report


def failing(error):
    def work():
        raise error

    return work


def test_a_kernel_that_fails_does_not_end_the_report():
    report = Report(1e9, time.monotonic(), [])
    report.item("one", failing(RuntimeError("out of memory")))
    report.item("two", lambda: {"status": "PASS"})
    assert [result["status"] for result in report.results] == ["FAIL", "PASS"]
    with pytest.raises(KeyError):
        report.item("three", failing(KeyError("a bug of ours")))
