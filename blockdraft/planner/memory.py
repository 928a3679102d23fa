"""Itemises the memory that an engine uses, each item with its arithmetic.

Weights, cache, states and tables are exact. A step's other memory is known only once the step has run: the
estimates come from a start of Qwen3-8B on an H200 (2026-11), and a start of our engine measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.cache.spec import (
    NUM_RESERVED_PAGES,
    LayerSpec,
    compressed,
    exact_bytes_per_token,
    row_table_bytes,
    tree_bytes_per_token,
)
from blockdraft.models.config import Storage
from blockdraft.models.mtp_config import MtpConfig
from blockdraft.planner.pair import Model, Pair
from blockdraft.planner.plan import LOGIT_BYTES, Plan
from blockdraft.planner.shape import CacheSpec, kinds
from blockdraft.planner.stored import WeightParts, stored_parts
from blockdraft.planner.values import Values

DRIVER_BYTES = 500 << 20  # a CUDA context with its libraries
TABLE_BYTES = 8  # of an entry of a page table
SCALE_BYTES = 4  # for each row of a matrix that we quantise
INT4_BYTES = 0.5 + 4 / 128  # of a value, with its share of a group's scale and zero point
_ACTIVATIONS = 8  # approximate number of a token's hidden states that exist at once in a prefill


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory."""

    name: str
    num_bytes: int
    how: str  # the arithmetic
    is_exact: bool = True


def held_parts(model: Model, storage: Storage, element_bytes: int) -> WeightParts:
    """Return the bytes of the weights as our engine holds them."""
    values = model.shape.values
    if storage == "keep":
        return stored_parts(model.stored.sizes, plain_bytes=element_bytes)
    assert values is not None, "our engine computes no such model"
    plain = values.plain * element_bytes + values.wide * (max(element_bytes, 4) - element_bytes)
    ends = (values.embedding * element_bytes, values.head * element_bytes)
    if storage in ("none", "both"):
        embedding, head = ends
        layers = values.projections * element_bytes + plain
        if storage == "both":
            stored = stored_parts(model.stored.sizes, plain_bytes=element_bytes)
            layers += max(stored.layers - plain, int(values.projections * INT4_BYTES))
            head += stored.head if stored.head < head else 0  # else it is stored unpacked
        return WeightParts(embedding, head, layers, values.experts * element_bytes)
    if storage == "int8" and element_bytes == 4:  # int8 on a CPU includes embedding and head
        ends = (values.embedding, values.head)
    if storage == "int4":
        layers = int(values.projections * INT4_BYTES) + plain
        return WeightParts(*ends, layers, int(values.experts * INT4_BYTES))
    layers = values.projections + values.projection_rows * SCALE_BYTES + plain
    return WeightParts(*ends, layers, values.experts + values.expert_rows * SCALE_BYTES)


def served_parts(model: Model, *, is_fp8: bool) -> WeightParts:
    """Return the bytes of the weights as vLLM and SGLang hold them: as stored, or in fp8."""
    values = model.shape.values
    if model.stored.tensors is None:
        if values is None:
            return WeightParts()
        return held_parts(model, "fp8" if is_fp8 else "none", 2)
    parts = stored_parts(model.stored.tensors)
    if not is_fp8 or model.stored.method is not None:
        return parts
    return WeightParts(parts.embedding, parts.head, parts.layers // 2, parts.experts // 2, parts.left_out)


def weight_how(values: Values | None, parts: WeightParts, note: str) -> str:
    count = "" if values is None else f"{values.total / 1e9:.3f} billion values, "
    tables = (
        ""
        if values is None or not values.tables
        else f", {values.tables:,} values of them for pairs of tokens"
    )
    return f"{count}{note}: {parts.text:,} bytes{tables}"


def cache_specs(pair: Pair, plan: Plan) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return the cache specs of the layers of target and drafter in our engine."""
    assert pair.config is not None, "our engine computes no such model"
    target = compressed(pair.config.layer_specs(), plan.kv_dtype)
    if pair.draft_config is None:
        return (target,)
    return target, compressed(pair.draft_config.layer_specs(), plan.draft_kv_dtype)


def window_item(plan: Plan, specs: tuple[LayerSpec, ...], element_bytes: int) -> Item | None:
    """Return the item of compressing layers' exact windows, allocated at the start, or None without any."""
    per_token = exact_bytes_per_token(specs, element_bytes)
    if not per_token:
        return None
    tokens = (plan.num_exact_pages + NUM_RESERVED_PAGES) * plan.page_size
    rows = f"{tokens:,} tokens of {plan.max_num_seqs} rows and their prompts"
    how = f"{rows} x {per_token:,} bytes, not compressed"
    return Item("exact windows", tokens * per_token, how)


def tree_item(plan: Plan, specs: tuple[LayerSpec, ...], element_bytes: int) -> Item | None:
    """Return the item of the pages of trees' branches and of their page tables, or None without any."""
    if not plan.num_tree_pages:
        return None
    tokens, per_token = plan.num_tree_pages * plan.page_size, tree_bytes_per_token(specs, element_bytes)
    rows = f"{tokens:,} tokens of trees in {len(plan.tree_rows)} rows"
    tables = f"{plan.tree_table_entries:,} entries of page tables"
    how = f"{rows} x {per_token:,} bytes, not compressed, and {tables}"
    return Item("branches", tokens * per_token + TABLE_BYTES * plan.tree_table_entries, how)


def cache_item(name: str, specs: tuple[CacheSpec, ...], element_bytes: int, num_tokens: int) -> Item:
    """Return the item of one model's pages, for `num_tokens` slots."""
    found = [kind for kind in kinds(specs, element_bytes, 1) if kind.bytes_per_token]
    layers = ", ".join(f"{kind.num_layers} {kind.name}" for kind in found)
    per_token = sum(kind.bytes_per_token for kind in found)
    return Item(
        name, num_tokens * per_token, f"{num_tokens:,} tokens x {per_token:,} bytes ({layers} layers)"
    )


def state_item(plan: Plan, specs: tuple[CacheSpec, ...], element_bytes: int) -> Item | None:
    """Return the item of the rows' states and tapes, allocated at the start, or None without any."""
    per_row = sum(kind.bytes_per_row for kind in kinds(specs, element_bytes, plan.block))
    if not per_row:
        return None
    rows = plan.max_num_seqs + 1
    return Item("recurrent states", rows * per_row, f"{rows} rows x {per_row:,} bytes, tape included")


def saved_item(plan: Plan, each: int) -> Item | None:
    """Return the item of the saved states of `each` bytes, or None without any."""
    if not plan.num_states:
        return None
    how = f"{plan.num_states} states x {each:,} bytes, and a spare one"
    return Item("saved states", plan.states_bytes(each), how)


def table_items(plan: Plan, pair: Pair, element_bytes: int) -> list[Item]:
    """Return the items of the rope tables by position, and of the tables of each row."""
    angles = sum(model.shape.rope_bytes for model in pair.models) * element_bytes
    vocab_size, rows = pair.target.shape.vocab_size, plan.max_num_seqs + 1
    num_tables = 2 if plan.num_exact_pages else 1
    history = plan.max_positions if plan.draft_ngram else 0
    num_entries = num_tables * plan.pages_of(plan.max_positions)
    if plan.num_states:
        num_entries += plan.max_positions // plan.state_grid
    per_row = row_table_bytes(vocab_size, num_entries, history)
    if isinstance(pair.draft_config, MtpConfig):
        per_row += pair.draft_config.hidden_size * element_bytes  # the last hidden state
    return [
        Item(
            "position tables",
            plan.max_positions * angles,
            f"{plan.max_positions:,} positions x {angles:,} bytes of cosines and sines",
        ),
        Item(
            "row tables",
            rows * per_row,
            f"{rows} rows x {per_row:,} bytes: what sampling reads, pages{', tokens' if history else ''}",
        ),
    ]


def step_items(pair: Pair, *, tokens: int, logits: int, element_bytes: int, has_graphs: bool) -> list[Item]:
    """Return the items of the largest steps' temporary memory, and of graphs if there are any."""
    target = pair.target.shape
    features = 0 if pair.draft is None else pair.draft.shape.num_taps * target.hidden_size
    token = (_ACTIVATIONS * target.hidden_size + 3 * target.inner_size + features) * element_bytes
    sampling = logits * LOGIT_BYTES
    how = f"the larger of {tokens:,} prompt tokens x {token:,} and {logits:,} logits x {LOGIT_BYTES} bytes"
    items = [Item("activations", max(tokens * token, sampling), how, is_exact=False)]
    if has_graphs:
        how = f"{logits:,} logits x {LOGIT_BYTES} bytes stay with them"
        items.append(Item("graphs", sampling, how, is_exact=False))
    return items


def cache_slots(plan: Plan) -> int:
    """Return how many tokens fit in the cache, the reserved pages included."""
    return (plan.num_pages + NUM_RESERVED_PAGES) * plan.page_size
