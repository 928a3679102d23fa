"""benchmarks/conversations.py without a card, on a tiny hybrid."""

from dataclasses import replace

from benchmarks.conversations import Sizes, measure
from tests.lossless import families
from tests.models.families import CASES


def test_a_hybrid_finds_its_past():
    models, plan = families.make_pair(*CASES["qwen3_5-mrope"], seed=1, max_model_len=300)
    sizes = Sizes(turn=192, new=9, answer=20, sibling=200, shared=150, conversations=(2,))
    found = measure(models, replace(plan, num_states=9), sizes)
    second, siblings, [held] = found["second_turn"], found["siblings"], found["held"]
    assert second["is_equal"]
    assert siblings["is_equal"]
    assert second["cached"] == 192
    assert second["second_turn_ms"] > 0
    assert siblings["cached"] == 0, "a prompt of 200 tokens saves no state before its end"
    assert (held["conversations"], held["held"], held["states"]) == (2, 2, 9)
