"""Compiles all kernels of a start on a GPU, in several processes, before the first kernel runs.

There is no list of these kernels. A dry run of the steps and checks on a small cache finds them: it executes
no kernel, but compiles each kernel that would have run (`compile_pool.collecting`). The code goes to Triton's
cache. A kernel that was missed, or does not compile, is handled when it is first used. After the first
complete start a mark in Triton's cache lets later starts skip all this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.cache.rows import RowSampling
from blockdraft.check.operations import check_kernels
from blockdraft.check.piece_sizes import pieces_for
from blockdraft.check.verified import card_facts, digest_of, libraries, plan_facts, sources
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.width_controller import widths_for
from blockdraft.kernels.choice import has_triton
from blockdraft.machine.machine import read_machine
from blockdraft.phases import StartProgress
from blockdraft.planner.plan import Plan
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dirs
from blockdraft.start.loading import Opened
from blockdraft.start.memory import pages_to_probe, release
from blockdraft.step.prefill_graphs import shapes, widest_counts
from blockdraft.step.row_sizes import row_sizes
from blockdraft.step.step_sizes import means_on, uneven_places, widest

if TYPE_CHECKING:
    from blockdraft.kernels.triton.compile_pool import CompilePool

DIFFERENT = (32, 64, 96)  # sizes of prefill graphs that have kernels of their own
MIN_CORES = 4  # with fewer, the start itself compiles as fast
# Together they use every part of sampling that is skipped if no row requests it.
SAMPLINGS = (
    RowSampling(),
    RowSampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01),
    RowSampling(temperature=0.8, repetition=1.1, presence=0.1, frequency=0.1, min_end=9, stop_ids=(0,)),
    RowSampling(bias=((0, 1.0),)),
)


class CompileAhead:
    """Holds the workers of one start. There are none if nothing needs to be compiled."""

    def __init__(self, device: torch.device, facts: object) -> None:
        """Start the workers. `facts`: all that decides on the kernels besides our sources and the GPU."""
        self.problem: str | None = None  # why some kernels are left to the start
        self.has_run = False  # whether an earlier start has compiled and run them all
        self._pool: CompilePool | None = None
        self._mark: Path | None = None
        if device.type != "cuda" or not has_triton():
            return
        key = digest_of([sources(), libraries(), card_facts(device), facts])
        self._mark = cache_dirs()["triton"] / f"blockdraft-{key}"
        self.has_run = self._mark.exists()
        num_cores = read_machine().cpu.num_cores
        if num_cores >= MIN_CORES and not self.has_run:
            from blockdraft.kernels.triton.compile_pool import MAX_WORKERS, CompilePool

            self._pool = CompilePool(min(num_cores, MAX_WORKERS))

    @contextlib.contextmanager
    def collecting(self) -> Iterator[bool]:
        """Collect the kernels of the code inside. Yield whether there is anything to compile.

        An error ends only the collecting, and is kept in `problem`: a real error occurs again in the start.
        """
        if self._pool is None:
            yield False
            return
        from blockdraft.kernels.triton.compile_pool import collecting

        try:
            with collecting(self._pool), torch.inference_mode():
                yield True
        except Exception as error:  # noqa: BLE001  # the code works on zeros, so any error may come
            self.problem = f"{type(error).__name__}: {error}"

    def wait(self, tell: Callable[[int, int, str], None]) -> None:
        """Wait until all is compiled. `tell` gets the number done, the total, and the last kernel's name.

        Then end the workers: a start that must do without a kernel compiles the rest itself.
        """
        if self._pool is not None:
            self._pool.wait(tell)
            if self._pool.errors:
                self.problem = f"{len(self._pool.errors)} failed, such as {self._pool.errors[0]}"
            elif self._pool.num_done < self._pool.num_asked:
                self.problem = f"the workers ended after {self._pool.num_done} of {self._pool.num_asked}"
            self._end_workers()

    def close(self, *, is_done: bool) -> None:
        """End the workers. `is_done`: all kernels have run, so the next start finds them compiled."""
        self._end_workers()
        if is_done and self._mark is not None and not self._mark.exists():
            keep(self._mark, b"")

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextlib.contextmanager
def compiling_for(opened: Opened) -> Iterator[CompileAhead]:
    """Run a start's compile workers while the code inside runs. They begin while the weights are read."""
    draft = None if opened.draft is None else repr(opened.draft.config)
    plan, rules = opened.plan, opened.plan.start
    facts = [repr(opened.target.config), draft, plan_facts(plan), rules.graphs, rules.verify]
    ahead, is_done = CompileAhead(opened.device, facts), False
    try:
        yield ahead
        is_done = True
    finally:
        ahead.close(is_done=is_done)


def compile_steps(ahead: CompileAhead, models: LoadedPair, plan: Plan, startup: StartProgress) -> None:
    """Compile the kernels that an engine of these models and its checks will run."""
    with ahead.collecting() as is_useful:
        if is_useful:
            _collect(models, plan)
    release()  # the small cache

    def tell(done: int, total: int, name: str) -> None:
        startup.note(f"compiled {done} of {total}: {name}")
        startup.progress(done, total)

    ahead.wait(tell)


def _collect(models: LoadedPair, plan: Plan) -> None:
    engine = Engine(models, replace(plan, num_pages=pages_to_probe(plan)))
    run_steps(engine)
    if plan.start.verify != "off":
        run_checks(engine)


def run_checks(engine: Engine) -> None:
    for _ in check_kernels(engine):
        pass


def run_steps(engine: Engine) -> None:
    """Run the steps of serving, warming up and checking in all their sizes, on rows with any contents."""
    plan, rows = engine.plan, engine.rows
    pieces = pieces_for(engine)
    chunks = [(1,), (plan.max_prefill_tokens,), (2, 7), (1,) * len(SAMPLINGS)]
    chunks += [piece.counts for piece in pieces if piece.is_known]
    for counts in chunks:
        if len(counts) <= plan.max_num_seqs:
            rows.activate((), len(counts))
            token_ids = _token_ids(engine, sum(counts))
            engine.prefill(token_ids, token_ids, counts)
    for num_tokens, num_rows in _graph_shapes(engine):
        rows.activate((), num_rows)
        offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=engine.models.device)
        token_ids = _token_ids(engine, num_tokens)
        engine.prefill(token_ids, token_ids, widest_counts(num_tokens, num_rows), offsets)
    blocks = {(len(piece.rows), piece.counts[0]) for piece in pieces if not piece.is_known}
    blocks |= {
        (size, width) for width in {1, plan.width, plan.block} for size in row_sizes(plan.max_num_seqs)
    }
    # For the other widths, only attention and the count of accepted drafts have their own code, by power of
    # two. Attention also has its own code if rows are so few that several programs share one.
    blocks |= {(size, width) for width in widths_for(plan.block) for size in (1, plan.max_num_seqs)}
    for num_rows, width in sorted(blocks):
        rows.activate((), num_rows)
        engine.decode(width)
    # Rows of different widths need few kernels of their own, which do not depend on how many rows there are.
    means, row_counts = means_on(engine.models.device), {min(2, plan.max_num_seqs), plan.max_num_seqs}
    for size in uneven_places(sorted(row_counts), plan.block, means):
        if not size.is_even:
            rows.activate((), size.rows, widths=widest(size))
            engine.decode(size.width, size.tokens)
    _run_sampled(engine)


def _run_sampled(engine: Engine) -> None:
    """Run steps with every part of sampling, and those with trees."""
    plan, rows = engine.plan, engine.rows
    for row, sampling in enumerate(SAMPLINGS[: plan.max_num_seqs]):
        rows.place(row, [1, 2], 1, sampling)
    several = list(range(min(len(SAMPLINGS), plan.max_num_seqs)))
    for width in (1, plan.width, plan.block):
        for chosen in ([0], several, *([one] for one in several)):
            rows.activate(chosen)
            engine.decode(width)
        engine.decode(width, num_logprobs=5)
    for num_rows, num_nodes in product(plan.tree_rows, plan.trees):
        rows.activate((), num_rows)
        engine.decode_tree(num_nodes)


def _token_ids(engine: Engine, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=engine.models.device)


def _graph_shapes(engine: Engine) -> list[tuple[int, int]]:
    """Return the shapes of prefill graphs that have kernels of their own. Larger ones share kernels."""
    if not engine.cache.reads_offsets:
        return []
    found = shapes(
        min(engine.plan.max_prefill_tokens, engine.plan.max_model_len),
        engine.plan.max_num_seqs,
    )
    return [shape for shape in found if shape[0] in DIFFERENT]
