"""Trains a drafter on features of the frozen target, with blocks at random anchors.

A step draws anchors, reads features, drafts all blocks at once, computes the loss and updates the weights.
The drafter is the module that the server runs; only its view differs (training/view.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from blockdraft.engine.seeds import mix
from blockdraft.kernels.transfer import to_device
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash, DFlash2, DFlashLayer
from blockdraft.step.pairs import drafter_type
from blockdraft.training.features import FeatureReader, KeptFeatures
from blockdraft.training.job import TrainingRecipe
from blockdraft.training.objective import Head, Scores, Teacher, block_loss, selector_loss, spark_loss
from blockdraft.training.optimizer import make_optimizers, rate_at
from blockdraft.training.packing import PackedRows, TrainingBatch, Walk, draw
from blockdraft.training.view import Kept, Seen, TrainView, block_masks


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state after one step. Read its tensors rarely: a read waits for the device."""

    step: int
    share: float  # of the run
    rate: float
    loss: Tensor
    matches: Tensor  # [blocks, B - 1]
    is_real: Tensor  # [blocks]

    def committed(self) -> float:
        """Return the mean tokens that a step at these anchors commits, including the target's own token."""
        runs = self.matches.long().cumprod(dim=1).sum(dim=1)
        return 1 + (runs * self.is_real).sum().item() / max(int(self.is_real.sum()), 1)


class BlockForward:
    """Runs a drafter over all blocks of packed rows at once."""

    def __init__(self, model: DFlash, target: Decoder) -> None:
        assert model.kernels.is_reference, "only the references have gradients, and can be compiled"
        self.model, self.target = model, target
        self.block = model.config.block
        self.drafter = drafter_type(model.config)(model, target)
        self._masks = {one.layer: one.mask for one in model.layers if isinstance(one, DFlashLayer)}
        self._run = _compiled() if next(model.parameters()).is_cuda else block_hidden

    def head(self) -> Head:
        """Return the target's head, with the drafter's scale and cap."""
        config, target = self.model.config, self.target
        module = target.embedding if target.head is None else target.head
        assert isinstance(module.weight, nn.Parameter), "a training target is loaded unpacked"
        return Head(module.weight.data, config.logit_scale, config.logit_softcap)

    def __call__(self, batch: TrainingBatch, features: Tensor) -> Tensor:
        """Return the hidden states of the drafting columns of every block, [R * A, B - 1, E]."""
        batch = replace(batch, first_column=self.model.config.first_column)
        ids = batch.block_ids(self.model.config.mask_token_id)
        x = self.drafter.embed(ids.flatten())
        masks = block_masks(batch, self._masks)
        with half(x):
            hidden = self._run(
                self.model,
                features,
                x,
                batch.positions.flatten(),
                batch.block_positions(),
                len(batch.tokens),
                masks,
                batch.num_columns,
            )
        return hidden.view(-1, batch.num_columns, x.shape[1])[:, batch.first_column :]


def block_hidden(  # noqa: PLR0913
    model: DFlash,
    features: Tensor,
    x: Tensor,
    context_positions: Tensor,
    block_positions: Tensor,
    num_rows: int,
    masks: dict[int, Seen],
    num_columns: int,
) -> Tensor:
    """Return the hidden states [R * A * C, E] of blocks with inputs `x`, whose context is `features`."""
    kept: Kept = {}
    model.absorb(features, TrainView(context_positions, kept, num_rows=num_rows, masks=masks))
    view = TrainView(block_positions, kept, num_rows=num_rows, masks=masks)
    hidden: Tensor = model(x, view, num_columns)
    return hidden


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """Return the compiled `block_hidden`, which all drafters share."""
    return torch.compile(block_hidden, dynamic=False)


def half(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager in which products use the dtype of `x`, as trained weights are float32."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(x.device.type, dtype=x.dtype)
    return nullcontext()


class Trainer:
    """Trains `model` to predict the answers of `target` in `rows`."""

    def __init__(self, model: DFlash, target: Decoder, rows: PackedRows, recipe: TrainingRecipe) -> None:
        self.model, self.recipe, self.rows = model, recipe, rows
        self.step_number = 0
        self.forward = BlockForward(model, target)
        self._head = self.forward.head()
        self.device = rows.tokens.device
        reader = FeatureReader(target, num_rows=recipe.rows_per_step, length=rows.tokens.shape[1])
        if isinstance(model, DFlash2) and recipe.trained == "selector":
            model.leave_out_idle_convs()
        self._has_teacher = recipe.objective.distill > 0 or model.markov is not None
        self.features = KeptFeatures(reader, rows, has_hidden=self._has_teacher)
        self._optimizers = make_optimizers(
            model, name=recipe.optimizer, rate=recipe.rate, weight_decay=recipe.weight_decay
        )
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._phase = 0
        self._walk = Walk(rows.tokens.shape, self.device) if recipe.anchoring == "walk" else None
        self._average = [one.detach().clone() for one in self._trained] if recipe.average else []

    # ---- a run

    def run(self, *, steps: int | None = None, seconds: float | None = None) -> Iterator[TrainingProgress]:
        """Train until `steps` steps are done in total, or for `seconds`; the rate schedule ends then."""
        if steps is not None:
            if self.step_number < steps:
                self._rehearse()
            while self.step_number < steps:
                yield self.step(self.step_number / steps)
            return
        assert seconds is not None
        end = time.monotonic() + seconds
        self._rehearse()
        begin = time.monotonic()
        while (now := time.monotonic()) < end:
            yield self.step((now - begin) / (end - begin))

    def step(self, share: float) -> TrainingProgress:
        recipe = self.recipe
        rate = recipe.rate * rate_at(share, warm_up=recipe.warm_up, floor=recipe.floor)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._change_phase(share)
        chosen = self._chosen()
        batch = self._batch(chosen, self._block(share))
        scores = self._draft(chosen, batch)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._trained, recipe.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._follow()
        if self._walk is not None:
            self._walk.learn(chosen, batch, scores.matches)
        self.step_number += 1
        return TrainingProgress(
            self.step_number, share, rate, scores.loss.detach(), scores.matches, batch.is_real.flatten()
        )

    def _draft(self, chosen: list[int], batch: TrainingBatch) -> Scores:
        """Return the loss and matches of every block of the rows `chosen`."""
        hidden, features = self.features.read(chosen)
        labels, objective = batch.labels.flatten(0, 1), self.recipe.objective
        teacher = self._teacher(batch, hidden)
        drafted = self.forward(batch, features)
        if self.model.markov is not None:
            assert teacher is not None
            markov = self.model.markov
            return spark_loss(
                drafted,
                markov.before.weight[batch.tokens_before()],
                markov.after.weight,
                labels,
                head=self._head,
                objective=objective,
                teacher=teacher,
            )
        if not isinstance(self.model, DFlash2):
            return block_loss(drafted, labels, self._head, objective, teacher)
        before, selector = batch.tokens_before(), self.model.candidate_selector
        pairs = selector_loss(drafted, labels, before, self._head, selector, objective, teacher)
        if self.recipe.trained == "selector":
            return pairs
        columns = block_loss(drafted, labels, self._head, objective, teacher)
        return Scores(columns.loss + objective.selector * pairs.loss, pairs.matches)

    def _rehearse(self) -> None:
        """Run steps without updates to compile code and allocate memory; the rest keeps features."""
        chosen = self._chosen()
        for block in sorted({self._block(0.0), self.forward.block}):
            self._draft(chosen, self._batch(chosen, block)).loss.backward()  # type: ignore[no-untyped-call]
            self.model.zero_grad()
        self.features.keep(len(self._rows_of_phase(0)))

    def _block(self, share: float) -> int:
        return self.forward.block // 2 if share < self.recipe.short_blocks else self.forward.block

    def _change_phase(self, share: float) -> None:
        phase = min(int(share * self.recipe.phases), self.recipe.phases - 1)
        if phase != self._phase:
            self._phase = phase
            self.features.change()

    def _rows_of_phase(self, phase: int) -> range:
        """Return the rows of `phase`: every N-th row for N phases, as rows are sorted by document length."""
        phases = min(self.recipe.phases, len(self.rows))
        return range(phase % phases, len(self.rows), phases)

    def _chosen(self) -> list[int]:
        """Return the rows of this step, which depend only on the step number, the phase and the seed."""
        recipe, rows = self.recipe, self._rows_of_phase(self._phase)
        per_epoch = max(1, len(rows) // recipe.rows_per_step)
        epoch, place = divmod(self.step_number, per_epoch)
        order = torch.randperm(len(rows), generator=_seeded("cpu", recipe.seed, 2 * epoch))
        first = order.roll(-place * recipe.rows_per_step)[: recipe.rows_per_step].tolist()
        return [rows[index] for index in first]

    def _batch(self, chosen: list[int], block: int) -> TrainingBatch:
        generator = _seeded(self.device.type, self.recipe.seed, 2 * self.step_number + 1)
        return draw(self.rows, chosen, self.recipe.num_anchors, block, generator, self._weights(chosen))

    def _weights(self, chosen: list[int]) -> Tensor | None:
        """Return the sampling weights of anchor places in the rows `chosen`, or None for uniform weights."""
        recipe = self.recipe
        weights = None if self._walk is None else self._walk.weights(chosen)
        if recipe.deep_weight == 1:
            return weights
        starts = self.rows.starts[to_device(chosen, self.device)]
        positions = torch.arange(starts.shape[1], device=self.device) - starts
        deep = torch.where(positions >= recipe.deep_from, recipe.deep_weight, 1.0)
        return deep if weights is None else deep * weights

    def _teacher(self, batch: TrainingBatch, hidden: Tensor) -> Teacher | None:
        if not self._has_teacher:
            return None
        offset = torch.arange(batch.block - 1, device=self.device)
        place = (batch.anchors[..., None] + offset).clamp(max=batch.tokens.shape[1] - 1)
        first = torch.arange(len(batch.tokens), device=self.device)[:, None, None] * batch.tokens.shape[1]
        # The target's own logits, so without the drafter's scale.
        head = Head(self._head.weight, cap=self.forward.target.config.logit_softcap)
        with torch.no_grad():
            return Teacher(head.logits(hidden), (first + place).flatten(0, 1))

    # ---- the moving average

    def _follow(self) -> None:
        if self._average:
            decay = min(self.recipe.average, (1 + self.step_number) / (10 + self.step_number))
            torch._foreach_lerp_(self._average, [one.detach() for one in self._trained], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context manager that gives the model the averaged weights, if `recipe.average` is set."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        for weight, other in zip(self._trained, self._average, strict=False):
            kept = weight.detach().clone()
            weight.data.copy_(other)
            other.copy_(kept)

    # ---- checkpoints

    def state(self) -> dict[str, object]:
        """Return everything that a resumed run needs."""
        return {
            "step": self.step_number,
            "model": self.model.state_dict(),
            "average": self._average,
            "walk": None if self._walk is None else self._walk.chance,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        step, average, optimizers = state["step"], state["average"], state["optimizers"]
        assert isinstance(step, int)
        assert isinstance(average, list)
        assert isinstance(optimizers, list)
        self.step_number = step
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        for mine, theirs in zip(self._average, average, strict=True):
            mine.copy_(theirs)
        for optimizer, saved in zip(self._optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        if self._walk is not None:
            walk = state["walk"]
            assert isinstance(walk, Tensor)
            self._walk.chance.copy_(walk)


def _seeded(device: str, seed: int, number: int) -> torch.Generator:
    # PyTorch's CPU generator uses only the lower 32 bits.
    return torch.Generator(device=device).manual_seed(mix(seed, number) % 2**32)
