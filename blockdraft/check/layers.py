"""Compares every served layer with an oracle; the effect of rounding in the oracle gives the tolerance.

One prompt is computed three times:

  T  the oracle: the references in float32 or wider, over the whole prompt at once (`WholeView`)
  R  the references in the served dtype; for int8 models, with inputs that differ in their last bits
  K  the served kernels, through rows and pages, in pieces of every size that has its own code

In each layer all three get equal inputs: T's output of the previous layer, rounded to the served dtype. So
errors do not add up over depth, and the distance of R from T is the effect of rounding inside this layer,
with these weights and this prompt, however large the activations are. K may differ from T by a few times this
distance; a fault differs by far more. End-to-end logits have no such tolerance, because depth amplifies
rounding without bound.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from blockdraft.check.borrowed_rows import borrowed_rows
from blockdraft.check.piece_sizes import Piece, pieces_for
from blockdraft.check.uncached_view import WholeView
from blockdraft.engine.engine import Engine
from blockdraft.kernels.pointwise import Angles
from blockdraft.models.decoder import Decoder
from blockdraft.models.gemma4 import GemmaRouter
from blockdraft.models.gpt_oss import GptOssMoE
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.moe import MoE
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.hints import HintDrafter
from blockdraft.step.lattice import LatticeDrafter
from blockdraft.step.mtp import MtpDrafter

# K may differ from T by this multiple of the rounding error. The rounding error is half a unit in the last
# place of every value that the part reads and writes, plus the error inside the part: that of R's worst
# token. Sound models reach half of the bound, the faults in tests/faults.py four times the bound (H200,
# Neoverse, 2026-11).
MULTIPLE = 3.0
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The least error inside a part, as a share of what the part adds. In float32 and float64, T and R are equal,
# and only this allows for sums in another order, exponentials of scores in the hundreds, and states of many
# tokens.
INSIDE = {"float64": 1e-10, "float32": 1e-4, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# If tokens are rounded to int8, the last bit of a float32 may decide the direction, and one changed value
# changes later ones: by 1 % of what a layer adds in the default model, by 5 % in its layer 11 (2026-11). So
# R's inputs are scaled by 1 ± NUDGE_INT8, enough to change how some value of nearly every token is rounded.
INSIDE_INT8 = 2.0**-7
NUDGE_INT8 = 2.0**-16
MAX_INSIDE = 0.5  # if R loses a larger share for most tokens, the dtype is too coarse for the model
MIN_SURE = 0.02  # least share of tokens for which K must choose T's experts
HEAD_TOKENS = 24  # more than one block


Why = Literal["overflow", "coarse", "flat", "unsure"]
A = TypeVar("A")  # angles, of one kind of rope or of all


class LayerError(Exception):
    """Raised if a part of a model cannot be compared, because its weights or the dtype are wrong."""

    def __init__(self, part: str, why: Why) -> None:
        super().__init__(f"{part}: {why}")
        self.part, self.why = part, why


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The worst token of a part: the one with the largest error relative to its bound."""

    part: str
    off: float  # error divided by the bound
    where: str
    inside: float  # R's largest rounding error inside the part, as a share of what the part adds
    is_draft: bool = False

    @property
    def is_passed(self) -> bool:
        return self.off <= 1


@torch.inference_mode()
def check_layers(engine: Engine, prompt: Callable[[int], list[int]]) -> list[LayerResult]:
    """Return a result for each layer, router and head of both models, over some tokens of `prompt`.

    The engine must be idle; its state is restored. Raise LayerError if the target cannot be compared. Parts
    of the drafter that cannot be compared are left out: `check_drafter` measures the drafter.
    """
    pieces = pieces_for(engine)
    num_rows = 1 + max(max(piece.rows) for piece in pieces)
    lengths = [sum(piece.kept_of(row) for piece in pieces) for row in range(num_rows)]
    check = _Check(engine, prompt(max(lengths)))
    check.run_oracle()
    with borrowed_rows(engine, lengths):
        for piece in pieces:
            check.run_piece(piece)
        if check.drafter is not None:
            check.run_drafter(check.drafter, lengths)
        if check.mtp is not None:
            check.run_mtp(check.mtp, lengths)
    check.run_head()
    findings = [part.finding() for part in check.target_parts]
    drafted = [part.finding() for part in check.draft_parts if part.why_not() is None]
    return findings + [replace(finding, is_draft=True) for finding in drafted]


@dataclass(slots=True)
class Part:
    """A layer, router or head, with T's outputs for all tokens and K's distances from them."""

    name: str
    exact: Tensor  # [N, E]
    allowed: Tensor  # [N]
    inside: Tensor  # [N] rounding error inside the part, as a share of what the part adds
    found: list[Tensor] = field(default_factory=list)  # K's distances divided by the bounds
    where: list[str] = field(default_factory=list)
    sure: list[Tensor] = field(default_factory=list)  # bool: tokens for which K has T's experts

    def compare(self, got: Tensor, index: Tensor, where: list[str], counts: Tensor | None = None) -> None:
        """Add K's outputs for the tokens `index`; ignore tokens for which `counts` is False."""
        off = (got.to(self.exact.dtype) - self.exact[index]).norm(dim=1) / self.allowed[index]
        self.found.append(off if counts is None else off.masked_fill(~counts, 0))
        self.where += where

    def why_not(self) -> Why | None:
        """Return the reason why the part cannot be compared, or None."""
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
        self.mtp = models.drafter if isinstance(models.drafter, MtpDrafter) else None
        self.target_parts: list[Part] = []
        self.draft_parts: list[Part] = []
        self._name = models.dtype
        parts = (part for model in models.models() for part in model.modules())
        self._is_int8 = any(isinstance(part, Int8Matrix) for part in parts)
        self._least_inside = max(INSIDE[self._name], INSIDE_INT8 if self._is_int8 else 0.0)
        self._dtype: torch.dtype = getattr(torch, self._name)
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._numbers = torch.Generator().manual_seed(0)
        self._ids = torch.tensor(prompt, device=self.device)
        self._specs = models.config.layer_specs()
        if models.draft_config is not None:
            self._specs += models.draft_config.layer_specs()
        self._inputs: list[Tensor] = []  # [N, E] for each layer, then the output of the last layer
        self._layers: list[tuple[Part, _Router | None]] = []

    # ---- T and R

    def run_oracle(self) -> None:
        views = self._views()
        angles = self.target.angles(views[0].positions)
        x = self.target.embed(self._ids)
        for index, layer in enumerate(self.oracle.layers):
            self._inputs.append(x)
            with _scores(layer) as scores:
                exact, rough = self._twice(functools.partial(self.oracle.through, index), x, angles, views)
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

    @functools.cached_property
    def _final(self) -> Tensor:
        """T's final hidden states [N, E], in the served dtype."""
        with _exactly():
            return self.oracle.norm(self._inputs[-1].to(self._wide)).to(self._dtype)  # type: ignore[no-any-return]

    @functools.cached_property
    def _next_ids(self) -> Tensor:
        """The token after each of the prompt's; the last one has itself."""
        return torch.cat((self._ids[1:], self._ids[-1:]))

    def _views(self) -> tuple[WholeView, ...]:
        """Return empty views of the prompt for T and R."""
        return tuple(WholeView(self._specs, count=len(self._ids), device=self.device) for _ in range(2))

    def _twice(
        self,
        through: Callable[[Tensor, A, WholeView], Tensor],
        x: Tensor,
        angles: A,
        views: Sequence[WholeView],
    ) -> tuple[Tensor, Tensor]:
        """Return T's and R's output for the input x. Those of float32 and float64 are the same."""
        with _exactly():
            exact = through(x.to(self._wide), angles, views[0])
            if self._wide == self._dtype and not self._is_int8:
                return exact, exact
            return exact, through(self._rough_input(x), angles, views[1])

    def _rough_input(self, x: Tensor) -> Tensor:
        """Return R's input of a layer [N, E]; for int8 models it differs slightly from `x`."""
        if not self._is_int8:
            return x.clone()
        signs = torch.randint(0, 2, x.shape, generator=self._numbers).to(x) * 2 - 1
        return x * (1 + NUDGE_INT8 * signs)

    def _router(self, index: int, scores: list[_Scores]) -> tuple[_Router | None, Tensor | None]:
        """Return a layer's router, and a mask of the tokens for which R and T have the same experts."""
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
        """Return a part with T's values and a bound from R's distance; the part adds to `stream`."""
        before = torch.zeros_like(exact) if stream is None else stream.to(exact.dtype)
        added = (exact - before).norm(dim=1)
        added = torch.maximum(added, added.median())  # where a token adds nothing, any rounding is large
        outside = ROUNDING[self._name] / 2 * (exact.norm(dim=1) + before.norm(dim=1))
        off = (rough.to(exact.dtype) - exact).norm(dim=1)
        tiny = torch.finfo(exact.dtype).tiny
        share = (off - outside).clamp(min=0) / added.clamp(min=tiny)
        inside = share if counts is None else share.masked_fill(~counts, 0)
        allowed = MULTIPLE * (outside + inside.amax().clamp(min=self._least_inside) * added)
        return Part(name, exact, allowed.clamp(min=tiny), inside)

    # ---- K

    def run_piece(self, piece: Piece) -> None:
        """Run one step of K: a forward of both models, then a commit of the right tokens."""
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
        if self.mtp is not None:
            hidden, num_kept = self._final[index], torch.tensor(piece.kept, device=self.device)
            hidden = torch.where(is_right[:, None], hidden, -hidden)
            self.mtp.follow(hidden, self._next_ids[index], num_kept, view, rows)
        if not piece.is_known:
            cache.commit(rows, view.starts, torch.tensor(piece.kept, device=self.device))
        rows.extend(piece.kept)

    def _tokens(self, number: int, index: Tensor, is_right: Tensor) -> Tensor:
        """Return T's input of a layer, with wrong values for the drafts that must be rejected."""
        x = self._inputs[number][index]
        return torch.where(is_right[:, None], x, -x)

    # ---- the drafter

    def run_drafter(self, drafter: DFlashDrafter, lengths: list[int]) -> None:
        """Compare the drafter on one block per row, after the `lengths` tokens that the pieces kept."""
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
            views = tuple(self._behind(oracle, lengths, dtype) for dtype in (self._wide, self._dtype))
        for number, (layer, same) in enumerate(zip(model.layers, oracle.model.layers, strict=True)):
            through = functools.partial(same, num_columns=num_columns)
            exact, rough = self._twice(through, x, angles, views)
            part = self._part(f"layer {number} of the drafter", exact, rough, stream=x)
            part.compare(layer(x.clone(), angles, view, num_columns), index, where * len(lengths))
            self.draft_parts.append(part)
            x = exact.to(self._dtype)
        heads = (functools.partial(_draft_logits, one) for one in (oracle, drafter))
        self.draft_parts.append(self._head("the drafter's head", x, *heads))
        if isinstance(drafter, HintDrafter | LatticeDrafter):
            shape = len(lengths), drafter.num_columns
            self._run_hints(oracle, drafter, x.view(*shape, -1))

    def _run_hints(self, oracle: DFlashDrafter, drafter: DFlashDrafter, x: Tensor) -> None:
        """Compare what the drafter's head says of tokens before each column of x [R, columns, E]."""
        num_rows, num_drafts = len(x), drafter.block - 1
        before = self._ids[torch.arange(num_rows * num_drafts, device=self.device) % len(self._ids)]
        before = before.view(num_rows, num_drafts)
        with _exactly():
            exact = _hints(oracle, x.to(self._wide), before)
            rough = _hints(oracle, self._rough_input(x), before)
        part = self._part("the drafter's hints", exact, rough)
        where = [f"of draft {draft} of {num_rows} rows" for draft in range(num_drafts)] * num_rows
        part.compare(_hints(drafter, x, before), torch.arange(len(exact), device=self.device), where)
        self.draft_parts.append(part)

    def run_mtp(self, drafter: MtpDrafter, lengths: list[int]) -> None:
        """Compare the head's first run of each row, after the `lengths` tokens that the pieces kept."""
        oracle, rows = with_kernels(drafter.model, self.oracle.kernels), self.engine.rows
        views, embedded = self._views(), self.target.embed(self._next_ids)
        angles = self.target.angles(views[0].positions)[0]

        def through(hidden: Tensor, angles: Angles, view: WholeView) -> Tensor:
            return oracle(embedded.to(hidden.dtype), hidden, angles, view)  # type: ignore[no-any-return]

        with _scores(oracle) as scores:
            exact, rough = self._twice(through, self._final, angles, views)
        router, agrees = self._router(self.target.config.num_layers, scores)
        part = self._part("the MTP head", exact, rough, counts=agrees)
        rows.activate(range(len(lengths)))
        index = torch.tensor(lengths, device=self.device) - 1
        where = [f"after {length} tokens, {len(lengths)} rows" for length in lengths]
        view = self.engine.cache.view(rows, 1, shift=-1)
        with _scores(drafter.model) as scores:
            out = drafter.run(self._next_ids[index], self._final[index], view)
        counts = None
        if router is not None:
            counts = router.agrees(scores[0], index)
            router.part.compare(scores[0].values, index, where)
            part.sure.append(counts)
            self.draft_parts.append(router.part)
        part.compare(out, index, where, counts)
        self.draft_parts.append(part)

    def _behind(self, drafter: DFlashDrafter, lengths: list[int], dtype: torch.dtype) -> WholeView:
        """Return the oracle's view of each row's block and of the context before the block."""
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
        """Return the head as a part, compared on one token, on a block, and on all given tokens."""
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
    """Return the logits of the tokens in the drafter's reduced vocabulary."""
    logits, ids = drafter.logits(drafter.model.norm(x)), drafter.vocab_map
    return logits if ids is None else logits[:, ids]


def _hints(drafter: DFlashDrafter, x: Tensor, before: Tensor) -> Tensor:
    """Return hints [R * D, rank] for drafts behind the tokens `before` [R, D].

    LiLiCorr's are its scores of these tokens and those with the next higher ids.
    """
    hidden = drafter.model.norm(x)
    if isinstance(drafter, LatticeDrafter):
        place = torch.arange(drafter.lattice.head.top_k, device=x.device)
        ids = (before[..., None] + place) % drafter.model.config.vocab_size
        return drafter.score(hidden, ids, -place.to(hidden.dtype).expand(ids.shape)).flatten(2).flatten(0, 1)
    hints = drafter.hints(hidden, before)
    assert hints is not None
    return hints.flatten(0, 1)


# ---- mixtures


class _Scores(NamedTuple):
    """The scores of a router in one forward."""

    values: Tensor  # [N, X]
    num_chosen: int

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Return the chosen experts, sorted, and whether the next expert ties with the last chosen one."""
        count = min(self.num_chosen + 1, self.values.shape[1])
        best = self.values.topk(count, dim=1)
        is_tied = best.values[:, self.num_chosen - 1] == best.values[:, -1]
        if count == self.num_chosen:  # all experts are chosen
            is_tied = torch.zeros_like(is_tied)
        return best.indices[:, : self.num_chosen].sort(dim=1).values, is_tied


class _Router:
    """T's choice of experts in a layer. K may choose otherwise if scores are nearly equal."""

    def __init__(self, scores: _Scores, part: Part) -> None:
        self.part = part
        self._chosen = scores.chosen()[0]

    def agrees(self, scores: _Scores, index: Tensor) -> Tensor:
        """Return a mask of the tokens that have the experts chosen by T."""
        chosen, is_tied = scores.chosen()
        return (chosen == self._chosen[index]).all(dim=1) & ~is_tied


@contextlib.contextmanager
def _scores(layer: nn.Module) -> Iterator[list[_Scores]]:
    """Yield a list to which each forward of the layer appends its router's scores."""
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


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
    """Compute float32 products in full precision, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
