"""Measures how much quality compressed keys and values lose, compared with exact ones on the same texts.

An arm is one way to store keys and values. Every arm reads every text in one piece, without a cache.
References compute what the server would compute, with the same keys compressed (kernels/kv_positions.py).
Tokens from a given depth on are counted: by loss, by KL divergence from the exact distribution (in nats), and
by whether the likeliest token is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.cache.spec import LayerSpec, Paged, SharedWith
from blockdraft.check.kv_texts import Likeliest
from blockdraft.check.uncached_view import WholeView
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import ModelError
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_codec import FORMATS, KvFormat, kv_format
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule

QUERIES = 512  # queries whose scores are in memory at a time: GPUs are fast with few large operations
SLICE = 256  # tokens whose logits are in memory at a time
BLOCK = 64  # tokens averaged for a standard error, as the losses of adjacent tokens are correlated
FIRST_DEPTH = 512  # begin of the first class of depths; each class ends at twice its begin

RULE = PositionRule()
Centres = Mapping[int, Tensor]  # [G, D] of each layer
KeysValues = tuple[Tensor, Tensor]  # [L, G, D] each
Compress = Callable[[int, Tensor, Tensor], KeysValues]  # compress and decompress, in a layer


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to store keys and values. `num_bytes` maps a head size to the bytes per token in one head."""

    name: str
    compress: Compress
    num_bytes: Callable[[int], float]


def exact_arm(element_bytes: int) -> Arm:
    return Arm("exact", lambda layer, k, v: (k, v), lambda head_dim: 2 * element_bytes * head_dim)


def of_format(form: KvFormat, centres: Centres | None = None) -> Arm:
    """Return the arm of a format. If `centres` are given, keys are stored minus their layer's centre."""

    def compress(layer: int, k: Tensor, v: Tensor) -> KeysValues:
        return form.keys_back(k, None if centres is None else centres[layer]), form.values_back(v)

    return Arm(form.name, compress, form.bytes_per_token)


# ---- attention


class ArmView(WholeView):
    """The view of a whole text, whose queries read keys and values as an arm stores them."""

    def __init__(self, models: LoadedPair, count: int, arm: Arm) -> None:
        super().__init__(models.config.layer_specs(), count=count, device=models.device)
        self._arm = arm

    def _attend_row(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None
    ) -> Tensor:
        spec = self._specs[layer]
        owner = spec.layer if isinstance(spec, SharedWith) else layer
        return attend_mixed(q, (k, v), self._arm.compress(owner, k, v), RULE, mask, sinks)


def attend_mixed(
    q: Tensor,
    exact: KeysValues,
    compressed: KeysValues,
    rule: PositionRule,
    mask: Mask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of all positions q [N, H, D] over exact and compressed keys of a whole text.

    QUERIES queries are computed at a time. Keys that only some of these queries read compressed are computed
    twice.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    stores = [[x.to(wide).transpose(0, 1) for x in pair] for pair in (exact, compressed)]  # [G, L, D]
    count, num_heads, dim = q.shape
    num_groups = exact[0].shape[1]
    rows = (q.to(wide) * mask.scale).view(count, num_groups, -1, dim).permute(1, 2, 0, 3)
    sink = None if sinks is None else sinks.to(wide).view(num_groups, -1, 1, 1)
    out = torch.empty_like(rows)  # [G, shared, N, D]
    for begin in range(0, count, QUERIES):
        end = min(begin + QUERIES, count)
        out[:, :, begin:end] = _attend_part(rows[:, :, begin:end], stores, rule, mask, begin, sink)
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, dim).to(q.dtype)


def _attend_part(
    rows: Tensor, stores: list[list[Tensor]], rule: PositionRule, mask: Mask, begin: int, sink: Tensor | None
) -> Tensor:
    """Return the attention of the queries [G, shared, n, D] from position `begin` on."""
    (exact_k, exact_v), (cold_k, cold_v) = stores
    groups, shared, count, dim = rows.shape
    end, flat = begin + count, rows.reshape(groups, shared * count, dim)
    query = torch.arange(begin, end, device=rows.device)[:, None]
    first = max(rule.compressed_end_at(begin), TILE)  # keys [TILE, first) are compressed for all queries
    last = max(rule.compressed_end_at(end - 1), first)  # keys [first, last) only for some queries

    def mixed(exact: Tensor, cold: Tensor) -> Tensor:
        return torch.cat((exact[:, :TILE], cold[:, TILE:first], exact[:, first:end]), dim=1)

    def scores_of(keys: Tensor) -> Tensor:
        return (flat @ keys.mT).view(groups, shared, count, -1)

    scores = scores_of(mixed(exact_k, cold_k))
    key = torch.arange(end, device=rows.device)
    is_compressed = key[first:last] < rule.compressed_end_at(query)
    if last > first:
        strip = scores[..., first:last]
        strip.copy_(torch.where(is_compressed, scores_of(cold_k[:, first:last]), strip))
    hidden = key > query
    if mask.window is not None:
        hidden |= key <= query - mask.window
    scores.masked_fill_(hidden, float("-inf"))
    if sink is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sink.expand(groups, shared, count, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    strip = weights[..., first:last].masked_fill(~is_compressed, 0)
    weights[..., first:last] -= strip
    read = weights.reshape(groups, shared * count, -1) @ mixed(exact_v, cold_v)
    read += strip.reshape(groups, shared * count, -1) @ cold_v[:, first:last]
    return read.view(groups, shared, count, dim)


# ---- reading a text


@torch.inference_mode()
def hidden_states(models: LoadedPair, text: Sequence[int], arm: Arm) -> Tensor:
    """Return the final hidden states [N, E] of a text."""
    tokens = torch.tensor(text, device=models.device)
    hidden: Tensor = models.target(tokens, ArmView(models, len(text), arm))[0]
    return hidden


def log_probabilities(models: LoadedPair, hidden: Tensor) -> Tensor:
    """Return log-probabilities [N, V] in float32 or wider."""
    logits = models.target.logits(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def likeliest(models: LoadedPair, arm: Arm) -> Likeliest:
    """Return a function that gives the likeliest token after each token of a text, with this arm."""

    @torch.inference_mode()
    def of_text(text: Sequence[int]) -> Tensor:
        parts = torch.split(hidden_states(models, text, arm), SLICE)
        return torch.cat([models.target.logits(part).argmax(dim=-1) for part in parts])

    return of_text


# ---- losses


@dataclass(slots=True)
class LossTally:
    """The loss and divergence (in nats) of every counted token, and whether its likeliest token stays."""

    begin: int  # the first counted token of a text
    losses: list[Tensor] = field(default_factory=list)  # a tensor for each text
    divergence: list[Tensor] = field(default_factory=list)
    is_same: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def count_text(
    models: LoadedPair, text: Sequence[int], arms: Sequence[Arm], tallies: Mapping[str, LossTally]
) -> None:
    """Read a text with all arms, of which the first is exact, and add the counted tokens to the tallies."""
    begin = tallies[arms[0].name].begin
    hidden = [hidden_states(models, text, arm)[begin - 1 : -1] for arm in arms]
    wanted = torch.tensor(text[begin:], device=models.device)
    found: dict[str, list[Tensor]] = {arm.name: [] for arm in arms}
    for place in range(0, len(wanted), SLICE):
        part = slice(place, place + SLICE)
        truth = log_probabilities(models, hidden[0][part])
        for arm, states in zip(arms, hidden, strict=True):
            logs = truth if arm is arms[0] else log_probabilities(models, states[part])
            found[arm.name].append(_of_slice(logs, truth, wanted[part]))
    for name, parts in found.items():
        losses, divergence, is_same = torch.cat(parts, dim=1).double().cpu()
        tallies[name].losses.append(losses)
        tallies[name].divergence.append(divergence)
        tallies[name].is_same.append(is_same)


def _of_slice(logs: Tensor, truth: Tensor, wanted: Tensor) -> Tensor:
    loss = -logs.gather(1, wanted[:, None])[:, 0]
    divergence = (truth.exp() * (truth - logs)).sum(dim=1)
    return torch.stack((loss, divergence, (logs.argmax(dim=1) == truth.argmax(dim=1)).to(loss.dtype)))


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of an arm over some tokens. Divergences are in thousandths of a nat."""

    num_tokens: int
    same_percent: float  # percent of the tokens whose likeliest next token is the same
    perplexity: float
    perplexity_percent: float  # percent more than with exact keys and values
    error_percent: float  # standard error of perplexity_percent
    divergence: float
    divergence_99th: float


def loss_of(tally: LossTally, base: LossTally, first: int = 0, end: int | None = None) -> Loss:
    """Return the loss of the tokens at depths [first, end), compared with the exact `base`."""
    part = slice(max(0, first - tally.begin), None if end is None else end - tally.begin)
    losses, divergence, is_same = (
        torch.cat([x[part] for x in listed]) for listed in (tally.losses, tally.divergence, tally.is_same)
    )
    change = losses - torch.cat([x[part] for x in base.losses])
    size = BLOCK if len(change) >= 2 * BLOCK else 1
    blocks = change[: len(change) // size * size].view(-1, size).mean(dim=1)
    error = blocks.std(correction=min(1, len(blocks) - 1)).item() / math.sqrt(len(blocks))
    return Loss(
        num_tokens=len(change),
        same_percent=100 * is_same.mean().item(),
        perplexity=math.exp(losses.mean().item()),
        perplexity_percent=100 * math.expm1(change.mean().item()),
        error_percent=100 * error,
        divergence=1000 * divergence.mean().item(),
        divergence_99th=1000 * _quantile(divergence, 0.99),
    )


def _quantile(x: Tensor, share: float) -> float:
    """Return a quantile without interpolation; torch.quantile takes at most 16 million values."""
    return x.kthvalue(max(1, math.ceil(share * len(x)))).values.item()


def depths(begin: int, length: int) -> list[tuple[int, int]]:
    """Return classes of depths [begin, end) from `begin` to `length`; edges double from 512."""
    edges = [begin]
    edge = FIRST_DEPTH
    while edge < length:
        if edge > begin:
            edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


# ---- bytes and formats


def kept_heads(specs: Iterable[LayerSpec]) -> list[tuple[int, int]]:
    """Return (number of key/value heads, head size) for every layer that stores its own keys and values."""
    return [(spec.num_kv_heads, spec.head_dim) for spec in specs if isinstance(spec, Paged)]


def bytes_of(arm: Arm, models: LoadedPair) -> float:
    """Return the bytes of one compressed token in all layers."""
    return sum(count * arm.num_bytes(dim) for count, dim in kept_heads(models.config.layer_specs()))


def formats_for(models: LoadedPair, names: Sequence[str] | None) -> tuple[list[KvFormat], list[str]]:
    """Return the named formats, or all that fit the heads if `names` is None, and the names that do not fit.

    Raise ModelError or SettingsError if a given name is unknown or does not fit.
    """
    sizes = {dim for _, dim in kept_heads(models.config.layer_specs())}
    if not sizes:
        raise ModelError(f"'{models.config.name}' keeps no keys and values: there is nothing to compress.")
    found, refused = [], []
    for name in FORMATS if names is None else names:
        try:
            found += list({kv_format(name, size) for size in sizes})
        except ModelError:
            if names is not None:
                raise
            refused.append(name)
    return found, refused
