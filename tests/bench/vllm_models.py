"""Model folders that both vLLM's CPU build and we can load, made from what the tests have."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from blockdraft.checkpoints.opening import open_checkpoint

PAIR = Path(__file__).parents[1] / "fixtures/pair"
WIDE = 32  # the smallest head_dim of vLLM's CPU attention
_KEY_NORM = "layers.{}.self_attn.k_norm.weight"


def write_default_model(folder):
    """The default model, a GGUF file, as a Hugging Face folder in float32."""
    folder.mkdir(parents=True)
    checkpoint = open_checkpoint("default")
    save_file({name: checkpoint.read(name).float() for name in checkpoint.tensors()}, _weights(folder))
    parts = checkpoint.tokenizer_parts()
    config = {**checkpoint.config, "dtype": "float32", "eos_token_id": list(parts.eos_ids)}
    _write(folder / "config.json", config)
    parts.tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, parts)
    checkpoint.close()
    return folder


def write_wide_pair(folder):
    """The fixture pair with heads of 32 values instead of 8, of which 24 are zero: the same functions.

    Value i of a rotated pair keeps its frequency where it moves from place i of 4 to place 4i of 16. What
    depends on the size is made up for by powers of two, which are exact in floating point: attention's
    scale is half, and the norm of a head averages over four times as many values.

    The drafter is another one all the same: its second layer norms keys by the weights of its first. vLLM
    0.32's CPU build does so with the context's keys, whatever the weights (its rms_norm takes one row of
    them for all layers), and what it accepts could not be compared.
    """
    target, draft = folder / "target", folder / "draft"
    for one in (target, draft):
        one.mkdir(parents=True)
        config = json.loads((PAIR / one.name / "config.json").read_text())
        _write(one / "config.json", {**config, "head_dim": WIDE})
        weights = load_file(PAIR / one.name / "model.safetensors")
        if one is draft:
            weights[_KEY_NORM.format(1)] = weights[_KEY_NORM.format(0)].clone()
        save_file(
            {name: _widened(name, value, one is draft) for name, value in weights.items()}, _weights(one)
        )
    parts = open_checkpoint(str(PAIR / "target")).tokenizer_parts()
    parts.tokenizer.save(str(target / "tokenizer.json"))
    _write_tokenizer_config(target, parts)
    return target, draft


def _widened(name, value, has_norms):
    part = name.split(".")[-2]
    match part:
        case "q_proj":  # twice: for the scale, or for the norm's average
            return 2 * _spread(value, dim=0)
        case "k_proj":
            return (2 if has_norms else 1) * _spread(value, dim=0)
        case "v_proj":
            return _spread(value, dim=0)
        case "o_proj":
            return _spread(value, dim=1)
        case "q_norm":  # half for the projection's factor, twice for the scale
            return _spread(value, dim=0)
        case "k_norm":
            return _spread(value, dim=0) / 2
    return value


def _spread(value, *, dim):
    """Every head of 8 along `dim` becomes one of 32, with zeros between."""
    value = value.transpose(0, dim)
    heads = value.reshape(-1, 8, *value.shape[1:])
    wide = torch.zeros(len(heads), WIDE, *value.shape[1:], dtype=value.dtype)
    wide[:, :: WIDE // 8] = heads
    return wide.flatten(0, 1).transpose(0, dim).contiguous()


def _weights(folder):
    return folder / "model.safetensors"


def _write_tokenizer_config(folder, parts):
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is, not the model type's own
        "bos_token": parts.bos_token,
        "eos_token": parts.eos_token,
        "chat_template": parts.chat_template,
    }
    _write(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None})


def _write(path, content):
    path.write_text(json.dumps(content, indent=1))
