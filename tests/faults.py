"""Faults as kernels and their callers could have them, one at a time, in what serves and not in the oracle.

Each changes what is computed wherever the reference was not asked for, by Python alone, so that the same
faults can be tried on a CPU and on a card.
"""

import functools
from dataclasses import replace

import torch

from blockdraft.cache import paged, recurrent, view
from blockdraft.cache.rows import Rows
from blockdraft.check.layercheck import check_layers
from blockdraft.engine.engine import Engine
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.choice import takes_reference
from blockdraft.models import decoder, gemma4, gpt_oss, layers, moe
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


@functools.lru_cache(maxsize=8)
def engine(name, dtype, device="cpu"):
    """`pair`: the trained pair; `int8`, `fp8`: the same, quantised; else a family with a random drafter."""
    settings = {"dtype": dtype, "device": device, "max_context": 330, "width": tiny.BLOCK, "max_rows": 3}
    if name in ("pair", "int8", "fp8"):
        quantization = "none" if name == "pair" else name
        settings |= {"model": tiny.TARGET, "draft": tiny.DRAFT, "quantization": quantization}
        models = load_models(Settings(**settings), lambda text: None)
    else:
        models = families.make_models(*CASES[name], seed=1, block=tiny.BLOCK, **settings)
    return Engine(replace(models, plan=replace(models.plan, num_pages=400, page_size=4)))


def worst(one):
    """The finding of `check_layers` that came closest to its bound or went furthest past it."""
    return max(check_layers(one, prompt(one)), key=lambda finding: finding.off)


def changed(monkeypatch, owner, name, before=None, after=None):
    """`owner.name` gets before(arguments, options) and gives after(result), where it serves."""
    right = getattr(owner, name)

    def call(*arguments, **options):
        if takes_reference():
            return right(*arguments, **options)
        if before is not None:
            arguments, options = before(list(arguments), dict(options))
        result = right(*arguments, **options)
        return result if after is None else after(result)

    monkeypatch.setattr(owner, name, call)


def attention(change):
    """`change` gets the arguments by name and changes some of them."""

    def inject(monkeypatch):
        def before(arguments, options):
            names = ("q", "keys", "values", "blocks", "mask", "sinks")
            given = dict(zip(names, arguments, strict=False)) | options
            return [], given | change(given)

        changed(monkeypatch, paged, "attend_paged", before=before)

    return inject


def moved(blocks, *, starts=None, table=None):
    return Blocks(
        pages=blocks._table if table is None else table,
        rows=blocks._rows,
        starts=blocks.starts if starts is None else starts,
        counts=blocks.counts,
        page_size=blocks._page_size,
    )


def stale_page(given):
    table = given["blocks"]._table.clone()
    table[:, 1] = table[:, 0]
    return {"blocks": moved(given["blocks"], table=table)}


def neighbours_pages(given):
    blocks = given["blocks"]
    if len(blocks.counts) == 1:
        return {}
    table = blocks._table.clone()
    table[blocks._rows[-1]] = blocks._table[blocks._rows[0]]
    return {"blocks": moved(blocks, table=table)}


def hidden_key(given):
    return {"blocks": moved(given["blocks"], starts=(given["blocks"].starts - 1).clamp(min=0))}


def rope_off_by_one(monkeypatch):
    """From some position on: a shift of all positions changes nothing."""
    changed(
        monkeypatch,
        Rotary,
        "forward",
        before=lambda arguments, options: ([arguments[0], arguments[1] + (arguments[1] > 20)], options),
    )


def rope_backwards(monkeypatch):
    def before(arguments, options):
        cos, sin = options["angles"]
        return arguments, options | {"angles": (cos, -sin)}

    changed(monkeypatch, view, "enter", before=before)


def slots_off_by_one(monkeypatch):
    right = Blocks.write_slots.fget
    monkeypatch.setattr(Blocks, "write_slots", property(lambda blocks: right(blocks).roll(1)))


def wrong_layer(monkeypatch):
    right = view.CacheView._pages
    monkeypatch.setattr(view.CacheView, "_pages", lambda self, layer: right(self, min(layer, 1)))


def one_row_off(monkeypatch):
    changed(monkeypatch, decoder.Decoder, "head_logits", after=lambda logits: logits.roll(1, dims=-1))


def wrong_cap(monkeypatch):
    changed(monkeypatch, decoder, "softcap", before=lambda arguments, options: ([arguments[0], 2.0], options))


def forgotten_extension(monkeypatch):
    monkeypatch.setattr(Rows, "extend", lambda self, counts: None)


def no_bias(monkeypatch):
    def before(arguments, options):
        return [*arguments[:2], None], options

    changed(monkeypatch, layers, "linear", before=before)


def gate_and_up_swapped(monkeypatch):
    right = layers.GatedMLP.forward

    def forward(self, x, norm=None):
        if takes_reference():
            return right(self, x, norm)
        h = x if norm is None else norm(x)
        inner = self.activate(torch.cat(self.gate_up(h).chunk(2, dim=-1)[::-1], dim=-1))
        return self.down(inner, None if norm is None else x)

    monkeypatch.setattr(layers.GatedMLP, "forward", forward)


def norms_without_weight(monkeypatch):
    changed(
        monkeypatch,
        layers,
        "rms_norm",
        before=lambda arguments, options: ([arguments[0], None, arguments[2]], options),
    )


def neighbours_scale(monkeypatch):
    changed(monkeypatch, Scaled, "_row_scale", after=lambda scale: scale.roll(1))

    right = Scaled.dequantise

    def dequantise(self, dtype):
        if takes_reference():
            return right(self, dtype)
        return right(Scaled(self.values, self.scale.roll(1, dims=-2), block=self.block), dtype)

    monkeypatch.setattr(Scaled, "dequantise", dequantise)


def routes(change):
    def inject(monkeypatch):
        for owner in (moe, gpt_oss, gemma4):
            right = owner.route

            def route(logits, *arguments, right=right):
                choice = right(logits, *arguments)
                if takes_reference():
                    return choice
                return change(choice, logits.shape[1])._replace(groups=None)

            monkeypatch.setattr(owner, "route", route)

    return inject


def experts_without(name):
    def inject(monkeypatch):
        right = moe.Experts.forward

        def forward(self, x, choice, shared=None, onto=None):
            added = {"shared": shared, "onto": onto}
            return right(self, x, choice, **(added if takes_reference() else added | {name: None}))

        monkeypatch.setattr(moe.Experts, "forward", forward)

    return inject


def commits(shift):
    def inject(monkeypatch):
        right = recurrent.RecurrentStates.commit

        def commit(self, rows, starts, counts):
            right(self, rows, starts, (counts + shift).clamp(min=0))

        monkeypatch.setattr(recurrent.RecurrentStates, "commit", commit)

    return inject


def state_from_nothing(monkeypatch):
    right = recurrent.RecurrentStates.scan

    def scan(self, layer, x, beta, gate, weights, where):
        if not where.is_known:
            self.state[layer] = 0
        return right(self, layer, x, beta, gate, weights, where)

    monkeypatch.setattr(recurrent.RecurrentStates, "scan", scan)


def forgotten_tail(monkeypatch):
    right = recurrent.RecurrentStates.scan

    def scan(self, *arguments):
        self.tail.zero_()
        return right(self, *arguments)

    monkeypatch.setattr(recurrent.RecurrentStates, "scan", scan)


def slow_fading(monkeypatch):
    right = recurrent.RecurrentState.scan

    def scan(self, x, beta, gate, weights, where):
        return right(self, x, beta, gate, weights._replace(gate_bias=weights.gate_bias - 0.5), where)

    monkeypatch.setattr(recurrent.RecurrentState, "scan", scan)


def context_shifted(monkeypatch):
    changed(
        monkeypatch,
        DFlash,
        "absorb",
        before=lambda arguments, options: (
            [arguments[0], arguments[1].roll(1, dims=0), arguments[2]],
            options,
        ),
    )


def tokens_swapped(minimum):
    """Two neighbours' products change places in pieces of at least so many tokens."""

    def swap(result):
        if result.shape[0] >= minimum and result.dim() == 2:
            result[[2, 3]] = result[[3, 2]]
        return result

    def inject(monkeypatch):
        changed(monkeypatch, layers, "gated_linear", after=swap)

    return inject


# name: (which `engine` shows it, what injects it)
FAULTS = {
    "rope off by one": ("pair", rope_off_by_one),
    "rope turned backwards": ("pair", rope_backwards),
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
    "slots off by one": ("pair", slots_off_by_one),
    "another layer's cache": ("pair", wrong_layer),
    "chunks that overwrite one another": ("pair", forgotten_extension),
    "gate and up swapped": ("pair", gate_and_up_swapped),
    "norms without their weight": ("pair", norms_without_weight),
    "two tokens swapped in a piece": ("pair", tokens_swapped(5)),
    "a head one row off": ("pair", one_row_off),
    "a drafter's context one token late": ("pair", context_shifted),
    "a drafter's block that is causal": (
        "pair",
        attention(lambda given: {"mask": replace(given["mask"], is_causal=True)}),
    ),
    "a forgotten bias": ("qwen2-layer-types", no_bias),
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
    "a state that starts from nothing": ("qwen3_next-whole", state_from_nothing),
    "a convolution without its past": ("qwen3_next-whole", forgotten_tail),
    "a state that fades too slowly": ("qwen3_next-whole", slow_fading),
    "a wrong logit cap": ("gemma4-mixture", wrong_cap),
    "a neighbour's scale": ("int8", neighbours_scale),
}
