"""Answers that are computed again while an engine is idle: counted, compared, and in nobody's way."""

import json
import threading

import pytest
import torch

from blockdraft import LLM, SamplingParams, SettingsError
from blockdraft.engine.loop import EngineLoop
from blockdraft.engine.receipt import Receipt
from blockdraft.engine.recheck import MAX_WAITING, Recheck
from blockdraft.settings.settings import Settings
from tests import tiny

PROMPT = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
SAMPLED = SamplingParams(n=3, max_tokens=14, temperature=0.8, seed=3, logprobs=1)
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, cache_salt="mine", stop=["t31"])
SMALL = {"device": "cpu", "dtype": "float64", "max_model_len": 200}


def finish(recheck):
    """Run all steps that wait, and count them."""
    num_steps = 0
    while recheck.step():
        num_steps += 1
    return num_steps


def counts(engine):
    found = engine.snapshot()
    return found.num_rechecked, found.num_different


@pytest.mark.parametrize(
    "plan", [{}, {"overlap": True, "is_captured": True}, {"kv_dtype": "int8"}, {"width": 1}]
)
def test_sampled_answers_are_computed_again_and_leave_no_trace(plan):
    engine = tiny.engine(**plan)
    recheck = Recheck(engine, 1.0)
    before = tiny.run(engine, [(PROMPT, SAMPLED), (PROMPT[:3], GREEDY)])
    snapshot = engine.snapshot()
    assert recheck.num_waiting == 4
    assert finish(recheck) >= 4 * 2
    assert counts(engine) == (4, 0)
    after = engine.snapshot()
    assert (after.generation_tokens, after.num_decode_steps) == (
        snapshot.generation_tokens,
        snapshot.num_decode_steps,
    )
    assert tiny.run(engine, [(PROMPT, SAMPLED), (PROMPT[:3], GREEDY)]) == before


def test_an_answer_that_differs_is_counted_and_logged_with_its_receipt(caplog):
    engine = tiny.engine()
    recheck = Recheck(engine, 1.0)
    keep = engine.on_end

    def changed(sequence):
        sequence.token_ids[-1] ^= 1
        keep(sequence)

    engine.on_end = changed
    tiny.run(engine, [(PROMPT, GREEDY)])
    finish(recheck)
    assert counts(engine) == (1, 1)
    line = caplog.messages[-1].partition("receipt: ")[2]
    assert Receipt.of(json.loads(line)).prompt_ids == tuple(PROMPT)


def test_a_fault_of_steps_with_drafts_is_found(monkeypatch):
    engine = tiny.engine()
    recheck, right = Recheck(engine, 1.0), engine.models.target.logits

    def wrong(hidden):
        logits = right(hidden)
        return logits + torch.arange(logits.shape[-1]) * (hidden.shape[0] > 1)

    monkeypatch.setattr(engine.models.target, "logits", wrong)
    tiny.run(engine, [(PROMPT, GREEDY)])
    finish(recheck)
    assert counts(engine) == (1, 1)


def test_a_share_of_the_answers_is_sampled_and_no_more_than_can_wait():
    engine = tiny.engine()
    recheck = Recheck(engine, 0.25)
    tiny.run(engine, [(PROMPT[:3], GREEDY)] * 10)
    assert recheck.num_waiting == 2
    tiny.run(engine, [(PROMPT[:3], GREEDY)] * 4 * (MAX_WAITING + 5))
    assert recheck.num_waiting == MAX_WAITING


def test_work_comes_first_and_the_answer_begins_again():
    engine = tiny.engine(max_num_seqs=1, num_pages=8)
    recheck = Recheck(engine, 1.0)
    expected = tiny.run(engine, [(PROMPT, GREEDY)])
    for _ in range(3):
        assert recheck.step()
    recheck.pause()
    engine.check()
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_pages
    engine.on_end = lambda sequence: None
    engine.add(PROMPT, GREEDY)
    assert not recheck.step(), "the engine has work"
    tiny.drain(engine)
    assert tiny.run(engine, [(PROMPT, GREEDY)]) == expected
    finish(recheck)
    assert counts(engine) == (1, 0)


def test_an_answer_whose_step_fails_is_dropped(monkeypatch):
    engine = tiny.engine()
    recheck = Recheck(engine, 1.0)
    expected = tiny.run(engine, [(PROMPT, GREEDY), (PROMPT[:4], GREEDY)])
    recheck.step()
    with monkeypatch.context() as broken:
        broken.setattr(type(engine), "_launch", None)
        with pytest.raises(TypeError):
            recheck.step()
    assert recheck.num_waiting == 1
    finish(recheck)
    assert counts(engine) == (1, 0)
    assert tiny.run(engine, [(PROMPT, GREEDY), (PROMPT[:4], GREEDY)]) == expected


def test_a_served_engine_checks_when_nobody_asks(monkeypatch):
    monkeypatch.setattr("blockdraft.engine.loop.QUIET_S", 0.01)
    ended = threading.Event()

    class Outlet:
        def send(self, deltas):
            if any(delta.finish_reason is not None for delta in deltas):
                ended.set()
            return True

    loop = EngineLoop(lambda startup: tiny.engine(), Outlet(), recheck_share=1.0).wait()
    for number in (1, 2):
        ended.clear()
        loop.add(PROMPT, GREEDY, "one").result()
        assert ended.wait(30)
        while loop.snapshot().num_rechecked < number:
            pass
    loop.close()
    assert loop.snapshot().num_different == 0


def test_an_llm_checks_after_its_answers():
    llm = LLM(tiny.TARGET, tiny.DRAFT, **SMALL, recheck=0.5)
    llm.generate([PROMPT, PROMPT[:3]], GREEDY)
    assert counts(llm.engine) == (1, 0)
    assert list(llm.stream(PROMPT, GREEDY))
    assert counts(llm.engine) == (1, 0)
    assert list(llm.stream(PROMPT, GREEDY))
    assert counts(llm.engine) == (2, 0)
    assert llm.engine.fingerprint.id is not None


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", float("nan")])
def test_a_share_is_from_0_to_1(share):
    with pytest.raises(SettingsError, match="is not a share from 0 to 1"):
        Settings(recheck=share)
