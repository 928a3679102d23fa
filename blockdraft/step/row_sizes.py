"""The numbers of rows of captured steps; other batches are padded to the next larger number."""

from __future__ import annotations

Place = tuple[int, int]  # rows and width of a step


def row_sizes(max_rows: int, *, is_exact: bool = False) -> list[int]:
    """Return the powers of two, from 32 on also their midpoints, and `max_rows`: few graphs, little padding.

    `is_exact`: return every size, for devices where padding is expensive and a capture cheap.
    """
    if is_exact:
        return list(range(1, max_rows + 1))
    sizes = {1, 2, 4, 8, 16}
    size = 32
    while size < max_rows:
        sizes |= {size, size + size // 2}
        size *= 2
    return [*sorted(size for size in sizes if size < max_rows), max_rows]
