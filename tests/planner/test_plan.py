"""resolve: every "auto" gets a number, what cannot work is refused, and a lone sequence always fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from blockdraft.cache.spec import bytes_per_row, bytes_per_token
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.errors import CapacityError, SettingsError
from blockdraft.kernels.cpu import why_not_here
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed, code_of
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.planner.plan import ELEMENT_BYTES, Weights
from blockdraft.planner.quality import MAX_COMMITTED, MAX_PERPLEXITY, Quality, measured_quality
from blockdraft.planner.resolver import (
    CACHE_SHARE,
    CPU_CACHE_BYTES,
    WORK_BYTES,
    gpu_budget,
    resolve,
)
from blockdraft.planner.storage_choice import UNPACK_SHARE
from blockdraft.settings.settings import Settings
from tests.checkpoints.published import CONFIGS
from tests.fixtures.make_pair import draft_config

GIB = 1 << 30
MACHINE = Machine(memory_bytes=8 * GIB)


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


def make_model(max_positions=512):
    raw = SHAPE | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": max_positions}
    return read_model_config(raw, name="some/model")


def make_draft(block=8):
    return read_draft_config(draft_config() | {"block_size": block}, name="some/drafter")


def make_hybrid(max_positions=512):
    """Three delta layers and one that attends, with the caches of make_model's layers."""
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "max_position_embeddings": max_positions}
    return read_model_config(SHAPE | STATES | raw, name="some/hybrid")


GPU = replace(MACHINE, gpu_bytes=80 * 10**9, gpu_free_bytes=78 * 10**9)


def plan(
    draft=None,
    machine=MACHINE,
    model=None,
    weights=None,
    draft_weights=None,
    *,
    name="somebody/else",
    **settings,
):
    """`name`: of a model whose quality in whole numbers nobody has measured."""
    return resolve(
        Settings(**{"device": "cpu", "model": name, **settings}),
        machine,
        model or make_model(),
        draft,
        weights=weights or Weights(1000),
        draft_weights=draft_weights,
    )


def refusal(kind, *args, **kwargs):
    with pytest.raises(kind) as caught:
        plan(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_auto_differs_by_device():
    found = (plan(), plan(make_draft(16), machine=GPU, device="cuda"))
    names = ("dtype", "width", "block", "max_num_seqs", "max_prefill_tokens", "overlap")
    assert [tuple(getattr(made, name) for name in names) for made in found] == [
        ("float32", 1, 1, 16, 256, False),
        ("bfloat16", 16, 16, 256, 2048, True),
    ]
    assert (found[0].max_model_len, found[0].max_positions) == (512, 514)


@pytest.mark.parametrize(
    ("vocab_size", "gpu_bytes", "max_num_seqs"),
    [
        (49_152, 80, 256),
        (151_936, 230, 256),
        (151_936, 170, 192),
        (151_936, 140, 128),
        (151_936, 80, 64),
        (151_936, 24, 64),
    ],
)
def test_a_gpu_has_as_many_rows_as_their_logits_leave_room_for(vocab_size, gpu_bytes, max_num_seqs):
    machine = replace(MACHINE, gpu_bytes=gpu_bytes * 10**9, gpu_free_bytes=gpu_bytes * 10**9)
    model = replace(make_model(), vocab_size=vocab_size)
    made = plan(make_draft(16), machine=machine, device="cuda", model=model)
    taken = made.max_num_seqs * 16 * vocab_size * 8 * 2
    assert made.max_num_seqs == max_num_seqs
    assert (taken <= 0.05 * 0.9 * gpu_bytes * 10**9) == ("at most 5%" in made.reasons["max_num_seqs"])


def test_so_do_recurrent_states(monkeypatch):
    monkeypatch.setattr(
        "blockdraft.planner.resolver.bytes_per_row", lambda specs, element_bytes, block: 20 << 20
    )
    assert plan(machine=GPU, device="cuda", model=make_hybrid()).max_num_seqs == 128


@pytest.mark.parametrize(("block", "width"), [(2, 2), (8, 8), (16, 8)])
def test_auto_width_on_a_cpu_is_the_block_up_to_eight(block, width):
    made = plan(make_draft(block))
    assert (made.width, made.block) == (width, block)
    assert made.max_positions == made.max_model_len + 2 * block


@pytest.mark.parametrize(
    "name", ["page_size", "max_num_seqs", "max_prefill_tokens", "max_queue", "seed", "max_model_len", "width"]
)
def test_what_was_asked_for_is_what_is_planned(name):
    assert getattr(plan(make_draft(), **{name: 5}), name) == 5


@pytest.mark.parametrize("name", ["prefix_cache", "overlap"])
@pytest.mark.parametrize("value", [True, False])
def test_switches_are_passed_on(name, value):
    assert getattr(plan(**{name: value}), name) is value


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_dtype_decides_how_many_tokens_fit(dtype):
    made = plan(dtype=dtype, cache_bytes=1_000_000, max_num_seqs=1000, page_size=1)
    assert made.dtype == dtype
    cost = 4 * 2 * 2 * 8 * ELEMENT_BYTES[dtype]  # layers, keys and values, heads, dim
    assert made.num_pages == 1_000_000 // cost


def test_the_drafters_layers_are_paid_for_too():
    sizes = {"cache_bytes": 1_000_000, "max_num_seqs": 1000, "page_size": 1}
    # 4 layers of the target and 2 of the drafter, 128 bytes per token each.
    assert plan(**sizes).num_pages == 1_000_000 // 512
    assert plan(make_draft(), **sizes).num_pages == 1_000_000 // 768


def test_auto_cache_is_a_share_of_free_memory():
    machine = Machine(memory_bytes=4_000_000)
    pages = plan(machine=machine, max_num_seqs=1000, page_size=1).num_pages
    assert pages == int(4_000_000 * CACHE_SHARE) // 512


def test_auto_cache_is_modest_on_a_cpu():
    """Old prompts fill what they may: nobody has asked for gigabytes of them."""
    machine = Machine(memory_bytes=64 * GIB)
    per_token = 512
    short = plan(machine=machine, max_num_seqs=10**7, page_size=1)
    assert short.num_pages * per_token == CPU_CACHE_BYTES
    positions = CPU_CACHE_BYTES // per_token
    long = plan(machine=machine, model=make_model(max_positions=positions), max_num_seqs=10**7, page_size=1)
    assert long.num_pages == 2 * positions
    assert "1 GiB" in short.reasons["cache_bytes"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_seqs": 2, "max_model_len": 100, "page_size": 10}, {"num_pages": 2 * (100 + 2 + 10) // 10}),
        ({"cache_bytes": 512 * 200, "page_size": 16}, {"max_model_len": 200 - 2 - 16}),
        ({"width": 5}, {"width": 5, "block": 5}),
        ({"max_model_len": 512}, {"max_model_len": 512}),
        ({"max_model_len": 100, "cache_bytes": 512 * 118, "page_size": 16}, {"max_model_len": 100}),
    ],
)
def test_sizes_follow_from_what_was_asked(settings, expected):
    made = plan(**settings)
    assert {name: getattr(made, name) for name in expected} == expected


FEW = Machine(memory_bytes=0)
SHORT = {"max_model_len": 100, "cache_bytes": 512 * 117}


@pytest.mark.parametrize(
    ("kind", "given", "parts"),
    [
        (
            SettingsError,
            {"draft": make_draft(8), "width": 9},
            ("width = 9", "some/drafter", "use --width 8"),
        ),
        (
            SettingsError,
            {"max_model_len": 513},
            ("= 513", "knows 512", "use --max-model-len 512"),
        ),
        (CapacityError, SHORT, ("raise --cache-bytes or lower --max-model-len",)),
        (CapacityError, {"cache_bytes": 1}, ("raise --cache-bytes or lower --max-model-len",)),
        (CapacityError, {"machine": FEW}, ("0 tokens",)),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(kind, given, parts):
    message = refusal(kind, **given)
    assert all(part in message for part in parts)


# ---- states


def state_bytes(width, element_bytes=4):
    """Of one row of make_hybrid, by hand."""
    wide = max(element_bytes, 4)
    channels = 2 * 2 * 8 + 4 * 12  # queries, keys, values
    state = 4 * 8 * 12 * wide + 3 * channels * element_bytes
    tape = (2 * 8 + 4 * (12 + 1)) * wide + channels * element_bytes
    return 3 * (state + width * tape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("block", [None, 8, 16])
def test_states_are_paid_for_before_pages(dtype, block):
    draft = None if block is None else make_draft(block)
    size = ELEMENT_BYTES[dtype]
    states = (7 + 1) * state_bytes(block or 1, size)  # one more row, for what runs beside the sequences
    per_token = 2 * 2 * 8 * size * (3 if draft else 1)  # one layer that attends, and the drafter's two
    made = plan(
        draft,
        model=make_hybrid(9000),
        dtype=dtype,
        max_num_seqs=7,
        page_size=1,
        prefix_cache=False,
        cache_bytes=states + 1000 * per_token + per_token - 1,
    )
    assert made.num_pages == 1000
    assert made.max_model_len == 1000 - 2 * (block or 1) - 1


def test_the_sum_of_the_states_is_that_of_the_layers():
    specs = make_hybrid().layer_specs()
    for size, width in [(4, 1), (2, 8), (8, 16)]:
        assert bytes_per_row(specs, size, width) == state_bytes(width, size)
    assert bytes_per_row(make_model().layer_specs(), 4, 8) == 0


def test_states_that_fill_the_cache_are_refused_with_both_ways_out():
    states = 17 * state_bytes(1)
    for cache_bytes in (states - 1, states):
        message = refusal(CapacityError, model=make_hybrid(), max_num_seqs=16, cache_bytes=cache_bytes)
        assert f"the states and exact windows of all rows take {states:,} bytes" in message
        assert f"the cache has {cache_bytes:,}" in message
        assert "raise --cache-bytes or lower --max-num-seqs" in message
    assert (
        plan(model=make_hybrid(), max_num_seqs=16, cache_bytes=states + 128 * 100).max_model_len
        == 100 - 2 - 16
    )
    # Fewer rows leave room for pages.
    assert plan(model=make_hybrid(), max_num_seqs=1, cache_bytes=states).max_model_len > 100


SAVED = 3 * (4 * 8 * 12 * 4 + 3 * (2 * 2 * 8 + 4 * 12) * 4)  # bytes of a saved state of make_hybrid


def test_saved_states_get_a_quarter_of_the_cache_beside_the_rows():
    rows, per_token = 2 * state_bytes(1), 2 * 2 * 8 * 4
    made = plan(model=make_hybrid(9000), max_num_seqs=1, cache_bytes=rows + 40 * SAVED)
    assert made.num_states == 9  # and a spare slot
    assert made.num_pages == 30 * SAVED // per_token // made.page_size
    assert (made.prefix_cache, made.state_grid) == (True, 64)
    assert made.reasons["prefix_state_bytes"] == "1/4 of the cache, in states of 0.0 MB"


def test_saved_states_get_what_is_asked_for():
    asked = plan(model=make_hybrid(), prefix_state_bytes=5 * SAVED)
    assert asked.num_states == 4
    assert plan(model=make_hybrid(), prefix_state_bytes=1 << 40, cache_bytes=1 << 41).num_states == 512


@pytest.mark.parametrize("asked", [0, 2 * SAVED - 1])
def test_prefixes_are_not_reused_if_no_state_can_be_saved(asked):
    made = plan(model=make_hybrid(), prefix_state_bytes=asked)
    assert (made.num_states, made.prefix_cache) == (0, False)
    assert "too little for a recurrent state" in made.reasons["prefix_cache"]
    assert plan(model=make_model(), prefix_state_bytes=asked).prefix_cache


def test_states_are_saved_where_a_page_ends():
    assert plan(model=make_hybrid(), page_size=24).state_grid == 192


def test_no_state_is_saved_without_a_prefix_cache():
    made = plan(model=make_hybrid(), prefix_cache=False)
    assert (made.num_states, made.prefix_cache) == (0, False)
    assert "prefix_cache" not in made.reasons


# ---- quantization

PACKED = Weights(1000, method="gptq")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_auto_leaves_plain_weights_plain(device):
    for num_values in (1000, 10**10):
        made = plan(
            make_draft(),
            machine=GPU,
            device=device,
            weights=Weights(num_values),
            draft_weights=Weights(num_values),
        )
        assert (made.quantization, made.draft_quantization) == ("none", "none")


@pytest.mark.skipif(why_not_here() is not None, reason=f"no products in whole numbers: {why_not_here()}")
def test_auto_takes_whole_numbers_on_a_cpu_where_their_quality_was_measured():
    plain, ggufs = Weights(1000), Weights(1000, "GGUF")
    made = plan(make_draft(), weights=ggufs, draft_weights=plain, name="default")
    assert (made.quantization, made.draft_quantization) == ("int8", "int8")
    assert str(measured_quality("default")) in made.reasons["quantization"]
    assert plan(weights=plain, name="default", dtype="float64").quantization == "none"
    assert plan(weights=plain, name="default", device="cuda", machine=GPU).quantization == "none"
    assert plan(weights=PACKED, name="default").quantization == "none"
    assert plan(weights=ggufs, name="default", quantization="none").quantization == "none"
    assert plan(weights=ggufs).quantization == "none"
    assert plan(weights=ggufs, quantization="int8").quantization == "int8"
    assert plan(weights=plain, quantization="int8").quantization == "int8"


def test_quality_that_is_not_kept_is_as_good_as_not_measured(monkeypatch):
    table = {
        "good": Quality(MAX_PERPLEXITY, MAX_COMMITTED),
        "worse": Quality(MAX_PERPLEXITY * 1.01, 0.0),
        "slower": Quality(-0.01, MAX_COMMITTED * 1.01),
    }
    monkeypatch.setattr("blockdraft.planner.quality._table", lambda: table)
    names = ("good", "worse", "slower", "other")
    assert [measured_quality(name) for name in names] == [table["good"], None, None, None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_unpacks_on_a_cpu_what_fits_easily(dtype):
    most = int(MACHINE.memory_bytes * UNPACK_SHARE) // ELEMENT_BYTES[dtype]
    assert plan(weights=Weights(most, "gptq"), dtype=dtype).quantization == "none"
    assert plan(weights=Weights(most + 1, "gptq"), dtype=dtype).quantization == "keep"


def test_auto_keeps_codes_that_were_measured_on_the_card(monkeypatch):
    gpu = Gpu("a card", (8, 9), GPU.gpu_bytes, GPU.gpu_free_bytes, "", False)
    here = {"machine": replace(GPU, gpus=(gpu,)), "device": "cuda", "weights": Weights(1000, "gptq", "int4")}
    here["max_num_seqs"] = 4
    assert plan(**here).quantization == "none"
    monkeypatch.setitem(MEASURED, ((8, 9), "int4"), KernelSpeed(64))
    made = plan(**here)
    assert made.quantization == "keep"
    assert "faster packed" in made.reasons["quantization"]
    for many in (65, "auto"):
        made = plan(**here | {"max_num_seqs": many})
        assert made.quantization == "none"
        assert "with few, --quantization keep" in made.reasons["quantization"]
    assert plan(**here, quantization="none").quantization == "none"
    others = (
        {"weights": Weights(1000, "modelopt NVFP4", "nvfp4")},
        {"weights": Weights(1000, "gptq")},
        {"device": "cpu"},
        {"machine": replace(GPU, gpus=(replace(gpu, capability=(8, 0)),))},
        {"model": read_model_config(CONFIGS["Qwen/Qwen3-30B-A3B"], name="a mixture")},
    )
    assert [plan(**{**here, **other}).quantization for other in others] == ["none"] * 5


def test_auto_names_both_forms_where_memory_allows():
    gpu = Gpu("H200", (9, 0), GPU.gpu_bytes, GPU.gpu_free_bytes, "", False)
    here = {"machine": replace(GPU, gpus=(gpu,)), "device": "cuda"}
    most = int(gpu_budget(Settings(), GPU) * UNPACK_SHARE)
    for num_values, rows, expected, named in (
        (most / 2.64, "auto", "none", "with few, --quantization both is"),
        (most / 2.64, 4, "keep", "steps of so few rows are faster packed"),
        (most / 2.6, "auto", "none", "with few, --quantization keep is"),
        (most, "auto", "keep", "unpacked it would take over"),
    ):
        weights = Weights(int(num_values), "gptq", "int4")
        made = plan(**here, weights=weights, max_num_seqs=rows, max_model_len=100)
        assert made.quantization == expected
        assert named in made.reasons["quantization"]
    packed = Weights(1000, "gptq", "int4")
    mixture = read_model_config(CONFIGS["Qwen/Qwen3-30B-A3B"], name="a mixture")
    for model in (make_model(), mixture):  # whose drafter is dense
        made = plan(make_draft(), **here, model=model, weights=Weights(1000), draft_weights=packed)
        assert "with few, --draft-quantization both is" in made.reasons["draft_quantization"]
    assert plan(**here, weights=packed, quantization="both").quantization == "both"
    float32 = here | {"weights": Weights(1000, "gptq", "int4"), "dtype": "float32"}
    assert plan(**float32).quantization == "none"
    for other in (here, {**here, "weights": Weights(1000, "fp8")}, {"weights": Weights(9, "gptq", "int4")}):
        message = refusal(SettingsError, **{"weights": Weights(1000), **other}, quantization="both")
        assert "quantization = both, but on this device no kernel was measured" in message


@pytest.mark.parametrize(
    ("method", "config", "code"),
    [
        ("gptq", {"quantization_config": {"bits": 4}}, "int4"),
        ("gptq", {"quantization_config": {"bits": 8}}, None),
        ("gptq 4 bit", {"quantization_config": {"bits": 4}}, "int4"),  # as a start names it
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "int4"),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4}}, "nvfp4"),
        ("modelopt NVFP4", {}, "nvfp4"),
        ("modelopt", {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4_AWQ"}}}, "nvfp4"),
        ("mxfp4", {}, "mxfp4"),
        ("fp8", {"num_bits": 8}, None),
        ("GGUF", {"bits": 4}, None),
        (None, {"head_bits": 4, "bits": 4}, None),
    ],
)
def test_a_code_is_told_by_the_configuration(method, config, code):
    assert code_of(method, config) == code


def test_a_gguf_file_s_code_is_the_type_of_most_of_its_bytes():
    """Once its kernel is measured on the card, both forms are held, but never the packed one alone."""
    found = [code_of("GGUF", {}, ggml_type=kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "INT4", None)]
    assert found == ["q4_0", "q4_1", "q8_0", None, None, None]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "auto"])
def test_auto_unpacks_on_a_gpu_what_fits_easily(device):
    most = int(gpu_budget(Settings(), GPU) * UNPACK_SHARE) // 2
    assert plan(machine=GPU, weights=Weights(most, "fp8"), device=device).quantization == "none"
    assert plan(machine=GPU, weights=Weights(most + 1, "fp8"), device=device).quantization == "keep"


# ---- a GPU's memory


def test_a_gpu_caches_in_what_the_budget_leaves_beside_weights_and_work():
    settings = {"max_model_len": 500, "max_num_seqs": 10**6, "device": "cuda", "page_size": 16}
    made = plan(machine=GPU, weights=Weights(10 * 10**9), gpu_memory_utilization=0.5, **settings)
    room = int(80e9 * 0.5) - 2 * 10**9 - 20 * 10**9 - WORK_BYTES
    assert made.num_pages == room // bytes_per_token(make_model().layer_specs(), 2) // 16
    halved = plan(machine=GPU, weights=Weights(10 * 10**9), quantization="fp8", **settings)
    assert halved.num_pages > made.num_pages


def test_weights_over_the_budget_are_refused_with_the_flags_that_help():
    for settings in ({"weights": Weights(40 * 10**9)}, {"gpu_memory_utilization": 0.01}):
        text = refusal(CapacityError, machine=GPU, device="cuda", **settings)
        assert all(word in text for word in ("--gpu-memory-utilization", "--quantization fp8", "80.0 GB"))
    assert plan(machine=GPU, device="cuda", weights=Weights(40 * 10**9), quantization="fp8")


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "most", float("nan")])
def test_a_share_of_the_memory_is_more_than_nothing_and_at_most_all(share):
    with pytest.raises(SettingsError, match="gpu_memory_utilization"):
        Settings(gpu_memory_utilization=share)


def test_target_and_drafter_are_decided_one_by_one():
    huge = Weights(10**15, "awq")
    made = plan(make_draft(), weights=huge, draft_weights=PACKED)
    assert (made.quantization, made.draft_quantization) == ("keep", "none")
    made = plan(make_draft(), weights=PACKED, draft_weights=huge)
    assert (made.quantization, made.draft_quantization) == ("none", "keep")
    assert plan(weights=huge).draft_quantization == "none"  # no drafter
    made = plan(make_draft(), weights=Weights(1), quantization="fp8", draft_quantization="int8")
    assert (made.quantization, made.draft_quantization) == ("fp8", "int8")


@pytest.mark.parametrize("asked", ["keep", "none"])
@pytest.mark.parametrize("weights", [Weights(1), Weights(10**15), PACKED, Weights(10**15, "GGUF")])
def test_keep_and_none_are_done_as_asked(asked, weights):
    made = plan(weights=weights, draft_weights=weights, quantization=asked, draft_quantization=asked)
    assert (made.quantization, made.draft_quantization) == (asked, asked)


def test_auto_leaves_a_drafter_unquantised_and_says_why():
    made = plan(make_draft(), machine=GPU, device="cuda", weights=Weights(1000))
    assert made.draft_quantization == "none"
    assert "int4 drafts are accepted less, fp8 and int8 were not timed" in made.reasons["draft_quantization"]
    assert made.reasons["quantization"] == "the file is not quantised"


def test_int4_is_made_where_a_kernel_multiplies_it():
    gpu = Gpu("H200", (9, 0), GPU.gpu_bytes, GPU.gpu_free_bytes, "", False)
    here = {"machine": replace(GPU, gpus=(gpu,)), "device": "cuda", "weights": Weights(1000)}
    mixture = {"model": read_model_config(CONFIGS["Qwen/Qwen3-30B-A3B"], name="a mixture")}
    assert plan(**here, quantization="int4").quantization == "int4"
    assert plan(make_draft(), **here, draft_quantization="int4").draft_quantization == "int4"
    older = {**here, "machine": replace(GPU, gpus=(replace(gpu, capability=(8, 0)),))}
    for other in (older, {**here, **mixture}, {**here, "device": "cpu"}):
        message = refusal(SettingsError, quantization="int4", **other)
        assert "no kernel was measured that multiplies this model in int4" in message
    for asked in ("fp8", "int8", "int4"):
        assert plan(**{**here, "weights": Weights(1000, "GGUF")}, quantization=asked).quantization == asked
    packed = {**here, "weights": Weights(1000, "gptq", "int4")}
    assert "is quantised already (gptq)" in refusal(SettingsError, quantization="int4", **packed)


@pytest.mark.parametrize("asked", ["fp8", "int8"])
def test_packed_weights_are_not_quantised_again(asked):
    message = refusal(SettingsError, weights=PACKED, quantization=asked)
    assert f"quantization = {asked}, but the checkpoint is quantised already (gptq)" in message
    assert "use keep or none" in message
    message = refusal(SettingsError, draft_weights=PACKED, draft_quantization=asked)
    assert message.startswith(f"draft_quantization = {asked}")
    made = plan(weights=Weights(1), draft_weights=PACKED, quantization=asked)  # one setting each
    assert (made.quantization, made.draft_quantization) == (asked, "none")


# ---- any settings


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    page_size=st.integers(1, 300),
    block=st.none() | st.integers(2, 16),
    width=st.just("auto") | st.integers(1, 16),
    max_model_len=st.just("auto") | st.integers(2, 600),
    max_num_seqs=st.just("auto") | st.integers(1, 40),
    cache_tokens=st.integers(1, 3000),
    dtype=st.sampled_from(["auto", "float32", "float64", "bfloat16"]),
    max_positions=st.integers(1, 600),
    make=st.sampled_from([make_model, make_hybrid]),
)
def test_a_lone_sequence_always_has_room_for_its_context_and_two_blocks(
    page_size, block, width, max_model_len, max_num_seqs, cache_tokens, dtype, max_positions, make
):
    draft = None if block is None else make_draft(block)
    model = make(max_positions)
    specs = model.layer_specs() + (draft.layer_specs() if draft else ())
    size = ELEMENT_BYTES["float32" if dtype == "auto" else dtype]
    cache_bytes = cache_tokens * bytes_per_token(specs, size)
    settings = {
        "page_size": page_size,
        "width": width,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "cache_bytes": cache_bytes,
        "dtype": dtype,
    }
    try:
        made = plan(draft, model=model, **settings)
    except (SettingsError, CapacityError):
        return
    assert made.num_pages * page_size >= made.max_model_len + 2 * made.block
    states = (made.max_num_seqs + 1) * bytes_per_row(specs, size, made.block)
    pages = made.num_pages * page_size * bytes_per_token(specs, size)
    assert pages + states <= cache_bytes
    assert made.max_positions >= made.max_model_len + 2 * made.block
    assert 2 <= made.max_model_len <= max_positions
    assert made.block == max(made.width, block or 1)
    assert max_model_len in ("auto", made.max_model_len)
