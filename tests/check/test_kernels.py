"""The checks of single operations: each new fault is found, under its own name and under no other."""

import functools
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
    of_others = {"packed product", "compressed attention", "block convolution", "walk", "trees", "lookup"}
    assert set(found) == set(operations.OPERATIONS) - of_others
    assert failed(engine) == {}
    assert failed(plain) == {}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_next-whole", "float16"), ("gpt_oss-whole", "float64")],
)
def test_other_dtypes_and_mixtures_pass(name, dtype, tmp_path):
    engine = family_engine(name, tmp_path, width=4, dtype=dtype)
    assert {"routing", "experts"} <= {result.operation for result in check_kernels(engine)}
    assert failed(engine) == {}


# ---- kernels that are wrong: an engine, the kernel, what it gives, the operation and a word of its place


def forgetful(y, x, weight, bias, onto, *_):
    return y if onto is None else y - onto


def rotated_wrongly(rotated, *_):
    return None if rotated is None else rotated * 1.001


def beside(name):
    def spill(result, *arguments):
        slots = arguments[-1]
        free = sorted(set(range(slots.keys.shape[1])) - set(slots.slot_ids.tolist()))[0]
        getattr(slots, name)[-1, free, -1] += 1
        return result

    return spill


def moved_context(result, q, *arguments):
    if q is None:
        arguments[-1].keys.copy_(arguments[-1].keys.roll(1, dims=1))
    return result


def wrong_code(result, pages, tiles):
    pages.keys.codes.add_(1)


def late_draft(result, block, *_):
    block[0, -1] += 1


def wrong_history(result, history, *_):
    history[2, 9] += 1


def wrong_row(row):
    def change(ids, *_):
        if ids.dim() == 2:  # not of a stream
            ids[row, 1] = (ids[row, 1] + 1) % 96
        return ids

    return change


def by_logits(_, logits, pairs, *rest):
    """Walk among the likeliest candidates, whatever the noise."""
    likeliest = logits.topk(pairs.top_k)
    kept = torch.full_like(logits, NEVER).scatter(2, likeliest.indices, likeliest.values)
    return reference_walk(kept, pairs, *rest)


def compressing(kv_dtype):
    return tiny.engine(dtype="float32", num_pages=64, kv_dtype=kv_dtype, draft_kv_dtype=kv_dtype)


MADE = {
    "DFlash2": lambda: tiny.engine("DFlash2", dtype="float32"),
    "DFlash2 in bfloat16": lambda: tiny.engine("DFlash2", dtype="bfloat16"),
    "DSpark": lambda: tiny.engine("DSpark", dtype="float32"),
    "trees": lambda: tiny.engine("DFlash2", dtype="float32", tree=32),
    "ngram": lambda: tiny.engine("ngram", dtype="float32", draft_ngram=2),
    "int8": lambda: compressing("int8"),
    "tq4v3": lambda: compressing("tq4v3"),
}
PLAIN = {"linear": "linear", "rms_norm": "norm", "gate_mul": "activation", "rotate": "rotation"}
WRONG = [
    ("family", "linear", forgetful, "linear", "onto the stream"),
    ("family", "norm_rope_write", rotated_wrongly, "heads", "queries"),
    ("family", "norm_rope_write", beside("keys"), "heads", "keys"),
    ("family", "norm_rope_write", beside("values"), "heads", "values"),
    ("plain", "norm_rope_write", moved_context, "heads", "context"),
    ("family", "gate_heads", slightly, "heads' gates", ""),
    *(("plain", name, slightly, kind, "") for name, kind in PLAIN.items()),
    ("family", "scan", lambda both, *_: (both[0] * 1.001, both[1]), "gated delta", "reads"),
    ("family", "fold", lambda _, state, *__: state.mul_(1.001), "gated delta", "state"),
    ("family", "convolve", slightly, "gated delta", "reads"),
    ("family", "gated_norm", slightly, "gated delta", "norm"),
    ("family", "route", lambda to, *_: to._replace(weights=to.weights * 1.001), "routing", "weights"),
    ("family", "route", lambda to, *_: to._replace(ids=(to.ids + 1) % 6), "routing", ""),
    ("family", "route", lambda to, *_: to._replace(ids=to.ids[:, :1].expand_as(to.ids)), "routing", ""),
    *(("family", "choose", wrong_row(row), "sampling", "") for row in range(len(choices.RULES))),
    ("family", "choose", lambda ids, *_: torch.full_like(ids, 10**6), "sampling", ""),
    ("family", "count_accepted", lambda counts, *_: counts.clamp(max=3), "acceptance", ""),
    ("DFlash2", "walk", by_logits, "walk", ""),
    ("DFlash2 in bfloat16", "walk", lambda drafts, *_: drafts + 1, "walk", ""),
    ("DSpark", "walk", lambda drafts, *_: drafts + 1, "walk", ""),
    ("DFlash2", "conv_before", lambda both, *_: (both[0], -both[1]), "block convolution", ""),
    ("DFlash2", "conv_after", lambda both, *_: (1.001 * both[0], both[1]), "block convolution", ""),
    (
        "DFlash2 in bfloat16",
        "conv_before",
        lambda both, *_: (1.3 * both[0], both[1]),
        "block convolution",
        "",
    ),
    ("DFlash2 in bfloat16", "conv_after", lambda both, *_: (both[0], -both[1]), "block convolution", ""),
    ("trees", "weigh", lambda one, *_: one._replace(chances=one.chances - 0.01), "trees", "chances"),
    ("trees", "grow", lambda one, *_: one._replace(paths=one.paths.roll(1, dims=1)), "trees", "32 tokens"),
    ("trees", "lay_out", lambda one, *_: one._replace(begins=one.begins + 1), "trees", "begins"),
    ("trees", "settle", lambda one, *_: one._replace(numbers=one.numbers + 1), "trees", "numbers kept"),
    ("trees", "copy_slots", lambda _, stores, *__: stores.keys[-1].mul_(1.001), "trees", "slots"),
    ("ngram", "lookup", late_draft, "lookup", ""),
    ("ngram", "remember", wrong_history, "lookup", ""),
    ("int8", "attend_compressed", slightly, "compressed attention", ""),
    ("tq4v3", "compress", wrong_code, "compressed attention", ""),
]


@pytest.fixture(scope="module")
def engine_of(engine, plain):
    return functools.cache(lambda name: {"family": engine, "plain": plain}.get(name) or MADE[name]())


@pytest.mark.parametrize("name", MADE)
def test_right_kernels_of_drafters_and_compressed_keys_pass(engine_of, name):
    assert failed(engine_of(name)) == {}


@pytest.mark.parametrize(("name", "kernel", "change", "operation", "place"), WRONG)
def test_a_wrong_kernel_is_found_under_its_own_name(engine_of, name, kernel, change, operation, place):
    found = failed_at(operation, wrong_kernel(engine_of(name), kernel, change))
    assert any(place in where for where in found)


def test_a_wrong_kernel_is_found_under_no_other_name(engine):
    assert list(failed(wrong_kernel(engine, "gate_heads", slightly))) == ["heads' gates"]


# ---- modules that are wrong


def test_a_gated_product(engine, monkeypatch):
    wrong(monkeypatch, Linear, "gated", slightly)
    assert list(failed(engine)) == ["gated product", "experts"], "a shared expert has one too"


def shifted(right, shift):
    return lambda self, rows, starts, counts: right(self, rows, starts, (counts + shift).clamp(min=0, max=4))


def of_another_layer(right):
    def commit(self, rows, starts, counts):
        right(self, rows, starts, counts)
        self.state.copy_(self.state.flip(0))

    return commit


def from_nothing(right):
    def scan(self, layer, x, beta, gate, weights, where):
        return right(self, layer, x, beta, gate, weights, where._replace(starts=where.starts * 0))

    return scan


@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        ("commit", lambda right: shifted(right, -1), ""),
        ("commit", lambda right: shifted(right, 1), ""),
        ("commit", of_another_layer, "state"),
        ("scan", from_nothing, "reads"),
    ],
)
def test_states_that_are_kept_wrongly(engine, monkeypatch, name, change, place):
    monkeypatch.setattr(RecurrentStates, name, change(getattr(RecurrentStates, name)))
    assert any(place in where for where in failed_at("gated delta", engine))


@pytest.mark.parametrize(
    ("wrong_part", "place"),
    [("shared", "onto the stream"), ("stream", "onto the stream"), ("sum", "experts"), ("norm", "its norm")],
)
def test_experts_that_are_off_or_forget_what_is_added(engine, wrong_part, place, monkeypatch):
    right = Experts.forward

    def forward(self, x, choice, shared=None, onto=None):
        if wrong_part == "shared":
            shared = None
        if wrong_part == "stream" and onto is not None:
            onto = onto._replace(stream=torch.zeros_like(x))
        total, normed = right(self, x, choice, shared, onto)
        if wrong_part == "norm" and normed is not None:
            normed = normed * 1.001
        return total * 1.001 if wrong_part == "sum" else total, normed

    monkeypatch.setattr(Experts, "forward", forward)
    assert any(place in where for where in failed_at("experts", engine))


@pytest.mark.parametrize("name", ["positions", "write_slots"])
def test_tokens_in_the_wrong_place(engine, name, monkeypatch):
    right = getattr(Blocks, name).fget
    rolled = type("Rolled", (Blocks,), {name: property(lambda blocks: right(blocks).roll(1))})
    monkeypatch.setattr(operations, "Blocks", rolled)
    found = failed_at("slots", engine)  # attention would read out of reach
    assert {where.split(",")[0] for where in found} == {name.removeprefix("write_")}


@pytest.mark.parametrize("name", ["length", "anchor", "_output_counts"])
def test_rows_that_advance_wrongly(engine, name, monkeypatch):
    def change(_, rows, *step):
        getattr(rows, name)[1] += 1

    wrong(monkeypatch, Rows, "advance", change)
    assert failed_at("acceptance", engine)


# ---- tolerances


def test_samples_as_good_as_equal_pass_and_others_do_not():
    numbers = Numbers(tiny.engine(dtype="float32"))
    rows = choices.rows_of_rules(9, numbers)
    starts, recent = rows.length[rows.active], torch.zeros(len(rows.active), 1, dtype=torch.int64)
    logits = torch.zeros(len(rows.active), 1, 9, dtype=torch.float64) - 20
    for below, expected in ((5e-5, 5), (1e-3, 3)):
        logits[..., 3], logits[..., 5] = 5.0, 5.0 - below
        greedy = choices.nearest(torch.full_like(recent, 5), logits, starts, recent, rows.sampling())[0]
        assert greedy.tolist() == [expected]


def test_integers_have_no_tolerance_and_nan_fails():
    got = torch.tensor([1, 2, 3, 4])
    result = measure("slots", Comparison("here", got, torch.tensor([1, 2, 3, 5])))
    assert (result.error, result.tolerance, result.is_passed) == (0.25, 0.0, False)
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


# ---- odd shapes

DTYPES = ("float16", "float32")  # of interpreted kernels
ODD = {
    "hidden_size": 30,
    "intermediate_size": 46,
    "vocab_size": 97,
    "head_dim": 10,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 75, "linear_key_head_dim": 5, "head_dim": 18}])
@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("served", "float32"),
        *(pytest.param("interpreted", dtype, marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_shapes_that_no_block_divides_are_slow_and_not_wrong(tmp_path, path, dtype, sizes):
    """None is a multiple of 16 and few are of 4: loads have masks, and some parts have no kernel."""
    engine = family_engine("qwen3_next-whole", tmp_path, ODD | sizes, width=4, dtype=dtype)
    if path == "interpreted":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the card's own run is the check itself")
        kernels = kernels_for(getattr(torch, dtype), torch.device("cpu"), is_interpreted=True)
        engine = Engine(engine.models.with_kernels(kernels), engine.plan)
    assert failed(engine) == {}
