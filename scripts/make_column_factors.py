"""Measure the factors of a model's columns (see blockdraft/checkpoints/int8_weights.py).

python -m scripts.make_column_factors [MODEL]

The largest magnitude in each column of what each matrix multiplies, over the prompts that ship with the
benchmark, in float32. A column with peak p is multiplied by 2**-round(log2(sqrt(p))).
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdraft import bench
from blockdraft.check.uncached_view import WholeView
from blockdraft.checkpoints.int8_weights import FOLDER
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.models.kernel_module import with_kernels
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models

PROMPTS = Path(bench.__file__).parent / "prompts"
NUM_TOKENS = 384  # of each category
CATEGORIES = ("code", "prose", "qa", "dialogue")


class Peaks:
    """The largest magnitude of each column, by weight name."""

    def __init__(self) -> None:
        self.by_weight: dict[int, Tensor] = {}

    def see(self, x: Tensor, weight: Tensor) -> None:
        peak = x.abs().flatten(0, -2).amax(dim=0)
        old = self.by_weight.get(weight.data_ptr())
        self.by_weight[weight.data_ptr()] = peak if old is None else torch.maximum(old, peak)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        self.see(x, weight)
        return REFERENCE.linear(x, weight, bias, onto)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
        self.see(x, weight)
        return REFERENCE.gated_linear(x, weight, bias, gate)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="default")
    model = parser.parse_args().model
    settings = Settings(model=model, draft="none", device="cpu", quantization="none", max_model_len=1024)
    models, _ = load_models(settings, lambda line: None)
    peaks = Peaks()
    target = with_kernels(
        models.target, replace(REFERENCE, linear=peaks.linear, gated_linear=peaks.gated_linear)
    )
    for category in CATEGORIES:
        ids = tokens(models.tokenizer, category)
        view = WholeView(models.config.layer_specs(), count=len(ids), device=models.device)
        hidden, _ = target(torch.tensor(ids), view)
        target.logits(hidden)
    found = {}
    for path, module in target.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.data_ptr() in peaks.by_weight:
            peak = peaks.by_weight[weight.data_ptr()]
            exponent = -torch.log2(peak.clamp(min=1e-6).sqrt()).round()
            found[path] = (exponent - exponent.median()).clamp(-20, 20).to(torch.int8)
    name = open_checkpoint(model, report=lambda line: None).name
    FOLDER.mkdir(exist_ok=True)
    save_file(found, FOLDER / f"{name.rpartition('/')[2]}.safetensors")
    print(f"{len(found)} matrices of {name}")


def tokens(tokenizer: object, category: str) -> list[int]:
    """Prompts, one of each category in turn, with the chat template."""
    ids: list[int] = []
    for line in (PROMPTS / f"{category}.jsonl").read_text().splitlines():
        ids += tokenizer.encode_chat(json.loads(line)["messages"])  # type: ignore[attr-defined]
        if len(ids) >= NUM_TOKENS:
            break
    return ids[:NUM_TOKENS]


if __name__ == "__main__":
    main()
