"""The promise on a card, in bfloat16 and with `==`: a drafter changes how many tokens a step yields, no more.

Plain decoding at the same (rows, width) is the baseline that arithmetic can be held to. Width 1, what a user
would otherwise run, has other kernels for other shapes: there agreement is reported, not promised.
"""

import pytest
import torch

from tests import stepping
from tests.lossless.families import NAMES
from tests.stepping import CARD, FAMILY_BLOCK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_MARGIN = 0.5  # nats between the two likeliest tokens, where two widths may part


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_rows", [1, 4])  # products of 8 tokens and of 32: our kernel, and the library's
def test_dflash_in_graphs_emits_the_tokens_of_plain_decoding(max_rows, temperature):
    stepping.check_lossless(CARD, max_rows=max_rows, temperature=temperature)


@pytest.mark.parametrize("max_rows", [1, 4])
def test_the_bits_of_a_token_do_not_depend_on_its_column(max_rows):
    stepping.check_columns(CARD, max_rows=max_rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_emits_the_bits_of_plain_decoding(name):
    stepping.check_family(name, CARD)


@pytest.mark.parametrize("name", ["qwen3_next-whole", "gemma4-mixture"])
def test_a_family_in_graphs_emits_the_tokens_of_plain_decoding(name):
    engine = stepping.family_engine(name, CARD, stepping.family_script(name, CARD, shift=3), is_captured=True)
    results = stepping.serve(engine, stepping.family_requests())
    assert stepping.tokens_of(results) == stepping.tokens_of(stepping.family_answers(name, CARD))
    assert stepping.columns_of(results) == set(range(FAMILY_BLOCK))


def test_width_16_agrees_with_width_1_up_to_a_close_call(capsys, record_property):
    found = stepping.compare_widths(CARD, 16)
    record_property("agreement of width 16 with width 1", found.text)
    with capsys.disabled():
        print(f"\n{found.text}")  # noqa: T201
    assert found.margins == [] or max(found.margins) < MAX_MARGIN
