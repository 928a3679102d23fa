"""Places of trees' tokens, and the paths to keep: the reference against plain Python, kernels against it."""

import itertools

import pytest
import torch

from blockdraft.kernels.branches import (
    Copies,
    RowPages,
    reference_lay_out,
    reference_settle,
    stores_of,
)
from blockdraft.kernels.tree import reference_grow
from blockdraft.kernels.tree_size import tree_size
from tests.kernels.implementations import CPU, only_triton, quiet
from tests.kernels.test_tree import drawn_choices

pytestmark = quiet

ROWS, LENGTHS = [4, 1, 2], [5, 13, 0, 7, 8]  # rows of the batch; lengths of all rows
SHAPES = [(16, 8, 1, 1), (16, 3, 4, 2), (32, 8, 7, 1)]  # nodes, width, page size, kinds of pages


def laid_out(lay_out, shape, device=CPU):
    """A batch of trees and its branches, by an implementation."""
    nodes, width, page_size, num_kinds = shape
    choices = drawn_choices(len(ROWS), width - 1, 8, has_pairs=True, seed=nodes)
    tree = reference_grow(choices, torch.tensor([[7], [8], [9]]), tree_size(nodes, width))
    num_pages = -(-(max(LENGTHS) + width) // page_size)
    pages = torch.randperm(len(LENGTHS) * num_pages, generator=torch.Generator().manual_seed(0)) + 2
    kinds = [
        RowPages((pages + 1000 * kind).view(len(LENGTHS), -1), 5000 * (kind + 1)) for kind in range(num_kinds)
    ]
    kinds = [RowPages(kind.table.to(device), kind.first) for kind in kinds]
    tree = tree._replace(**{name: getattr(tree, name).to(device) for name in tree._fields[1:]})
    given = torch.tensor(ROWS, device=device), torch.tensor(LENGTHS, device=device)
    return tree, kinds, lay_out(tree, *given, kinds, page_size)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_is_found_by_position_in_its_branchs_pages(shape):
    """Each token is written wherever a branch reads it, and nothing else is written there."""
    tree, kinds, found = laid_out(reference_lay_out, shape)
    page_size, num_branches = shape[2], tree.size.branches
    for kind, pages in zip(kinds, found.pages, strict=True):
        assert pages.slots[:, 0].unique().numel() == len(pages.slots), "two tokens' own slots are the same"
        written = {}
        for token, slots in enumerate(pages.slots.tolist()):
            for slot in set(slots):
                assert written.setdefault(slot, token) == token
        for source, target in zip(*(one.tolist() for one in pages.copies), strict=True):
            assert target == 0 or written.setdefault(target, -source) == -source
        for branch in range(len(tree.firsts)):
            row, length = ROWS[branch // num_branches], int(tree.lengths[branch])
            start, own = LENGTHS[row], pages.table[branch].tolist()
            assert [found.rows[branch], found.starts[branch]] == [row, start]
            assert found.begins[branch] == start + tree.firsts[branch]
            for position in range(start + length) if length > 1 else ():
                slot = own[position // page_size] * page_size + position % page_size
                usual = int(kind.table[row, position // page_size]) * page_size + position % page_size
                if position < start:
                    assert slot == usual or written[slot] == -usual
                else:
                    assert written[slot] == tree.paths[branch, position - start]
                    assert found.positions[written[slot]] == position
    assert found.path_ids.tolist() == tree.path_ids.tolist()


def samples_for(tree, seed):
    """Samples that often agree with a child."""
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.full((len(tree.token_ids),), -5)
    for branch in torch.randperm(len(tree.firsts), generator=generator).tolist():
        path = tree.paths[branch, : tree.lengths[branch]].tolist()
        for token, following in itertools.pairwise(path):
            if torch.rand((), generator=generator) < 0.8:
                sampled[token] = tree.token_ids[following]
    for leaf, following in zip(tree.paths[:: tree.size.branches, -1], tree.following, strict=True):
        sampled[leaf] = following if seed % 2 else -5
    return sampled


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest_path_that_agrees_is_kept_and_moves_to_its_rows_pages(shape):
    tree, kinds, found = laid_out(reference_lay_out, shape)
    nodes, width, page_size, _ = shape
    limits, depths = torch.tensor([100, 100, 2]), set()
    for seed in range(6):
        sampled = samples_for(tree, seed)
        kept = reference_settle(tree, found, sampled, limits, page_size)
        for row in range(len(ROWS)):
            path, branches = [row * nodes], range(row * tree.size.branches, (row + 1) * tree.size.branches)
            paths = [tree.paths[branch, : tree.lengths[branch]].tolist() for branch in branches]
            held = {tuple(one[: end + 1]) for one in paths for end in range(len(one))}
            while True:  # a walk from the anchor
                right = tree.token_ids == sampled[path[-1]]
                children = [one for one in right.nonzero().flatten().tolist() if one != path[-1]]
                following = [one for one in children if (*path, one) in held]
                if not following:
                    break
                path += following
            count = min(len(path), int(limits[row]))
            depths.add(count)
            assert kept.num_committed[row] == count
            assert kept.numbers[row, :count].tolist() == path[:count]
            assert kept.token_ids[row, :count].tolist() == tree.token_ids[path[:count]].tolist()
            assert kept.sampled[row, :count].tolist() == sampled[path[:count]].tolist()
            first = paths[0]
            alone = sum(path[:end] == first[:end] for end in range(1, min(len(path), len(first)) + 1))
            following = int(tree.following[row])
            is_right = alone == len(first) and following == sampled[first[-1]]
            assert kept.chains[row, :2].tolist() == [len(first) + (following >= 0), alone + is_right]
            has_children = any(one[: len(path)] == tuple(path) for one in held if len(one) > len(path))
            assert kept.chains[row, 2] == len(path) + has_children
            for kind, pages, copies in zip(kinds, found.pages, kept.copies, strict=True):
                sources, targets = (one.view(len(ROWS), width)[row].tolist() for one in copies)
                start, table = LENGTHS[ROWS[row]], kind.table[ROWS[row]].tolist()
                wanted = [
                    table[p // page_size] * page_size + p % page_size for p in range(start, start + count)
                ]
                assert targets == wanted + [0] * (width - count)
                assert sources == pages.slots[path[:count], 0].tolist() + [0] * (width - count)
    assert len(depths) > 1


@only_triton
@pytest.mark.parametrize("shape", SHAPES)
def test_every_implementation_lays_out_and_settles_as_the_reference(implementation, shape):
    kernels, device = implementation.kernels, implementation.device
    tree, _, expected = laid_out(reference_lay_out, shape)
    on_device, _, found = laid_out(kernels.lay_out, shape, device)
    assert as_lists(found) == as_lists(expected)
    limits = torch.tensor([100, 100, 2])
    for seed in range(3):
        sampled = samples_for(tree, seed)
        wanted = reference_settle(tree, expected, sampled, limits, shape[2])
        got = kernels.settle(on_device, found, sampled.to(device), limits.to(device), shape[2])
        assert as_lists(got) == as_lists(wanted)


def as_lists(found):
    return found.tolist() if isinstance(found, torch.Tensor) else [as_lists(one) for one in found]


@pytest.mark.parametrize("implementation", ["reference", "triton"], indirect=True)
def test_slots_are_copied_in_every_layer_and_head_and_nothing_else_changes(implementation):
    generator = torch.Generator().manual_seed(0)
    layers = [[torch.randn(2, 40, dim, generator=generator) for _ in range(2)] for dim in (24, 16, 24)]
    copies = Copies(torch.tensor([5, 0, 7, 9, 12] * 2), torch.tensor([20, 0, 7, 21, 33, 22, 0, 7, 23, 35]))
    expected = [[one.clone() for one in layer] for layer in layers]
    for one in (one for layer in expected for one in layer):
        one[:, copies.targets] = one[:, copies.sources]
    got = [tuple(one.to(implementation.device) for one in layer) for layer in layers]
    found = stores_of(got)
    assert [len(one.keys) for one in found] == [2, 1]
    for stores in found:
        implementation.kernels.copy_slots(stores, Copies(*(one.to(implementation.device) for one in copies)))
    assert as_lists(got) == as_lists(expected)
