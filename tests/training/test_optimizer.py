"""Muon against the linear algebra it stands for and against PyTorch's own; the learning rate over a run."""

import copy
import math

import pytest
import torch
from torch import nn

from blockdraft.models.layers import Linear, RMSNorm
from blockdraft.training.optimizer import Muon, make_optimizers, orthogonal, rate_at

SHAPES = [(8, 24), (24, 8), (16, 16)]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_keeps_the_directions_and_evens_the_lengths(shape):
    matrices = torch.stack([numbers(*shape, seed=number) * 10.0**number for number in range(3)])
    turned = orthogonal(matrices)
    for before, after in zip(matrices, turned, strict=True):
        u, _, v = torch.linalg.svd(before, full_matrices=False)
        inside = u.T @ after @ v.T  # diagonal where directions are kept
        lengths = inside.diagonal()
        assert (lengths > 0.5).all()
        assert (lengths < 1.3).all()
        torch.testing.assert_close(inside, torch.diag(lengths), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_pytorchs_muon(shape, weight_decay):
    mine = nn.Parameter(numbers(*shape, seed=1))
    theirs = nn.Parameter(mine.detach().clone())
    ours = Muon([(mine, (shape[0],))], lr=0.02, weight_decay=weight_decay)
    official = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        before = mine.detach().clone()
        mine.grad = numbers(*shape, seed=10 + step)
        theirs.grad = mine.grad.clone()
        ours.step()
        official.step()
        moved = (mine.detach() - before).norm()
        assert (mine - theirs).norm() < 0.03 * (step + 1) * moved  # PyTorch's iterates in bfloat16


def test_stacked_projections_move_as_separate_matrices():
    parts = (6, 4, 4)
    stacked = nn.Parameter(numbers(sum(parts), 10))
    separate = [nn.Parameter(one.detach().clone()) for one in stacked.split(parts)]
    together = Muon([(stacked, parts)], lr=0.1, weight_decay=0.05)
    apart = Muon([(one, (len(one),)) for one in separate], lr=0.1, weight_decay=0.05)
    for step in range(3):
        stacked.grad = numbers(sum(parts), 10, seed=20 + step)
        for one, gradient in zip(separate, stacked.grad.split(parts), strict=True):
            one.grad = gradient.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stacked.data, torch.cat([one.data for one in separate]))
    whole = nn.Parameter(numbers(sum(parts), 10))
    alone = Muon([(whole, (sum(parts),))], lr=0.1, weight_decay=0.05)
    for step in range(3):
        whole.grad = numbers(sum(parts), 10, seed=20 + step)
        alone.step()
    assert (whole - stacked).abs().max() > 1e-3


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = RMSNorm(8, 1e-6), Linear(8, 4, 4), Linear(8, 8)
        self.fixed = RMSNorm(8, 1e-6)
        for parameter in self.parameters():
            parameter.data = numbers(*parameter.shape, seed=parameter.numel())
        self.fixed.weight.requires_grad_(False)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_together_the_optimizers_move_every_trained_parameter_once(name):
    model = Small()
    optimizers = make_optimizers(model, name=name, rate=0.1, weight_decay=0.0)
    held = [
        id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
    ]
    trained = [one for one in model.parameters() if one.requires_grad]
    assert sorted(held) == sorted(map(id, trained))
    assert len(optimizers) == (2 if name == "muon" else 1)
    before = copy.deepcopy(model)
    for one in trained:
        one.grad = torch.ones_like(one)
    for optimizer in optimizers:
        optimizer.step()
    for (label, one), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(one, old) == (label == "fixed.weight"), label


def test_the_rate_climbs_then_falls_as_a_cosine_to_its_floor():
    at = [rate_at(share, warm_up=0.1, floor=0.2) for share in (0.0, 0.05, 0.1, 0.325, 0.55, 1.0, 1.5)]
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert at == pytest.approx([0.0, 0.5, 1.0, quarter, 0.6, 0.2, 0.2])
    assert rate_at(0.0, warm_up=0.0, floor=0.0) == 1.0
