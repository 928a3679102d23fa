"""The counts of benchmarks/draft_formats.py, on the fixture pair."""

import pytest
import torch

from benchmarks import draft_formats
from blockdraft.models.layers import Linear
from tests import tiny


def test_only_the_drafter_s_projections_are_rounded_and_the_pair_keeps_its_own():
    models = tiny.load("float32")
    before = {name: tensor.clone() for name, tensor in models.drafter.model.state_dict().items()}
    some = draft_formats.rounded_pair(models, "int8")
    assert some.target is models.target
    rounded = some.drafter.model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, rounded[name])}
    linears = {name for name, part in models.drafter.model.named_modules() if isinstance(part, Linear)}
    assert changed == {f"{name}.weight" for name in linears}
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in models.drafter.model.state_dict().items()
    )
    assert draft_formats.rounded_pair(models, "none") is models


def test_the_change_is_of_all_prompts_together():
    fits = [draft_formats.DrafterFit(1, tokens, steps, ()) for tokens, steps in ((10, 5), (30, 10))]
    slower = [draft_formats.DrafterFit(1, tokens, steps, ()) for tokens, steps in ((10, 6), (30, 14))]
    assert draft_formats.change_percent(fits, fits) == (0, 0)
    change, error = draft_formats.change_percent(fits, slower)
    assert change == pytest.approx(-25)
    assert error == pytest.approx(100 * abs(5 / 6 - 10 / 14) / 2)
