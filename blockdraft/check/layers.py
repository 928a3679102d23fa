"""Compares every layer as serving computes it with an oracle; the oracle's rounding gives the tolerance.

One prompt is computed three times:

  T  the oracle: the references in float32 or wider, over the whole prompt at once (`WholeView`)
  R  the same in the served dtype; of models in int8, from inputs that differ in their last bits
  K  what serves: the kernels, through rows and pages, in pieces of every size that has code of its own

All three get the same input of a layer: T's output of the layer before it, rounded to the served dtype. So
errors do not add up over depth, and the distance of R from T is the effect of rounding inside this layer,
with these weights and this prompt, however large its activations are. K may be off from T by a few times
that; a fault is off by far more. End-to-end logits have no such tolerance: depth amplifies rounding without
bound.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import RowSampling
from blockdraft.check.piece_sizes import Piece, pieces_for
from blockdraft.check.uncached_view import WholeView
from blockdraft.engine.engine import Engine
from blockdraft.models.decoder import Decoder
from blockdraft.models.gemma4 import GemmaRouter
from blockdraft.models.gpt_oss import GptOssMoE
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.moe import MoE
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.step.dflash import DFlashDrafter

# How far K may be from T: this many times what rounding explains. That is half of the last place of every
# value that the part reads and writes, and, for what happens inside it, R's worst token. Of that bound sound
# models reach a half, the faults of tests/faults.py four times as much (H200 and Neoverse, 2026-11).
MULTIPLE = 3.0
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The least that is taken for what happens inside. In float32 and float64 T and R are the same, and it is all
# there is: sums in another order, scores of some hundreds behind an exponential, a state of many tokens.
INSIDE = {"float64": 1e-10, "float32": 1e-4, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Where tokens are rounded to 8 bits, the last bit of a float32 may decide which way, and one value changes
# those behind it: of the default model 1 % of what a layer adds, in layer 11 5 % (2026-11). So R's input
# differs there by a share that is enough for some value of nearly every token to be rounded the other way.
INSIDE_INT8 = 2.0**-7
NUDGE_INT8 = 2.0**-16
MAX_INSIDE = 0.5  # where most tokens of R lose more of what a part adds, the dtype does not hold the model
MIN_SURE = 0.02  # share of the tokens of a mixture for which K must have T's experts
HEAD_TOKENS = 24  # more than one block


Why = Literal["overflow", "coarse", "flat", "unsure"]


class LayerError(Exception):
    """`part` of a model cannot be compared: its weights or the dtype are wrong."""

    def __init__(self, part: str, why: Why) -> None:
        super().__init__(f"{part}: {why}")
        self.part, self.why = part, why


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The token of a part that came closest to its bound, or went past it."""

    part: str
    off: float  # in bounds
    where: str
    inside: float  # R's worst: what rounding does inside the part, as a share of what the part adds
    is_draft: bool = False

    @property
    def is_passed(self) -> bool:
        return self.off <= 1


@torch.inference_mode()
def check_layers(engine: Engine, prompt: Callable[[int], list[int]]) -> list[LayerResult]:
    """Return a finding for each layer, router and head of both models, over some tokens of `prompt`.

    The engine must be idle, and is left as it was. LayerError: the target cannot be compared. A drafter that
    cannot be compared is left out: `check_drafter` measures it.
    """
    pieces = pieces_for(engine)
    num_rows = 1 + max(max(piece.rows) for piece in pieces)
    lengths = [sum(piece.kept_of(row) for piece in pieces) for row in range(num_rows)]
    check = _Check(engine, prompt(max(lengths)))
    check.run_oracle()
    with _borrowed_rows(engine, lengths):
        for piece in pieces:
            check.run_piece(piece)
        if check.drafter is not None:
            check.run_drafter(check.drafter, lengths)
    check.run_head()
    findings = [part.finding() for part in check.target_parts]
    drafted = [part.finding() for part in check.draft_parts if part.why_not() is None]
    return findings + [replace(finding, is_draft=True) for finding in drafted]


@dataclass(slots=True)
class Part:
    """A layer, a router or a head: T's values of its tokens, and the distances of K from them."""

    name: str
    exact: Tensor  # [N, E]
    allowed: Tensor  # [N]
    inside: Tensor  # [N] what rounding does inside the part, as a share of what it adds
    found: list[Tensor] = field(default_factory=list)  # K's distances, in bounds
    where: list[str] = field(default_factory=list)
    sure: list[Tensor] = field(default_factory=list)  # bool: which tokens of a mixture count

    def compare(self, got: Tensor, index: Tensor, where: list[str], counts: Tensor | None = None) -> None:
        """Add K's values of the tokens `index`; those that do not count may be anything."""
        off = (got.to(self.exact.dtype) - self.exact[index]).norm(dim=1) / self.allowed[index]
        self.found.append(off if counts is None else off.masked_fill(~counts, 0))
        self.where += where

    def why_not(self) -> Why | None:
        """Return the reason why a comparison is impossible, if it is."""
        if not bool(self.inside.isfinite().all()):
            return "overflow"
        if float(self.inside.median()) > MAX_INSIDE:
            return "coarse"
        if self.sure and float(torch.cat(self.sure).double().mean()) < MIN_SURE:
            return "unsure"
        return None

    def finding(self) -> LayerResult:
        why = self.why_not()
        if why is not None:
            raise LayerError(self.name, why)
        off = torch.cat(self.found).nan_to_num(nan=math.inf)
        worst = int(off.argmax())
        return LayerResult(self.name, float(off[worst]), self.where[worst], float(self.inside.amax()))


class _Check:
    """The three computations of one engine and prompt."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        models = engine.models
        self.engine, self.target, self.device = engine, models.target, models.device
        self.oracle = with_kernels(models.target, models.target.kernels.references())
        self.drafter = models.block_drafter
        self.target_parts: list[Part] = []
        self.draft_parts: list[Part] = []
        self._name = models.dtype
        self._is_int8 = any(isinstance(one, Int8Matrix) for one in models.target.modules())
        if self.drafter is not None:
            self._is_int8 |= any(isinstance(one, Int8Matrix) for one in self.drafter.model.modules())
        self._least_inside = max(INSIDE[self._name], INSIDE_INT8 if self._is_int8 else 0.0)
        self._dtype: torch.dtype = getattr(torch, self._name)
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._numbers = torch.Generator().manual_seed(0)
        self._ids = torch.tensor(prompt, device=self.device)
        self._specs = models.config.layer_specs()
        if models.draft_config is not None:
            self._specs += models.draft_config.layer_specs()
        self._inputs: list[Tensor] = []  # [N, E] of each layer, and last what comes out of all
        self._layers: list[tuple[Part, _Router | None]] = []

    # ---- T and R

    def run_oracle(self) -> None:
        exact_view, rough_view = (
            WholeView(self._specs, count=len(self._ids), device=self.device) for _ in range(2)
        )
        angles = self.target.angles(exact_view.positions)
        x = self.target.embed(self._ids)
        for index, layer in enumerate(self.oracle.layers):
            self._inputs.append(x)
            with _exactly(), _scores(layer) as scores:
                exact = self.oracle.through(index, x.to(self._wide), angles, exact_view)
                rough = exact
                if self._wide != self._dtype or self._is_int8:
                    rough = self.oracle.through(index, self._rough_input(x), angles, rough_view)
            router, agrees = self._router(index, scores)
            part = self._part(f"layer {index}", exact, rough, stream=x, counts=agrees)
            self._layers.append((part, router))
            self.target_parts += [part] if router is None else [router.part, part]
            x = exact.to(self._dtype)
        self._inputs.append(x)
        is_finite = torch.stack([x.isfinite().all() for x in self._inputs]).tolist()
        if not all(is_finite):
            broken = is_finite.index(False)
            raise LayerError("the embedding" if broken == 0 else f"layer {broken - 1}", "overflow")

    def _rough_input(self, x: Tensor) -> Tensor:
        """Return R's copy of a layer's input [N, E]."""
        if not self._is_int8:
            return x.clone()
        signs = torch.randint(0, 2, x.shape, generator=self._numbers).to(x) * 2 - 1
        return x * (1 + NUDGE_INT8 * signs)

    def _router(self, index: int, scores: list[_Scores]) -> tuple[_Router | None, Tensor | None]:
        """Return a layer's router, and which tokens have the same experts in R as in T."""
        if not scores:
            return None, None
        exact, rough = scores[0], scores[-1]
        router = _Router(exact, self._part(f"the router of layer {index}", exact.values, rough.values))
        return router, router.agrees(rough, torch.arange(len(self._ids), device=self.device))

    def _part(
        self,
        name: str,
        exact: Tensor,
        rough: Tensor,
        *,
        stream: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Part:
        """Return T's values with the bound that R's distance gives; `stream` is what the part adds to."""
        before = torch.zeros_like(exact) if stream is None else stream.to(exact.dtype)
        added = (exact - before).norm(dim=1)
        added = torch.maximum(added, added.median())  # beside a token that adds nothing, rounding is a lot
        outside = ROUNDING[self._name] / 2 * (exact.norm(dim=1) + before.norm(dim=1))
        off = (rough.to(exact.dtype) - exact).norm(dim=1)
        tiny = torch.finfo(exact.dtype).tiny
        share = (off - outside).clamp(min=0) / added.clamp(min=tiny)
        inside = share if counts is None else share.masked_fill(~counts, 0)
        allowed = MULTIPLE * (outside + inside.amax().clamp(min=self._least_inside) * added)
        return Part(name, exact, allowed.clamp(min=tiny), inside)

    # ---- K

    def run_piece(self, piece: Piece) -> None:
        """Run a step: a forward of both models, then a commit of what is right."""
        rows, cache = self.engine.rows, self.engine.cache
        index = torch.tensor(piece.positions, device=self.device).clamp(max=len(self._ids) - 1)
        is_right = torch.tensor(piece.is_right, device=self.device)
        where = [f"at position {position}, {piece}" for position in piece.positions]
        rows.activate(piece.rows)
        view = cache.view(rows, piece.counts, is_known=piece.is_known)
        angles = self.target.angles(view.positions)
        for number, (part, router) in enumerate(self._layers):
            with _scores(self.target.layers[number]) as scores:
                out = self.target.through(number, self._tokens(number, index, is_right), angles, view)
            counts = is_right
            if router is not None:
                router.part.compare(scores[0].values, index, where, is_right)
                agrees = router.agrees(scores[0], index)
                part.sure.append(agrees[is_right])
                counts = agrees & is_right
            part.compare(out, index, where, counts)
        if self.drafter is not None:
            taps = [self._tokens(tap + 1, index, is_right) for tap in self.target.taps]
            self.drafter.absorb(torch.cat(taps, dim=1), view)
        if not piece.is_known:
            cache.commit(rows, view.starts, torch.tensor(piece.kept, device=self.device))
        rows.extend(piece.kept)

    def _tokens(self, number: int, index: Tensor, is_right: Tensor) -> Tensor:
        """Return T's input of a layer, but other values for drafts that are to be rejected."""
        x = self._inputs[number][index]
        return torch.where(is_right[:, None], x, -x)

    # ---- the drafter

    def run_drafter(self, drafter: DFlashDrafter, lengths: list[int]) -> None:
        """Draft a block for each row, behind the `lengths` tokens that the pieces have left there."""
        model, num_columns = drafter.model, drafter.num_columns
        oracle = drafter.beside(with_kernels(drafter.target, self.oracle.kernels))
        anchors = self._ids[torch.tensor(lengths, device=self.device).clamp(max=len(self._ids) - 1)]
        masks = anchors.new_full((len(lengths), num_columns - 1), model.config.mask_token_id)
        x = drafter.embed(torch.cat((anchors[:, None], masks), dim=1).flatten())
        rows = self.engine.rows
        rows.activate(range(len(lengths)))
        view = self.engine.cache.view(rows, num_columns)
        angles = model.rotary(view.positions)
        index = torch.arange(len(x), device=self.device)
        where = [f"in column {column} of a block of {len(lengths)} rows" for column in range(num_columns)]
        with _exactly():
            exact_view = self._behind(oracle, lengths, self._wide)
            rough_view = self._behind(oracle, lengths, self._dtype)
        for number, (layer, same) in enumerate(zip(model.layers, oracle.model.layers, strict=True)):
            with _exactly():
                exact = same(x.to(self._wide), angles, exact_view, num_columns)
                rough = same(self._rough_input(x), angles, rough_view, num_columns)
            part = self._part(f"layer {number} of the drafter", exact, rough, stream=x)
            part.compare(layer(x.clone(), angles, view, num_columns), index, where * len(lengths))
            self.draft_parts.append(part)
            x = exact.to(self._dtype)
        heads = (functools.partial(_draft_logits, one) for one in (oracle, drafter))
        self.draft_parts.append(self._head("the drafter's head", x, *heads))

    def _behind(self, drafter: DFlashDrafter, lengths: list[int], dtype: torch.dtype) -> WholeView:
        """Return a view of each row's block and of the context before it."""
        features = torch.cat([self._inputs[tap + 1] for tap in self.target.taps], dim=1)
        context = WholeView(self._specs, count=len(self._ids), device=self.device)
        drafter.model.absorb(features.to(dtype), context)
        return WholeView(
            self._specs, count=drafter.num_columns, device=self.device, starts=lengths, context=context.kept
        )

    # ---- the heads

    def run_head(self) -> None:
        x = self._inputs[-1][-HEAD_TOKENS:]
        heads = (functools.partial(_logits, one) for one in (self.oracle, self.target))
        part = self._head("the head", x, *heads)
        if bool((part.exact.amax(dim=1) == part.exact.amin(dim=1)).any()):
            raise LayerError("the head", "flat")
        self.target_parts.append(part)

    def _head(
        self, name: str, x: Tensor, oracle: Callable[[Tensor], Tensor], logits: Callable[[Tensor], Tensor]
    ) -> Part:
        """Return a head, compared on one token, on a block, and on more than that."""
        with _exactly():
            exact, rough = (oracle(x.to(dtype)) for dtype in (self._wide, self._dtype))
        part = self._part(name, exact, rough)
        for count in sorted({1, min(self.engine.plan.block, len(x)), len(x)}):
            index = torch.arange(count, device=self.device)
            part.compare(logits(x[:count]), index, [f"of {count} tokens"] * count)
        return part


def _logits(target: Decoder, x: Tensor) -> Tensor:
    return target.logits(target.norm(x))


def _draft_logits(drafter: DFlashDrafter, x: Tensor) -> Tensor:
    """Return logits of the tokens that the drafter's head has rows for."""
    logits, ids = drafter.logits(drafter.model.norm(x)), drafter.vocab_map
    return logits if ids is None else logits[:, ids]


# ---- mixtures


class _Scores(NamedTuple):
    """The scores of one forward of a router."""

    values: Tensor  # [N, X]
    num_chosen: int

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Return the experts with the largest scores, sorted, and whether the next one ties with them."""
        count = min(self.num_chosen + 1, self.values.shape[1])
        best = self.values.topk(count, dim=1)
        is_tied = best.values[:, self.num_chosen - 1] == best.values[:, -1]
        if count == self.num_chosen:  # there is no next one
            is_tied = torch.zeros_like(is_tied)
        return best.indices[:, : self.num_chosen].sort(dim=1).values, is_tied


class _Router:
    """T's choice of a layer's experts. Rounding decides between two with nearly equal scores."""

    def __init__(self, scores: _Scores, part: Part) -> None:
        self.part = part
        self._chosen = scores.chosen()[0]

    def agrees(self, scores: _Scores, index: Tensor) -> Tensor:
        """Return which tokens have the experts that T chose."""
        chosen, is_tied = scores.chosen()
        return (chosen == self._chosen[index]).all(dim=1) & ~is_tied


@contextlib.contextmanager
def _scores(layer: nn.Module) -> Iterator[list[_Scores]]:
    """Give a list that gets the scores of the layer's experts, once for each forward."""
    found: list[_Scores] = []

    def look(router: MoE | GptOssMoE | GemmaRouter, inputs: tuple[Tensor, nn.Module]) -> None:
        found.append(_Scores(router.scores(*inputs), router.num_chosen))  # type: ignore[call-arg, arg-type]

    routers = [part for part in layer.modules() if isinstance(part, MoE | GptOssMoE | GemmaRouter)]
    hooks = [router.register_forward_pre_hook(look) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# ---- the engine's rows


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
    """Compute float32 products in float32, whatever the process has asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _borrowed_rows(engine: Engine, lengths: list[int]) -> Iterator[None]:
    """Borrow rows with pages for `lengths` tokens and a block each; NaN in them reveals stale reads."""
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
    """Let compressing layers read exact keys, since loss by compression is not a fault."""
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
