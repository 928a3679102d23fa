"""Which formats of keys and values a pair may have, what they take, and what is said of those it may not."""

from dataclasses import replace

import pytest

from blockdraft.cache.spec import Paged, bytes_per_token, compressed, exact_bytes_per_token
from blockdraft.errors import BlockdraftError, SettingsError
from blockdraft.kernels.kv_formats import EXACT, exact_tokens
from blockdraft.planner.advice import advise
from blockdraft.planner.kv_choice import KvRequest, kv_choice
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case
from blockdraft.planner.report import make_report
from tests.planner.shapes import on, opened

LAYER = Paged(num_kv_heads=8, head_dim=128)  # of Qwen3-8B and of its drafter
BF16 = 2
SMALL = 0.68  # of a GeForce's memory: some 22 GB


@pytest.mark.parametrize(("kv_dtype", "least"), [("tq4v3", 4.4), ("tq4", 3.85), ("int8", 1.95)])
def test_a_layer_takes_so_many_times_less(kv_dtype, least):
    (layer,) = compressed((LAYER,), kv_dtype)
    assert LAYER.bytes_per_token(BF16) / layer.bytes_per_token(BF16) >= least


@pytest.mark.parametrize(("draft_kv_dtype", "least"), [(EXACT, 3.0), ("tq4v3", 3.9)])
def test_a_pair_of_32k_tokens_takes_so_many_times_less_with_its_window(draft_kv_dtype, least):
    plain = (LAYER,) * 41
    specs = compressed((LAYER,) * 36, "tq4v3") + compressed((LAYER,) * 5, draft_kv_dtype)
    taken = 32768 * bytes_per_token(specs, BF16)
    taken += exact_tokens(128, 16, 16) * exact_bytes_per_token(specs, BF16)
    assert 32768 * bytes_per_token(plain, BF16) / taken >= least


def test_a_plan_counts_compressed_layers_and_their_windows():
    settings, pair = opened("qwen3-8b", max_model_len=32768, max_num_seqs=16)
    exact, small = (
        fit_native(Case(replace(settings, kv_dtype=name), on("h100"), pair)) for name in ("auto", "tq4v3")
    )
    assert exact.footprint.per_token == 41 * LAYER.bytes_per_token(BF16)
    assert small.footprint.per_token == 36 * 8 * 116 + 5 * LAYER.bytes_per_token(BF16)
    windows = next(item for item in small.items if item.name == "exact windows")
    tokens = (small.plan.num_exact_pages + 2) * small.plan.page_size
    assert windows.num_bytes == tokens * 36 * LAYER.bytes_per_token(BF16)
    assert all(item.name != "exact windows" for item in exact.items)
    assert sum(item.num_bytes for item in small.items) <= small.budget


def rows_and_share(card, **settings):
    """Rows as planned, why, and the share of the cache that their exact windows take."""
    wanted, pair = opened("qwen3-8b", **settings)
    fit = fit_native(Case(wanted, on(card), pair))
    windows = sum(item.num_bytes for item in fit.items if item.name == "exact windows")
    why = next(choice.reason for choice in fit.choices if choice.name == "max_num_seqs")
    return fit.max_num_seqs, why, windows / (windows + fit.cache_bytes)


@pytest.mark.parametrize(
    ("card", "memory", "max_num_seqs", "why"),
    [
        ("h200", 0.9, 64, "logits and states of so many"),
        ("h100", 0.9, 64, "the least on a GPU"),
        ("rtx-5090", 0.9, 32, "exact windows of more would take over 25% of the cache"),
        ("rtx-5090", SMALL, 8, "the least, though their exact windows take over 25% of the cache"),
    ],
)
def test_a_default_number_of_rows_leaves_the_cache_to_compressed_tokens(card, memory, max_num_seqs, why):
    rows, reason, share = rows_and_share(card, kv_dtype="tq4", gpu_memory_utilization=memory)
    assert rows == max_num_seqs
    assert reason.startswith(why)
    assert share < 0.27 or rows == 8  # estimates of a step are not known yet when rows are chosen


def test_rows_that_were_asked_for_stay_and_exact_keys_have_no_windows():
    small = {"gpu_memory_utilization": SMALL}
    assert rows_and_share("rtx-5090", kv_dtype="tq4", max_num_seqs=16, **small)[:2] == (16, "asked for")
    assert rows_and_share("rtx-5090", **small)[0] == 64


def test_a_cache_of_a_given_size_has_rows_for_it():
    sizes = {2 * 10**9: 8, 6 * 10**9: 12, 10**11: 64}
    found = [
        rows_and_share("h200", kv_dtype="tq4", cache_bytes=size, max_model_len=8192)[0] for size in sizes
    ]
    assert found == list(sizes.values())


def test_bytes_of_a_token_are_shown_by_kind():
    settings, pair = opened("qwen3-8b", max_model_len=4096, kv_dtype="tq4", draft_kv_dtype="int8")
    report = make_report(Case(replace(settings, device="cpu"), on("h100"), pair))
    kinds = [(kind.name, kind.num_layers, kind.bytes_per_token) for kind in report.caches["target"]]
    assert kinds == [("tq4", 36, 36 * 8 * 132)]  # a CPU's: on a card the drafter's stay exact
    assert [kind.name for kind in report.caches["drafter"]] == ["int8"]


def test_what_compression_would_serve_is_advised_until_it_is_chosen():
    settings, pair = opened("qwen3-8b", max_model_len=32768)
    case = Case(settings, on("rtx-5090"), pair)
    (line,) = (line for line in advise(case) if line.who == "more at once")
    assert line.flags.startswith("--kv-dtype tq4")
    count, before = int(line.result.split()[0]), int(line.result.split("(as it is, ")[1].split(")")[0])
    assert (count, before) == (5, 2)
    chosen = replace(case, settings=replace(settings, kv_dtype="tq4"))
    assert all(line.who != "more at once" for line in advise(chosen))


# ---- what is refused


def asked(kv_dtype="auto", draft_kv_dtype="auto", kv_window=128):
    return KvRequest(kv_dtype, draft_kv_dtype, kv_window, page_size=16)


def choice(shape, **settings):
    _, pair = opened(shape)
    return kv_choice(asked(**settings), "bfloat16", pair.config, pair.draft_config, pair.block)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ("qwen3-8b", {"kv_dtype": "tq3"}, "kv_dtype = tq3, .* use auto or bfloat16 .* int8, tq4, tq4v3"),
        ("qwen3-8b", {"kv_dtype": "fp8"}, "kv_dtype = fp8, which our engine does not have: use int8"),
        ("qwen3-8b", {"draft_kv_dtype": "fp8_e4m3"}, "draft_kv_dtype = fp8, .* use int8"),
        ("qwen3-8b", {"kv_dtype": "int4"}, "kv_dtype = int4, which our engine does not know"),
        ("qwen3-8b", {"kv_dtype": "float16"}, "kv_dtype = float16, .* use auto or bfloat16"),
        ("qwen3-8b", {"draft_kv_dtype": "tq2"}, "draft_kv_dtype = tq2, which our engine does not know"),
        ("qwen3-8b", {"kv_dtype": "turboquant_4bit_nc"}, "kv_dtype = turboquant_4bit_nc, .* tq4"),
        ("gpt-oss-20b", {"kv_dtype": "tq4"}, "kv_dtype = tq4, but gpt-oss .* use --kv-dtype int8"),
        ("gpt-oss-20b", {"kv_dtype": "tq4v3"}, "kv_dtype = tq4v3, but gpt-oss"),
        ("qwen3-8b", {"kv_dtype": "tq4", "kv_window": 15}, "kv_window = 15, .* use --kv-window 16 or more"),
        ("qwen3-8b", {"draft_kv_dtype": "int8", "kv_window": 8}, "kv_window = 8, .* use --kv-window 16"),
    ],
)
def test_what_cannot_be_is_refused_by_name_with_what_can(shape, settings, message):
    with pytest.raises(SettingsError, match=message):
        choice(shape, **settings)


@pytest.mark.parametrize(
    ("card", "change", "is_served"),
    [
        ("h100", {}, True),
        ("gb10", {}, True),
        ("a100", {}, False),  # before Hopper
        ("rtx-4090", {}, False),
        ("h100", {"dtype": "float16"}, False),
        ("h100", {"draft_kv_dtype": "int8"}, False),
        ("h100", {"head_dim": 256}, False),  # Qwen3.5's and Gemma's
        ("h100", {"shape": "gpt-oss-20b", "kv_dtype": "int8"}, False),  # heads of 64, with windows
    ],
)
def test_a_plan_refuses_what_a_start_would_refuse_on_a_card(card, change, is_served):
    change = dict(change)
    head_dim, shape = change.pop("head_dim", None), change.pop("shape", "qwen3-8b")
    settings, pair = opened(shape, max_model_len=4096, **{"kv_dtype": "tq4", **change})
    if head_dim is not None:
        layers = [replace(one, mixer=replace(one.mixer, head_dim=head_dim)) for one in pair.config.layers]
        pair = replace(pair, config=replace(pair.config, layers=tuple(layers)))
    case = Case(settings, on(card), pair)
    if is_served:
        fit_native(case)
        return
    with pytest.raises(SettingsError, match=r"on a card, .* heads of 64 or 128 .* Use --kv-dtype auto"):
        fit_native(case)
    if not change:  # and it is not advised either
        exact = replace(case, settings=replace(settings, kv_dtype="auto"))
        own = [line.flags for line in advise(exact) if "--engine" not in line.flags]
        assert not any("--kv-dtype" in flags for flags in own)


def test_gemma_has_eight_bits_only():
    _, pair = opened("qwen3-8b", has_draft=False)
    gemma = replace(pair.config, family="gemma4")
    with pytest.raises(SettingsError, match=r"kv_dtype = tq4, but Gemma 4.* use --kv-dtype int8"):
        kv_choice(asked("tq4"), "bfloat16", gemma, None, 1)
    assert kv_choice(asked("int8"), "bfloat16", gemma, None, 1).target == "int8"


def test_heads_that_cannot_be_rotated_are_named_with_the_setting():
    _, pair = opened("qwen3-8b", has_draft=False)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, head_dim=100)) for layer in pair.config.layers[:1]
    )
    odd = replace(pair.config, layers=layers)
    with pytest.raises(BlockdraftError, match=r"kv_dtype = tq4.*[Hh]eads of 100 values.* int8"):
        kv_choice(asked("tq4"), "bfloat16", odd, None, 1)
    assert kv_choice(asked("int8"), "bfloat16", odd, None, 1).target == "int8"


@pytest.mark.parametrize("name", ["auto", "bfloat16", "bf16"])
def test_the_models_own_dtype_is_no_compression(name):
    found = choice("qwen3-8b", kv_dtype=name, kv_window=1)  # of which nobody reads the window
    assert (found.target, found.draft, found.is_compressed) == (EXACT, EXACT, False)
    assert found.num_exact_pages(16, 16, 2048) == 0
