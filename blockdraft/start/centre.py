"""What all keys of a head have in common, found once at the start: rotated keys are stored without it.

A constant that is taken from every key of a head moves all scores of a query alike and no weight. But it
would take up levels where keys are compressed. It is read off a text that ships here, so it is the same at
every start: keys of a model differ far more from head to head than their means do from text to text.
"""

from __future__ import annotations

import torch

from blockdraft.cache.cold import ColdLayer
from blockdraft.check.whole_view import WholeView
from blockdraft.engine.engine import Engine

TOKENS = 384  # at most
FIRST = 4  # the first tokens' keys, which all queries look at, are unlike the others
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
def centre_keys(engine: Engine) -> None:
    """For layers that rotate keys; the engine is new, and nothing is in its cache."""
    models = engine.models
    if not any(cold.pages.format.is_turned for cold in engine.cache.cold):
        return
    token_ids = models.tokenizer.encode(TEXT)[: min(TOKENS, models.plan.max_context)]
    view = WholeView(models.config.layer_specs(), count=len(token_ids), device=models.device)
    models.target(torch.tensor(token_ids, device=models.device), view)
    for layer, (keys, _) in view.kept.items():
        storage = engine.cache.storage[layer]
        if isinstance(storage, ColdLayer):
            storage.centre_on(keys[FIRST:].float().mean(dim=0))
