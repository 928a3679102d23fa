"""Training on a card: FlexAttention, compiled, against the mask spelled out on the CPU, on the same weights.

The card multiplies in bfloat16. A mask that is wrong by one key moves hidden states by far more than that.
"""

import copy
from dataclasses import replace

import pytest
import torch

from blockdraft.training.job import Objective, TrainingRecipe
from blockdraft.training.objective import Head, block_loss
from blockdraft.training.packing import draw, pack
from blockdraft.training.trainer import BlockForward, Trainer
from tests.training import pairs

TOLERANCE = 0.03  # of the norm; bfloat16 has eight bits
# FlexAttention wants heads of 16 values or more.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "block_size": 16}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "use_sliding_window": True,
}
KINDS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "windows": SLIDING,
    "blocks across tiles": {"block_size": 10},
}
# Row lengths: whole tiles of 128, and not.
LENGTHS = [256, 200]


class Scene:
    """A drafter on the card and on the CPU, over rows of several documents."""

    def __init__(self, kind, length):
        raw = pairs.draft_json(top=HEADS | KINDS[kind])
        target = pairs.load_target(dtype="bfloat16")[0].target
        model = pairs.random_drafter(raw, dtype=torch.float32, max_positions=512, decoder=target)
        self.block = model.config.block
        self.slow = BlockForward(model, copy.deepcopy(target).float())
        self.fast = BlockForward(copy.deepcopy(model).cuda(), copy.deepcopy(target).cuda())
        sizes = [(3 + 7 * k % 31, 20 + 23 * k % 71) for k in range(12)]
        self.rows, _ = pack(pairs.random_documents(sizes), length)
        assert max(map(len, self.rows.spans)) > 1, "several documents in a row"
        chosen = range(len(self.rows))
        self.batch = draw(self.rows, chosen, 24, self.block, torch.Generator().manual_seed(1))
        self.features = pairs.random_features(self.batch, dtype=torch.float32).bfloat16()

    def on_card(self):
        moved = {
            name: value.cuda()
            for name in self.batch.__slots__
            if isinstance(value := getattr(self.batch, name), torch.Tensor)
        }
        return replace(self.batch, **moved)


def distance(mine, theirs):
    mine, theirs = mine.detach().float().cpu(), theirs.detach().float().cpu()
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_gradients_are_those_of_the_dense_mask(kind, length):
    scene = Scene(kind, length)
    is_real = scene.batch.is_real.flatten()
    expected = scene.slow(scene.batch, scene.features.float())
    got = scene.fast(scene.on_card(), scene.features.cuda())
    assert got.shape == expected.shape
    assert distance(got[is_real.cuda()], expected[is_real]) < TOLERANCE
    # Each block alone, too: one that sees too much does not hide among the others.
    for mine, theirs in zip(got[is_real.cuda()], expected[is_real], strict=True):
        assert distance(mine, theirs) < 2 * TOLERANCE

    elsewhere = replace(scene.batch, anchors=scene.batch.anchors + 1)
    shifted = scene.slow(elsewhere, scene.features.float())
    assert distance(shifted[is_real], expected[is_real]) > 3 * TOLERANCE, "the tolerance tells blocks apart"

    labels = scene.batch.labels.flatten(0, 1)
    for forward, hidden in ((scene.slow, expected), (scene.fast, got)):
        head = Head(forward.head().weight.to(hidden.dtype))
        block_loss(hidden, labels.to(hidden.device), head, Objective("decay")).loss.backward()
    for (name, mine), theirs in zip(
        scene.fast.model.named_parameters(), scene.slow.model.parameters(), strict=True
    ):
        if theirs.requires_grad:
            assert distance(mine.grad, theirs.grad) < 4 * TOLERANCE, name


def test_a_few_steps_on_the_card_bring_the_loss_down():
    device = torch.device("cuda")
    models, _ = pairs.load_target(dtype="bfloat16", device="cuda")
    models.target.taps = pairs.TAPS
    raw = pairs.draft_json(top=HEADS)
    model = pairs.random_drafter(raw, dtype=torch.float32, max_positions=512).to(device)
    rows, _ = pack(pairs.random_documents([(9, 100)] * 8), 128)
    recipe = TrainingRecipe(rows_per_step=4, num_anchors=32, rate=1e-2, objective=Objective(distill=0.5))
    trainer = Trainer(model, models.target, rows.to(device), recipe)
    losses = [progress.loss.item() for progress in trainer.run(steps=60)]
    assert losses[-1] < 0.8 * losses[0]
