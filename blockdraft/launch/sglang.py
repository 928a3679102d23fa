"""Writes SGLang's command: `sglang serve` and its environment, for 0.5.23.

SGLang counts the anchor, of DSpark drafters too: width 16 is --speculative-num-draft-tokens 16. It accepts
API keys only as arguments, which all users of the machine can read. So SGLang gets no key and listens only on
this machine; our server checks the clients' key.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.errors import SettingsError
from blockdraft.launch.launch_request import HOST, TRUST_FLAG, Command, Flags, LaunchRequest, write_command

IMAGE = "lmsysorg/sglang"
BACKENDS = {"triton_attn": "triton", "flash_infer": "flashinfer", "flex": "flex_attention"}
OVERLAP_VARIABLES = (
    "SGLANG_ENABLE_SPEC_V2",
    "SGLANG_ENABLE_DFLASH_SPEC_V2",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
)
_OWN_KV = ("fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16")
KV_DTYPES = {"fp8": "fp8_e4m3", **{name: name for name in _OWN_KV}}


def sglang_command(order: LaunchRequest) -> Command:
    """Return the command. Raise SettingsError if this version has no flag for a setting."""
    _refuse(order)
    metrics = ("--enable-metrics", True)  # else /metrics is empty
    flags = [*order.address_flags, metrics, *_model(order), *_limits(order)]
    flags += order.machine_flags("--tp-size", "--pp-size")
    if order.settings.num_nodes > 1:
        flags.append(("--dist-init-addr", "{}:{}".format(*order.head)))
    flags += _speculation(order)
    program = ("sglang", "serve", "--model-path", order.settings.model)
    # They let the scheduler run ahead of drafts. z-lab calls them experimental: set them only on request.
    is_wanted = order.settings.overlap is True and order.drafter is not None
    env = dict.fromkeys(OVERLAP_VARIABLES, "1") if is_wanted else {}
    image = f"{IMAGE}:v{order.version.text.partition('+')[0]}"
    return write_command(order, program, flags, env={**env, **order.environment}, image=image)


def _refuse(order: LaunchRequest) -> None:
    settings = order.settings
    if settings.cache_bytes != "auto":
        raise order.refusal("cache_bytes", "it sizes its cache by a share; use --gpu-memory-utilization")
    if settings.synthetic_acceptance is not None:
        raise order.refusal("synthetic_acceptance", "its simulation takes no such profile; use --engine vllm")
    if order.api_key is not None and order.host != HOST:
        raise SettingsError(
            f"{order.version} would answer everybody on {order.host}: it takes keys as arguments only, where "
            "all can read them, so it gets none. Leave out --host, or the key."
        )


def _model(order: LaunchRequest) -> Flags:
    settings = order.settings
    if settings.kv_dtype != "auto" and settings.kv_dtype not in KV_DTYPES:
        raise order.refusal("kv_dtype", f"it knows {', '.join(KV_DTYPES)}")
    return [
        ("--device", None if settings.device == "auto" else settings.device.partition(":")[0]),
        ("--dtype", order.changed("dtype")),
        ("--quantization", order.quantization("quantization")),
        ("--load-format", order.changed("load_format")),
        ("--kv-cache-dtype", KV_DTYPES.get(settings.kv_dtype)),
        ("--attention-backend", _backend(order, "attention_backend")),
        ("--sampling-defaults", order.changed("sampling_defaults")),
        ("--chat-template", order.settings.chat_template),
        (TRUST_FLAG, order.settings.trust_remote_code),
        ("--random-seed", order.changed("seed")),
    ]


def _backend(order: LaunchRequest, name: str) -> str | None:
    """Return SGLang's name of a backend: FlashAttention is fa3 on Hopper, fa4 on B200, else triton."""
    value: str | None = getattr(order.settings, name)
    if value is None:
        return None
    value = value.lower()
    if value not in ("flash_attn", "flash"):
        return BACKENDS.get(value, value)
    if order.capability is None:
        cards = "fa3 on Hopper, fa4 on B200 and B300, triton elsewhere"
        raise order.refusal(name, f"the card is not known (see --card): it is {cards}")
    return {9: "fa3", 10: "fa4"}.get(order.capability[0], "triton")


def _limits(order: LaunchRequest) -> Flags:
    settings = order.settings
    return [
        ("--context-length", order.changed("max_model_len")),
        ("--max-running-requests", order.changed("max_num_seqs")),
        ("--max-queued-requests", order.changed("max_queue")),
        ("--chunked-prefill-size", order.changed("max_prefill_tokens")),
        ("--page-size", order.changed("page_size")),
        # SGLang's share covers only weights and cache: our default would leave too little for the rest.
        ("--mem-fraction-static", order.changed("gpu_memory_utilization")),
        ("--disable-radix-cache", not settings.prefix_cache),
        ("--disable-cuda-graph", not settings.graphs),
        ("--disable-overlap-schedule", settings.overlap is False),
    ]


def _speculation(order: LaunchRequest) -> Flags:
    drafter = order.drafter
    if drafter is None:
        return []
    return [
        ("--speculative-algorithm", "DSPARK" if order.draft_kind == "dspark" else "DFLASH"),
        ("--speculative-draft-model-path", drafter),
        ("--speculative-num-draft-tokens", order.width),
        ("--speculative-draft-attention-backend", _backend(order, "draft_attention_backend")),
        ("--speculative-draft-model-quantization", _draft_quantization(order)),
    ]


def _draft_quantization(order: LaunchRequest) -> str | None:
    """Return the drafter's format. Without it SGLang uses the target's for the drafter (sglang #35860)."""
    if isinstance((order.draft or {}).get("quantization_config"), Mapping):
        return None
    is_none = order.settings.draft_quantization == "none"
    return "unquant" if is_none else order.quantization("draft_quantization") or "unquant"
