"""Compressed keys on a card: what has been served there starts, and the rest is refused by name."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from blockdraft.cache.spec import Paged, Windowed
from blockdraft.check.kv_served import check_served_on_card
from blockdraft.errors import SettingsError
from blockdraft.kernels.triton import kv_mma

HEADS_OF_64 = Paged(3, 64)


@dataclass(frozen=True)
class Case:
    kv_dtype: str = "tq4"
    draft_kv_dtype: str = "exact"
    dtype: str = "bfloat16"
    page_size: int = 16
    spec: Paged = HEADS_OF_64
    has_pdl: bool = True
    num_exact_pages: int = 100


def check(case, monkeypatch):
    monkeypatch.setattr(kv_mma, "has_pdl", lambda device: case.has_pdl)
    config = SimpleNamespace(layer_specs=lambda: (case.spec,))
    check_served_on_card(SimpleNamespace(config=config, device=torch.device("cuda")), case)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "tq4", "tq4v3"])
def test_every_format_starts(kv_dtype, monkeypatch):
    check(Case(kv_dtype), monkeypatch)
    check(Case(kv_dtype, spec=Paged(8, 128), page_size=64), monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"draft_kv_dtype": "tq4"},
        {"dtype": "float16"},
        {"page_size": 8},
        {"spec": Paged(3, 96)},
        {"spec": Windowed(3, 64, 1024)},
        {"has_pdl": False},
    ],
    ids=str,
)
def test_what_was_never_served_there_is_refused_with_what_to_use(change, monkeypatch):
    with pytest.raises(SettingsError, match="Use --kv-dtype auto, or --device cpu"):
        check(replace(Case(), **change), monkeypatch)
