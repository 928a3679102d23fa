"""Faults as kernels and their callers could have them, one at a time, in what serves and not in the oracle.

Each is an injection: it takes an engine and gives one that computes wrongly, by Python alone, so that the
same faults can be tried on a CPU and on a card.
"""

import contextlib
import functools
from dataclasses import replace

import torch

from blockdraft.cache import recurrent, view
from blockdraft.cache.rows import Rows
from blockdraft.check import layers as layercheck
from blockdraft.check.layers import check_layers
from blockdraft.engine.engine import Engine
from blockdraft.kernels.attention import Blocks
from blockdraft.models import decoder, layers, moe
from blockdraft.models.dflash import DFlash
from blockdraft.models.packed import Scaled
from blockdraft.models.rotary import Rotary
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from tests import tiny
from tests.lossless import families
from tests.models.families import CASES


def prompt(one):
    """Token ids for `check_layers`."""
    vocab_size = one.models.config.vocab_size
    return lambda count: [(3 * i * i + 7 * i + 1) % vocab_size for i in range(count)]


@functools.lru_cache(maxsize=24)
def engine(name, dtype, device="cpu"):
    """`pair`: the trained pair; `int8`, `fp8`: the same, quantised; else a family with a random drafter."""
    settings = {
        "dtype": dtype,
        "device": device,
        "max_model_len": 330,
        "width": tiny.BLOCK,
        "max_num_seqs": 3,
    }
    if name in ("pair", "int8", "fp8"):
        quantization = "none" if name == "pair" else name
        settings |= {"model": tiny.TARGET, "draft": tiny.DRAFT, "quantization": quantization}
        models, plan = load_models(Settings(**settings), lambda text: None)
    else:
        models, plan = families.make_pair(*CASES[name], seed=1, block=tiny.BLOCK, **settings)
    return Engine(models, replace(plan, num_pages=400, page_size=4))


def worst(one):
    """The finding of `check_layers` that came closest to its bound or went furthest past it."""
    return max(check_layers(one, prompt(one)), key=lambda finding: finding.off)


def with_kernels(one, **kernels):
    """`one` on its own kernels, but for these."""
    changed = replace(one.models.target.kernels, **kernels)
    return Engine(one.models.with_kernels(changed), one.plan)


def kernel(name, before=None, after=None):
    """The kernel `name` gets before(arguments, options) and gives after(result)."""

    def inject(monkeypatch, one):
        right = getattr(one.models.target.kernels, name)
        return with_kernels(one, **{name: wrapped(right, before, after)})

    return inject


def wrapped(right, before, after):
    def call(*arguments, **options):
        if before is not None:
            arguments, options = before(list(arguments), dict(options))
        result = right(*arguments, **options)
        return result if after is None else after(result)

    return call


_ORACLE = []  # not empty while the oracle of `check_layers` computes


def method(owner, name, before=None, after=None):
    """Inject before and after a method, or a function of a module, while the oracle does not compute."""

    def inject(monkeypatch, one):
        right = getattr(owner, name)
        return instead(owner, name, wrapped(right, before, after))(monkeypatch, one)

    return inject


def instead(owner, name, wrong):
    """`wrong` in the place of a method, or of a function of a module, while the oracle does not compute."""

    def inject(monkeypatch, one):
        right, exactly = getattr(owner, name), layercheck._exactly

        def call(*arguments, **options):
            return (right if _ORACLE else wrong)(*arguments, **options)

        @contextlib.contextmanager
        def watched():
            _ORACLE.append(True)
            try:
                with exactly():
                    yield
            finally:
                _ORACLE.pop()

        monkeypatch.setattr(owner, name, call)
        monkeypatch.setattr(layercheck, "_exactly", watched)
        return one

    return inject


def always(owner, name, wrong):
    """`wrong` takes the place of what the oracle does not use."""

    def inject(monkeypatch, one):
        monkeypatch.setattr(owner, name, wrong)
        return one

    return inject


def attention(change):
    """`change` gets the arguments by name and changes some of them."""

    def before(arguments, options):
        names = ("q", "keys", "values", "blocks", "mask", "sinks")
        given = dict(zip(names, arguments, strict=False)) | options
        return [], given | change(given)

    return kernel("attend", before=before)


_ATTEND = view.CacheView.attend


def causal(self, layer, q, k, v, mask, **options):
    return _ATTEND(self, layer, q, k, v, replace(mask, is_causal=True), **options)


def moved(blocks, *, starts=None, table=None):
    return Blocks(
        pages=blocks.table if table is None else table,
        rows=blocks.rows,
        starts=blocks.starts if starts is None else starts,
        counts=blocks.counts,
        page_size=blocks.page_size,
    )


def stale_page(given):
    table = given["blocks"].table.clone()
    table[:, 1] = table[:, 0]
    return {"blocks": moved(given["blocks"], table=table)}


def neighbours_pages(given):
    blocks = given["blocks"]
    if len(blocks.counts) == 1:
        return {}
    table = blocks.table.clone()
    table[blocks.rows[-1]] = blocks.table[blocks.rows[0]]
    return {"blocks": moved(blocks, table=table)}


def hidden_key(given):
    return {"blocks": moved(given["blocks"], starts=(given["blocks"].starts - 1).clamp(min=0))}


def later_positions(arguments, options):
    """From some position on: a shift of all positions changes nothing."""
    return [arguments[0], arguments[1] + (arguments[1] > 20)], options


def backwards(arguments, options):
    *given, (cos, sin), slots = arguments
    return [*given, (cos, -sin), slots], options


_WRITE_SLOTS = Blocks.write_slots.fget
_PAGES = view.CacheView._pages


def gate_and_up_swapped(self, x, norm=None):
    h = x if norm is None else norm(x)
    halves = torch.cat(self.gate_up(h).chunk(2, dim=-1)[::-1], dim=-1)
    return self.down(self.gate_up.kernels.gate_mul(halves, self.gate), None if norm is None else x)


_DEQUANTISE = Scaled.dequantise


def neighbours_scale(monkeypatch, one):
    def dequantise(self, dtype):
        return _DEQUANTISE(Scaled(self.values, self.scale.roll(1, dims=-2), block=self.block), dtype)

    right = one.models.target.kernels

    def int8_linear(x, weight, bias, onto):
        return right.int8_linear(x, weight._replace(scale=weight.scale.roll(1)), bias, onto)

    def scaled_linear(x, values, scale, *rest):
        return right.scaled_linear(x, values, scale.roll(1), *rest)

    one = with_kernels(one, int8_linear=int8_linear, scaled_linear=scaled_linear)
    return instead(Scaled, "dequantise", dequantise)(monkeypatch, one)


def routes(change):
    def inject(monkeypatch, one):
        right = one.models.target.kernels.route

        def route(logits, *arguments):
            return change(right(logits, *arguments), logits.shape[1])

        return with_kernels(one, route=route)

    return inject


def experts_without(name):
    right = moe.Experts.forward

    def forward(self, x, choice, shared=None, onto=None):
        return right(self, x, choice, **({"shared": shared, "onto": onto} | {name: None}))

    return instead(moe.Experts, "forward", forward)


def commits(shift):
    right = recurrent.RecurrentStates.commit

    def commit(self, rows, starts, counts):
        right(self, rows, starts, (counts + shift).clamp(min=0))

    return always(recurrent.RecurrentStates, "commit", commit)


_SCAN = recurrent.RecurrentStates.scan
_SCAN_LAYER = recurrent.RecurrentState.scan


def from_nothing(self, layer, x, beta, gate, weights, where):
    if not where.is_known:
        self.state[layer] = 0
    return _SCAN(self, layer, x, beta, gate, weights, where)


def without_tail(self, *arguments):
    self.tail.zero_()
    return _SCAN(self, *arguments)


def slow_fading(self, x, beta, gate, weights, where):
    return _SCAN_LAYER(self, x, beta, gate, weights._replace(gate_bias=weights.gate_bias - 0.5), where)


def late_context(arguments, options):
    return [arguments[0], arguments[1].roll(1, dims=0), arguments[2]], options


def tokens_swapped(minimum):
    """Two neighbours' products change places in pieces of at least so many tokens."""

    def swap(result):
        if result.shape[0] >= minimum and result.dim() == 2:
            result[[2, 3]] = result[[3, 2]]
        return result

    return kernel("gated_linear", after=swap)


# name: (which `engine` shows it, what injects it)
FAULTS = {
    "rope off by one": ("pair", method(Rotary, "forward", before=later_positions)),
    "rope turned backwards": ("pair", kernel("norm_rope_write", before=backwards)),
    "mask off by one": ("pair", attention(hidden_key)),
    "a wrong scale of scores": (
        "pair",
        attention(lambda given: {"mask": replace(given["mask"], scale=1.25 * given["mask"].scale)}),
    ),
    "a dropped split": ("pair", attention(lambda given: {"mask": replace(given["mask"], window=8)})),
    "swapped key heads": ("pair", attention(lambda given: {"keys": given["keys"].flip(0)})),
    "swapped value heads": ("pair", attention(lambda given: {"values": given["values"].flip(0)})),
    "a stale page": ("pair", attention(stale_page)),
    "a neighbour's pages": ("pair", attention(neighbours_pages)),
    "slots off by one": (
        "pair",
        always(Blocks, "write_slots", property(lambda blocks: _WRITE_SLOTS(blocks).roll(1))),
    ),
    "another layer's cache": (
        "pair",
        always(view.CacheView, "_pages", lambda self, layer: _PAGES(self, min(layer, 1))),
    ),
    "chunks that overwrite one another": ("pair", always(Rows, "extend", lambda self, counts: None)),
    "gate and up swapped": ("pair", instead(layers.GatedMLP, "forward", gate_and_up_swapped)),
    "norms without their weight": (
        "pair",
        kernel("rms_norm", before=lambda given, options: ([given[0], None, given[2]], options)),
    ),
    "two tokens swapped in a piece": ("pair", tokens_swapped(5)),
    "a head one row off": (
        "pair",
        method(decoder.Decoder, "head_logits", after=lambda logits: logits.roll(1, dims=-1)),
    ),
    "a drafter's context one token late": ("pair", method(DFlash, "absorb", before=late_context)),
    "a drafter's block that is causal": ("pair", always(view.CacheView, "attend", causal)),
    "a forgotten bias": (
        "qwen2-layer-types",
        kernel("linear", before=lambda given, options: ([*given[:2], None], options)),
    ),
    "a window that is ignored": (
        "qwen3-slides",
        attention(lambda given: {"mask": replace(given["mask"], window=None)}),
    ),
    "a window off by one": (
        "qwen3-slides",
        attention(lambda given: {"mask": replace(given["mask"], window=(given["mask"].window or 999) + 1)}),
    ),
    "sinks that are ignored": ("gpt_oss-whole", attention(lambda given: {"sinks": None})),
    "a wrong expert": (
        "qwen3_moe-some-dense",
        routes(lambda choice, count: choice._replace(ids=(choice.ids + 1) % count)),
    ),
    "experts' weights swapped": (
        "qwen3_moe-some-dense",
        routes(lambda choice, count: choice._replace(weights=choice.weights.flip(1))),
    ),
    "experts without the stream": ("qwen3_moe-some-dense", experts_without("onto")),
    "a forgotten shared expert": ("qwen3_next-whole", experts_without("shared")),
    "one token too few committed": ("qwen3_next-whole", commits(-1)),
    "a state that starts from nothing": (
        "qwen3_next-whole",
        always(recurrent.RecurrentStates, "scan", from_nothing),
    ),
    "a convolution without its past": (
        "qwen3_next-whole",
        always(recurrent.RecurrentStates, "scan", without_tail),
    ),
    "a state that fades too slowly": (
        "qwen3_next-whole",
        always(recurrent.RecurrentState, "scan", slow_fading),
    ),
    "a wrong logit cap": (
        "gemma4-mixture",
        method(decoder, "softcap", before=lambda given, options: ([given[0], 2.0], options)),
    ),
    "a neighbour's scale": ("int8", neighbours_scale),
}
