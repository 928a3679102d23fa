"""Compares the operations that choose tokens with references: sampling, candidates, acceptance, n-grams."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.check.comparison import Comparison, Comparisons, Numbers
from blockdraft.engine.engine import Engine
from blockdraft.kernels import branches, ngram_lookup, sampling, tree
from blockdraft.kernels.candidates import reference_walk
from blockdraft.kernels.sampling_tables import Real
from blockdraft.kernels.tree_size import tree_size
from blockdraft.planner.plan import Plan
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.pairs import PairDrafter

NEAR = 1e-4  # difference of two scores below which rounding may decide between the tokens
RULES = (
    RowSampling(),
    RowSampling(repetition=1.3, presence=0.4, frequency=0.3, output_start=2),
    RowSampling(temperature=0.8, seed=-3),
    RowSampling(temperature=1.1, top_k=20, min_p=0.02, seed=5),
    RowSampling(temperature=0.9, top_p=0.8, seed=2**40, bias=((1, 3.0),), stop_ids=(0,), min_end=9),
)


def compare_sampling(engine: Engine, numbers: Numbers) -> Comparisons:
    vocab_size = engine.models.config.vocab_size
    table = rows_of_rules(vocab_size, numbers)
    starts, recent = table.length[table.active], numbers.integers(min(vocab_size, 9), len(RULES), 2)
    logits = 3 * numbers.normal(len(RULES), 2, vocab_size)
    got = numbers.kernels.choose(logits, starts, recent, table.sampling())
    expected = nearest(got, logits.double(), starts, recent, table.sampling())
    for row, rule in enumerate(RULES):
        kind = "random" if rule.is_random else "greedy"
        name = f"{'filtered ' * rule.is_filtered}{'penalised ' * rule.is_penalised}{kind}"
        yield Comparison(f"{name}, {vocab_size} tokens", got[row], expected[row])
    places = sampling.places_of(numbers.whole(0, 1, 3, 3, 4, 6), 6, 2)
    stream = numbers.kernels.choose(places.take(logits), starts, recent, table.sampling(), places)
    yield Comparison("rows of different widths", stream, places.take(got))
    words = numbers.integers(2**31, len(RULES), 2, -(-vocab_size // 32)).int()
    allowed = sampling.Allowed(words, numbers.integers(3, len(RULES)).int())
    forms = logits.clone(), logits.clone()
    numbers.kernels.forbid(forms[0], allowed)
    sampling.reference_forbid(forms[1], allowed)
    yield Comparison("structured output", forms[0].isfinite().long(), forms[1].isfinite().long())


def compare_walk(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare a walk over drafts in the models' dtype: if rounding changes a draft, all later ones change.

    The logits are close enough for the random numbers to change the choice.
    """
    drafter = engine.models.drafter
    if not isinstance(drafter, PairDrafter):
        return
    vocab_size = drafter.model.config.vocab_size
    table = rows_of_rules(vocab_size, numbers)
    pairs = drafter.pairs(numbers.normal(len(RULES), 3, drafter.model.config.hidden_size))
    starts, anchor = table.length[table.active], numbers.integers(vocab_size, len(RULES), 1)
    inputs = (numbers.normal(len(RULES), 3, vocab_size), pairs, starts, anchor, table.sampling())
    got = numbers.kernels.walk(*inputs)
    yield Comparison(f"{pairs.top_k} of {vocab_size} tokens", got, reference_walk(*inputs))


def compare_trees(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare what trees hold, the chances that they grow by, their tokens' places, and which are kept."""
    drafter, plan = engine.models.drafter, engine.plan
    if not plan.tree or not isinstance(drafter, DFlashDrafter):
        return
    config, columns = drafter.model.config, plan.block - 1
    table = rows_of_rules(config.vocab_size, numbers)
    starts, anchor = table.length[table.active], numbers.integers(config.vocab_size, len(RULES), 1)
    pairs = drafter.pairs(numbers.normal(len(RULES), columns, config.hidden_size))
    given = pairs, starts, anchor, table.sampling()
    logits = 3 * numbers.normal(len(RULES), columns, config.vocab_size)
    choices = numbers.kernels.weigh(logits, *given)
    wanted = tree.reference_weigh(logits.double(), *given).chances[:, 0, 0].exp()  # behind the anchor
    yield Comparison("chances", choices.chances[:, 0, 0, : wanted.shape[-1]].exp(), wanted, num_steps=4)
    choices = choices._replace(chances=(64 * choices.chances).round() / 64)  # their sums are exact
    for num_nodes in plan.trees:
        size = tree_size(num_nodes, plan.block)
        kinds = numbers.kernels.grow, tree.reference_grow
        grown, expected = (grow(choices, anchor, size) for grow in kinds)
        for name in ("token_ids", "offsets", "paths"):
            found = getattr(grown, name), getattr(expected, name)
            yield Comparison(f"{num_nodes} tokens, {name}", *found)
        yield from _compare_branches(expected, table, plan, numbers)
    copies = branches.Copies(numbers.whole(5, 0, 7, 9), numbers.whole(20, 0, 7, 21))
    layers = [numbers.normal(2, 40, 64) for _ in range(4)]
    wanted_layers = [one.clone() for one in layers]
    for both, copy in (
        (layers, numbers.kernels.copy_slots),
        (wanted_layers, branches.reference_copy_slots),
    ):
        for stores in branches.stores_of([(both[0], both[1]), (both[2], both[3])]):
            copy(stores, copies)
    yield Comparison("copied slots", torch.cat(layers), torch.cat(wanted_layers).double())


def _compare_branches(grown: tree.Tree, table: Rows, plan: Plan, numbers: Numbers) -> Comparisons:
    """Compare the places of trees' tokens, and the paths that are kept for random samples."""
    name, page_size = f"{grown.size.nodes} tokens", plan.page_size
    num_rows, num_pages = len(table.active), plan.pages_of(plan.scratch + 2 * len(RULES))
    pages = numbers.integers(99, len(table.length), num_pages)
    kinds = [branches.RowPages(pages, 100), branches.RowPages(pages + 1, 200)][
        : 1 + bool(plan.num_exact_pages)
    ]
    given = grown, table.active, table.length, kinds, page_size
    found, expected = numbers.kernels.lay_out(*given), branches.reference_lay_out(*given)
    limits = numbers.whole(*[plan.block] * num_rows)
    # Often the token after it in the stream, which is a child if both are of one branch.
    sampled = grown.token_ids.roll(-1).where(numbers.integers(4, len(grown.token_ids)) > 0, -1)
    kept = numbers.kernels.settle(grown, found, sampled, limits, page_size)
    wanted = branches.reference_settle(grown, expected, sampled, limits, page_size)
    for part in ("num_committed", "numbers", "token_ids", "sampled", "chains"):
        yield Comparison(f"{name}, {part} kept", getattr(kept, part), getattr(wanted, part))
    for part in ("rows", "starts", "begins", "path_ids", "positions"):
        yield Comparison(f"{name}, {part} of branches", getattr(found, part), getattr(expected, part))
    kinds_of_pages = zip(found.pages, kept.copies, expected.pages, wanted.copies, strict=True)
    for got, copies, its, its_copies in kinds_of_pages:
        yield Comparison(f"{name}, pages", got.table, its.table)
        yield Comparison(f"{name}, slots", got.slots, its.slots)
        pairs = torch.cat((*got.copies, *copies)), torch.cat((*its.copies, *its_copies))
        yield Comparison(f"{name}, copies", *pairs)


def rows_of_rules(vocab_size: int, numbers: Numbers) -> Rows:
    """Return active rows, one for each of RULES."""
    count, device = len(RULES), numbers.device
    table = Rows(
        max_rows=count,
        max_pages=1,
        vocab_size=vocab_size,
        scratch_page=0,
        device=device,
        kernels=numbers.kernels,
    )
    for row, rule in enumerate(RULES):
        table.place(row, numbers.integers(min(vocab_size, 9), 6 + row).tolist(), 5 + row, rule)
    table.activate(range(count))
    return table


def nearest(
    got: Tensor, logits: Tensor, starts: Tensor, recent: Tensor, batch: sampling.SamplingBatch
) -> Tensor:
    """Return the reference's tokens, but `got` where the reference chooses `got` for nearly equal inputs."""
    expected = sampling.reference_choose(logits, starts, recent, batch)
    if torch.equal(got, expected):
        return expected
    in_reach = got.clamp(0, logits.shape[2] - 1)[..., None]
    nudged = logits.scatter_add(2, in_reach, torch.full_like(logits[..., :1], NEAR))
    for top_p in (1.0, 1 - NEAR, 1 + NEAR):
        real = batch.real.clone()
        real[:, Real.TOP_P] *= top_p
        for near in (logits, nudged):
            found = sampling.reference_choose(near, starts, recent, replace(batch, real=real))
            expected = torch.where(found == got, got, expected)
    return expected


def compare_acceptance(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare the counts of accepted drafts, and the rows after the step, with counts in Python."""
    width = max(engine.plan.block, 2)
    sampled, block = numbers.integers(2, 8, width), numbers.integers(2, 8, width)
    sampled[0, :-1] = block[0, 1:]  # all drafts are right
    sampled[1, :-1] = 1 - block[1, 1:]  # all drafts are wrong
    agrees = (sampled[:, :-1] == block[:, 1:]).tolist()
    counts = [1 + [*row, False].index(False) for row in agrees]
    got = numbers.kernels.count_accepted(sampled, block, numbers.whole(*[width] * 8))
    yield Comparison(f"blocks of {width}", got, numbers.whole(*counts))
    limits = [1 + row % width for row in range(8)]
    got = numbers.kernels.count_accepted(sampled, block, numbers.whole(*limits))
    limited = [min(pair) for pair in zip(counts, limits, strict=True)]
    yield Comparison(f"blocks of up to {width}", got, numbers.whole(*limited))
    table = rows_of_rules(9, numbers)
    lengths, anchors = table.length.clone(), table.anchor.clone()
    output_counts = table.sampling().output_counts.long()
    for row, rule in enumerate(RULES):
        if rule.is_penalised:
            for token in block[row, max(0, rule.output_start - int(lengths[row])) : counts[row]].tolist():
                output_counts[row, token] += 1
        lengths[row] += counts[row]
        anchors[row] = sampled[row, counts[row] - 1]
    num = len(RULES)
    table.advance(block[:num], sampled[:num], numbers.whole(*counts[:num]))
    yield Comparison(f"lengths after blocks of {width}", table.length, lengths)
    yield Comparison(f"anchors after blocks of {width}", table.anchor, anchors)
    after = table.sampling().output_counts.long()
    yield Comparison(f"counts after blocks of {width}", after, output_counts)


def compare_ngram_lookup(engine: Engine, numbers: Numbers) -> Comparisons:
    """Compare n-gram lookup in random texts of few distinct tokens, for some rows of a table."""
    if not engine.plan.draft_ngram:
        return
    width, size = max(engine.plan.block, 2), 2500
    history = numbers.integers(3, 5, size).to(torch.int32)
    history[1, 1000:2000] = history[1, :1000]
    order, starts = numbers.whole(4, 1, 0, 3), numbers.whole(2499 - width, 1700, 0, 40)
    blocks = [history[order].gather(1, starts[:, None]).long().repeat(1, width) for _ in range(2)]
    for block, call in zip(blocks, (numbers.kernels.lookup, ngram_lookup.reference_lookup), strict=True):
        call(block, history, order, starts, 2)
    yield Comparison(f"blocks of {width}", blocks[0], blocks[1])
    lengths, tables = numbers.whole(7, 1700, 3, 40, 2499 - width), (history.clone(), history.clone())
    for table, note in zip(tables, (numbers.kernels.remember, ngram_lookup.reference_remember), strict=True):
        note(table, blocks[1], order, lengths)
    yield Comparison(f"texts after blocks of {width}", tables[0].long(), tables[1].long())
