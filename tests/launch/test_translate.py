"""Settings in the words of vLLM and SGLang: what is passed, what is refused, and where secrets go."""

import dataclasses
import json

import pytest

from blockdraft.errors import SettingsError
from blockdraft.launch import translate
from blockdraft.launch.engine_versions import read_version
from blockdraft.launch.launch_request import LaunchRequest
from blockdraft.launch.shell import shell_line
from blockdraft.machine.machine import Machine
from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.settings import Settings
from tests.launch.golden import machine_with

PAIR = {"model": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16", "width": 16}


def command(engine, *, port=18000, served_name="name", **values):
    names = ("machine", "target", "draft_config", "api_key", "host")
    known = {key: values.pop(key) for key in names if key in values}
    if "draft_config" in known:
        known["draft"] = known.pop("draft_config")
    settings = with_drafter(Settings(**{**PAIR, "engine": engine, **values}))
    return translate(LaunchRequest(settings=settings, served_name=served_name, port=port, **known))


def value(command, flag):
    """What follows a flag; None where it is not there."""
    argv = command.argv
    assert argv.count(flag) <= 1
    return argv[argv.index(flag) + 1] if flag in argv else None


def speculative(command):
    return json.loads(value(command, "--speculative-config"))


def test_width_16_is_15_drafts_in_vllm_and_16_tokens_in_sglang():
    assert speculative(command("vllm"))["num_speculative_tokens"] == 15
    assert value(command("sglang"), "--speculative-num-draft-tokens") == "16"


def test_drafter_is_named_with_its_method():
    assert speculative(command("vllm"))["method"] == "dflash"
    assert speculative(command("vllm"))["model"] == PAIR["draft"]
    assert value(command("sglang"), "--speculative-algorithm") == "DFLASH"
    for raw in ({"architectures": ["Qwen3DSparkModel"]}, {"speculators_model_type": "dspark"}):
        block7 = {**raw, "block_size": 7}
        found = speculative(command("vllm", draft_config=block7, width="auto"))
        assert (found["method"], found["num_speculative_tokens"]) == ("dspark", 7)
    for known in (
        {"draft": "LiquidAI/LFM2.5-1.2B-Instruct-DSpark"},  # by its name, where config.json is not read
        {"draft_config": {"architectures": ["Lfm2DSparkDraftModel"], "block_size": 7}},
        {"draft_config": {"architectures": ["Qwen3DSparkModel"], "block_size": 7}},
    ):
        found = command("sglang", width=8, **known)
        assert value(found, "--speculative-algorithm") == "DSPARK"
        assert value(found, "--speculative-num-draft-tokens") == "8"  # seven drafts and the anchor
        assert speculative(command("vllm", width=8, **known))["method"] == "dspark"
    assert value(command("sglang"), "--speculative-draft-model-path") == PAIR["draft"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("values", [{"draft": None}, {"draft": "none"}, {"draft": "auto"}, {"width": 1}])
def test_without_drafts_nothing_is_said_of_speculation(engine, values):
    assert "specul" not in " ".join(command(engine, **values).argv)


def test_on_unified_memory_vllm_gets_a_share_that_leaves_the_system_alive():
    spark, flag = machine_with("gb10"), "--gpu-memory-utilization"
    assert value(command("vllm", machine=spark), flag) == "0.8"
    assert value(command("vllm", machine=spark, gpu_memory_utilization=0.6), flag) == "0.6"
    assert value(command("vllm", machine=machine_with("h100")), flag) == "0.9"
    assert value(command("vllm"), flag) == "0.9"


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"block_size": 10}, 10),
        ({"dflash_config": {"block_size": 8}, "block_size": 16}, 8),
        ({"dflash_config": {}, "architectures": ["DFlashDraftModel"]}, 16),
        ({"speculators_model_type": "dflash", "block_size": 6}, 6),
        ({"speculators_model_type": "dflash"}, 8),
        ({"block_size": True}, 16),
    ],
)
def test_width_auto_is_the_drafters_block(config, width):
    vllm = command("vllm", width="auto", draft_config=config)
    assert speculative(vllm)["num_speculative_tokens"] == width - 1
    sglang = command("sglang", width="auto", draft_config=config)
    assert value(sglang, "--speculative-num-draft-tokens") == str(width)
    with pytest.raises(SettingsError, match="give --width"):
        command("vllm", width="auto")  # of a drafter that is not known


def test_attention_backends_of_target_and_drafter_are_apart_in_vllm():
    found = command("vllm", attention_backend="triton_attn", draft_attention_backend="flash")
    assert value(found, "--attention-backend") == "TRITON_ATTN"
    assert speculative(found)["attention_backend"] == "FLASH_ATTN"


CARDS = {"h100": "fa3", "h200": "fa3", "b200": "fa4", "b300": "fa4"}


@pytest.mark.parametrize("card", [*CARDS, "gb10", "rtx-4090", "a100"])
def test_flash_attention_is_named_by_the_card_in_sglang(card):
    """Triton stands in where there is none."""
    found = command("sglang", draft_attention_backend="flash_attn", machine=machine_with(card))
    assert value(found, "--speculative-draft-attention-backend") == CARDS.get(card, "triton")
    both = command("sglang", attention_backend="flash_attn", machine=machine_with(card))
    assert value(both, "--attention-backend") == CARDS.get(card, "triton")
    with pytest.raises(SettingsError, match="fa3 on Hopper"):
        command("sglang", draft_attention_backend="flash_attn", machine=None)


# ---- what is off unless it is asked for


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_code_of_a_checkpoint_is_trusted_when_it_is_asked_for(engine):
    assert "--trust-remote-code" not in command(engine).argv
    assert command(engine, trust_remote_code=True).argv.count("--trust-remote-code") == 1


@pytest.mark.parametrize(
    ("values", "is_asked"),
    [
        ({}, False),  # on by vLLM's own choice
        ({"model": "Qwen/Qwen3.5-27B"}, True),
        ({"model": "saricles/Qwen3-Coder-Next-NVFP4-GB10"}, True),
        ({"model": "Qwen/Qwen3.5-27B", "prefix_cache": False}, False),
        ({"model": "/models/x", "target": {"text_config": {"layer_types": ["linear_attention"]}}}, True),
        ({"model": "/models/x", "target": {"model_type": "qwen3_next", "full_attention_interval": 4}}, True),
        ({"model": "Qwen/Qwen3.5-27B", "target": {"layer_types": ["full_attention"]}}, False),
    ],
)
def test_vllm_is_asked_for_the_prefix_cache_of_a_hybrid(values, is_asked):
    found = command("vllm", **values).argv
    assert ("--enable-prefix-caching" in found) is is_asked
    assert ("--no-enable-prefix-caching" in found) is (values.get("prefix_cache") is False)
    assert "--enable-prefix-caching" not in command("sglang", **values).argv  # its radix cache is on


def test_sglangs_overlap_with_drafts_is_switched_on_by_variables():
    names = {"SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"}
    assert not names & command("sglang").env.keys()
    assert names <= command("sglang", overlap=True).env.keys()
    assert not names & command("sglang", overlap=True, draft="none").env.keys()
    own = command("sglang", overlap=True, engine_env=(("SGLANG_ENABLE_SPEC_V2", "0"),))
    assert own.env["SGLANG_ENABLE_SPEC_V2"] == "0"


# ---- versions


@pytest.mark.parametrize("version", ["0.19.0", "0.19.1"])
def test_releases_of_vllm_0_19_have_no_dflash(version):
    with pytest.raises(SettingsError, match=r"0\.20\.0.*pull/36847"):
        command("vllm", engine_version=version)
    assert "--speculative-config" not in command("vllm", engine_version=version, draft=None).argv


@pytest.mark.parametrize("version", ["0.19.1rc1.dev110", "0.19.2rc1.dev21+g893611813"])
def test_nightly_builds_of_vllm_0_19_have_dflash(version):
    found = command("vllm", engine_version=version)
    assert speculative(found) == {
        "method": "dflash",
        "model": PAIR["draft"],
        "num_speculative_tokens": 15,
    }
    assert "--per-request-spec-decode-metrics" not in found.argv
    assert "--per-request-spec-decode-metrics" not in command("vllm", engine_version="0.28.0").argv
    assert value(command("vllm"), "--per-request-spec-decode-metrics") == "summary"  # since 0.29
    assert found.image == "vllm/vllm-openai:nightly"


def test_a_drafters_own_backend_is_refused_before_vllm_0_21():
    split = {"attention_backend": "triton", "draft_attention_backend": "flash"}
    for version in ("0.19.2rc1.dev21", "0.20.2"):
        with pytest.raises(SettingsError, match="pull/39930"):
            command("vllm", engine_version=version, **split)
    same = command(
        "vllm", engine_version="0.20.2", attention_backend="flash", draft_attention_backend="flash"
    )
    assert "attention_backend" not in speculative(same)
    assert speculative(command("vllm", engine_version="0.21.0", **split))["attention_backend"] == "FLASH_ATTN"


def test_an_older_build_that_carries_the_pull_request_takes_the_drafters_backend():
    split = {"attention_backend": "triton", "draft_attention_backend": "flash"}
    for version in ("0.19.2rc1.dev21+pr39930.pr35568", "0.20.2+pr39930"):
        found = command("vllm", engine_version=version, **split)
        assert speculative(found)["attention_backend"] == "FLASH_ATTN"
    with pytest.raises(SettingsError, match=r"named as 0\.20\.2\+pr39930"):
        command("vllm", engine_version="0.20.2+pr35568", **split)


def test_queue_limit_is_refused_before_vllm_0_29_and_counts_running_requests():
    with pytest.raises(SettingsError, match=r"0\.29\.0"):
        command("vllm", engine_version="0.28.0", max_queue=10, max_num_seqs=4)
    with pytest.raises(SettingsError, match="--max-num-seqs"):
        command("vllm", max_queue=10)
    assert value(command("vllm", max_queue=10, max_num_seqs=4), "--max-num-queued-reqs") == "14"
    assert value(command("sglang", max_queue=10), "--max-queued-requests") == "10"


@pytest.mark.parametrize(
    ("engine", "version", "why"),
    [
        ("vllm", "0.18.1", "older than"),
        ("sglang", "0.5.22", "older than"),
        ("vllm", "newest", "is not a version"),
        ("vllm", "0.33.0; rm", "is not a version"),
        ("vllm", "refs/pull/41703/head", r"is not a version: .*\+pr41703"),
        ("vllm", "main", "is not a version"),
        ("vllm", "0.33.0+prhead", "'prhead', which is no pull request"),
        ("sglang", "0.5.23+pr0", "'pr0', which is no pull request"),
    ],
)
def test_versions_that_are_not_known_are_refused(engine, version, why):
    with pytest.raises(SettingsError, match=why):
        command(engine, engine_version=version)


def test_versions_are_read_as_packages_write_them():
    nightly = read_version("vllm", "0.19.2rc1.dev21+g893611813")
    assert (nightly.release, nightly.is_nightly, nightly.carried) == ((0, 19, 2), True, frozenset())
    patched = read_version("vllm", "v0.33+pr41703.pr38484")
    assert (patched.release, patched.is_nightly, patched.carried) == ((0, 33, 0), False, {41703, 38484})
    assert (patched.source, patched.has_spark_kernels) == ("0.33+pr41703", True)
    assert read_version("vllm", "0.33.0+cu130").with_spark_kernels() == "0.33.0+cu130.pr38484"
    assert read_version("vllm", "0.33.0+cu130.pr38484").source == "0.33.0"
    assert read_version("vllm", None).text == "0.33.0"
    assert not read_version("vllm", "0.30.0").within("<0.9.0")  # as numbers, not as text
    assert read_version("vllm", "0.24.0").within(">=0.24.0,<0.25.0")
    assert not read_version("vllm", "0.25.0").within(">=0.24.0,<0.25.0")


def test_image_is_the_versions_own():
    assert command("vllm").image == "vllm/vllm-openai:v0.33.0"
    assert command("vllm", engine_version="0.33.0+cu130").image == "vllm/vllm-openai:v0.33.0"
    built = command("vllm", engine_version="0.33.0+pr41703")  # nobody publishes one: it is built
    assert (built.image, built.build) == ("blockdraft-vllm:0.33.0-pr41703", "vllm")
    spark = command("vllm", engine_version="0.33.0+pr38484")  # kernels, not a change to merge
    assert (spark.build, spark.source) == ("spark", "0.33.0")
    assert command("vllm", engine_version="0.19.2rc1.dev21+pr39930").image is None  # no tag to build from
    assert command("sglang", engine_version="0.5.23+pr5").image is None
    assert command("vllm", engine_version="0.33.1.dev3+gabc.precompiled").image == "vllm/vllm-openai:nightly"
    assert command("vllm", device="cpu").image is None
    assert command("sglang", machine=Machine(memory_bytes=1 << 34)).image is None
    assert command("sglang").image == "lmsysorg/sglang:v0.5.23"


# ---- secrets


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_api_key_is_never_an_argument_nor_shown_and_only_vllm_gets_it(engine):
    found = command(engine, api_key="very-secret")
    for text in (" ".join(found.argv), repr(found), shell_line(found)):
        assert "very-secret" not in text
    assert found.env.get("VLLM_API_KEY") == ("very-secret" if engine == "vllm" else None)
    assert ('VLLM_API_KEY="${VLLM_API_KEY}"' in shell_line(found)) == (engine == "vllm")
    assert "VLLM_API_KEY" not in command(engine).env
    assert "very-secret" not in (found.env.values() if engine == "sglang" else ())


def test_an_engine_listens_for_us_alone_unless_it_is_told_where():
    for engine in ("vllm", "sglang"):
        found = command(engine, port=18431)
        assert (value(found, "--host"), value(found, "--port"), found.port) == ("127.0.0.1", "18431", 18431)
        assert value(command(engine, host="0.0.0.0"), "--host") == "0.0.0.0"
    assert value(command("vllm", host="0.0.0.0", api_key="very-secret"), "--host") == "0.0.0.0"
    with pytest.raises(SettingsError, match=r"would answer everybody on 0\.0\.0\.0") as caught:
        command("sglang", host="0.0.0.0", api_key="very-secret")
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("args", [("--api-key", "very-secret"), ("--hf-token=very-secret",)])
def test_secrets_in_engine_args_are_refused_without_being_shown(engine, args):
    with pytest.raises(SettingsError) as caught:
        command(engine, engine_args=args)
    assert "very-secret" not in str(caught.value)
    assert "environment" in str(caught.value)


# ---- what is passed on


def test_engine_args_and_variables_are_passed_on_as_they_are():
    args = ("--limit-mm-per-prompt", '{"image": 4, "video": 2}', "--tool-call-parser", "qwen3_xml")
    found = command("vllm", engine_args=args, engine_env=(("VLLM_LOGGING_LEVEL", "DEBUG"),))
    assert found.argv[-4:] == args
    assert found.env["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    "argument", ["--max-model-len", "--max-model-len=4096", "--speculative-config", "--host"]
)
def test_engine_args_that_repeat_a_setting_are_refused(argument):
    with pytest.raises(SettingsError, match="repeats --"):
        command("vllm", max_model_len=8192, engine_args=(argument, "x"))
    if argument.startswith("--max-model-len"):
        assert argument in command("vllm", engine_args=(argument, "4096")).argv


VLLM = {
    "--dtype": ({"dtype": "bfloat16"}, "bfloat16"),
    "--quantization": ({"quantization": "fp8"}, "fp8"),
    "--load-format": ({"load_format": "dummy"}, "dummy"),
    "--max-model-len": ({"max_model_len": 4096}, "4096"),
    "--max-num-seqs": ({"max_num_seqs": 3}, "3"),
    "--max-num-batched-tokens": ({"max_prefill_tokens": 2048}, "2048"),
    "--block-size": ({"page_size": 32}, "32"),
    "--kv-cache-memory-bytes": ({"cache_bytes": 123456}, "123456"),
    "--gpu-memory-utilization": ({"gpu_memory_utilization": 0.7}, "0.7"),
    "--kv-cache-dtype": ({"kv_dtype": "fp8"}, "fp8"),
    "--generation-config": ({"sampling_defaults": "openai"}, "vllm"),
    "--chat-template": ({"chat_template": "mine.jinja"}, "mine.jinja"),
    "--seed": ({"seed": 7}, "7"),
    "--tensor-parallel-size": ({"tensor_parallel": 4}, "4"),
    "--pipeline-parallel-size": ({"pipeline_parallel": 2}, "2"),
}
SGLANG = {
    "--dtype": ({"dtype": "bfloat16"}, "bfloat16"),
    "--quantization": ({"quantization": "fp8"}, "fp8"),
    "--load-format": ({"load_format": "dummy"}, "dummy"),
    "--context-length": ({"max_model_len": 4096}, "4096"),
    "--max-running-requests": ({"max_num_seqs": 3}, "3"),
    "--chunked-prefill-size": ({"max_prefill_tokens": 2048}, "2048"),
    "--page-size": ({"page_size": 32}, "32"),
    "--mem-fraction-static": ({"gpu_memory_utilization": 0.7}, "0.7"),
    "--kv-cache-dtype": ({"kv_dtype": "fp8"}, "fp8_e4m3"),
    "--sampling-defaults": ({"sampling_defaults": "openai"}, "openai"),
    "--chat-template": ({"chat_template": "mine.jinja"}, "mine.jinja"),
    "--random-seed": ({"seed": 7}, "7"),
    "--tp-size": ({"tensor_parallel": 4}, "4"),
    "--pp-size": ({"pipeline_parallel": 2}, "2"),
    "--device": ({"device": "cuda"}, "cuda"),
}


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", flag) for flag in VLLM] + [("sglang", flag) for flag in SGLANG]
)
def test_each_setting_has_its_flag_and_only_when_it_is_set(engine, flag):
    values, expected = (VLLM if engine == "vllm" else SGLANG)[flag]
    assert value(command(engine, **values), flag) == expected
    if (engine, flag) != ("vllm", "--gpu-memory-utilization"):  # whose default differs between versions
        assert flag not in command(engine).argv


@pytest.mark.parametrize(
    ("values", "vllm", "sglang"),
    [
        ({"prefix_cache": False}, "--no-enable-prefix-caching", "--disable-radix-cache"),
        ({"graphs": False}, "--enforce-eager", "--disable-cuda-graph"),
        ({"overlap": False}, "--no-async-scheduling", "--disable-overlap-schedule"),
    ],
)
def test_switches_are_bare_flags(values, vllm, sglang):
    for engine, flag in (("vllm", vllm), ("sglang", sglang)):
        assert flag in command(engine, **values).argv
        assert flag not in command(engine).argv


NEITHER = [
    {"dtype": "float64"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "both"},
    {"draft_quantization": "int8"},
    {"kv_dtype": "tq4"},
]
NEITHER += [{"draft_kv_dtype": "tq4"}, {"kv_window": 256}, {"prefix_state_bytes": 1}]
NEITHER += [{"prefix_disk": "kept"}, {"prefix_disk_bytes": 1}]
NEITHER += [
    {"tool_format": "hermes"},
    {"max_stall_ms": 50},
    {"recheck": 0.1},
    {"replicas": 2},
    {"model": "default"},
    {"model": "folder/model.Q4_1.gguf"},
]


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        *((engine, values) for engine in ("vllm", "sglang") for values in NEITHER),
        ("sglang", {"cache_bytes": 1 << 30}),
        ("sglang", {"kv_dtype": "turboquant_k8v4"}),
        ("sglang", {"synthetic_acceptance": "mean:4"}),
        ("vllm", {"device": "mps"}),
        ("vllm", {"device": "cuda:1", "tensor_parallel": 2}),
    ],
)
def test_what_an_engine_has_no_words_for_is_refused_by_name(engine, values):
    name = next(iter(values))
    with pytest.raises(SettingsError, match=f"{name} = .* cannot be passed to (vLLM|SGLang) "):
        command(engine, **values)


def test_every_setting_is_translated_or_refused_or_known_to_be_ours():
    """A new setting must not be dropped in silence."""
    ours = {"verify", "allow_batch_variance", "recipe", "engine", "engine_version", "node_rank"}
    ours |= {"head_address", "num_nodes", "draft", "draft_ngram", "tree"}
    elsewhere = {"model", "width", "device", "attention_backend", "draft_attention_backend", "max_queue"}
    elsewhere |= {"synthetic_acceptance", "draft_quantization", "max_stall_ms", "engine_args", "engine_env"}
    elsewhere |= {"prefix_cache", "overlap", "graphs", "tool_format", "trust_remote_code", "recheck"}
    elsewhere |= {"replicas", "prefix_disk", "prefix_disk_bytes"}
    elsewhere |= {"draft_kv_dtype", "kv_window", "prefix_state_bytes"}
    tested = {name for values, _ in VLLM.values() for name in values}
    assert {item.name for item in dataclasses.fields(Settings)} == ours | elsewhere | tested


def test_synthetic_acceptance_is_the_same_profile_in_vllm():
    config = speculative(command("vllm", width=4, synthetic_acceptance="0.9,0.5"))
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.9, 0.5, 0.0]  # one per draft
    config = speculative(command("vllm", width=8, synthetic_acceptance="mean:4.5"))
    mean = config["synthetic_acceptance_rates"]
    assert len(mean) == 7
    assert 1 + sum(mean) == pytest.approx(4.5)
    with pytest.raises(SettingsError, match=r"before 0\.20\.0"):
        command("vllm", engine_version="0.19.2rc1.dev21", synthetic_acceptance="mean:4.5")


def test_a_quantised_target_does_not_make_sglang_read_its_drafter_as_quantised():
    flag = "--speculative-draft-model-quantization"
    assert value(command("sglang", quantization="fp8"), flag) == "unquant"
    assert value(command("sglang", draft_quantization="fp8"), flag) == "fp8"
    stored = {"quantization_config": {"quant_method": "fp8"}}
    assert flag not in command("sglang", draft_config=stored).argv
    assert "quantization" not in speculative(command("vllm", quantization="fp8"))
    assert speculative(command("vllm", draft_quantization="fp8"))["quantization"] == "fp8"


def test_one_card_is_chosen_by_its_number():
    assert command("vllm", device="cuda:1").env["CUDA_VISIBLE_DEVICES"] == "1"
    assert value(command("sglang", device="cuda:1"), "--device") == "cuda"
    assert "CUDA_VISIBLE_DEVICES" not in command("vllm", device="cuda").env


def test_on_a_cpu_vllm_takes_no_share_of_the_machine_unless_told():
    flag = "--gpu-memory-utilization"
    assert flag not in command("vllm", machine=Machine(memory_bytes=1)).argv
    assert flag not in command("vllm", device="cpu").argv
    assert value(command("vllm", device="cpu", gpu_memory_utilization=0.4), flag) == "0.4"
    assert value(command("vllm", machine=machine_with("h200")), flag) == "0.9"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1", "10.0.0.1", 29501), ("head:5000", "head", 5000), ("[fd00::1]:5000", "[fd00::1]", 5000)],
)
def test_machines_meet_at_the_head(address, host, port):
    nodes = {"num_nodes": 2, "tensor_parallel": 2, "head_address": address}
    head = command("vllm", node_rank=0, **nodes)
    assert [value(head, flag) for flag in ("--nnodes", "--node-rank", "--master-addr", "--master-port")] == [
        "2", "0", host, str(port),
    ]  # fmt: skip
    assert "--headless" not in head.argv
    assert "--headless" in command("vllm", node_rank=1, **nodes).argv
    second = command("sglang", node_rank=1, **nodes)
    assert [value(second, flag) for flag in ("--nnodes", "--node-rank", "--dist-init-addr")] == [
        "2", "1", f"{host}:{port}",
    ]  # fmt: skip
