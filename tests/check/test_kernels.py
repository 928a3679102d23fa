"""The checks of single operations: each new fault is found, under its own name and under no other."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which other tests interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

from blockdraft.cache.recurrent import RecurrentStates
from blockdraft.cache.rows import Rows
from blockdraft.check import choices, operations
from blockdraft.check.comparison import Comparison, Numbers, measure
from blockdraft.check.operations import check_kernels
from blockdraft.engine.engine import Engine
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.candidates import reference_walk
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.sampling import NEVER
from blockdraft.models.layers import Linear
from blockdraft.models.moe import Experts
from tests import tiny
from tests.check.test_selfcheck import family_engine
from tests.faults import with_kernels


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Gated attention, gated delta layers, and experts with a shared one beside them."""
    return family_engine("qwen3_next-whole", tmp_path_factory.mktemp("model"), width=4)


@pytest.fixture(scope="module")
def plain():
    """With a drafter."""
    return tiny.engine(dtype="float32")


def failed(engine):
    return {result.operation: result.where for result in check_kernels(engine) if not result.is_passed}


def failed_at(operation, engine):
    """Where one operation is wrong; no other runs."""
    found = operations.OPERATIONS[operation](engine, Numbers(engine))
    return {one.where for one in found if not measure(operation, one).is_passed}


def wrong(monkeypatch, owner, name, change):
    """`owner.name` gives change(result, arguments); no reference calls it."""
    right = getattr(owner, name)

    def call(*arguments, **options):
        return change(right(*arguments, **options), *arguments, **options)

    monkeypatch.setattr(owner, name, call)


def wrong_kernel(engine, name, change):
    """`engine` with a kernel that gives change(result, arguments)."""
    right = getattr(engine.models.target.kernels, name)

    def call(*arguments, **options):
        return change(right(*arguments, **options), *arguments, **options)

    return with_kernels(engine, **{name: call})


def slightly(result, *arguments, **options):
    return result * 1.001


def test_a_right_engine_has_every_operation_checked(engine, plain):
    found = [result.operation for result in check_kernels(engine)]
    of_others = {"packed product", "compressed attention", "block convolution", "walk", "lookup"}
    assert set(found) == set(operations.OPERATIONS) - of_others
    assert failed(engine) == {}
    assert failed(plain) == {}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_dflash2_adds_is_checked(dtype):
    engine = tiny.engine("DFlash2", dtype=dtype)
    assert {"block convolution", "walk"} <= {result.operation for result in check_kernels(engine)}
    assert failed(engine) == {}
    assert list(failed(wrong_kernel(engine, "walk", lambda drafts, *_: drafts + 1))) == ["walk"]
    factor = 1.3 if dtype == "bfloat16" else 1.001
    for name in ("conv_before", "conv_after"):
        for wrong in (lambda both, *_: (both[0], -both[1]), lambda both, *_: (factor * both[0], both[1])):
            assert list(failed(wrong_kernel(engine, name, wrong))) == ["block convolution"]


def test_a_walk_whose_candidates_are_the_likeliest_whatever_the_noise_is_found():
    def by_logits(_, logits, pairs, *rest):
        likeliest = logits.topk(pairs.top_k)
        kept = torch.full_like(logits, NEVER).scatter(2, likeliest.indices, likeliest.values)
        return reference_walk(kept, pairs, *rest)

    engine = tiny.engine("DFlash2", dtype="float32")
    assert failed_at("walk", engine) == set()
    assert failed_at("walk", wrong_kernel(engine, "walk", by_logits))


def test_dsparks_walk_is_checked():
    engine = tiny.engine("DSpark", dtype="float32")
    assert failed(engine) == {}
    assert list(failed(wrong_kernel(engine, "walk", lambda drafts, *_: drafts + 1))) == ["walk"]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes_pass(dtype, tmp_path):
    assert failed(family_engine("qwen3_next-whole", tmp_path, width=4, dtype=dtype)) == {}


@pytest.mark.parametrize("name", ["gpt_oss-whole", "gemma4-mixture"])
def test_every_kind_of_mixture_is_checked(name, tmp_path):
    engine = family_engine(name, tmp_path, width=4)
    assert {"routing", "experts"} <= {result.operation for result in check_kernels(engine)}


def test_a_product_that_forgets_the_stream(engine):
    right = engine.models.target.kernels.linear
    forgetful = with_kernels(engine, linear=lambda x, weight, bias, onto: right(x, weight, bias, None))
    assert "onto the stream" in failed(forgetful)["linear"]


@pytest.mark.parametrize("kv_dtype", ["int8", "tq4v3"])
def test_compressed_keys_that_are_a_little_off(kv_dtype):
    engine = tiny.engine(dtype="float32", num_pages=64, kv_dtype=kv_dtype, draft_kv_dtype=kv_dtype)
    assert not failed_at("compressed attention", engine)
    assert failed(wrong_kernel(engine, "attend_compressed", slightly)).keys() == {"compressed attention"}

    def beside(result, pages, tiles):
        pages.keys.codes.add_(1)

    assert failed(wrong_kernel(engine, "compress", beside)).keys() == {"compressed attention"}


def test_drafts_that_are_recalled_wrongly():
    engine = tiny.engine("ngram", dtype="float32", draft_ngram=2)
    assert not failed_at("lookup", engine)

    def late(result, block, *_):
        block[0, -1] += 1

    def beside(result, history, *_):
        history[2, 9] += 1

    assert failed(wrong_kernel(engine, "lookup", late)).keys() == {"lookup"}
    assert failed(wrong_kernel(engine, "remember", beside)).keys() == {"lookup"}


def test_a_gated_product(engine, monkeypatch):
    wrong(monkeypatch, Linear, "gated", slightly)
    assert list(failed(engine)) == ["gated product", "experts"], "a shared expert has one too"


def test_queries_that_are_a_little_off(engine):
    def change(rotated, *_):
        return None if rotated is None else rotated * 1.001

    assert "queries" in failed(wrong_kernel(engine, "norm_rope_write", change))["heads"]


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_write_beside_the_slots(engine, name):
    def spill(result, *arguments):
        slots = arguments[-1]
        free = sorted(set(range(slots.keys.shape[1])) - set(slots.slot_ids.tolist()))[0]
        getattr(slots, name)[-1, free, -1] += 1
        return result

    assert name in failed(wrong_kernel(engine, "norm_rope_write", spill))["heads"]


def test_a_context_that_is_written_elsewhere(plain):
    def move(result, q, *arguments):
        if q is None:
            arguments[-1].keys.copy_(arguments[-1].keys.roll(1, dims=1))
        return result

    assert any(
        "context" in where for where in failed_at("heads", wrong_kernel(plain, "norm_rope_write", move))
    )


def test_heads_that_are_let_through_wrongly(engine):
    assert list(failed(wrong_kernel(engine, "gate_heads", slightly))) == ["heads' gates"]


def test_the_norm_behind_a_delta_layer(engine):
    assert "norm" in failed(wrong_kernel(engine, "gated_norm", slightly))["gated delta layer"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_commit_of_the_wrong_number_of_tokens(engine, shift, monkeypatch):
    right = RecurrentStates.commit

    def commit(self, rows, starts, counts):
        right(self, rows, starts, (counts + shift).clamp(min=0, max=4))

    monkeypatch.setattr(RecurrentStates, "commit", commit)
    assert list(failed(engine)) == ["gated delta layer"]


def test_a_commit_into_the_states_of_another_layer(engine, monkeypatch):
    right = RecurrentStates.commit

    def commit(self, rows, starts, counts):
        right(self, rows, starts, counts)
        self.state.copy_(self.state.flip(0))

    monkeypatch.setattr(RecurrentStates, "commit", commit)
    assert "state" in failed(engine)["gated delta layer"]


def test_a_block_that_starts_from_nothing(engine, monkeypatch):
    right = RecurrentStates.scan

    def scan(self, layer, x, beta, gate, weights, where):
        return right(self, layer, x, beta, gate, weights, where._replace(starts=where.starts * 0))

    monkeypatch.setattr(RecurrentStates, "scan", scan)
    assert "reads" in failed(engine)["gated delta layer"]


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice._replace(weights=choice.weights * 1.001),
        lambda choice: choice._replace(ids=(choice.ids + 1) % 6),
        lambda choice: choice._replace(ids=choice.ids[:, :1].expand_as(choice.ids)),
    ],
    ids=["weights", "experts", "one expert twice"],
)
def test_a_wrong_route(engine, change):
    assert list(failed(wrong_kernel(engine, "route", lambda choice, *_: change(choice)))) == ["routing"]


def test_experts_that_are_a_little_off(engine, monkeypatch):
    wrong(monkeypatch, Experts, "forward", slightly)
    assert "experts" in failed(engine)


@pytest.mark.parametrize("forgotten", ["shared", "onto"])
def test_experts_that_forget_what_is_added(engine, forgotten, monkeypatch):
    right = Experts.forward

    def forward(self, x, choice, shared=None, onto=None):
        added = {"shared": shared, "onto": onto} | {forgotten: None}
        return right(self, x, choice, **added)

    monkeypatch.setattr(Experts, "forward", forward)
    assert "onto the stream" in failed(engine)["experts"]


@pytest.mark.parametrize("name", ["positions", "write_slots"])
def test_tokens_in_the_wrong_place(engine, name, monkeypatch):
    right = getattr(Blocks, name).fget
    rolled = type("Rolled", (Blocks,), {name: property(lambda blocks: right(blocks).roll(1))})
    monkeypatch.setattr(operations, "Blocks", rolled)
    kind = {"positions": "positions", "write_slots": "slots"}[name]
    found = failed_at("slots", engine)  # attention would read out of reach
    assert {where.split(",")[0] for where in found} == {kind}


@pytest.mark.parametrize("row", range(len(choices.RULES)))
def test_a_wrong_sample_of_any_rule(engine, row):
    def change(ids, *_):
        ids[row, 1] = (ids[row, 1] + 1) % 96
        return ids

    assert list(failed(wrong_kernel(engine, "choose", change))) == ["sampling"]


def test_ids_out_of_range_are_wrong_samples(engine):
    out_of_range = wrong_kernel(engine, "choose", lambda ids, *_: torch.full_like(ids, 10**6))
    assert list(failed(out_of_range)) == ["sampling"]


def test_samples_as_good_as_equal_pass_and_others_do_not():
    numbers = Numbers(tiny.engine(dtype="float32"))
    rows = choices.rows_of_rules(9, numbers)
    starts, recent = rows.length[rows.active], torch.zeros(len(rows.active), 1, dtype=torch.int64)
    logits = torch.zeros(len(rows.active), 1, 9, dtype=torch.float64) - 20
    logits[..., 3], logits[..., 5] = 5.0, 5.0 - 5e-5
    batch = rows.sampling()
    greedy = choices.nearest(torch.full_like(recent, 5), logits, starts, recent, batch)[0]
    assert greedy.tolist() == [5]
    logits[..., 5] -= 1e-3
    greedy = choices.nearest(torch.full_like(recent, 5), logits, starts, recent, batch)[0]
    assert greedy.tolist() == [3]


def test_a_wrong_count(engine):
    clamped = wrong_kernel(engine, "count_accepted", lambda counts, *_: counts.clamp(max=3))
    assert list(failed(clamped)) == ["acceptance"]


@pytest.mark.parametrize("name", ["length", "anchor", "_output_counts"])
def test_rows_that_advance_wrongly(engine, name, monkeypatch):
    def change(_, rows, *step):
        getattr(rows, name)[1] += 1

    wrong(monkeypatch, Rows, "advance", change)
    assert list(failed(engine)) == ["acceptance"]


def test_whole_numbers_have_no_tolerance():
    got = torch.tensor([1, 2, 3, 4])
    result = measure("slots", Comparison("here", got, torch.tensor([1, 2, 3, 5])))
    assert (result.error, result.tolerance, result.is_passed) == (0.25, 0.0, False)


def test_what_is_not_a_number_fails():
    got, expected = torch.tensor([1.0, float("nan")]), torch.ones(2, dtype=torch.float64)
    assert not measure("norm", Comparison("here", got, expected)).is_passed


@pytest.mark.slow
def test_the_kernels_of_a_gpu_pass(plain):
    """Interpreted where there is none."""
    if torch.cuda.is_available():
        pytest.skip("the card's own run is the check itself")
    pytest.importorskip("triton")
    kernels = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    assert failed(Engine(plain.models.with_kernels(kernels), plain.plan)) == {}
