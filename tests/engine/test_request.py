"""Sampling parameters: mistyped names, pickling, and limits that a request runs into."""

import pickle
from dataclasses import replace

import pytest

from blockdraft.engine.describe import engine_info
from blockdraft.engine.request import SamplingParams, check_limits
from blockdraft.errors import RequestError
from blockdraft.planner.plan import CACHE_HOLDS
from tests import tiny


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "SamplingParams has no field 'temprature': did you mean temperature?"),
        ("max_token", "SamplingParams has no field 'max_token': did you mean max_tokens?"),
        ("max_new_tokens", "transformers's max_new_tokens is max_tokens in SamplingParams."),
        ("temp", "llama.cpp's temp is temperature in SamplingParams."),
        ("zzz", "SamplingParams has no field 'zzz': it has n, temperature, top_p"),
    ],
)
def test_a_mistyped_field_is_refused_with_the_one_that_was_meant(name, message):
    for make in (SamplingParams, lambda **given: replace(SamplingParams(), **given)):
        with pytest.raises(RequestError) as caught:
            make(**{name: 1})
        assert str(caught.value).startswith(message)


def test_parameters_travel_between_processes():
    params = SamplingParams(temperature=0.5, stop=("a",))
    assert pickle.loads(pickle.dumps(params)) == params


def refusal(length, *, max_model_len=32, most_context=32):
    limits = {"max_model_len": max_model_len, "most_context": most_context, "block": 1}
    with pytest.raises(RequestError) as caught:
        check_limits(length, SamplingParams(), **limits)
    return str(caught.value)


def test_too_long_a_prompt_is_told_only_what_can_be_done():
    assert refusal(40).endswith("the answer needs one more: shorten it.")
    assert refusal(40, most_context=64).endswith("shorten it, or start with --max-model-len 64.")
    assert refusal(64, most_context=64).endswith("the answer needs one more: shorten it.")


def test_a_context_can_be_raised_where_somebody_has_asked_for_less():
    known = tiny.engine().models.config.max_positions
    assert engine_info(tiny.engine(max_model_len=64)).most_context == known
    engine = tiny.engine(max_model_len="auto")
    full = engine.plan.changed({"max_model_len": CACHE_HOLDS}, max_model_len=100)
    assert engine.models.most_context(full) == 100
