"""Rows of an idle engine for the check of its layers: with pages of their own, and nothing in them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.engine import Engine


@contextlib.contextmanager
def borrowed_rows(engine: Engine, lengths: list[int]) -> Iterator[None]:
    """Borrow rows with pages for `lengths` tokens and a block each, filled with NaN to reveal stale reads."""
    allocator, rows, block = engine.scheduler.pages, engine.rows, engine.plan.block
    sizes = [-(-(length + block) // allocator.page_size) for length in lengths]
    exact_pages = engine.scheduler.exact
    pages = allocator.allocate(sum(sizes))
    exact = [] if exact_pages is None else exact_pages.allocate(sum(sizes))
    try:
        _spoil(engine, pages, exact, len(lengths))
        first = 0
        for row, size in enumerate(sizes):
            rows.place(row, [0], 0, RowSampling())
            rows.set_pages([(row, 0, pages[first : first + size])])
            if exact:
                rows.set_exact_pages([(row, 0, exact[first : first + size])])
            first += size
        with _all_exact(engine):
            yield
    finally:
        allocator.release(pages)
        if exact_pages is not None:
            exact_pages.release(exact)


@contextlib.contextmanager
def _all_exact(engine: Engine) -> Iterator[None]:
    """Make compressed layers read exact keys, because the loss by compression is not a fault."""
    layers = [storage for storage in engine.cache.storage if isinstance(storage, CompressedLayer)]
    before = [layer.pages for layer in layers]
    for layer in layers:
        rule = replace(layer.pages.rule, window=1 + engine.plan.max_positions)
        layer.pages = layer.pages._replace(rule=rule)
    try:
        yield
    finally:
        for layer, pages in zip(layers, before, strict=True):
            layer.pages = pages


def _spoil(engine: Engine, pages: list[int], exact: list[int], num_rows: int) -> None:
    slots, exact_slots = _slots_of(engine, pages), _slots_of(engine, exact)
    for storage in engine.cache.storage:
        if isinstance(storage, PagedKV):
            storage.keys[:, slots] = math.nan
            storage.values[:, slots] = math.nan
        elif isinstance(storage, CompressedLayer):
            storage.pages.exact_keys[:, :, exact_slots] = math.nan
            storage.pages.exact_values[:, :, exact_slots] = math.nan
        else:
            assert isinstance(storage, RecurrentState)
            storage.state[:num_rows] = math.nan
            storage.tail[:num_rows] = math.nan


def _slots_of(engine: Engine, pages: list[int]) -> Tensor:
    size = engine.plan.page_size
    firsts = torch.tensor(pages, dtype=torch.int64) * size
    return (firsts[:, None] + torch.arange(size)).flatten().to(engine.models.device)
