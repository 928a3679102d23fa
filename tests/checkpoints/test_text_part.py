"""Checkpoints that also see or hear, as transformers writes them: their text part runs, the rest stays."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from tests.models.checkpoints import bench_of, randomise, write_tokenizer
from tests.models.families import (
    BASE,
    GEMMA,
    GEMMA_MOE,
    GEMMA_UNIFIED,
    HYBRID,
    MOE,
    PARTIAL,
    SHARED_EXPERT,
    widen,
)

NUM_WORDS = 90  # tokens above mark pictures and sounds
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_config": QWEN_VISION,
}
GEMMA_PARTS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "boi_token_id": 93,
    "eoi_token_id": 94,
    "boa_token_id": 95,
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
}
AUDIO = {
    "audio_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [4, 2],
        "output_proj_dims": 16,
    }
}
UNIFIED_PARTS = GEMMA_PARTS | {
    "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "patch_size": 2, "pooling_kernel_size": 2},
    "audio_config": {},
}
HYBRID_TEXT = {**BASE, **HYBRID, "rope_parameters": PARTIAL}
GEMMA_TEXT = {**BASE, **GEMMA, "pad_token_id": 0, "use_bidirectional_attention": "vision"}
UNIFIED_TEXT = {**BASE, **GEMMA_UNIFIED, "pad_token_id": 0, "use_bidirectional_attention": "vision"}

# name -> class, config, the parts that are not text
CASES = {
    "qwen3_5": (
        Qwen3_5ForConditionalGeneration,
        lambda: Qwen3_5Config(text_config=HYBRID_TEXT, tie_word_embeddings=True, **QWEN_TOKENS),
        "vision",
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForConditionalGeneration,
        lambda: Qwen3_5MoeConfig(text_config=HYBRID_TEXT | MOE | SHARED_EXPERT, **QWEN_TOKENS),
        "vision",
    ),
    "gemma4": (
        Gemma4ForConditionalGeneration,
        lambda: Gemma4Config(text_config=GEMMA_TEXT, **GEMMA_PARTS, **AUDIO),
        "vision and audio",
    ),
    "gemma4 mixture, keys are values": (
        Gemma4ForConditionalGeneration,
        lambda: Gemma4Config(
            text_config=GEMMA_TEXT | GEMMA_MOE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **GEMMA_PARTS,
            audio_config=None,
        ),
        "vision",
    ),
    "gemma4 unified": (
        Gemma4UnifiedForConditionalGeneration,
        lambda: Gemma4UnifiedConfig(text_config=UNIFIED_TEXT, **UNIFIED_PARTS),
        "vision and audio",
    ),
}


class Case:
    """One checkpoint in both implementations."""

    def __init__(self, name, folder):
        model_class, make_config, self.left_out = CASES[name]
        torch.manual_seed(0)  # what is not a parameter
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.hf = model_class._from_config(make_config(), **eager).eval()
        randomise(self.hf, seed=3)
        self.hf.save_pretrained(folder)
        write_tokenizer(folder, BASE["vocab_size"])
        self.folder = folder
        self.is_hybrid = name.startswith("qwen")
        # mtp: the checkpoint's own draft head, which no class of transformers has
        self.rewrite(
            lambda tensors: tensors | {"mtp.fc.weight": torch.ones(4), "mtp.norm.weight": torch.ones(2)}
        )

    def tensors(self):
        return load_file(self.folder / "model.safetensors")

    def rewrite(self, change):
        save_file(change(self.tensors()), self.folder / "model.safetensors", {"format": "pt"})

    def load(self, dtype):
        lines = []
        settings = Settings(
            model=str(self.folder),
            device="cpu",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=200,
            max_num_seqs=2,
            page_size=4,
        )
        return load_models(settings, lines.append)[0], lines

    def logits(self, models, ids):
        with torch.no_grad():
            bench = bench_of(models, 1, len(ids), page_size=4)
            return bench.prefill(models.target, [ids], [[7, len(ids) - 7]])[0][0]

    def compare(self, dtype):
        models, lines = self.load(dtype)
        ids = torch.randint(0, NUM_WORDS, (29,), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            theirs = self.hf.to(dtype)(input_ids=ids[None]).logits[0]
        assert theirs.std() > 0.1
        # As in test_against_transformers.py.
        tolerance = (2e-5 if self.is_hybrid else 5e-6) * float(theirs.abs().max())
        torch.testing.assert_close(self.logits(models, ids), theirs, rtol=0, atol=tolerance)
        return models, lines


@pytest.fixture(params=CASES)
def case(request, tmp_path, monkeypatch):
    widen(monkeypatch)
    return Case(request.param, tmp_path)


def test_text_gets_the_logits_of_the_whole_model_and_the_other_parts_stay(case):
    models, lines = case.compare(torch.float64)
    names = case.tensors().keys()
    is_tied = case.hf.config.tie_word_embeddings
    assert ("lm_head.weight" in names) is not is_tied
    assert (models.target.head is None) is is_tied
    parts = {
        "vision": ("model.visual.", "model.vision_tower.", "model.vision_embedder."),
        "audio": ("model.audio_tower.", "model.embed_audio."),
    }
    for part in case.left_out.split(" and "):
        assert any(name.startswith(parts[part]) for name in names)
    assert f"text only: the {case.left_out} part of {case.folder} is not loaded" in lines
    assert " and ".join(models.config.left_out) == case.left_out
