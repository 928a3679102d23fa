"""Trees of drafts: which tokens they hold, by enumeration; every implementation against the reference."""

import itertools

import pytest
import torch

from blockdraft.kernels.kernels import REFERENCE
from blockdraft.kernels.sampling import NEVER, reference_choose
from blockdraft.kernels.tree import Choices, reference_grow, reference_weigh
from blockdraft.kernels.tree_size import TreeSize, tree_size, trees_for
from tests.kernels.implementations import CPU, assert_close, only_triton, quiet
from tests.kernels.test_candidates import RULES, make_walk, place_rows
from tests.matrix import slow_but

pytestmark = quiet


def drawn_choices(num_rows, num_columns, num_choices, *, has_pairs, seed=0):
    """Chances in sixteenths: their sums are exact, and some are equal."""
    generator = torch.Generator().manual_seed(seed)
    lines = num_choices if has_pairs else 1
    drawn = -torch.randint(1, 90, (num_rows, num_columns, lines, num_choices), generator=generator) / 16
    ids = torch.stack([torch.randperm(1000, generator=generator) for _ in range(num_rows * num_columns)])
    ids = ids[:, :num_choices].reshape(num_rows, num_columns, num_choices).contiguous()
    return Choices(ids, *drawn.sort(dim=-1, descending=True, stable=True))


def paths_of(tree):
    """Each row's paths, as tuples of token ids from the anchor on, one for every token of the tree."""
    found = []
    for row in range(len(tree.token_ids) // tree.size.nodes):
        paths = set()
        for branch in range(row * tree.size.branches, (row + 1) * tree.size.branches):
            path = tree.path_ids[branch].tolist()[: tree.lengths[branch]]
            paths |= {tuple(path[:end]) for end in range(1, len(path) + 1)}
        found.append(paths)
    return found


def all_paths(choices, row, anchor):
    """All paths and their chances."""
    known = [((anchor,), 0, 0.0)]
    for column in range(choices.ids.shape[1]):
        new = []
        for path, place, chance in known:
            if len(path) == column + 1:
                lines = choices.chances[row, column]
                line = min(place, len(lines) - 1)
                for its, where in zip(
                    lines[line].tolist(), choices.places[row, column, line].tolist(), strict=True
                ):
                    new.append(((*path, int(choices.ids[row, column, where])), where, chance + its))
        known += new
    return {path: chance for path, _, chance in known}


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize(("nodes", "columns"), [(4, 2), (9, 3), (16, 4)])
def test_a_tree_holds_the_likeliest_paths_of_all(nodes, columns, has_pairs):
    """Where branches are plenty."""
    choices = drawn_choices(3, columns, 3, has_pairs=has_pairs)
    anchor = torch.tensor([[1000], [1001], [1002]])
    tree = reference_grow(choices, anchor, TreeSize(nodes, 30, columns + 1))
    for row, held in enumerate(paths_of(tree)):
        chances = all_paths(choices, row, 1000 + row)
        best = sorted(chances.values(), reverse=True)[:nodes]
        assert sorted((chances[path] for path in held), reverse=True) == best


@pytest.mark.parametrize(("nodes", "width"), [(16, 3), (16, 8), (32, 16), (64, 16)])
def test_every_token_has_one_branch_and_every_path_its_ancestors(nodes, width):
    size = tree_size(nodes, width)
    for seed in range(4):
        choices = drawn_choices(2, width - 1, 8, has_pairs=bool(seed % 2), seed=seed)
        tree = reference_grow(choices, torch.tensor([[7], [8]]), size)
        held = paths_of(tree)
        assert [len(paths) for paths in held] == [nodes, nodes]
        assert tree.token_ids[tree.offsets[:: size.branches][:-1]].tolist() == [7, 8]
        assert tree.offsets[-1] == 2 * nodes
        for row in range(2):
            leaf, line = int(tree.paths[row * size.branches, -1]), 0
            column = int(tree.columns[leaf])
            if column == width - 1:
                assert tree.following[row] == -1
                continue
            if choices.chances.shape[2] > 1 and column > 0:
                line = choices.ids[row, column - 1].tolist().index(int(tree.token_ids[leaf]))
            best = choices.places[row, column, line, 0]
            assert tree.following[row] == choices.ids[row, column, best]
        for branch, (first, length) in enumerate(
            zip(tree.firsts.tolist(), tree.lengths.tolist(), strict=True)
        ):
            own = list(range(tree.offsets[branch], tree.offsets[branch + 1]))
            assert tree.columns[own].tolist() == list(range(first, first + len(own)))
            assert set(tree.branches[own].tolist()) <= {branch}
            path = tree.paths[branch].tolist()
            assert path[:length][first:] == own or (own == [] and length == 1)
            assert path[length:] == [path[length - 1]] * (width - length)
            assert tree.columns[path[:length]].tolist() == list(range(length))


@pytest.mark.parametrize("num_choices", [2, 4, 6, 8])
def test_sizes_that_are_allowed_can_always_be_filled(num_choices):
    for width in (3, 4, 5, 8):
        for nodes in trees_for((16, 32, 64, 128), width, num_choices):
            for seed in range(3):
                choices = drawn_choices(1, width - 1, num_choices, has_pairs=False, seed=seed)
                tree = reference_grow(choices, torch.tensor([[7]]), tree_size(nodes, width))
                assert len(tree.token_ids) == nodes
    assert trees_for((16, 32, 64, 128), 16, 8) == (16, 32, 64, 128)
    assert trees_for((16, 128), 3, 8) == (16,)


@only_triton
@pytest.mark.parametrize(
    ("nodes", "width", "has_pairs"),
    slow_but(
        [(n, w, p) for n in (16, 32, 64) for w in (3, 8, 16) for p in (False, True)],
        (16, 8, True),
        (16, 3, False),
    ),
)
def test_every_implementation_grows_the_references_trees(implementation, nodes, width, has_pairs):
    size, device = tree_size(nodes, width), implementation.device
    choices = drawn_choices(3, width - 1, 8, has_pairs=has_pairs, seed=nodes + width)
    anchor = torch.tensor([[2**40], [8], [9]])
    expected = reference_grow(choices, anchor, size)
    given = Choices(*(one.to(device) for one in choices))
    for got, wanted in zip(
        implementation.kernels.grow(given, anchor.to(device), size), expected, strict=True
    ):
        assert got.tolist() == wanted.tolist() if isinstance(got, torch.Tensor) else got == wanted


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("rule", ["greedy", "random", "filters"])
def test_the_likeliest_path_is_what_a_chain_drafts(rule, has_pairs):
    rows = place_rows([RULES[rule]] * 3)
    logits, pairs = make_walk(rows, has_mixture=True, dtype=torch.float64)
    starts, anchor = rows.length[rows.active], rows.anchor[rows.active][:, None]
    given = starts, anchor, rows.sampling()
    choices = reference_weigh(logits, pairs if has_pairs else None, *given)
    place, likeliest = torch.zeros(3, dtype=torch.int64), []
    for column in range(logits.shape[1]):
        line = place if has_pairs else torch.zeros_like(place)
        place = choices.places[torch.arange(3), column, line, 0]
        likeliest.append(choices.ids[torch.arange(3), column, place])
    walk, choose = REFERENCE.walk, reference_choose
    chain = walk(logits, pairs, *given) if has_pairs else choose(logits, *given)
    assert torch.stack(likeliest, dim=1).tolist() == chain.tolist()
    assert choices.chances.exp().sum(dim=-1).sub(1).abs().max() < 1e-9


MIXED = "random greedy filters"


@only_triton
@pytest.mark.parametrize(
    ("rules", "has_pairs"),
    slow_but(
        [(rules, p) for rules in (*RULES, MIXED) for p in (True, False)], (MIXED, True), ("penalties", False)
    ),
)
def test_every_implementation_weighs_as_the_reference(implementation, rules, has_pairs):
    known = []
    for kernels, device in ((REFERENCE, CPU), (implementation.kernels, implementation.device)):
        rows = place_rows([RULES[name] for name in rules.split()], device=device)
        logits, pairs = make_walk(rows, has_mixture=True)
        logits, parts = logits.to(device), [one.to(device) for one in pairs[:3]]
        pairs = (
            pairs._replace(predecessors=parts[0], successors=parts[1], mixture=parts[2])
            if has_pairs
            else None
        )
        given = rows.length[rows.active], rows.anchor[rows.active][:, None], rows.sampling()
        known.append(chances_by_token(kernels.weigh(logits, pairs, *given)))
    expected, got = known
    assert got.keys() == expected.keys()
    wanted = torch.tensor([expected[key] for key in expected])
    assert_close(torch.tensor([got[key] for key in expected]), wanted.double(), 1e-4)


def chances_by_token(choices):
    """Every chance by row, column, the token before and the token."""
    found, ids = {}, choices.ids.tolist()
    num_choices = int((choices.chances[0, 0, 0] > NEVER).sum())  # the others are padding
    for (row, column, line, rank), chance in zip(
        itertools.product(*map(range, choices.chances.shape)), choices.chances.flatten().tolist(), strict=True
    ):
        if chance > NEVER and line < num_choices:
            place = int(choices.places[row, column, line, rank])
            before = None if column == 0 or choices.chances.shape[2] == 1 else ids[row][column - 1][line]
            found[row, column, before, ids[row][column][place]] = chance
    return found
