"""The chunked loss against plain autograd over all logits at once, with weights spelled out."""

import math

import pytest
import torch
from torch.nn import functional as F

from blockdraft.training import objective
from blockdraft.training.job import Objective
from blockdraft.training.objective import Head, Teacher, block_loss, column_weights

BLOCKS, WIDTH, HIDDEN, VOCAB = 7, 5, 12, 40


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def labels():
    """With documents that end inside a block, and one block that is all past the end."""
    drawn = torch.randint(0, VOCAB, (BLOCKS, WIDTH), generator=torch.Generator().manual_seed(3))
    drawn[1, 2:] = drawn[4, 1:] = drawn[6] = -1
    return drawn


def weights_by_hand(confidence, labels, wanted):
    rows = []
    for q, row in zip(confidence.tolist(), labels.tolist(), strict=True):
        size = sum(label >= 0 for label in row)
        if wanted.weighting == "dpace":
            smooth = [(1 - wanted.alpha) * one + wanted.alpha for one in q[:size]]
            mine = [sum(math.prod(smooth[: m + 1]) for m in range(j, size)) for j in range(size)]
        elif wanted.weighting == "decay":
            mine = [math.exp(-j / wanted.gamma) for j in range(size)]
        else:
            mine = [1.0] * size
        rows.append(mine + [0.0] * (len(row) - size))
    return torch.tensor(rows, dtype=torch.float64)


def plain_loss(hidden, labels, head, wanted, teacher):
    """Cross-entropy, or its mixture with the divergence from the teacher, by autograd."""
    logits = hidden @ head.weight.T * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    chances = F.log_softmax(logits, dim=-1)
    entropy = -chances.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    weights = weights_by_hand(torch.exp(-entropy.detach()), labels, wanted)
    loss = entropy
    if teacher is not None:
        said = F.log_softmax(teacher.logits, dim=-1)[teacher.rows]
        divergence = F.kl_div(chances, said, log_target=True, reduction="none").sum(dim=-1)
        loss = (1 - wanted.distill) * entropy + wanted.distill * divergence
    return (weights * loss).sum() / weights.sum(), logits


HEADS = {"plain": {}, "scaled": {"scale": 1.7}, "capped": {"scale": 0.6, "cap": 1.3}}
WANTED = {
    "dpace": Objective("dpace"),
    "dpace, little smoothing": Objective("dpace", alpha=0.1),
    "decay": Objective("decay", gamma=2.5),
    "uniform": Objective("uniform"),
    "half distilled": Objective("dpace", distill=0.5),
    "all distilled": Objective("decay", distill=1.0),
}


@pytest.mark.parametrize(
    ("chunk_bytes", "head"), [(1, "capped"), (3 * WIDTH * VOCAB * 8, "scaled"), (1 << 30, "plain")]
)  # a block, three, all
@pytest.mark.parametrize("wanted", WANTED)
def test_loss_and_gradient_are_those_of_autograd(monkeypatch, labels, wanted, head, chunk_bytes):
    monkeypatch.setattr(objective, "CHUNK_BYTES", chunk_bytes)
    wanted, head = WANTED[wanted], Head(numbers(VOCAB, HIDDEN, seed=1), **HEADS[head])
    teacher = None
    if wanted.distill:
        rows = torch.randint(0, 20, labels.shape, generator=torch.Generator().manual_seed(5))
        teacher = Teacher(numbers(20, VOCAB, seed=4), rows)
    mine = numbers(BLOCKS, WIDTH, HIDDEN, seed=2).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    scores = block_loss(mine, labels, head, wanted, teacher)
    expected, logits = plain_loss(theirs, labels, head, wanted, teacher)
    torch.testing.assert_close(scores.loss.double(), expected, rtol=1e-6, atol=1e-6)
    (3 * scores.loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-9)
    assert theirs.grad.abs().max() > 1e-3
    assert not mine.grad[labels < 0].any()
    assert torch.equal(scores.matches, (logits.argmax(dim=-1) == labels) & (labels >= 0))


def test_a_batch_without_any_label_has_no_loss_and_no_gradient(labels):
    hidden = numbers(BLOCKS, WIDTH, HIDDEN, seed=2).requires_grad_()
    scores = block_loss(
        hidden, torch.full_like(labels, -1), Head(numbers(VOCAB, HIDDEN, seed=1)), Objective()
    )
    scores.loss.backward()
    assert scores.loss == 0
    assert not hidden.grad.any()


def test_hard_blocks_count_more_by_the_length_they_expect():
    confidence = torch.tensor([[0.5, 0.5, 0.9], [1.0, 1.0, 1.0]], dtype=torch.float64)
    is_label = torch.tensor([[True, True, False], [True, True, True]])
    plain = column_weights(confidence, is_label, Objective())
    length = torch.tensor([[1 + 0.5 + 0.25], [4.0]], dtype=torch.float64)  # nothing counts past the end
    for power in (1.0, 2.0):
        found = column_weights(confidence, is_label, Objective(hardness=power))
        torch.testing.assert_close(found, plain / length**power)
