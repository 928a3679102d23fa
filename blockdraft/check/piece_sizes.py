"""Cuts the prompt for the check of layers into pieces of every size for which the server has its own code."""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.engine.engine import Engine
from blockdraft.models.config import ModelConfig

# A GPU has different kernels for up to 16 tokens, for 17 to 64, and for more (gate and up: also for up to
# 128). Attention has another for more than 64 tokens of a sequence; experts for more than 512 (token, expert)
# pairs. Tiles of experts that take more tokens than this are compared alone (`expert_tiles`).
LONG, RAGGED, MIDDLE, FEW = 144, (40, 25, 3), 30, 7
MANY_PAIRS = 513
# A CPU's kernels do not change with the number of tokens; `operations` has the heights of its tiles.
CPU_LONG, CPU_RAGGED = 16, (6, 5)


@dataclass(frozen=True, slots=True)
class Piece:
    """One forward: `counts[i]` tokens of row `rows[i]` from position `starts[i]` on."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    kept: tuple[int, ...]  # how many of these tokens, the first ones, are right and stay
    is_known: bool  # True: prompt tokens; False: blocks to verify

    @property
    def positions(self) -> list[int]:
        """Return the positions of all tokens, row by row."""
        pairs = zip(self.starts, self.counts, strict=True)
        return [start + i for start, count in pairs for i in range(count)]

    @property
    def is_right(self) -> list[bool]:
        return [i < kept for count, kept in zip(self.counts, self.kept, strict=True) for i in range(count)]

    def kept_of(self, row: int) -> int:
        return self.kept[self.rows.index(row)] if row in self.rows else 0

    def __str__(self) -> str:
        kind = "prompt tokens" if self.is_known else "tokens to verify"
        rows = f"{len(self.rows)} rows" if len(self.rows) > 1 else "one row"
        return f"among {sum(self.counts)} {kind} of {rows}"


def pieces_for(engine: Engine) -> tuple[Piece, ...]:
    """Return the pieces that the engine's rows, prefill size and pages allow; row 0 comes first."""
    plan, is_card = engine.plan, engine.models.device.type != "cpu"
    num_rows = min(plan.max_num_seqs, 3 if is_card else 2)
    room = _room(engine, num_rows)
    if room < 2 * plan.block:
        num_rows, room = 1, max(1, _room(engine, 1))
    width = max(plan.block, 2)
    maker = _Maker(num_rows, room, plan.max_prefill_tokens, reserve=2 * width + 1)
    maker.known({0: _long(engine.models.config) if is_card else CPU_LONG})
    maker.known(dict(enumerate(RAGGED if is_card else CPU_RAGGED)))
    if is_card:
        maker.known({1: MIDDLE})
        maker.known({2: FEW})
    if num_rows == 1:
        maker.block(width, {0: width // 2})
    else:
        maker.block(width, {0: width, 1: 1, 2: width // 2})
        maker.block(width, {1: width})  # overwrites the rejected drafts
    maker.block(1, {0: 1, 1: 1, 2: 1})
    maker.block(width, {0: width})
    return tuple(maker.pieces)


def _room(engine: Engine, num_rows: int) -> int:
    """Return how many tokens each of `num_rows` rows can hold in addition to a block."""
    plan = engine.plan
    num_pages = min(plan.num_pages, plan.num_exact_pages or plan.num_pages)
    pages = num_pages // num_rows * plan.page_size
    return min(plan.max_model_len - 1, pages - plan.block)


def _long(config: ModelConfig) -> int:
    chosen = [layer.moe.num_chosen for layer in config.layers if layer.moe is not None]
    return max(LONG, -(-MANY_PAIRS // min(chosen))) if chosen else LONG


class _Maker:
    """Collects pieces, and leaves out tokens for which there is no space."""

    def __init__(self, num_rows: int, room: int, chunk: int, *, reserve: int) -> None:
        self.pieces: list[Piece] = []
        self._lengths = dict.fromkeys(range(num_rows), 0)
        self._room = room
        self._prompt_room = max(1, room - reserve)  # prompts leave `reserve` tokens for blocks
        self._chunk = chunk

    def known(self, counts: dict[int, int]) -> None:
        """Add prompt tokens for each row, but in total at most one prefill chunk."""
        left, fitting = self._chunk, {}
        for row in (row for row in counts if row in self._lengths):
            count = min(counts[row], self._prompt_room - self._lengths[row], left)
            if count > 0:
                fitting[row] = count
                left -= count
        self._add(fitting, fitting, is_known=True)

    def block(self, width: int, kept: dict[int, int]) -> None:
        """Add a block of `width` tokens for each row; the first `kept[row]` tokens stay."""
        rows = [row for row in kept if self._lengths.get(row, self._room) + width <= self._room]
        self._add(dict.fromkeys(rows, width), {row: kept[row] for row in rows}, is_known=False)

    def _add(self, counts: dict[int, int], kept: dict[int, int], *, is_known: bool) -> None:
        if not counts:
            return
        starts = tuple(self._lengths[row] for row in counts)
        self.pieces.append(
            Piece(tuple(counts), starts, tuple(counts.values()), tuple(kept.values()), is_known)
        )
        for row, count in kept.items():
            self._lengths[row] += count
