"""The Python API: order, interleaving, leaks, and what an interrupted step leaves behind."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from blockdraft import LLM, RequestError, SamplingParams, SettingsError
from blockdraft.cache.view import CacheView
from blockdraft.engine.seeds import mix
from blockdraft.kernels.cpu import why_no_llvm
from tests import tiny

PROMPT = [2, 4, 6, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"device": "cpu", "dtype": "float64", "max_model_len": 200}


@pytest.fixture
def llm():
    return LLM(tiny.TARGET, tiny.DRAFT, **SMALL, max_queue=4, width=8)


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [[i, i + 1, i + 2] for i in range(3)]
    together = llm.generate(prompts, GREEDY)
    assert [r.prompt_token_ids for r in together] == [tuple(p) for p in prompts]
    assert [r.token_ids for r in together] == [llm.generate([p], GREEDY)[0].token_ids for p in prompts]


def test_strings_ids_and_conversations_are_the_same_prompt(llm):
    text = llm.generate("t2 t4 t6 t8", GREEDY)[0]
    assert text.token_ids == llm.generate(PROMPT, GREEDY)[0].token_ids
    assert text.token_ids == llm.chat([{"role": "user", "content": "t2 t4 t6 t8"}], GREEDY)[0].token_ids
    assert text.token_ids == llm.generate(np.array(PROMPT), GREEDY)[0].token_ids


def test_more_prompts_than_the_queue_holds_are_fed_as_it_empties(llm):
    assert len(llm.generate([PROMPT] * 11, GREEDY)) == 11


def test_streams_interleave_with_each_other_and_with_generate(llm):
    expected = llm.generate([PROMPT, [1, 2, 3]], GREEDY)
    first, second = llm.stream(PROMPT, GREEDY), llm.stream([1, 2, 3], GREEDY)
    tokens = [next(first).token_ids, next(second).token_ids]
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected[0].token_ids
    for stream, start, result in zip((first, second), tokens, expected, strict=True):
        assert start + tuple(t for d in stream for t in d.token_ids) == result.token_ids


def test_a_stream_that_is_closed_or_dropped_frees_its_request_at_once(llm):
    stream = llm.stream(PROMPT, GREEDY)
    stream.close()
    assert not llm.engine.has_work
    assert list(stream) == []
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert not llm.engine.has_work
    assert not llm._streams
    llm.engine.check()


def test_threads_share_one_llm_and_its_steps(llm):
    prompts = [[i, i + 3, i + 5] for i in range(6)]
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    num_blocks = llm.engine.stats.num_blocks
    started = threading.Barrier(len(prompts))

    def ask(prompt):
        started.wait()
        if prompt[0] % 2:
            return llm.generate([prompt, prompt], GREEDY)[1].token_ids
        return tuple(token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids)

    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(5):
            assert list(pool.map(ask, prompts)) == expected
    assert llm.engine.stats.num_blocks > num_blocks
    assert not llm.engine.has_work
    llm.engine.check()


def test_a_thread_that_fails_in_a_step_leaves_the_engine_to_the_others(llm, monkeypatch):
    expected, step = llm.generate([PROMPT], GREEDY)[0].token_ids, llm.engine.step
    first, second = llm.stream(PROMPT, GREEDY), llm.stream([1, 2, 3], GREEDY)
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(next, second).result()
    monkeypatch.setattr(llm.engine, "step", step)
    assert tuple(token for delta in first for token in delta.token_ids) == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["absorb", "attend"])
def test_an_interrupted_step_ends_its_requests_and_poisons_nothing(place, overlap, monkeypatch):
    llm = LLM(tiny.TARGET, tiny.DRAFT, **SMALL, overlap=overlap, page_size=4, max_prefill_tokens=6)
    prompt = list(range(3, 33))
    expected = LLM(tiny.TARGET, **SMALL).generate([prompt], GREEDY)[0].token_ids
    other = llm.stream(PROMPT, GREEDY)
    next(other)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "absorb":
            patch.setattr(type(llm.engine.models.drafter), "absorb", interrupt)
        else:
            patch.setattr(CacheView, "attend", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], GREEDY)
    llm.engine.check()
    with pytest.raises(RequestError, match="interrupted"):
        list(other)
    assert llm.generate([prompt], GREEDY)[0].token_ids == expected


def test_no_two_choices_of_different_requests_share_a_seed():
    seeds = [mix(mix(7, number), index) for number in range(50) for index in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_unseeded_choices_of_neighbouring_requests_differ(llm):
    params = SamplingParams(n=3, max_tokens=30, ignore_eos=True, temperature=1.0)
    outputs = [o.token_ids for r in llm.generate([PROMPT] * 3, params) for o in r.outputs]
    assert len(set(outputs)) == 9


@pytest.mark.parametrize("prompt", [[True, 3], [1.5], ["t1"], [None]])
def test_prompts_that_are_not_token_ids_are_refused(llm, prompt):
    with pytest.raises(RequestError, match="integer token ids"):
        llm.generate([prompt], GREEDY)


def test_several_engines_are_for_a_server():
    with pytest.raises(SettingsError, match="only `blockdraft serve` runs several engines"):
        LLM(replicas=2)
    with pytest.raises(SettingsError, match="is a list, which only `blockdraft serve` takes"):
        LLM(device="cpu,cpu")
    with pytest.raises(SettingsError, match="only `blockdraft serve` keeps prefixes"):
        LLM(prefix_disk="kept")


def test_an_unknown_setting_is_an_error_with_a_suggestion():
    with pytest.raises(SettingsError, match="did you mean width"):
        LLM(tiny.TARGET, widht=3)


def test_half_precision_runs_with_a_drafter_and_is_said_to_be_slower():
    for dtype in ("bfloat16", "float16"):
        warned = []
        llm = LLM(tiny.TARGET, tiny.DRAFT, **SMALL | {"dtype": dtype}, width=8, warn=warned.append)
        has_kernels = why_no_llvm(torch.float32, torch.device("cpu")) is None
        assert [dtype in line for line in warned] == [True] * has_kernels
        result = llm.generate([PROMPT], GREEDY)[0]
        assert len(result.token_ids) == 12
        assert torch.isfinite(llm.engine.models.target.embedding.weight).all()
