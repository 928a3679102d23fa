"""float32 on the CPU kernels: not only the tokens but every bit of a log-probability is plain decoding's.

tests/lossless/test_lossless.py needs float64 to keep arithmetic noise away from decisions. Here there is
none: linear, attention, norm, activation and rotation compute a token by one order of operations, whatever
the width, batch, pages, chunks, hits and preemptions.
"""

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.cpu import why_no_llvm
from tests import tiny

pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)

PROMPTS = [
    [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 2, 4],
    [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 8],
    [40, 41, 42],
    [i * 7 % 60 for i in range(70)],
]


def params(index, **changes):
    temperature = 0.8 * (index % 2)
    return SamplingParams(
        max_tokens=40, ignore_eos=True, logprobs=3, seed=index, temperature=temperature, **changes
    )


def serve(engine, indices, **changes):
    """Per request: every emitted token with its log-probabilities, as exact numbers."""
    return serve_with_metrics(engine, indices, **changes)[0]


def serve_with_metrics(engine, indices, **changes):
    ids = [engine.add(PROMPTS[index], params(index, **changes)) for index in indices]
    deltas = tiny.drain(engine)
    answers = [
        [one for delta in deltas if delta.request_id == request_id for one in delta.logprobs]
        for request_id in ids
    ]
    return answers, [delta.metrics for delta in deltas if delta.metrics is not None]


@pytest.fixture(scope="module")
def plain():
    """Every request alone, without a drafter, one token at a time."""
    answers = []
    for index in range(len(PROMPTS)):
        engine = tiny.engine("none", dtype="float32", width=1, prefix_cache=False, page_size=16)
        answers += serve(engine, [index], width=1)
    assert all(len(answer) == 40 for answer in answers)
    return answers


@pytest.mark.parametrize("width", [2, 5, 8])
@pytest.mark.parametrize("drafter", ["trained", "random"])
def test_bits_do_not_depend_on_drafter_and_width(plain, drafter, width):
    for index, answer in enumerate(plain):
        engine = tiny.engine(drafter, dtype="float32", width=width)
        assert serve(engine, [index]) == [answer]


@pytest.mark.parametrize(
    "plan",
    [{"chunk": 1}, {"chunk": 7}, {"chunks": 1}, {"page_size": 1}, {"page_size": 3}, {"max_rows": 2}],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch_chunks_and_pages(plain, plan):
    assert serve(tiny.engine(dtype="float32", **plan), range(len(PROMPTS))) == plain


def test_bits_do_not_depend_on_a_prefix_hit(plain):
    engine = tiny.engine(dtype="float32", prefix_cache=True, page_size=2)
    assert serve(engine, [0]) == plain[:1]
    answers, metrics = serve_with_metrics(engine, [1, 0])
    assert answers == [plain[1], plain[0]]
    assert all(one.num_cached_tokens > 0 for one in metrics)


def test_bits_do_not_depend_on_preemption(plain):
    engine = tiny.engine(dtype="float32", page_size=2, num_pages=80, prefix_cache=False)
    answers, metrics = serve_with_metrics(engine, range(len(PROMPTS)))
    assert answers == plain
    assert any(one.preemptions > 0 for one in metrics)


def test_bits_do_not_depend_on_the_number_of_threads(plain):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert serve(tiny.engine(dtype="float32"), range(len(PROMPTS))) == plain
    finally:
        torch.set_num_threads(threads)
