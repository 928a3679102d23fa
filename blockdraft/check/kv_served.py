"""Prepares compressed keys and values: refuses formats that a GPU cannot serve, computes the keys' centres.

Subtracting one constant from every key of a head shifts all scores of a query equally, so attention weights
do not change. Formats with a Hadamard rotation store keys minus their mean, because smaller values lose less
by compression. The mean is computed from a built-in text, so it is the same at every start. Rotary positions
rotate the mean, so the mean of the first tokens is averaged over all depths; only its slowly rotating part
remains (benchmarks/log.md, 2026-11-17).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.check.uncached_view import WholeView
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.kernels.kernels import REFERENCE
from blockdraft.models.config import AttentionConfig
from blockdraft.models.rotary import inverse_frequencies
from blockdraft.planner.kv_choice import check_card_layers
from blockdraft.planner.plan import Plan


def check_served_on_card(models: LoadedPair, plan: Plan) -> None:
    """Raise SettingsError for untested formats on a GPU: one crashed although its kernels passed."""
    if not plan.num_exact_pages or models.device.type != "cuda":
        return
    draft = () if models.draft_config is None else models.draft_config.layer_specs()
    check_card_layers(
        (plan.kv_dtype, plan.draft_kv_dtype),
        (models.config.layer_specs(), draft),
        plan.dtype,
        plan.page_size,
        torch.cuda.get_device_capability(models.device),
    )


TOKENS = 384  # at most
DEPTH = 8192  # maximal number of positions over which the mean is averaged
FIRST = 4  # skipped tokens: all queries attend to the first keys, which are unlike the others
TEXT = """The lighthouse keeper wrote down what he saw every evening: the wind, the colour of the water and
the names of the ships that passed. On the third of March there were eleven of them. "Eleven," he said, "and
not one came in." He counted again, because he did not trust a number that he had written only once.

1. Boil 2 litres of water with 15 g of salt.
2. Add 400 g of pasta, and stir for the first minute.
3. Drain it after 9 minutes; keep a cup of the water.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("the mean of nothing")
    return sum(values) / len(values)

What is the difference between weather and climate? Weather is what happens on a day; climate is what one may
expect of many years. If it rains on Tuesday, that is weather. If it rains on most Tuesdays in November, and
has done so since anybody kept records, that is climate. One of them is easier to predict than the other, and
people often guess wrong which of the two it is.

| city | people | founded |
|---|---|---|
| Aldmoor | 48,200 | 1203 |
| Westering | 7,950 | 1871 |

{"name": "lamp", "price": 19.5, "tags": ["brass", "desk"], "in_stock": true}
"""


@torch.inference_mode()
def served_centres(models: LoadedPair, max_model_len: int) -> dict[int, Tensor]:
    """Return, for each layer that stores keys, their mean [G, D] in float32."""
    token_ids = models.tokenizer.encode(TEXT)[: min(TOKENS, max_model_len)]
    view = WholeView(models.config.layer_specs(), count=len(token_ids), device=models.device)
    models.target(torch.tensor(token_ids, device=models.device), view)
    centres, depth = {}, min(DEPTH, max_model_len)
    for layer, (keys, _) in view.kept.items():
        mixer = models.config.layers[layer].mixer
        assert isinstance(mixer, AttentionConfig)
        centres[layer] = over_depths(keys[FIRST:].float().mean(dim=0), mixer, depth)
    return centres


def over_depths(mean: Tensor, attention: AttentionConfig, depth: int) -> Tensor:
    """Return `mean` [G, D] averaged over its rotations to the positions below `depth`."""
    turns = inverse_frequencies(attention.rope, attention.head_dim).to(mean.device)
    angle = torch.outer(torch.arange(depth, device=mean.device, dtype=torch.float32), turns)
    angles = angle.cos().mean(dim=0)[None, None], angle.sin().mean(dim=0)[None, None]
    return REFERENCE.rotate(mean[None], angles)[0]
