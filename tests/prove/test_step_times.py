"""The ten kinds of steps that a report times, on an engine that can run them all and on a small one."""

import pytest

from blockdraft.cli.main import main
from blockdraft.prove import step_times as module
from blockdraft.prove.step_times import step_times
from blockdraft.step.drafter import NoDrafter
from tests import tiny


def kinds(engine):
    found = step_times(engine)
    assert all(step.ms > 0 for step in found)
    return [(step.kind, step.rows, step.tokens) for step in found]


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_an_engine_can_run_is_timed_and_leaves_no_trace(monkeypatch, is_captured):
    monkeypatch.setattr(module, "PREFILLS", (20, 150, 2048))
    engine = tiny.engine(is_captured=is_captured, max_num_seqs=8)
    found = kinds(engine)
    widths = [width for width in (1, 4, 8, 16) if width <= tiny.BLOCK]
    assert found[:-2] == [("decode", rows, width) for rows in (1, 8) for width in widths]
    assert found[-2:] == [("prefill", 1, 20), ("prefill", 1, 150)]
    assert engine.snapshot().generation_tokens == 0
    tiny.drain(engine)


def test_a_small_engine_has_fewer():
    assert kinds(tiny.engine(NoDrafter(), max_num_seqs=1, block=1, width=1)) == [("decode", 1, 1)]


def test_a_report_is_about_this_machine(capsys):
    assert main(["prove", "http://127.0.0.1:9", "--report", "report.json"]) == 2
    assert "--report is about our own engine" in capsys.readouterr().err
