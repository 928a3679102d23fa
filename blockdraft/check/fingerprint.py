"""The fingerprint of an engine: everything that determines an answer's tokens, except the request itself.

Equal fingerprints, prompts, parameters and seeds give equal tokens. The drafter, the width, the number of
sequences and the memory are left out, because no token depends on them (docs/lossless.md).
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import replace

import torch

from blockdraft import __version__
from blockdraft.check.verified import card_facts, checksum, digest_of, sources
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import Fingerprint
from blockdraft.kernels.kv_formats import EXACT
from blockdraft.machine.machine import read_machine
from blockdraft.text.tokenizer import Tokenizer

COMPILERS = {"triton": "triton", "llvm": "llvmlite"}  # package of the compiler, by family of kernels


def fingerprint(engine: Engine) -> Fingerprint:
    """Return the fingerprint of a ready engine, or the reason why its answers cannot be repeated."""
    models, plan = engine.models, engine.plan
    if not plan.same_bits:
        return Fingerprint(reason=f"answers may depend on who else is served: {plan.reasons['same_bits']}")
    if models.labels.synthetic_acceptance is not None:
        return Fingerprint(reason="acceptance is synthetic: answers are not the model's")
    kernels = models.target.kernels
    compiler = COMPILERS.get(kernels.available.path)
    family = kernels.available.path + ("" if compiler is None else f" {_version(compiler)}")
    left_out = f", without {', '.join(kernels.off)}" if kernels.off else ""
    return Fingerprint.of(
        {
            "weights": engine.target_checksum or checksum(models.target),
            "config": digest_of(repr(replace(models.config, name="")))[:16],  # rotary angles are no weights
            "tokenizer": digest_of([models.tokenizer.as_json(), *models.tokenizer.eos_ids])[:16],
            "template": _template(models.tokenizer),
            "grammar": f"llguidance {_version('llguidance')}",
            "engine": f"{__version__} {sources()[:8]}",
            "pytorch": str(torch.__version__),
            "kernels": family + left_out,
            "device": _device(models.device),
            "formats": f"{plan.dtype}, weights {plan.quantization}, keys {_keys(engine)}",
        }
    )


def prefix_parts(engine: Engine) -> dict[str, str]:
    """Return all that the bytes of cached prefixes depend on, besides tokens: more than tokens depend on."""
    models, plan = engine.models, engine.plan
    draft, machine = "none", f"{read_machine().cpu.name}, {torch.get_num_threads()} threads"
    if models.drafter.model is not None and models.draft_config is not None:
        config = digest_of(repr(replace(models.draft_config, name="")))[:16]
        draft = f"{checksum(models.drafter.model)} {config}"
    if models.device.type == "cuda":
        machine = f"card and driver {digest_of(card_facts(models.device))[:8]}"
    sizes = [part.num_bytes for part in engine.cache.raw()]
    kept = f"{plan.kv_dtype} and {plan.draft_kv_dtype}, {plan.kv_window} exact, blocks of {plan.block}"
    return {
        **engine.fingerprint.parts,
        "drafter": draft,
        "machine": machine,
        "pages": f"{plan.page_size} tokens, {sizes} bytes" + (f", {kept}" if plan.num_exact_pages else ""),
    }


def _keys(engine: Engine) -> str:
    """Return the target's format of keys and values. Rotated ones are stored relative to their centre."""
    plan, groups = engine.plan, engine.cache.compressed
    if plan.kv_dtype == EXACT:
        return plan.dtype
    centred = [group.centre.tolist() for group in groups if group.pages.format.is_rotated]
    around = f" around {digest_of(centred)[:8]}" if centred else ""
    return f"{plan.kv_dtype}{around} but for the last {plan.kv_window}"


def _template(tokenizer: Tokenizer) -> str:
    text = tokenizer.chat_template
    return "none" if text is None else digest_of(text)[:16]


def _device(device: torch.device) -> str:
    """Return the GPU's name and compute capability with CUDA's version, or the CPU's instruction set."""
    if device.type == "cpu":
        cpu = read_machine().cpu
        return f"{platform.machine()} {digest_of(sorted(cpu.features))[:8]}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # PyTorch's build for CUDA brings its own Triton
        return "unknown"
