"""Writes vLLM's command: `vllm serve` and its environment, for 0.19.x (nightly) to 0.33.

vLLM does not count the anchor: width 16 is num_speculative_tokens 15. This module refuses settings that a
version has no flag for; `issues` lists settings that vLLM accepts but handles wrongly. The flags are those of
the wheels on PyPI, 0.19.0 to 0.33.0.
"""

from __future__ import annotations

from blockdraft.launch.launch_request import TRUST_FLAG, Command, Flags, LaunchRequest, write_command
from blockdraft.settings.acceptance_profile import acceptance_rates

IMAGE = "vllm/vllm-openai"
DFLASH = SYNTHETIC = "0.20.0"  # releases; nightly builds of 0.19.1 and 0.19.2 have DFlash as well
DRAFT_BACKEND, DRAFT_BACKEND_PULL = "0.21.0", 39930
QUEUE_LIMIT = REQUEST_METRICS = "0.29.0"
BACKENDS = {"TRITON": "TRITON_ATTN", "FLASH": "FLASH_ATTN", "FLEX": "FLEX_ATTENTION"}


def vllm_command(order: LaunchRequest) -> Command:
    """Return the command. Raise SettingsError if this version has no flag for a setting."""
    flags = [*order.address_flags, *_model(order), *_limits(order), *_machines(order), *_speculation(order)]
    program = ("vllm", "serve", order.settings.model)
    env = {"VLLM_NO_USAGE_STATS": "1", **order.environment}
    if order.api_key is not None:
        env["VLLM_API_KEY"] = order.api_key
    tag = "nightly" if order.version.is_nightly else f"v{order.version.text.partition('+')[0]}"
    return write_command(order, program, flags, env=env, image=f"{IMAGE}:{tag}")


def _model(order: LaunchRequest) -> Flags:
    return [
        ("--dtype", order.changed("dtype")),
        ("--quantization", order.quantization("quantization")),
        ("--load-format", order.changed("load_format")),
        ("--kv-cache-dtype", order.changed("kv_dtype")),
        ("--attention-backend", _backend(order.settings.attention_backend)),
        ("--generation-config", "vllm" if order.settings.sampling_defaults == "openai" else None),
        ("--chat-template", order.settings.chat_template),
        (TRUST_FLAG, order.settings.trust_remote_code),
        ("--seed", order.changed("seed")),
    ]


def _backend(name: str | None) -> str | None:
    return None if name is None else BACKENDS.get(name.upper(), name.upper())


def _limits(order: LaunchRequest) -> Flags:
    settings, overlap = order.settings, order.settings.overlap
    # vLLM's default differs between versions, so the share is always passed, except on a CPU: there it
    # would be a share of the machine's whole memory.
    share = order.changed("gpu_memory_utilization") if order.is_cpu else order.memory_share
    return [
        ("--max-model-len", order.changed("max_model_len")),
        ("--max-num-seqs", order.changed("max_num_seqs")),
        ("--max-num-queued-reqs", _max_in_flight(order)),
        ("--max-num-batched-tokens", order.changed("max_prefill_tokens")),
        ("--block-size", order.changed("page_size")),
        ("--kv-cache-memory-bytes", order.changed("cache_bytes")),
        ("--gpu-memory-utilization", share),
        # Before 0.32, the prefix cache of hybrid models is off without this flag.
        ("--enable-prefix-caching", settings.prefix_cache and order.is_hybrid),
        ("--no-enable-prefix-caching", not settings.prefix_cache),
        ("--enforce-eager", not settings.graphs),
        ("--async-scheduling", overlap is True),
        ("--no-async-scheduling", overlap is False),
    ]


def _max_in_flight(order: LaunchRequest) -> int | None:
    """Return the queue's limit as vLLM counts it: including running requests."""
    if order.changed("max_queue") is None:
        return None
    if not order.version.within(f">={QUEUE_LIMIT}"):
        raise order.refusal("max_queue", f"its queue has no limit before {QUEUE_LIMIT}")
    if order.settings.max_num_seqs == "auto":
        raise order.refusal("max_queue", "it counts running requests too; give --max-num-seqs as well")
    return order.settings.max_num_seqs + order.settings.max_queue


def _machines(order: LaunchRequest) -> Flags:
    flags = order.machine_flags("--tensor-parallel-size", "--pipeline-parallel-size")
    if order.settings.num_nodes > 1:
        host, port = order.head
        is_headless = order.settings.node_rank > 0  # only the head node answers clients
        flags += [("--master-addr", host), ("--master-port", port), ("--headless", is_headless)]
    return flags


def _speculation(order: LaunchRequest) -> Flags:
    drafter = order.drafter
    if drafter is None:
        return []
    version = order.version
    if not (version.within(f">={DFLASH}") or (version.is_nightly and version.within(">=0.19.1"))):
        raise order.refusal(
            "draft",
            f"no release before {DFLASH} has DFlash; use {DFLASH} or newer, or a nightly build such as "
            "0.19.1rc1.dev110 (https://github.com/vllm-project/vllm/pull/36847)",
        )
    config: dict[str, object] = {
        "method": "dspark" if order.draft_kind == "dspark" else "dflash",
        "model": drafter,
        "num_speculative_tokens": order.width - 1,
        "attention_backend": _draft_backend(order),
        "quantization": order.quantization("draft_quantization"),
        **_synthetic(order),
    }
    metrics = "summary" if order.version.within(f">={REQUEST_METRICS}") else None
    return [
        ("--speculative-config", {key: value for key, value in config.items() if value is not None}),
        ("--per-request-spec-decode-metrics", metrics),
    ]


def _draft_backend(order: LaunchRequest) -> str | None:
    backend = _backend(order.settings.draft_attention_backend)
    has_own = order.version.within(f">={DRAFT_BACKEND}") or DRAFT_BACKEND_PULL in order.version.carried
    if backend is None or has_own:
        return backend
    if backend != _backend(order.settings.attention_backend):
        raise order.refusal(
            "draft_attention_backend",
            f"the drafter uses the target's before {DRAFT_BACKEND}, but in a build that carries the pull "
            f"request, named as {order.version.text.partition('+')[0]}+pr{DRAFT_BACKEND_PULL} "
            f"(https://github.com/vllm-project/vllm/pull/{DRAFT_BACKEND_PULL})",
        )
    return None


def _synthetic(order: LaunchRequest) -> dict[str, object]:
    profile = order.settings.synthetic_acceptance
    if profile is None:
        return {}
    if not order.version.within(f">={SYNTHETIC}"):
        raise order.refusal("synthetic_acceptance", f"it has none before {SYNTHETIC}")
    rates = acceptance_rates(profile, width=order.width, block=order.width)
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
