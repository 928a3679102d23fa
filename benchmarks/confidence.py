"""What a drafter's confidence is worth to the governor, in simulation.

    python -m benchmarks.confidence [--seeds 8 --json RESULT]

Rows of text whose tokens differ in how easy they are to draft: stretches of one kind follow each other (a
chance of 0.93, 0.8, 0.6 or 0.3 in the middle), and within a stretch tokens differ as well. The head sees
that, or some of it, or nothing. Compared with the same governor that hears nothing: tokens for the time, of
which luck is left out. `stretches`: a governor that knows which kind follows; `clairvoyant`: one that knows
the chance of every draft.
"""

from __future__ import annotations

import argparse
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.record import context, save
from blockdraft.engine.width_controller import (
    DraftChances,
    DraftRecord,
    StepCosts,
    WidthController,
    widths_for,
)

KINDS = np.log([0.93 / 0.07, 0.8 / 0.2, 0.6 / 0.4, 0.3 / 0.7])  # log-odds
LIKE_THE_LAST = 0.3  # correlation of neighbouring tokens
DEEPER = 0.03  # log-odds that a place is worse than the one before
Cost = Callable[[int, int], float]
# What a head says of a draft: by the kind of its text, by its token's own log-odds, and by noise.
HEADS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "well calibrated": lambda kind, token, noise: 0.9 * (kind + token) + 0.5 * noise,
    "overconfident": lambda kind, token, noise: 3 * (kind + token) + 2 + 0.5 * noise,
    "of tokens only": lambda kind, token, noise: 1 + token + 0.3 * noise,
    "useless": lambda kind, token, noise: 1.5 * noise,
    "opposite": lambda kind, token, noise: -(kind + token) + 0.5 * noise,
    "useless after half": lambda kind, token, noise: kind + token + 0.5 * noise,
}


def large_card(rows: int, width: int) -> float:
    """Seconds, as of Qwen3-8B's shape on an H200: memory up to a hundred tokens, then arithmetic."""
    tokens, draft = rows * width, 0.95 + 0.05 * rows if width > 1 else 0.0
    return (4.8 + 0.035 * rows + draft + 0.02 * min(tokens, 100) + 0.0235 * max(0, tokens - 100)) / 1e3


def two_cores(rows: int, width: int) -> float:
    return (16 + (8 if width > 1 else 0) + 4.0 * (rows * width - 1)) / 1e3


@dataclass(frozen=True)
class World:
    """What is simulated."""

    cost: Cost
    rows: int = 1
    block: int = 8
    stretch: float = 100.0  # tokens of one kind, in the mean
    spread: float = 1.0  # of tokens within a stretch, in log-odds
    overlap: bool = False  # a width is chosen before the last step's result is there
    tokens: int = 4000


class Texts:
    """By row: the kind of each token, and its own log-odds against its kind."""

    def __init__(self, world: World, draw: np.random.Generator) -> None:
        self.world, self._draw = world, draw
        rows, length = world.rows, world.tokens + 4 * world.block
        self.kinds = np.stack([self._kinds(length) for _ in range(rows)])
        self.tokens = draw.normal(size=(rows, length)) * world.spread
        for at in range(1, length):
            self.tokens[:, at] *= np.sqrt(1 - LIKE_THE_LAST**2)
            self.tokens[:, at] += LIKE_THE_LAST * self.tokens[:, at - 1]

    def _kinds(self, length: int) -> np.ndarray:
        sizes = self._draw.exponential(self.world.stretch, length).astype(int) + 1
        return np.repeat(self._draw.choice(KINDS, length), sizes)[:length]

    def drafts(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Kinds and log-odds [R, B - 1] of the drafts behind these positions."""
        places = np.arange(self.world.block - 1)
        where = positions[:, None] + places
        rows = np.arange(len(positions))[:, None]
        return self.kinds[rows, where] - DEEPER * places, self.tokens[rows, where]


def chances(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def by_width(kept: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Tokens that a step of each width commits, by the chances [R, B - 1] that drafts are kept."""
    sums = np.concatenate(([0.0], np.cumsum(kept.sum(axis=0))))
    return np.array([len(kept) + sums[width - 1] for width in widths])


def run(world: World, head: str | None, seed: int, knows: str = "") -> float:
    """Tokens per second. `head`: None for a drafter without one; `knows`: "stretches" or "everything"."""
    draw, widths = np.random.default_rng(seed), widths_for(world.block)
    texts, unseen = Texts(world, draw), deque[tuple[int, np.ndarray, float, np.ndarray | None]]()
    corners = itertools.product((1, 256), (1, world.block))
    costs = StepCosts({place: world.cost(*place) for place in corners}, (1, 2, 4, 8, 16, 32, 64, 256))
    governor = WidthController(
        costs, DraftChances([0.75] * (world.block - 1)), first=world.block, block=world.block
    )
    records = [DraftRecord() for _ in range(world.rows)]
    positions, seconds, committed = np.zeros(world.rows, dtype=int), 0.0, 0.0
    times = np.array([world.cost(world.rows, width) for width in widths])
    while positions.max() < world.tokens:
        kinds, tokens = texts.drafts(positions)
        chance = chances(kinds + tokens)
        expected = by_width(np.cumprod(chance, axis=1), widths)
        luck, noise, late = draw.random(chance.shape), draw.normal(size=chance.shape), abs(draw.normal())
        if knows:
            known = (
                expected if knows == "everything" else by_width(np.cumprod(chances(kinds), axis=1), widths)
            )
            width = widths[int(np.argmax(known / times))]
        else:
            width = governor.next_width(records)
        right = np.cumprod(luck < chance, axis=1)[:, : width - 1].sum(axis=1)
        seconds += world.cost(world.rows, width)
        committed += expected[widths.index(width)]
        said = None
        if head is not None:
            is_over = head == "useless after half" and positions.max() > world.tokens / 2
            said = HEADS["useless" if is_over else head](kinds, tokens, noise)[:, : width - 1]
        positions += right + 1
        unseen.append((width, right, world.cost(world.rows, width) * (1 + 0.03 * late), said))
        if len(unseen) > world.overlap:
            tell(governor, records, *unseen.popleft())
    return committed / seconds


def tell(
    governor: WidthController,
    records: Sequence[DraftRecord],
    width: int,
    num_right: np.ndarray,
    seconds: float,
    said: np.ndarray | None,
) -> None:
    """As the scheduler does."""
    governor.observe(width, num_right.tolist(), seconds, records, said if width > 1 else None)
    for record, count in zip(records, num_right.tolist(), strict=True):
        record.count(width, count)


def compare(
    world: World, seeds: Sequence[int], heads: Sequence[str] = tuple(HEADS)
) -> dict[str, list[float]]:
    """Speed against the governor that hears nothing, by seed."""
    silent = np.array([run(world, None, seed) for seed in seeds])
    found = {head: np.array([run(world, head, seed) for seed in seeds]) / silent for head in heads}
    found["stretches"] = np.array([run(world, None, seed, "stretches") for seed in seeds]) / silent
    found["clairvoyant"] = np.array([run(world, None, seed, "everything") for seed in seeds]) / silent
    return {name: [round(float(one), 4) for one in speeds] for name, speeds in found.items()}


WORLDS = {
    f"{cost.__name__}, {rows} x {block}, stretches of {stretch}, spread {spread:g}": World(
        cost, rows, block, stretch, spread, cost is large_card, tokens=4000 if rows < 4 else 2000
    )
    for cost, rows, block, stretch, spread in (
        (two_cores, 1, 8, 50, 1.0),
        (two_cores, 1, 8, 200, 1.0),
        (two_cores, 1, 8, 200, 2.0),
        (two_cores, 1, 8, 100_000, 1.0),
        (two_cores, 1, 16, 100, 1.0),
        (two_cores, 2, 8, 100, 1.0),
        (large_card, 1, 8, 100, 1.0),
        (large_card, 1, 16, 100, 1.0),
        (large_card, 4, 8, 100, 1.0),
        (large_card, 4, 8, 100_000, 1.0),
        (large_card, 16, 16, 100, 1.0),
        (large_card, 64, 8, 100, 1.0),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    for name, world in WORLDS.items():
        found[name] = compare(world, range(args.seeds))
        print(name, flush=True)
        for head, its in found[name].items():
            print(f"  {head:20} {np.mean(its):.3f} +- {np.std(its) / len(its) ** 0.5:.3f}", flush=True)
    save(args.json, {"context": context(), "speeds": found})


if __name__ == "__main__":
    main()
