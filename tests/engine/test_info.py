"""EngineInfo: what runs, and which weights draft."""

import torch
from torch import nn

from blockdraft.engine.describe import engine_info, fingerprint
from tests import tiny


def test_a_drafter_is_known_by_its_weights():
    known = engine_info(tiny.engine()).draft_hash
    assert engine_info(tiny.engine(max_rows=2)).draft_hash == known
    assert len(known) == 16
    assert engine_info(tiny.engine("random")).draft_hash != known
    assert engine_info(tiny.engine(dtype="float32")).draft_hash != known
    assert engine_info(tiny.engine("none")).draft_hash is None


def test_a_fingerprint_sees_names_shapes_dtypes_and_values():
    def model(weight, name="weight"):
        found = nn.Module()
        found.register_buffer(name, weight)
        return found

    zeros = torch.zeros(4, 6)
    kinds = [
        model(zeros),
        model(zeros, "other"),
        model(zeros.view(6, 4)),
        model(zeros.half()),
        model(zeros.bfloat16()),
        model(zeros + 1),
        model(torch.zeros(0)),
        model(torch.zeros(())),
        model(zeros.to(torch.float8_e4m3fn)),
    ]
    assert len({fingerprint(kind) for kind in kinds}) == len(kinds)
    large = torch.zeros(100_000)
    large[-1] = 1  # the ends are always looked at
    assert fingerprint(model(large)) != fingerprint(model(torch.zeros(100_000)))
