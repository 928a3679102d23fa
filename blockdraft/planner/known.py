"""Model families and target/drafter pairs that are known by name: data for `blockdraft models` and its page.

Nothing here decides what loads: config.py and draft_config.py read the checkpoint's own config.json, and
a pair that is not listed may run as well as one that is. SOURCES and DATE say where the list is from and
of when; what the sources do not say is None. Sizes are parameter counts, so memory is approximate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

DATE = "2026-11-14"
SOURCES = (
    "the DFlash paper (arXiv 2602.06036)",
    "the model lists of z-lab/dflash, vllm-project/speculators and deepseek-ai/DeepSpec",
    "the models' cards and config.json files on the Hugging Face hub",
)

Layout = Literal["z-lab", "speculators", "other"]

_BYTES_PER_PARAMETER = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class KnownFamily:
    """A target family that this version computes."""

    name: str  # as in models/config.py
    architectures: tuple[str, ...]
    kind: str
    models: tuple[str, ...]
    rope: str
    notes: str


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target and a drafter that was trained for it."""

    target: str
    drafter: str
    layout: Layout
    family: str | None  # None: a family we do not compute
    block: int | None = None  # anchor included
    draft_layers: int | None = None
    target_billions: float | None = None  # parameters, for the text part where the target also sees or hears
    draft_billions: float | None = None
    refused: str = ""  # why it does not run here; "" when it does
    notes: str = ""

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def target_gb(self) -> float | None:
        """Approximate bfloat16 weights in GB; a quantised target needs less."""
        return _gigabytes(self.target_billions)

    @property
    def draft_gb(self) -> float | None:
        return _gigabytes(self.draft_billions)


def find(query: str = "") -> tuple[tuple[KnownFamily, ...], tuple[KnownPair, ...]]:
    """Families and pairs whose name, architecture, model, target or drafter contains `query`, in any case."""
    wanted = query.casefold()
    families = tuple(
        family
        for family in FAMILIES
        if any(wanted in text.casefold() for text in (family.name, *family.architectures, *family.models))
    )
    pairs = tuple(
        pair
        for pair in PAIRS
        if any(wanted in text.casefold() for text in (pair.target, pair.drafter, pair.family or ""))
    )
    return families, pairs


def as_json(families: tuple[KnownFamily, ...], pairs: tuple[KnownPair, ...]) -> dict[str, object]:
    """The same as plain values, with what the properties say."""
    return {
        "date": DATE,
        "sources": list(SOURCES),
        "families": [asdict(family) for family in families],
        "pairs": [
            {**asdict(pair), "runs": pair.runs, "target_gb": pair.target_gb, "draft_gb": pair.draft_gb}
            for pair in pairs
        ],
    }


def _gigabytes(billions: float | None) -> float | None:
    return None if billions is None else round(billions * _BYTES_PER_PARAMETER, 1)


_HYBRID = (
    "Three of four layers keep a recurrent state per sequence instead of keys and values, so the prefix "
    "cache is off."
)
_TEXT_ONLY = "Only the text part of these vision checkpoints is loaded."

FAMILIES = (
    KnownFamily(
        name="llama",
        architectures=("LlamaForCausalLM",),
        kind="dense",
        models=("Llama 2", "Llama 3.x", "SmolLM2", "TinyLlama"),
        rope="default, linear, llama3, yarn",
        notes="",
    ),
    KnownFamily(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        kind="dense",
        models=("Qwen2", "Qwen2.5"),
        rope="default, linear, yarn",
        notes="Sliding windows as configured.",
    ),
    KnownFamily(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        kind="dense",
        models=("Qwen3-0.6B to Qwen3-32B",),
        rope="default, linear, yarn",
        notes="Sliding windows as configured.",
    ),
    KnownFamily(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        kind="mixture of experts",
        models=("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-30B-A3B"),
        rope="default, linear, yarn",
        notes="",
    ),
    KnownFamily(
        name="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        kind="hybrid recurrent, mixture of experts",
        models=("Qwen3-Next-80B-A3B", "Qwen3-Coder-Next"),
        rope="default or yarn, on a quarter of each head",
        notes=f"{_HYBRID} The checkpoint's own draft head (mtp.*) is not loaded.",
    ),
    KnownFamily(
        name="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        kind="hybrid recurrent",
        models=("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.6-27B"),
        rope="default or yarn, on a quarter of each head",
        notes=f"{_HYBRID} {_TEXT_ONLY} The checkpoint's own draft head (mtp.*) is not loaded.",
    ),
    KnownFamily(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        kind="hybrid recurrent, mixture of experts",
        models=("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B"),
        rope="default or yarn, on a quarter of each head",
        notes=f"{_HYBRID} {_TEXT_ONLY} The checkpoint's own draft head (mtp.*) is not loaded.",
    ),
    KnownFamily(
        name="gemma4",
        architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        kind="dense, or mixture of experts",
        models=("gemma-4-31B", "gemma-4-26B-A4B"),
        rope="default in sliding layers, proportional in full ones",
        notes=(
            "Five of six layers slide over 1024 tokens; full layers have heads of their own shape, and keys "
            f"that serve as values. {_TEXT_ONLY} gemma-4-E2B and E4B (per-layer embeddings) are refused."
        ),
    ),
    KnownFamily(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        kind="mixture of experts",
        models=("gpt-oss-20b", "gpt-oss-120b"),
        rope="yarn, default",
        notes="Every other layer slides over 128 tokens; attention sinks. Published with MXFP4 experts.",
    ),
)

_NO_THINKING = "Trained on answers without thinking; fewer drafts are accepted when the target thinks."
_RETRAINED = "Retrained in June 2026; the layers are those of the first release."
_GEMMA_SCALE = "Trained on embeddings scaled by the root of the hidden size, as Gemma's are."
_REDUCED = "Reduced draft vocabulary."
_FAMILY = "the target's family is not computed by this version"
_DFLASH2 = "DFlash2 drafter (convolutions and a candidate selector)"
_DSPARK = "DSpark drafter (drafts from the anchor, with a Markov head)"
_SHIFTED = "drafts from the anchor, as DSpark does (Qwen3DSparkModel without its heads)"

_RUNNING = (
    # ---- llama
    KnownPair(
        target="meta-llama/Llama-3.1-8B-Instruct",
        drafter="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        layout="z-lab",
        family="llama",
        block=10,
        draft_layers=5,
        target_billions=8.0,
        draft_billions=1.05,
        notes="The target is gated on the hub.",
    ),
    # ---- qwen3
    KnownPair(
        target="Qwen/Qwen3-4B",
        drafter="z-lab/Qwen3-4B-DFlash-b16",
        layout="z-lab",
        family="qwen3",
        block=16,
        draft_layers=5,
        target_billions=4.0,
        draft_billions=0.54,
        notes=_NO_THINKING,
    ),
    KnownPair(
        target="Qwen/Qwen3-8B",
        drafter="z-lab/Qwen3-8B-DFlash-b16",
        layout="z-lab",
        family="qwen3",
        block=16,
        draft_layers=5,
        target_billions=8.2,
        draft_billions=1.05,
        notes=_NO_THINKING,
    ),
    KnownPair(
        target="Qwen/Qwen3-8B",
        drafter="RedHatAI/Qwen3-8B-speculator.dflash",
        layout="speculators",
        family="qwen3",
        block=8,
        target_billions=8.2,
        notes=_REDUCED,
    ),
    # ---- qwen3_moe
    KnownPair(
        target="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        drafter="z-lab/Qwen3-Coder-30B-A3B-DFlash",
        layout="z-lab",
        family="qwen3_moe",
        block=16,
        draft_layers=8,
        target_billions=30.5,
        draft_billions=0.47,
    ),
    KnownPair(
        target="Qwen/Qwen3-30B-A3B",
        drafter="RedHatAI/Qwen3-30B-A3B-speculator.dflash",
        layout="speculators",
        family="qwen3_moe",
        block=8,
        draft_layers=5,
        target_billions=30.5,
        draft_billions=0.68,
        notes=_REDUCED,
    ),
    KnownPair(
        target="Qwen/Qwen3-30B-A3B-Instruct-2507",
        drafter="RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
        layout="speculators",
        family="qwen3_moe",
        target_billions=30.5,
    ),
    # ---- qwen3_next
    KnownPair(
        target="Qwen/Qwen3-Coder-Next",
        drafter="z-lab/Qwen3-Coder-Next-DFlash",
        layout="z-lab",
        family="qwen3_next",
        block=16,
        draft_layers=8,
        target_billions=79.7,
        draft_billions=0.47,
    ),
    # ---- qwen3_5
    KnownPair(
        target="Qwen/Qwen3.5-4B",
        drafter="z-lab/Qwen3.5-4B-DFlash",
        layout="z-lab",
        family="qwen3_5",
        block=16,
        draft_layers=5,
        target_billions=4,
        draft_billions=0.54,
        notes=_RETRAINED,
    ),
    KnownPair(
        target="Qwen/Qwen3.5-9B",
        drafter="z-lab/Qwen3.5-9B-DFlash",
        layout="z-lab",
        family="qwen3_5",
        block=16,
        draft_layers=5,
        target_billions=9,
        draft_billions=1.05,
        notes=_RETRAINED,
    ),
    KnownPair(
        target="Qwen/Qwen3.5-27B",
        drafter="z-lab/Qwen3.5-27B-DFlash",
        layout="z-lab",
        family="qwen3_5",
        block=16,
        draft_layers=6,
        target_billions=26.9,
        draft_billions=2.1,
        notes="Sliding layers; the first release had five full ones.",
    ),
    KnownPair(
        target="Qwen/Qwen3.6-27B",
        drafter="z-lab/Qwen3.6-27B-DFlash",
        layout="z-lab",
        family="qwen3_5",
        block=16,
        draft_layers=5,
        target_billions=26.9,
        draft_billions=1.73,
        notes="Sliding layers are causal inside the block. The drafter was gated on the hub on 2026-05-29.",
    ),
    # ---- qwen3_5_moe
    KnownPair(
        target="Qwen/Qwen3.5-35B-A3B",
        drafter="z-lab/Qwen3.5-35B-A3B-DFlash",
        layout="z-lab",
        family="qwen3_5_moe",
        block=16,
        draft_layers=8,
        target_billions=34.7,
        draft_billions=0.47,
        notes=_RETRAINED,
    ),
    KnownPair(
        target="Qwen/Qwen3.6-35B-A3B",
        drafter="z-lab/Qwen3.6-35B-A3B-DFlash",
        layout="z-lab",
        family="qwen3_5_moe",
        block=16,
        draft_layers=6,
        target_billions=34.7,
        draft_billions=0.39,
        notes="Sliding layers; the first release had eight full ones.",
    ),
    KnownPair(
        target="Qwen/Qwen3.5-122B-A10B",
        drafter="z-lab/Qwen3.5-122B-A10B-DFlash",
        layout="z-lab",
        family="qwen3_5_moe",
        block=16,
        draft_layers=6,
        target_billions=122,
        draft_billions=0.79,
        notes="Sliding layers; the first release had four.",
    ),
    KnownPair(
        target="Qwen/Qwen3.5-397B-A17B",
        drafter="z-lab/Qwen3.5-397B-A17B-DFlash",
        layout="z-lab",
        family="qwen3_5_moe",
        block=16,
        draft_layers=6,
        target_billions=397,
        draft_billions=1.3,
        notes="Also published as modal-labs/ and lmsys/Qwen3.5-397B-A17B-DFlash.",
    ),
    KnownPair(
        target="RedHatAI/Qwen3.5-397B-A17B-FP8-dynamic",
        drafter="inference-optimization/Qwen3.5-397B-A17B-FP8-dynamic-speculator.dflash",
        layout="speculators",
        family="qwen3_5_moe",
        target_billions=397,
        notes="The target is published in fp8: half of the bfloat16 memory, packed.",
    ),
    # ---- gemma4
    KnownPair(
        target="google/gemma-4-31B-it",
        drafter="z-lab/gemma-4-31B-it-DFlash",
        layout="z-lab",
        family="gemma4",
        block=16,
        draft_layers=5,
        target_billions=30.7,
        draft_billions=1.47,
        notes=f"Apache-2.0 drafter. {_GEMMA_SCALE}",
    ),
    KnownPair(
        target="google/gemma-4-31B-it",
        drafter="RedHatAI/gemma-4-31B-it-speculator.dflash",
        layout="speculators",
        family="gemma4",
        target_billions=30.7,
    ),
    KnownPair(
        target="google/gemma-4-26B-A4B-it",
        drafter="z-lab/gemma-4-26B-A4B-it-DFlash",
        layout="z-lab",
        family="gemma4",
        block=16,
        draft_layers=5,
        target_billions=25.2,
        draft_billions=0.43,
        notes=f"Apache-2.0 drafter. {_GEMMA_SCALE}",
    ),
    # ---- gpt_oss
    KnownPair(
        target="openai/gpt-oss-20b",
        drafter="z-lab/gpt-oss-20b-DFlash",
        layout="z-lab",
        family="gpt_oss",
        block=8,
        draft_layers=8,
        target_billions=20.9,
        draft_billions=0.78,
        notes="The target is published in MXFP4: about 14 GB packed.",
    ),
    KnownPair(
        target="openai/gpt-oss-120b",
        drafter="z-lab/gpt-oss-120b-DFlash",
        layout="z-lab",
        family="gpt_oss",
        block=10,
        draft_layers=8,
        target_billions=116.8,
        draft_billions=0.78,
        notes="The target is published in MXFP4: about 65 GB packed.",
    ),
)

_REFUSED = (
    # ---- other drafters for families we compute
    KnownPair("Qwen/Qwen3-4B", "deepseek-ai/dflash_qwen3_4b_block7", "other", "qwen3", refused=_SHIFTED),
    KnownPair("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", "other", "qwen3", refused=_DSPARK),
    KnownPair(
        "Qwen/Qwen3-4B", "RedHatAI/Qwen3-4B-speculator.dflash2", "speculators", "qwen3", refused=_DFLASH2
    ),
    KnownPair("Qwen/Qwen3-8B", "deepseek-ai/dflash_qwen3_8b_block7", "other", "qwen3", refused=_SHIFTED),
    KnownPair("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", "other", "qwen3", refused=_DSPARK),
    KnownPair("Qwen/Qwen3-8B", "Dogacel/Qwen3-8B-DSpark", "other", "qwen3", refused=_DSPARK),
    KnownPair(
        "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2", "speculators", "qwen3", refused=_DFLASH2
    ),
    KnownPair("Qwen/Qwen3-14B", "deepseek-ai/dflash_qwen3_14b_block7", "other", "qwen3", refused=_SHIFTED),
    KnownPair("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", "other", "qwen3", refused=_DSPARK),
    KnownPair(
        "Qwen/Qwen3.6-35B-A3B",
        "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
        "speculators",
        "qwen3_5_moe",
        draft_layers=5,
        refused=_DSPARK,
    ),
    KnownPair(
        "Qwen/Qwen3.8-27B",
        "z-lab/Qwen3.8-27B-DFlash2",
        "z-lab",
        "qwen3_5",
        block=8,
        draft_layers=5,
        draft_billions=1.92,
        refused=_DFLASH2,
        notes="Also published as incoai/Qwen3.8-27B-DFlash2.",
    ),
    KnownPair("Qwen/Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", "other", "qwen3_5", refused=_DSPARK),
    KnownPair(
        "Qwen/Qwen3.8-27B",
        "RedHatAI/Qwen3.8-27B-speculator.dspark-preview",
        "speculators",
        "qwen3_5",
        refused=_DSPARK,
    ),
    KnownPair(
        "google/gemma-4-31B-it",
        "RedHatAI/gemma-4-31B-it-speculator.dflash2",
        "speculators",
        "gemma4",
        refused=_DFLASH2,
    ),
    KnownPair(
        "google/gemma-4-31B-it",
        "RedHatAI/gemma-4-31B-it-speculator.dspark",
        "speculators",
        "gemma4",
        refused=_DSPARK,
    ),
    # ---- targets of other families
    KnownPair(
        "google/gemma-4-12B-it",
        "z-lab/gemma4-12B-it-DFlash",
        "z-lab",
        None,
        block=16,
        draft_billions=0.73,
        refused=f"{_FAMILY} (gemma4_unified)",
    ),
    KnownPair(
        "moonshotai/Kimi-K2.5",
        "z-lab/Kimi-K2.5-DFlash",
        "z-lab",
        None,
        block=8,
        draft_layers=6,
        refused=_FAMILY,
    ),
    KnownPair(
        "moonshotai/Kimi-K2.6",
        "z-lab/Kimi-K2.6-DFlash",
        "z-lab",
        None,
        refused=_FAMILY,
        notes="The drafter was gated on the hub on 2026-05-29.",
    ),
    KnownPair("moonshotai/Kimi-K2.6", "nvidia/Kimi-K2.6-DFlash", "other", None, refused=_FAMILY),
    KnownPair(
        "MiniMaxAI/MiniMax-M2.5",
        "z-lab/MiniMax-M2.5-DFlash",
        "z-lab",
        None,
        refused=_FAMILY,
        notes="The drafter was gated on the hub on 2026-05-29.",
    ),
    KnownPair(
        "MiniMaxAI/MiniMax-M2.7",
        "z-lab/MiniMax-M2.7-DFlash",
        "z-lab",
        None,
        refused=_FAMILY,
        notes="The drafter was gated on the hub on 2026-05-29.",
    ),
    KnownPair(
        "zai-org/GLM-5.1-FP8",
        "z-lab/GLM-5.1-FP8-DFlash",
        "z-lab",
        None,
        refused=_FAMILY,
        notes="The drafter is gated on the hub.",
    ),
    KnownPair("zai-org/GLM-5.2", "RedHatAI/GLM-5.2-speculator.dspark", "speculators", None, refused=_FAMILY),
    KnownPair("zai-org/GLM-5.3", "RedHatAI/GLM-5.3-speculator.dspark", "speculators", None, refused=_FAMILY),
    KnownPair("zai-org/GLM-5.3-Flash", "incoai/GLM-5.3-Flash-DFlash2", "z-lab", None, refused=_FAMILY),
    KnownPair(
        "zai-org/GLM-5.3-Flash",
        "canada-quant/GLM-5.3-Flash-DFlash2-G",
        "z-lab",
        None,
        block=8,
        draft_layers=8,
        draft_billions=1.84,
        refused=_FAMILY,
    ),
    KnownPair(
        "deepseek-ai/DeepSeek-V4-Flash",
        "RedHatAI/DeepSeek-V4-Flash-speculator.dflash",
        "speculators",
        None,
        refused=_FAMILY,
    ),
    KnownPair(
        "meta-models/Muse-Glimmer-30B",
        "z-lab/Muse-Glimmer-30B-DFlash2",
        "z-lab",
        None,
        block=16,
        draft_layers=5,
        refused=_FAMILY,
        notes="Also published as incoai/Muse-Glimmer-30B-DFlash2.",
    ),
    KnownPair(
        "poolside/Laguna-XS.2", "poolside/Laguna-XS.2-speculator.dflash", "other", None, refused=_FAMILY
    ),
    KnownPair("poolside/Laguna-S-2.1", "poolside/Laguna-S-2.1-DFlash", "other", None, refused=_FAMILY),
)

PAIRS = _RUNNING + _REFUSED
