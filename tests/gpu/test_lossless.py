"""The promise on a card, in bfloat16 and with `==`: a drafter changes how many tokens a step yields, no more.

On Hopper a token's bits follow from its position and its row alone, so every way of serving is compared with
plain decoding at width 1. On other cards the library may add in another order than our kernels: there plain
decoding at the same rows and width is what arithmetic is held to.
"""

import pytest
import torch

from blockdraft.check.batch_invariance import check_bits
from blockdraft.engine.engine import Engine
from tests import stepping, tiny
from tests.lossless.families import NAMES
from tests.stepping import CARD, FAMILY_BLOCK

MAX_MARGIN = 0.5  # nats between the two likeliest tokens, where two widths may part
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "max_num_seqs", [1, 4]
)  # products of 8 tokens and of 32: our kernel, and the library's
def test_dflash_in_graphs_emits_the_tokens_of_plain_decoding(max_num_seqs, temperature):
    stepping.check_lossless(CARD, max_num_seqs=max_num_seqs, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_kind_of_drafter_in_graphs_emits_the_tokens_of_plain_decoding(kind, temperature):
    stepping.check_kind(CARD, kind, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["trained", "DFlash2", "DSpark"])
def test_trees_in_graphs_emit_the_tokens_of_plain_decoding(kind, temperature):
    stepping.check_trees(CARD, kind, temperature=temperature)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5-mrope", "qwen3_next-whole"])
def test_a_model_s_own_head_in_graphs_emits_the_tokens_of_plain_decoding(name, overlap):
    stepping.check_mtp(name, CARD, overlap=overlap)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_the_bits_of_a_token_do_not_depend_on_its_column(max_num_seqs):
    stepping.check_columns(CARD, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_emits_the_bits_of_plain_decoding(name):
    stepping.check_family(name, CARD)


@pytest.mark.parametrize("name", ["qwen3_next-whole", "gemma4-mixture"])
def test_a_family_in_graphs_emits_the_tokens_of_plain_decoding(name):
    engine = stepping.family_engine(name, CARD, stepping.family_script(name, CARD, shift=3), is_captured=True)
    results = stepping.serve(engine, stepping.family_requests())
    assert stepping.tokens_of(results) == stepping.tokens_of(stepping.family_answers(name, CARD))
    assert stepping.columns_of(results) == set(range(FAMILY_BLOCK))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_the_same_bits_in_any_company(name):
    engine = Engine(*stepping.family_pair(name, CARD))
    found = check_bits(engine, [3, 5, 7, 11, 2, 9])
    assert found.is_same or not IS_HOPPER, found.detail


def test_width_16_agrees_with_width_1(capsys, record_property):
    found = stepping.compare_widths(CARD, 16)
    record_property("agreement of width 16 with width 1", found.text)
    with capsys.disabled():
        print(f"\n{found.text}")  # noqa: T201
    assert found.margins == [] or (not IS_HOPPER and max(found.margins) < MAX_MARGIN)
