"""Each known-bad combination is found, with its thread; the good one beside it is not."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from blockdraft.cli.plan import problems_with
from blockdraft.errors import FetchError, SettingsError
from blockdraft.launch import preflight
from blockdraft.launch.issues import FACTS, RULES, check_settings, entries, read_entries, refuse
from blockdraft.launch.launch_request import Combination
from blockdraft.machine.machine import Machine
from blockdraft.planner.pair import Case
from blockdraft.planner.resolver import with_drafter
from blockdraft.planner.stored import Stored
from blockdraft.settings.settings import Settings
from tests import tiny
from tests.launch.golden import machine_with, recipe_settings

GEMMA = {"model": "google/gemma-4-31B-it", "draft": "z-lab/gemma-4-31B-it-DFlash"}
REDHAT = {"model": "google/gemma-4-31B-it", "draft": "RedHatAI/gemma-4-31B-it-speculator.dflash"}
QWEN = {"model": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16"}
CODER = {"model": "saricles/Qwen3-Coder-Next-NVFP4-GB10", "draft": "z-lab/Qwen3-Coder-Next-DFlash"}
HYBRID = {"model": "Qwen/Qwen3.5-27B", "draft": "z-lab/Qwen3.5-27B-DFlash"}
A3B = {"model": "Qwen/Qwen3.6-35B-A3B", "draft": "z-lab/Qwen3.6-35B-A3B-DFlash"}
DFLASH2 = {"model": "Qwen/Qwen3.8-27B", "draft": "z-lab/Qwen3.8-27B-DFlash2"}
OSS = {"model": "openai/gpt-oss-120b", "draft": "z-lab/gpt-oss-120b-DFlash"}
SPARK = {"machine": machine_with("gb10"), "gpu_memory_utilization": 0.6}
OLD_RUNNER = {"engine_env": (("VLLM_USE_V2_MODEL_RUNNER", "0"),)}
SGLANG = {"engine": "sglang"}
PACKED = {"draft_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}
WINDOWS = {"draft_config": {"layer_types": ["sliding_attention", "full_attention"]}}
DSPARK = {"draft_config": {"speculators_model_type": "dspark", "block_size": 7}}
XPRESS = {"draft_config": {"architectures": ["Qwen3XPressModel"]}}
SHORT = {"draft_config": {"max_position_embeddings": 40960}}
LAZY = {"engine_args": ("--mamba-radix-cache-strategy", "extra_buffer_lazy")}


def on_kernel(kernel):
    return {"machine": replace(machine_with("gb10"), kernel=kernel)}


# What is bad, and what of it to change so that it is good.
CASES = {
    "gb10-cutlass-fp8": (
        {**REDHAT, **SPARK, "quantization": "fp8", "engine_version": "0.21.0"},
        {"engine_version": "0.22.0"},
    ),
    "draft-non-causal": (
        {**QWEN, "draft_attention_backend": "triton", "engine_version": "0.23.0"},
        {"engine_version": "0.24.0"},
    ),
    "inherited-non-causal": (
        {**QWEN, "attention_backend": "triton", "engine_version": "0.20.2"},
        {"attention_backend": "flash_attn"},
    ),
    "gemma4-one-backend": ({**REDHAT, "engine_version": "0.20.2"}, {"engine_version": "0.21.0"}),
    "qwen3-next-eagle3": ({**CODER, "engine_version": "0.23.0"}, {"engine_version": "0.24.0"}),
    "turboquant-speculation": ({**QWEN, "kv_dtype": "turboquant_k8v4"}, {"draft": "none"}),
    "gemma4-embedding-scale": (GEMMA, {"draft": REDHAT["draft"]}),
    "draft-kv-dtype-mla": ({**QWEN, "kv_dtype": "fp8_ds_mla"}, {"kv_dtype": "fp8"}),
    "fp8-kv-non-causal": (
        {**QWEN, "kv_dtype": "fp8", "engine_version": "0.23.0"},
        {"engine_version": "0.24.0"},
    ),
    "sm100-nvfp4-fp8-kv": (
        {**HYBRID, "model": "nvidia/Qwen3.6-27B-NVFP4", "machine": machine_with("b200")},
        {"machine": machine_with("h200")},
    ),
    "nvfp4-awq": (
        {**HYBRID, "model": "AEON-7/DFlash-Qwen3.5-27B-Uncensored-NVFP4"},
        {"model": "rdtand/Qwen3.5-27B-NVFP4-DeltaNet-Included"},
    ),
    "nvfp4-before-blackwell": ({**CODER, "machine": machine_with("h100")}, {"machine": machine_with("gb10")}),
    "quantised-drafter": ({**QWEN, **PACKED, "engine_version": "0.30.0"}, {"engine_version": "0.31.0"}),
    "speculators-v2-runner": ({**REDHAT, "engine_version": "0.25.1"}, OLD_RUNNER),
    "dflash2-before-support": ({**DFLASH2, "engine_version": "0.27.1"}, {"engine_version": "0.28.0"}),
    "old-runner-dflash2": ({**DFLASH2, **OLD_RUNNER}, {"engine_env": ()}),
    "old-runner-windows": ({**QWEN, **WINDOWS, **OLD_RUNNER}, {"engine_env": ()}),
    "old-runner-rejected-slots": ({**QWEN, **OLD_RUNNER}, {"engine_env": ()}),
    "windows-ignored": ({**QWEN, **WINDOWS, "engine_version": "0.24.0"}, {"engine_version": "0.25.0"}),
    "dspark-short-block": ({**QWEN, **DSPARK, "width": 7}, {"width": 8}),
    "int4-autoround-coder-next": (
        {**CODER, "model": "Intel/Qwen3-Coder-Next-int4-AutoRound"},
        {"model": CODER["model"]},
    ),
    "context-past-drafter": (
        {**QWEN, **SHORT, "max_model_len": 65536, "engine_version": "0.32.0"},
        {"engine_version": "0.33.0"},
    ),
    "context-past-drafters-range": ({**QWEN, **SHORT, "max_model_len": 65536}, {"max_model_len": 40960}),
    "xpress-before-support": ({**QWEN, **XPRESS, "engine_version": "0.32.0"}, {"engine_version": "0.33.0"}),
    "width-past-block": ({**QWEN, "draft_config": {"block_size": 8}, "width": 10}, {"width": 9}),
    "gemma4-redhat-illegal-access": ({**REDHAT, "engine_version": "0.22.0"}, {"engine_version": "0.33.0"}),
    "moe-graphs-illegal-access": (
        {**A3B, "engine_version": "0.22.1", "max_num_seqs": 16},
        {"graphs": False},
    ),
    "dflash2-long-sampling": (
        {**DFLASH2, "engine_version": "0.28.0", "machine": machine_with("a100")},
        {"engine_version": "0.32.0"},
    ),
    "prefix-cache-crash": ({**QWEN, "engine_version": "0.22.0"}, {"prefix_cache": False}),
    "startup-plan-gb10": (
        {**QWEN, **SPARK, "engine_env": (("VLLM_ENABLE_STARTUP_PLAN", "1"),), "engine_version": "0.32.0"},
        {"engine_version": "0.33.0"},
    ),
    "unified-memory-freeze": (
        {**QWEN, **SPARK, "gpu_memory_utilization": 0.89},
        {"gpu_memory_utilization": 0.85},
    ),
    "coder-next-gb10-memory": (
        {**CODER, **SPARK, "gpu_memory_utilization": 0.61},
        {"gpu_memory_utilization": 0.6},
    ),
    "gb10-batched-tokens": ({**QWEN, **SPARK, "max_prefill_tokens": 65536}, {"max_prefill_tokens": 32768}),
    "gb10-wheels": ({**REDHAT, **SPARK, "quantization": "fp8"}, {"machine": machine_with("rtx-5090")}),
    "gb10-gpt-oss": ({**OSS, **SPARK}, {"draft": "none"}),
    "gb10-multi-node-graphs": (
        {**QWEN, **SPARK, "num_nodes": 2, "head_address": "10.0.0.1"},
        {"graphs": False},
    ),
    "gb10-kernel-1019": (
        {**QWEN, **SPARK, **on_kernel("7.0.0-1019-nvidia"), "num_nodes": 2, "head_address": "10.0.0.1"},
        on_kernel("7.0.0-1018-nvidia"),
    ),
    "hybrid-prefix-cache": ({**HYBRID, "engine_version": "0.32.0"}, {"engine_version": "0.33.0"}),
    "hybrid-prefix-boundaries": (HYBRID, {"prefix_cache": False}),
    "mamba-cache-mode": (
        {**HYBRID, "engine_args": ("--mamba-cache-mode", "align")},
        {"engine_version": "0.32.0"},
    ),
    "hybrid-near-ties": (HYBRID, {"draft": "none"}),
    "dspark-json-schema": ({**QWEN, **DSPARK}, {"draft_config": {}}),
    "draft-rows-past-step": (
        {**QWEN, "max_num_seqs": 257, "max_prefill_tokens": 2048},
        {"max_num_seqs": 256},
    ),
    "prefix-cache-acceptance": (QWEN, {"prefix_cache": False}),
    "moe-concurrency": ({**A3B, "max_num_seqs": 9}, {"max_num_seqs": 8}),
    "long-context": ({**QWEN, "max_model_len": 185000}, {"max_model_len": 32768}),
    "min-p-logit-bias": (QWEN, {"draft": None}),
    "sglang-pipeline": ({**QWEN, **SGLANG, "pipeline_parallel": 2}, {"pipeline_parallel": 1}),
    "sglang-cpu": ({**QWEN, **SGLANG, "device": "cpu"}, {"draft": None}),
    "sglang-no-flash-attention": (
        {**QWEN, **SGLANG, "draft_attention_backend": "flash_attn", "machine": machine_with("a100")},
        {"machine": machine_with("h100")},
    ),
    "sglang-speculators-layout": ({**REDHAT, **SGLANG}, {"draft": GEMMA["draft"]}),
    "sglang-quantised-drafter": ({**QWEN, **SGLANG, **PACKED}, {"draft_config": {}}),
    "sglang-hybrid-radix": ({**HYBRID, **SGLANG}, LAZY),
    "sglang-hybrid-batches": ({**HYBRID, **SGLANG}, {"draft": None}),
    "sglang-gemma4-26b-fp8": (
        {**GEMMA, **SGLANG, "model": "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic"},
        {"model": "google/gemma-4-26B-A4B-it"},
    ),
    "sglang-mimo-mask": ({**SGLANG, "model": "XiaomiMiMo/MiMo-V2.5", "draft": "x/y"}, {"draft": None}),
    "sglang-kimi-prefix-cache": (
        {**SGLANG, "model": "moonshotai/Kimi-K2.5", "draft": "z-lab/Kimi-K2.5-DFlash"},
        {"prefix_cache": False},
    ),
    "sglang-dflash2-thinking": ({**DFLASH2, **SGLANG}, {"draft": HYBRID["draft"]}),
    "sglang-autotune": (
        {**DFLASH2, **SGLANG, **SPARK},
        {"engine_args": ("--disable-flashinfer-autotune",)},
    ),
    "sglang-min-p": ({**QWEN, **SGLANG}, {"width": 1}),
    "sglang-moe-low-acceptance": (
        {**A3B, **SGLANG, "machine": machine_with("a100")},
        {"machine": machine_with("h200")},
    ),
}


def findings(**values):
    known = {key: values.pop(key) for key in ("machine", "target") if key in values}
    draft = values.pop("draft_config", None)
    settings = with_drafter(Settings(**{"engine": "vllm", "width": 8, **values}))
    return check_settings(Combination(settings=settings, draft=draft, **known))


def ids(**values):
    return {finding.id for finding in findings(**values)}


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.issue.id)
def test_known_bad_combination_is_found_and_the_one_beside_it_is_not(entry):
    bad, change = CASES[entry.issue.id]
    assert entry.issue.id in ids(**bad)
    assert entry.issue.id not in ids(**{**bad, **change})


REFUSED = [entry.issue for entry in entries() if entry.issue.severity == "refuse"]


@pytest.mark.parametrize("finding", REFUSED, ids=lambda finding: finding.id)
def test_plan_and_serve_refuse_it_and_name_the_thread_and_the_way_out(monkeypatch, finding):
    values, _ = CASES[finding.id]
    values = dict(values)
    machine, config = values.pop("machine", Machine(memory_bytes=1)), values.pop("draft_config", None)
    values.pop("target", None)
    settings = Settings(**{"engine": "vllm", "width": 8, **values})

    def open_stored(source, *, needs_weights, what="model"):
        if source == settings.draft and config is not None:
            return Stored(source, "folder", config, None, None, ())
        raise FetchError("no hub here")

    monkeypatch.setattr(preflight, "open_stored", open_stored)
    monkeypatch.setattr(preflight, "read_machine", lambda: machine)
    with pytest.raises(SettingsError) as caught:
        preflight.check_to_print(settings, "x", None)
    assert finding.thread in str(caught.value)
    assert finding.way_out in str(caught.value)

    draft = None if config is None else SimpleNamespace(stored=SimpleNamespace(full_config=config))
    pair = SimpleNamespace(target=SimpleNamespace(stored=SimpleNamespace(full_config=None)), draft=draft)
    found = [one for one in problems_with(Case(settings, machine, pair)) if one.id == finding.id]
    assert [(one.severity, one.thread) for one in found] == [("refuse", finding.thread)]


def test_what_only_warns_is_not_refused():
    found = findings(**HYBRID, engine_version="0.32.0")
    refuse(found)
    assert [finding.severity for finding in found] == ["warn", "note", "note", "note"]  # worst first


def test_silently_wrong_combinations_are_refused_in_every_version():
    for version in ("0.20.0", "0.27.1", "0.31.0", "0.33.0", "0.33.1rc1.dev7", "0.34.0"):
        bad = findings(**QWEN, kv_dtype="turboquant_4bit_nc", engine_version=version)
        assert bad[0].id == "turboquant-speculation"
        assert "gemma4-embedding-scale" in ids(**GEMMA, engine_version=version)


def test_a_build_that_carries_the_repair_is_spared():
    assert "gemma4-embedding-scale" in ids(**GEMMA)
    assert "gemma4-embedding-scale" not in ids(**GEMMA, engine_version="0.33.0+pr41703")
    assert "gemma4-embedding-scale" in ids(**GEMMA, engine_version="0.33.0+pr4170")
    assert "qwen3-next-eagle3" not in ids(**CODER, engine_version="0.20.2+pr45319.pr39930")


@pytest.mark.parametrize(
    ("version", "issue"),
    [
        ("0.33.0+pr999999", "unknown-pull-request"),
        ("0.33.0+pr41703", None),
        ("0.19.2rc1.dev21+pr39930.pr35568", None),
        ("0.33.0+g893611813.cu130", None),
        ("0.34.0", "unknown-version"),
        ("0.33.0", None),
    ],
)
def test_versions_and_pull_requests_that_we_do_not_know_are_said(version, issue):
    unknown = {"unknown-pull-request", "unknown-version"}
    assert ids(**QWEN, engine_version=version) & unknown == ({issue} if issue else set())
    assert not ids(**QWEN, engine="sglang", engine_version="0.5.23+pr23000") & unknown  # one of SGLang's


def test_what_ran_is_not_warned_of_its_own_width_where_the_block_is_eight():
    block = {"speculators_model_type": "dflash", "block_size": 8}
    (settings,) = recipe_settings("gemma-4-31b-redhat-spark")
    found = check_settings(Combination(settings=settings, machine=machine_with("gb10"), draft=block))
    assert "width-past-block" not in {finding.id for finding in found}


@pytest.mark.parametrize(
    ("id", "since"),
    [
        ("gb10-cutlass-fp8", "0.22.0"),
        ("draft-non-causal", "0.24.0"),
        ("gemma4-one-backend", "0.21.0"),
        ("qwen3-next-eagle3", "0.24.0"),
    ],
)
def test_patches_are_needed_up_to_the_release_that_has_them(id, since):
    entry = next(entry for entry in entries() if entry.issue.id == id)
    assert entry.issue.upstream_since == since
    bad = CASES[id][0]
    assert id in ids(**{**bad, "engine_version": "0.19.2rc1.dev21"})
    assert id not in ids(**{**bad, "engine_version": "0.33.0"})


def test_a_nightly_build_just_before_the_repair_is_warned_of_and_an_older_one_refused():
    severity = {
        version: next(
            f.severity for f in findings(**CODER, engine_version=version) if f.id == "qwen3-next-eagle3"
        )
        for version in ("0.23.0", "0.23.1rc1.dev861", "0.22.1rc1.dev5")
    }
    assert severity == {"0.23.0": "refuse", "0.23.1rc1.dev861": "warn", "0.22.1rc1.dev5": "refuse"}


def test_the_models_type_goes_before_its_name():
    gemma = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}
    mine = {"model": "/models/mine", "draft": "/models/drafter", "draft_config": {"block_size": 16}}
    assert "gemma4-embedding-scale" in ids(**mine, target=gemma)
    assert "gemma4-embedding-scale" not in ids(**mine, target={"model_type": "llama"})
    assert "gemma4-embedding-scale" not in ids(**mine)  # nothing is known, so nothing is claimed
    assert "gemma4-embedding-scale" not in ids(**GEMMA, target={"model_type": "qwen3"})
    speculators = {**mine, "draft_config": {"speculators_model_type": "dflash", "block_size": 8}}
    assert "gemma4-embedding-scale" not in ids(**speculators, target=gemma)


@pytest.mark.parametrize(
    ("config", "is_bad"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, True),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}, True),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, True),
        ({"quantization_config": {"quant_method": "gptq"}}, False),
        ({}, False),
    ],
)
def test_how_the_weights_are_packed_is_read_from_config_json(config, is_bad):
    found = ids(**QWEN, **SPARK, engine_version="0.21.0", target=config)
    assert ("gb10-cutlass-fp8" in found) == is_bad


@pytest.mark.parametrize("card", ["gb10", "h100"])
@pytest.mark.parametrize(
    ("quantised", "is_refused", "is_nvfp4"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, True, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False, True),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, False, True),
        ({"quant_method": "fp8"}, False, False),
    ],
)
@pytest.mark.parametrize("is_own_file", [False, True])
def test_nvfp4_is_known_by_what_a_folder_says_and_not_by_its_name(
    card, quantised, is_refused, is_nvfp4, is_own_file
):
    """AEON-7's quick start mounts its checkpoint as /models/target; ModelOpt may write its own file."""
    config, file = {"model_type": "qwen3_5", "quantization_config": quantised}, None
    if is_own_file and quantised["quant_method"] == "modelopt":
        file = {"quantization": {"quant_algo": config.pop("quantization_config")["quant_algo"]}}
    folder = Stored("/models/target", "folder", config, file, None, ())
    found = ids(**{**HYBRID, "model": folder.name}, machine=machine_with(card), target=folder.full_config)
    assert ("nvfp4-awq" in found) == is_refused
    assert ("nvfp4-before-blackwell" in found) == (is_nvfp4 and card == "h100")


def test_kernels_that_are_switched_off_and_unknown_cards_are_not_complained_about():
    bad, _ = CASES["gb10-cutlass-fp8"]
    switched = {"engine_env": (("VLLM_DISABLED_KERNELS", "CutlassFp8BlockScaledMMKernel"),)}
    for change in (switched, {"machine": None}, {"machine": Machine(memory_bytes=1)}):
        assert "gb10-cutlass-fp8" not in ids(**{**bad, **change})


def test_our_own_engine_is_not_asked_about():
    assert check_settings(Combination(settings=Settings(**GEMMA), machine=machine_with("gb10"))) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_code_of_a_checkpoint_runs_only_when_asked_and_is_warned_of(engine):
    assert "trust-remote-code" not in ids(**QWEN, engine=engine)
    for asked in ({"trust_remote_code": True}, {"engine_args": ("--trust-remote-code",)}):
        found = [one for one in findings(**QWEN, engine=engine, **asked) if one.id == "trust-remote-code"]
        assert [one.severity for one in found] == ["warn"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_head_whose_body_is_in_the_folder_above_is_refused(tmp_path, monkeypatch, engine):
    head = tiny.write_head(tmp_path / "drafter")
    found = findings(engine=engine, draft=str(head))
    with pytest.raises(SettingsError, match=f"Use the whole drafter, --draft {head.parent}, or our own"):
        refuse(found)
    monkeypatch.chdir(tmp_path)
    assert found == findings(engine=engine, draft="drafter/dflash2")
    for whole in ({"draft": str(head.parent)}, {"draft": str(head), "width": 1}):
        assert "head-without-body" not in ids(engine=engine, **whole)
    index = head / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("../", ""))
    assert "head-without-body" not in ids(engine=engine, draft=str(head)), "its shards are its own"


def test_entries_are_well_formed_and_each_has_a_case():
    assert {entry.issue.id for entry in entries()} == set(CASES)
    assert len(entries()) == len(CASES)
    for entry in entries():
        finding = entry.issue
        assert re.fullmatch(r"[a-z0-9-]+", finding.id)
        assert finding.severity in ("refuse", "warn", "note")
        assert finding.thread.startswith("https://"), finding.id
        assert finding.symptom.endswith("."), finding.id
        assert finding.way_out.endswith("."), finding.id
        assert entry.engine in ("vllm", "sglang")


def test_a_misspelt_condition_is_a_bug_that_shows():
    about = 'id="x"\nseverity="note"\nsymptom="s"\nway_out="w"\nthread="t"\nengine="vllm"\n'
    assert read_entries(f"[[issue]]\n{about}speculates=true\n")[0].issue.id == "x"
    with pytest.raises(AssertionError, match="speculate"):
        read_entries(f"[[issue]]\n{about}speculate=true\n")


def test_every_condition_is_used():
    used = {name.removesuffix("_unset") for entry in entries() for name in entry.conditions}
    assert used == FACTS.keys() | RULES.keys()
