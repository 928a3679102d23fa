"""What fits: kinds of cache, shared GPUs, unified memory, and changes that really make a pair fit."""

import argparse
import json
from dataclasses import replace

import pytest

from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.cli.flags import add_settings, given_settings
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Machine
from blockdraft.planner.acceptance import fading, own_acceptance, published_acceptance
from blockdraft.planner.advice import advise, best_width, fit_pair, fixes, wanted
from blockdraft.planner.estimate import estimate_step, unpacks_weights
from blockdraft.planner.external import fit_external
from blockdraft.planner.memory import INT4_BYTES, held_parts
from blockdraft.planner.memory_fit import Footprint, fit_native, machine_of
from blockdraft.planner.pair import Case, Model, Pair, open_pair
from blockdraft.planner.report import make_report
from blockdraft.planner.resolver import UNIFIED_SHARE, gpu_budget
from blockdraft.planner.shape import kinds, raw_shape
from blockdraft.planner.stored import Size, Stored, open_stored, stored_parts
from blockdraft.settings.settings import DEFAULTS, Settings
from blockdraft.settings.shipped import shipped_drafter
from tests import tiny
from tests.planner.shapes import folders, on, opened

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}


def case_of(settings, pair, machine, card):
    return Case(settings, machine, pair, None if card is None else card_by_key(card))


def test_the_cache_is_counted_by_kind_of_layer():
    _, pair = opened("qwen3.5-35b-a3b")
    found = {kind.name: kind for kind in kinds(pair.target.shape.specs, 2, 16)}
    assert found["full"].num_layers == 10
    assert found["full"].bytes_per_token == 10 * 2 * 2 * 256 * 2
    state, tail = 32 * 128 * 128 * 4, 3 * 8192 * 2
    tape = 16 * ((2048 + 4096 + 32) * 4 + 8192 * 2)
    assert found["recurrent"].num_layers == 30
    assert found["recurrent"].bytes_per_row == 30 * (state + tail + tape)
    assert found["recurrent"].bytes_per_token == 0


def test_the_drafter_has_a_cache_of_its_own():
    wanted_settings, pair = opened("qwen3-8b")
    fit = fit_native(Case(wanted_settings, on("h200"), pair))
    assert fit.footprint.per_token == 36 * 2 * 8 * 128 * 2 + 5 * 2 * 8 * 128 * 2
    names = [item.name for item in fit.items]
    assert names[-2:] == ["target cache", "drafter cache"]
    assert names[:2] == ["target weights", "drafter weights"]


def test_latent_attention_is_small_and_every_gpu_keeps_it():
    shape = raw_shape(DEEPSEEK, name="deepseek")
    assert [kind.name for kind in kinds(shape.specs, 2, 1)] == ["latent"]
    stored = Stored("deepseek", "folder", DEEPSEEK, None, {"model.x": Size(10**9, 10**9, True)}, ())
    pair = Pair(Model(stored, shape), None, None, None, 1)
    for tensor in (1, 8):
        settings = Settings(model="x", engine="vllm", tensor_parallel=tensor)
        fit = fit_external(Case(settings, on("b200"), pair))
        assert fit.footprint.per_token == 61 * (512 + 64) * 2


def test_other_engines_keep_a_window_and_a_state_for_every_drafted_token():
    settings, pair = opened("gpt-oss-20b")
    fit = fit_external(Case(replace(settings, engine="vllm"), on("h100"), pair))
    window = pair.target.shape.specs[0].window
    assert fit.footprint.windows == ((window + 16, 12 * 2 * 8 * 64 * 2),)
    own = fit_native(Case(settings, on("h100"), pair))
    assert own.footprint.windows == ()
    assert own.footprint.per_token == fit.footprint.per_token + 12 * 2 * 8 * 64 * 2

    settings, hybrid = opened("qwen3.5-35b-a3b")
    fit = fit_external(Case(replace(settings, engine="sglang"), on("h200"), hybrid))
    alone = replace(hybrid, draft=None)
    plain = fit_external(Case(replace(settings, engine="sglang", width=1), on("h200"), alone))
    assert fit.footprint.per_row == 16 * plain.footprint.per_row > 0


def test_gpus_share_weights_and_heads_but_no_head_is_cut():
    settings, pair = opened("qwen3-8b", engine="vllm")
    one, four, many = (
        fit_external(Case(replace(settings, tensor_parallel=count), on("h100"), pair)) for count in (1, 4, 16)
    )
    assert four.parts[0].text == pytest.approx(one.parts[0].text / 4, rel=1e-6)
    assert four.footprint.per_token * 4 == one.footprint.per_token
    assert many.footprint.per_token * 8 == one.footprint.per_token  # 8 heads
    half = fit_external(Case(replace(settings, kv_dtype="fp8"), on("h100"), pair))
    assert half.footprint.per_token * 2 == one.footprint.per_token


@pytest.mark.parametrize(
    ("kv_dtype", "head_bytes"),  # of a key and a value of 128 numbers
    [
        ("auto", 512),
        ("bfloat16", 512),
        ("fp8_e4m3", 256),
        ("nvfp4", 144),
        ("turboquant_k8v4", 196),
        ("turboquant_4bit_nc", 134),
        ("turboquant_k3v4_nc", 118),
        ("turboquant_3bit_nc", 102),
        ("int4_per_token_head", 136),
        ("of_tomorrow", 512),
    ],
)
def test_a_kv_dtype_takes_its_own_bytes(kv_dtype, head_bytes):
    settings, pair = opened("qwen3-8b", engine="vllm", has_draft=False, kv_dtype=kv_dtype)
    fit = fit_external(Case(settings, on("h200"), pair))
    ends = 4 if kv_dtype.startswith("turboquant") else 0  # two layers at either end stay in 2 bytes
    assert fit.footprint.per_token == 8 * (ends * 512 + (36 - ends) * head_bytes)
    report = make_report(Case(settings, on("h200"), pair, card_by_key("h200")))
    assert sum(kind.bytes_per_token for kind in report.caches["target"]) == fit.footprint.per_token


def test_a_smaller_cache_is_read_faster_and_hybrids_have_no_plain_ends():
    def step(kv_dtype):
        settings, pair = opened("qwen3-8b", engine="vllm", kv_dtype=kv_dtype)
        fit = fit_external(Case(settings, on("h200"), pair))
        return estimate_step(fit, pair, card_by_key("h200"), rows=16, context=32768, width=16).seconds

    assert step("nvfp4") < step("fp8") < step("auto")
    settings, hybrid = opened(
        "qwen3.5-35b-a3b", engine="vllm", has_draft=False, kv_dtype="turboquant_4bit_nc"
    )
    assert fit_external(Case(settings, on("h200"), hybrid)).footprint.per_token == 10 * 2 * (2 * 128 + 6)


def test_experts_made_int4_are_counted():
    """As an MTP head's are, with --draft-quantization int4."""
    _, pair = opened("qwen3.5-35b-a3b")
    values = pair.target.shape.values
    parts = [held_parts(pair.target, storage, 2) for storage in ("int4", "none")]
    assert parts[1].experts == 2 * values.experts > 10**9
    assert parts[0].experts == int(values.experts * INT4_BYTES)


def test_a_step_reads_one_of_the_two_forms_that_memory_holds():
    settings, pair = opened("qwen3-8b")
    one, both = (
        fit_pair(Case(replace(settings, quantization=how, draft_quantization=how), on("h200"), pair))
        for how in ("none", "both")
    )
    assert both.parts == one.parts
    assert all(both.items[i].num_bytes > 1.2 * one.items[i].num_bytes for i in range(2))


def test_unified_memory_leaves_more_to_the_system():
    spark, card = on("dgx-spark"), on("h200")
    settings = Settings(model="x")
    assert gpu_budget(settings, spark) == int(spark.gpu_bytes * UNIFIED_SHARE)
    assert gpu_budget(settings, card) == int(card.gpu_bytes * 0.9)
    assert gpu_budget(replace(settings, gpu_memory_utilization=0.5), spark) == spark.gpu_bytes // 2
    wanted_settings, pair = opened("qwen3-8b")
    found = fit_native(Case(wanted_settings, spark, pair)).choices
    share = next(choice for choice in found if choice.name == "gpu_memory_utilization")
    assert share.value == "0.85"
    assert "unified" in share.reason
    told = replace(wanted_settings, engine="vllm")
    for share, value in ((0.9, "0.8"), (0.85, "0.85"), (0.95, "0.95")):  # 0.9 is the default: nobody asked
        told = replace(told, gpu_memory_utilization=share)
        fit = fit_external(Case(told, spark, pair))
        found = next(one for one in fit.choices if one.name == "gpu_memory_utilization")
        assert found.value == value
        assert ("unified" in found.reason) is (share == 0.9)
        assert fit.budget == int(spark.gpu_bytes * float(value))
    assert fit_external(Case(replace(told, gpu_memory_utilization=0.9), card, pair)).budget == int(
        card.gpu_bytes * 0.9
    )


def test_every_auto_has_a_value_and_a_reason():
    settings, pair = opened("qwen3.5-35b-a3b")
    found = {choice.name: choice for choice in fit_pair(Case(settings, on("h200"), pair)).choices}
    autos = {name for name, default in DEFAULTS.items() if default == "auto"}
    left = {"load_format", "kv_dtype", "verify", "tool_format", "prefix_disk_bytes"}  # no part of a plan
    assert autos - left <= found.keys()
    assert all(choice.value not in ("", "auto") and choice.reason for choice in found.values())
    asked = replace(settings, width=8, max_num_seqs=3)
    found = fit_pair(Case(asked, on("h200"), pair)).choices
    reasons = {choice.name: choice.reason for choice in found}
    assert reasons["width"] == reasons["max_num_seqs"] == "asked for"
    assert reasons["max_prefill_tokens"] != "asked for"


@pytest.mark.parametrize(
    ("shape", "card", "chunk"),
    [("qwen3.5-35b-a3b", "h200", 8192), ("qwen3-8b", "h200", 2048), ("gpt-oss-20b", "rtx-5090", 2048)],
)
def test_only_mixtures_on_large_cards_read_prompts_in_large_chunks(shape, card, chunk):
    settings, pair = opened(shape)
    found = {choice.name: choice for choice in fit_pair(Case(settings, on(card), pair)).choices}
    assert found["max_prefill_tokens"].value == f"{chunk:,}"


def test_sequences_and_the_longest_context_agree():
    settings, pair = opened("qwen3-8b")
    fit = fit_native(Case(settings, on("h100"), pair))
    for count in (1, 4, 16):
        longest = fit.longest(count, 10**6)
        assert fit.sequences(longest) >= count
        assert fit.cache_bytes // fit.footprint.at(longest + 1) < count


def test_a_sequence_takes_whole_pages_and_its_scratch():
    footprint = Footprint(per_token=10, per_row=7, windows=((32, 3),), scratch=4, page_size=16)
    assert footprint.at(12) == 7 + 16 * 10 + 16 * 3
    assert footprint.at(13) == 7 + 32 * 10 + 32 * 3
    assert footprint.at(100) == 7 + 112 * 10 + 32 * 3


def parsed(settings, flags):
    """The settings that a user has after adding `flags`."""
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return replace(settings, **given_settings(parser.parse_args(flags.split())))


@pytest.mark.parametrize(
    ("shape", "card", "changes"),
    [
        ("qwen3-8b", "rtx-5090", {"max_model_len": 32768, "max_num_seqs": 8}),
        ("qwen3-8b", "l4", {}),
        ("qwen3.5-35b-a3b", "h100", {}),
        ("gpt-oss-20b", "h100", {"engine": "sglang", "max_model_len": 131072, "max_num_seqs": 16}),
        ("gpt-oss-20b", "rtx-4090", {"engine": "vllm"}),
    ],
)
def test_every_fix_that_is_named_makes_it_fit(shape, card, changes):
    settings, pair = opened(shape, **changes)
    case = case_of(settings, pair, on(card), card)
    before = fit_pair(Case(settings, on(card), pair))
    context, rows = wanted(case)
    assert before.problem is not None or before.sequences(context) < rows
    found = fixes(case)
    assert found
    for fix in found:
        changed = parsed(settings, fix.flags)
        other = open_pair(changed) if "--draft" in fix.flags else pair
        fit = fit_pair(Case(changed, on(card), other))
        assert fit.problem is None, fix
        context, rows = wanted(replace(case, settings=changed))
        if "--max-model-len" in fix.flags:
            rows = wanted(case)[1]
        assert fit.max_model_len >= context
        assert fit.sequences(context) >= (1 if "--max-num-seqs" in fix.flags else rows), fix


def test_a_gguf_file_that_does_not_fit_unpacked_may_stay_packed_or_become_fp8():
    settings, plain = opened("qwen3-8b", max_model_len=8192, max_num_seqs=4, quantization="none")
    values = plain.target.shape.values
    packed = {"model.layers.0.all.weight": Size(values.projections, int(0.5625 * values.projections), True)}
    target = replace(plain.target, stored=replace(plain.target.stored, where="GGUF file", tensors=packed))
    asked = replace(settings, load_format="auto")
    found = fixes(case_of(asked, replace(plain, target=target), on("rtx-4090"), "rtx-4090"))
    assert {"--quantization keep", "--quantization fp8"} <= {fix.flags for fix in found}


def test_what_is_known_to_go_wrong_is_not_advised():
    settings, pair = opened("qwen3-8b", max_model_len=32768, max_num_seqs=8)
    case = case_of(settings, pair, on("rtx-5090"), "rtx-5090")
    assert any("vllm" in fix.flags for fix in fixes(case))
    careful = replace(case, is_allowed=lambda changed: changed.settings.engine != "vllm")
    assert fixes(careful)
    assert not any("vllm" in fix.flags for fix in fixes(careful))


def test_six_kinds_of_users_are_advised_and_each_advice_starts():
    settings, pair = opened("qwen3-8b")
    case = case_of(settings, pair, on("h200"), "h200")
    found = {advice.who: advice for advice in advise(case)}
    assert list(found) == [
        "one user, chat",
        "4-16 users",
        "agent fleet",
        "long context",
        "more at once",
        "out of memory",
    ]
    for advice in found.values():
        fit = fit_pair(Case(parsed(settings, advice.flags), on("h200"), pair))
        assert fit.problem is None
    assert parsed(settings, found["agent fleet"].flags).max_model_len == 16384
    assert "--quantization fp8" in found["out of memory"].flags


def test_nothing_is_advised_that_cannot_start():
    settings, pair = opened("qwen3-8b")
    card = "rtx-4080"  # 17 GB for weights of 18
    found = {advice.who for advice in advise(case_of(settings, pair, on(card), card))}
    assert not found & {"one user, chat", "4-16 users", "long context"}
    assert "out of memory" in found
    small = replace(on(card), gpu_bytes=1 << 30, gpu_free_bytes=1 << 30)
    found = {advice.who for advice in advise(case_of(settings, pair, small, card))}
    assert found == {"out of memory"}, "no flag makes a fleet of it"


def test_on_a_cpu_a_larger_cache_is_advised_where_the_modest_one_is_the_limit():
    settings, pair = opened("qwen3-8b", device="cpu", quantization="int8")
    machine = Machine(memory_bytes=64 << 30)
    found = {advice.who: advice for advice in advise(case_of(settings, pair, machine, None))}
    team = parsed(settings, found["4-16 users"].flags)
    assert team.cache_bytes > 1 << 30
    assert fit_pair(Case(team, machine, pair)).sequences(4096) >= 16
    small = replace(machine, memory_bytes=14 << 30)  # nothing larger fits beside the weights
    assert not any("--cache-bytes" in one.flags for one in advise(case_of(settings, pair, small, None)))


def test_a_fleet_that_does_not_fit_is_told_what_would():
    settings, pair = opened("qwen3-8b")
    case = case_of(settings, pair, on("rtx-5090"), "rtx-5090")
    (fleet,) = [one for one in advise(case) if "fleet" in one.who]
    assert fleet.flags == "--engine vllm --tensor-parallel 8 --max-num-seqs 32 --max-model-len 16384"
    changed = parsed(settings, fleet.flags)
    assert fit_pair(Case(changed, case.machine, pair)).sequences(16384) == 32
    assert fleet.result == "32 sequences of 16,384 tokens (as it is, 3)"
    as_it_is = replace(settings, max_num_seqs=32, max_model_len=16384)
    assert fit_pair(Case(as_it_is, case.machine, pair)).sequences(16384) == 3


def test_more_gpus_of_a_dgx_spark_are_more_machines():
    settings, pair = opened("qwen3-8b", engine="vllm", max_model_len=40960, max_num_seqs=16)
    found = fixes(case_of(settings, pair, on("dgx-spark"), "dgx-spark"))
    (fix,) = [fix for fix in found if "--tensor-parallel 2" in fix.flags]
    assert fix.flags == "--tensor-parallel 2 --num-nodes 2 --head-address HOST"
    assert fix.result == "16 x 40,960 tokens, with a second machine"
    assert parsed(settings, fix.flags).num_nodes == 2


def test_a_native_engine_that_unpacks_in_every_step_is_not_promised_another_ones_speed(monkeypatch):
    """NVFP4 is a fourth of bf16, yet each forward writes all of it out again."""
    settings, plain = opened("qwen3-8b")
    values = plain.target.shape.values
    packed = {
        "model.embed_tokens.weight": Size(values.embedding, 2 * values.embedding, False),
        "lm_head.weight": Size(values.head, 2 * values.head, False),
        "model.norm.weight": Size(values.plain, 2 * values.plain, False),
        "model.layers.0.all.weight": Size(values.projections, int(0.5625 * values.projections), True),
    }
    config = {**plain.target.stored.config, "quantization_config": {"quant_algo": "NVFP4"}}
    target = replace(plain.target, stored=replace(plain.target.stored, tensors=packed, config=config))
    pair, card = replace(plain, target=target), card_by_key("h200")
    kept = replace(settings, load_format="auto", quantization="keep")

    def step(asked):
        fit = fit_pair(Case(asked, on("h200"), pair))
        return unpacks_weights(fit, pair, card), estimate_step(
            fit, pair, card, rows=1, context=1024, width=1
        ).seconds

    assert not step(kept)[0], "a kernel was measured"
    both = replace(settings, load_format="auto", quantization="both")
    fit = fit_pair(Case(both, on("h200"), pair))
    assert fit.plan.quantization == "both"
    assert fit.items[0].num_bytes == plain.target.weights.num_values * 2 + int(values.projections * 0.5625)
    assert "packed and in bfloat16" in fit.items[0].how
    head = {"lm_head.weight": Size(values.head, int(0.5625 * values.head), True)}
    with_head = replace(target, stored=replace(target.stored, tensors=packed | head))
    item = fit_pair(Case(both, on("h200"), replace(pair, target=with_head))).items[0]
    assert item.num_bytes == fit.items[0].num_bytes + int(0.5625 * values.head)
    assert step(both) == step(kept)
    wide = [
        estimate_step(fit_pair(Case(asked, on("h200"), pair)), pair, card, rows=32, context=1024, width=16)
        for asked in (both, replace(both, quantization="none"))
    ]
    assert wide[0].seconds == wide[1].seconds
    monkeypatch.delitem(MEASURED, (card.capability, "nvfp4"))
    is_unpacked, own = step(kept)
    assert is_unpacked
    at_load, unpacked = step(replace(kept, quantization="none"))
    assert not at_load
    is_vllm_unpacking, vllm = step(replace(kept, quantization="auto", engine="vllm"))
    assert not is_vllm_unpacking
    assert vllm < unpacked < own
    assert make_report(Case(kept, on("h200"), pair, card)).unpacks_weights
    monkeypatch.setitem(MEASURED, (card.capability, "nvfp4"), KernelSpeed(16))
    is_unpacked, packed = step(kept)
    assert not is_unpacked
    assert packed < unpacked


def test_no_more_cards_are_named_than_are_needed():
    settings, pair = opened("qwen3-8b", max_model_len=16384, max_num_seqs=8)
    found = [fix.flags for fix in fixes(case_of(settings, pair, on("rtx-5090"), "rtx-5090"))]
    assert [flags for flags in found if "parallel" in flags] == ["--engine vllm --tensor-parallel 2"]


def test_what_is_too_large_for_another_engine_is_told_from_a_context_that_is_too_long():
    settings, pair = opened("qwen3-8b", engine="vllm")
    problem = fit_external(Case(settings, on("rtx-4080"), pair)).problem
    assert problem.startswith("weights and working memory take 27.7 GB, but the budget is 15.5 GB (0.9 of")
    problem = fit_external(Case(replace(settings, max_model_len=40960), on("rtx-5090"), pair)).problem
    assert problem.startswith("a context of 40,960 tokens needs 6.9 GB of cache, and 3.0 GB are left of")


def test_the_more_rows_the_narrower_the_best_width():
    settings, pair = opened("qwen3-8b")
    case = case_of(settings, pair, on("h200"), "h200")
    fit = fit_pair(Case(settings, on("h200"), pair))
    widths = [best_width(case, fit, rows=rows, context=1024)[0] for rows in (1, 16, 256)]
    assert widths[0] == 16
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 16
    asked = replace(case, settings=replace(settings, width=4))
    fit = fit_pair(Case(asked.settings, on("h200"), pair))
    assert best_width(asked, fit, rows=1, context=1024)[0] == 4


def test_acceptance_fades_and_is_known_by_name():
    assert fading(100) == 1.0
    assert fading(20_000) < fading(9000) < 1.0
    assert published_acceptance("/models/Qwen3-8B", "").code == 6.50
    assert published_acceptance("/models/target", "z-lab/Qwen3-4B-DFlash-b16").code == 6.64
    assert not published_acceptance("/models/target", "mine").is_of_pair
    assert published_acceptance("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash").is_of_pair
    other = published_acceptance("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash2")
    assert not other.is_of_pair
    assert "of z-lab's drafter: yours may differ" in other.source


def test_a_drafter_of_ours_says_its_own_acceptance():
    shares = {"code": [0.8, 0.4], "humaneval": [0.6, 0.2], "prose": [0.5, 0.0], "all": [0.1, 0.1]}
    fit_file = {category: {"accepted_by_position": listed} for category, listed in shares.items()}
    found = own_acceptance(fit_file, name="mine")
    assert found.is_of_pair
    assert found.code == pytest.approx((2.2 + 1.8) / 2)
    assert found.maths == found.chat == pytest.approx((2.2 + 1.8 + 1.5) / 3)  # neither is in it: all of them
    folder = shipped_drafter("default")
    stored = open_stored(str(folder), needs_weights=False)
    assert stored.fit_file == json.loads((folder / "fit.json").read_text())


def test_a_card_that_our_kernels_do_not_know_is_named_however_much_it_holds():
    settings, pair = opened("qwen3-8b")
    report = make_report(Case(settings, on("v100"), pair, card_by_key("v100")))
    assert report.verdict == "does not fit"
    assert "capability 7.0" in report.sentence
    asked = replace(settings, device="cpu")
    assert "capability" not in make_report(Case(asked, on("v100"), pair)).sentence


def test_a_model_of_others_without_its_files_is_not_taken_for_one_of_no_size(tmp_path):
    config = '{"model_type": "of-tomorrow", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, '
    (tmp_path / "config.json").write_text(config + '"num_attention_heads": 4}')
    with pytest.raises(ModelError, match="leave out --load-format dummy"):
        open_pair(Settings(engine="vllm", model=str(tmp_path), load_format="dummy"))


def test_who_asks_for_the_cpu_is_not_advised_another_engine():
    settings, pair = opened("qwen3-8b", device="cpu")
    report = make_report(Case(settings, on("h200"), pair, card_by_key("h200")))
    assert not [one for one in report.advice if "--engine" in one.flags]


def test_verdicts():
    settings, pair = opened("qwen3-8b")
    card = card_by_key("h200")
    assert make_report(Case(settings, on("h200"), pair, card)).verdict == "fits"
    many = replace(settings, max_num_seqs=64, max_model_len=40960)
    report = make_report(Case(many, on("h200"), pair, card))
    assert report.verdict == "tight"
    assert "16 sequences of 40,960" in report.sentence
    small = make_report(Case(settings, on("rtx-4080"), pair, card_by_key("rtx-4080")))
    assert small.verdict == "does not fit"
    assert small.speeds == ()


def test_a_cpu_that_cannot_hold_the_weights_says_so():
    settings, pair = opened("qwen3-8b", device="cpu", max_model_len=512)
    fit = fit_native(Case(settings, Machine(memory_bytes=20 << 30), pair))
    assert "37." in fit.problem
    assert "int8" in fit.problem
    assert fit_native(Case(settings, Machine(memory_bytes=64 << 30), pair)).problem is None


def test_another_engine_needs_a_gpu():
    settings, pair = opened("qwen3-8b", engine="vllm")
    with pytest.raises(SettingsError, match="no GPU"):
        fit_external(Case(settings, Machine(memory_bytes=64 << 30), pair))


def test_a_pair_that_does_not_match_is_named():
    target, draft = folders("qwen3-8b")[0], folders("smollm2-135m")[1]
    for engine in ("native", "vllm"):
        with pytest.raises(ModelError, match="the pair does not match"):
            open_pair(Settings(model=target, draft=draft, load_format="dummy", engine=engine))


def test_packed_weights_take_what_the_file_has_and_plain_ones_the_model_s_dtype():
    tensors = {
        "model.embed_tokens.weight": Size(100, 200, False),
        "lm_head.weight": Size(100, 200, False),
        "model.layers.0.mlp.experts.3.down_proj.weight_packed": Size(50, 50, True),
        "model.layers.0.mlp.down_proj.weight_scale": Size(5, 10, False),
        "model.layers.0.input_layernorm.weight": Size(7, 14, False),
        "model.visual.patch.weight": Size(9, 18, False),
    }
    stored = stored_parts(tensors)
    assert (stored.embedding, stored.head, stored.layers, stored.experts) == (200, 200, 24, 50)
    assert (stored.left_out, stored.text) == (18, 474)
    wide = stored_parts(tensors, plain_bytes=4)
    assert (wide.embedding, wide.layers, wide.experts) == (400, 10 + 28, 50)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("config", "quant_file"),
    [
        ({}, None),
        ({"quantization_config": FP8}, None),
        ({"text_config": {"quantization_config": FP8}}, None),
        ({"quantization_config": MODELOPT}, None),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, None),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, None),
        ({}, {"quantization": {"quant_algo": "NVFP4"}}),
        ({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
        ({"quantization_config": {"quant_method": "modelopt"}}, {"quantization": {"quant_algo": "NVFP4"}}),
    ],
)
def test_what_is_quantised_is_told_as_the_loader_tells_it(config, quant_file):
    stored = Stored("x", "folder", config, quant_file, {}, ())
    assert (stored.method is None) == (read_quantization(config, quant_file, name="x") is None)


def test_the_fixture_pair_is_read_to_the_byte():
    pair = open_pair(Settings(model=tiny.TARGET, draft=tiny.DRAFT))
    parts = stored_parts(pair.target.stored.sizes)
    assert parts.text == pair.target.shape.values.total * 4  # stored in float32
    assert machine_of(card_by_key("h100")).gpu_bytes == card_by_key("h100").memory_bytes
