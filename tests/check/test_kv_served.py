"""Compressed keys on a card: what has been served there starts, and the rest is refused by name."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from blockdraft.cache.spec import Paged, Windowed
from blockdraft.check.kv_served import check_served_on_card
from blockdraft.errors import SettingsError
from blockdraft.kernels import kv_formats
from blockdraft.planner import kv_choice

HEADS_OF_64 = Paged(3, 64)


@dataclass(frozen=True)
class Case:
    kv_dtype: str = "tq4"
    draft_kv_dtype: str = "exact"
    dtype: str = "bfloat16"
    page_size: int = 16
    spec: Paged = HEADS_OF_64
    capability: tuple = (9, 0)
    num_exact_pages: int = 100


def check(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case.capability)
    config = SimpleNamespace(layer_specs=lambda: (case.spec,))
    models = SimpleNamespace(config=config, draft_config=config, device=torch.device("cuda"))
    check_served_on_card(models, case)


@pytest.mark.parametrize("kv_dtype", ["int8", "tq4", "tq4v3"])
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
        {"capability": (8, 9)},
    ],
    ids=str,
)
def test_what_was_never_served_there_is_refused_with_what_to_use(change, monkeypatch):
    with pytest.raises(SettingsError, match="Use --kv-dtype auto, or --device cpu"):
        check(replace(Case(), **change), monkeypatch)


def test_what_the_tests_on_a_card_ask_is_one_line_away(monkeypatch):
    limits = kv_formats.CardLimits((64, 128, 256, 512), *(True,) * 3)
    for case in (Case(draft_kv_dtype="tq4"), Case(spec=Paged(2, 256)), Case(spec=Windowed(3, 512, 1024))):
        with pytest.raises(SettingsError, match="heads of 64 or 128 values without a sliding window"):
            check(case, monkeypatch)
        with monkeypatch.context() as served:
            served.setattr(kv_choice, "CARD", limits)
            check(case, served)
            with pytest.raises(SettingsError, match="for heads of 64, 128, 256 or 512 values, on Hopper"):
                check(replace(case, spec=Paged(3, 96)), served)
