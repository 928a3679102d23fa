"""A start on a card asks for all its kernels at once, and only if it must."""

import contextlib
from dataclasses import replace

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from blockdraft.phases import StartProgress
from blockdraft.planner.plan import StartRules
from blockdraft.start import compile_ahead
from blockdraft.start.compile_ahead import CompileAhead, compile_steps
from tests import tiny

CARD = torch.device("cuda", 0)


class Pool:
    """Compiles nothing and says that it has."""

    made: list["Pool"]

    def __init__(self, num_workers):
        self.num_workers, self.is_closed = num_workers, False
        self.asked, self.errors = [], []
        self.num_asked = self.num_done = 0
        self.made.append(self)

    def wait(self, tell):
        for number, name in enumerate(self.asked):
            tell(number + 1, len(self.asked), name)

    def close(self):
        self.is_closed = True


@pytest.fixture
def pools(monkeypatch, tmp_path):
    """A card, 32 cores, and the pools that were made."""
    pytest.importorskip("triton")
    from blockdraft.kernels.triton import compile_pool

    machine = replace(compile_ahead.read_machine())
    machine = replace(machine, cpu=replace(machine.cpu, num_cores=32))
    monkeypatch.setattr(compile_ahead, "read_machine", lambda: machine)
    monkeypatch.setattr(compile_ahead, "has_triton", lambda: True)
    monkeypatch.setattr(compile_ahead, "card_facts", lambda device: ["H200"])
    monkeypatch.setattr(compile_pool, "CompilePool", Pool)
    monkeypatch.setattr(compile_pool, "collecting", lambda pool: contextlib.nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    Pool.made = []
    return Pool.made


def test_a_second_start_finds_the_mark_and_starts_nobody(pools):
    CompileAhead(CARD, ["facts"]).close(is_done=False)
    assert pools[0].is_closed
    CompileAhead(CARD, ["facts"]).close(is_done=True)
    assert [pool.num_workers for pool in pools] == [16, 16], "the first start did not end"
    again = CompileAhead(CARD, ["facts"])
    with again.collecting() as is_useful:
        assert not is_useful
    again.close(is_done=True)
    assert len(pools) == 2
    CompileAhead(CARD, ["other facts"]).close(is_done=True)
    assert len(pools) == 3


def test_with_few_cores_or_without_a_card_a_start_compiles_as_it_runs(pools, monkeypatch):
    CompileAhead(torch.device("cpu"), []).close(is_done=True)
    machine = compile_ahead.read_machine()
    few = replace(machine, cpu=replace(machine.cpu, num_cores=2))
    monkeypatch.setattr(compile_ahead, "read_machine", lambda: few)
    CompileAhead(CARD, []).close(is_done=True)
    monkeypatch.setattr(compile_ahead, "has_triton", lambda: False)
    CompileAhead(CARD, ["others"]).close(is_done=True)
    assert pools == []


def test_an_error_while_collecting_is_left_to_the_start(pools):
    ahead = CompileAhead(CARD, [])
    with ahead.collecting():
        raise RuntimeError("a reference that fails")
    ahead.close(is_done=False)
    assert ahead.problem == "RuntimeError: a reference that fails"


def test_what_will_be_served_is_run_once_by_size(pools, monkeypatch):
    decoded, prefilled, checked = set(), set(), []

    def decode(engine, width, num_logprobs=None):
        decoded.add((len(engine.rows.active), width))
        decoded.add(("random", engine.rows.sampling().needs.random))
        decoded.add(("logprobs", num_logprobs is not None))

    monkeypatch.setattr(compile_ahead.Engine, "decode", decode)
    monkeypatch.setattr(
        compile_ahead.Engine,
        "prefill",
        lambda engine, ids, later, counts, offsets=None: prefilled.add(counts),
    )
    monkeypatch.setattr(compile_ahead, "check_kernels", lambda engine: checked.append(engine) or ())
    engine = tiny.engine(width=5, max_num_seqs=6, max_prefill_tokens=16)
    models = engine.models.with_kernels(kernels_for(torch.float64, torch.device("cpu")))
    ahead, startup = CompileAhead(CARD, []), StartProgress()
    pools[0].asked += ["_attend", "_norm"]
    with startup.phase("allocate"):
        compile_steps(ahead, models, engine.plan, startup)
        assert startup.phases()[2].progress == 1.0
    assert startup.phases()[2].detail == "compiled 2 of 2: _norm"
    assert ahead.problem is None
    assert decoded >= {(rows, width) for rows in (1, 2, 4, 6) for width in (1, 5, 8)}
    assert decoded >= {(rows, width) for rows in (1, 6) for width in (1, 2, 3, 4, 6, 8)}
    assert decoded >= {(kind, asked) for kind in ("random", "logprobs") for asked in (True, False)}
    assert prefilled >= {(1,), (16,), (2, 7)}
    assert len(checked) == 1
    compile_steps(ahead, models, engine.plan, startup)
    assert len(checked) == 1, "all is compiled"
    assert pools[0].is_closed
    ahead.close(is_done=True)


def test_what_is_not_compared_is_not_compiled_and_what_failed_is_named(pools, monkeypatch):
    checked = []
    monkeypatch.setattr(compile_ahead.Engine, "decode", lambda engine, width, num_logprobs=None: None)
    monkeypatch.setattr(compile_ahead.Engine, "prefill", lambda *given: None)
    monkeypatch.setattr(compile_ahead, "check_kernels", lambda engine: checked.append(engine) or ())
    engine = tiny.engine(width=5, max_num_seqs=6, max_prefill_tokens=16)
    ahead = CompileAhead(CARD, [])
    pools[0].errors += ["_norm: PTXASError: too large", "_attend: another"]
    plan = replace(engine.plan, start=StartRules(verify="off"))
    compile_steps(ahead, engine.models, plan, StartProgress())
    assert checked == []
    assert ahead.problem == "2 failed, such as _norm: PTXASError: too large"
    ahead.close(is_done=False)


def test_workers_that_end_early_are_told_of(pools):
    ahead = CompileAhead(CARD, [])
    pools[0].num_asked, pools[0].num_done = 50, 3
    ahead.wait(lambda done, total, name: None)
    assert ahead.problem == "the workers ended after 3 of 50"
