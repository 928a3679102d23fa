"""Samples of a /metrics page."""

from blockdraft.prometheus_text import samples

PAGE = """# HELP vllm:x words {a="1"} 3
vllm:x{engine="0",name="a \\"b\\" } c"} 3.5
vllm:y 1e3 1700000000
plain_total 7
vllm:nan NaN
vllm:inf{le="+Inf"} +Inf
vllm:words none
"""


def test_numbers_are_read_with_their_labels_and_nothing_else():
    assert list(samples(PAGE)) == [
        ("vllm:x", {"engine": "0", "name": 'a \\"b\\" } c'}, 3.5),
        ("vllm:y", {}, 1000.0),
        ("plain_total", {}, 7.0),
    ]
