"""The table of known cards: found by the name a driver gives them, and by the key a recipe writes."""

import pytest

from blockdraft.errors import SettingsError
from blockdraft.machine.cards import (
    CARDS,
    MIB,
    card_by_key,
    card_named,
    find_card,
    has_bf16,
    has_fp4,
    has_fp8,
    has_tma,
)

NAMES = {  # as nvidia-smi prints them
    "NVIDIA GB10": "gb10",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA GeForce RTX 5090 Laptop GPU": "rtx-5090-laptop",
    "NVIDIA GeForce RTX 5070 Ti": "rtx-5070-ti",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "Orin (nvgpu)": "orin",
    "NVIDIA Thor": "thor",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-32GB": "v100",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_a_card_is_found_by_its_drivers_name(name, key):
    card = find_card(name)
    assert card is not None
    assert card.key == key


@pytest.mark.parametrize("name", ["", "AMD Instinct MI300X", "NVIDIA RTX A2000", "Quadro P4000", "B2000"])
def test_an_unknown_card_is_not_mistaken_for_a_known_one(name):
    assert find_card(name) is None


def test_one_name_with_two_sizes_is_told_apart_by_its_memory():
    assert find_card("NVIDIA A100-SXM4-40GB", 40_536 * MIB).key == "a100-40gb"
    assert find_card("NVIDIA A100-SXM4-80GB", 81_920 * MIB).key == "a100-80gb"
    assert find_card("NVIDIA GH200 144G HBM3e", 146_831 * MIB).key == "gh200-144gb"


def test_a_card_is_found_by_its_key_and_its_aliases():
    for card in CARDS:
        assert card_by_key(card.key) is card
        assert all(card_by_key(alias) is card for alias in card.aliases)
    assert card_by_key("DGX Spark").key == "gb10"
    assert card_by_key("a card of the future") is None


def test_no_two_cards_share_a_key():
    keys = [key for card in CARDS for key in (card.key, *card.aliases)]
    assert len(keys) == len(set(keys))


def test_the_numbers_are_of_the_right_size():
    for card in CARDS:
        assert 10 << 30 <= card.memory_bytes <= 300 << 30, card.key
        assert 2e11 <= card.bandwidth <= 8e12, card.key
        assert 4e13 <= card.bf16_flops <= 2.5e15, card.key
    assert {card.key for card in CARDS if card.is_unified} == {"gb10", "thor", "orin"}


@pytest.mark.parametrize(
    ("key", "expected"),  # bf16, fp8, fp4, TMA
    [
        ("v100", (False, False, False, False)),
        ("a100", (True, False, False, False)),
        ("rtx-4090", (True, True, False, False)),
        ("h100", (True, True, False, True)),
        ("b200", (True, True, True, True)),
        ("gb10", (True, True, True, True)),
    ],
)
def test_what_a_capability_has(key, expected):
    capability = card_by_key(key).capability
    assert tuple(has(capability) for has in (has_bf16, has_fp8, has_fp4, has_tma)) == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gtx-5090", "rtx-5090"),
        ("h-200", "h200"),
        ("rtx5080", "rtx-5080"),
        ("rtx4090-laptop", "rtx-4090-laptop"),
        ("h2000", "h200"),
        ("dgx-sprak", "dgx-spark"),
    ],
)
def test_a_card_that_is_nearly_named_is_suggested(name, meant):
    with pytest.raises(SettingsError, match=f"card '{name}' is unknown: did you mean {meant}\\?"):
        card_named(name)


@pytest.mark.parametrize("name", ["gtx-1080", "GTX 1080", "gtx_980", "titan-xp", "tesla-p40", "p100", "k80"])
def test_a_card_before_volta_is_called_too_old_and_no_other_is_suggested(name):
    with pytest.raises(SettingsError) as caught:
        card_named(name)
    assert "older than our kernels: they need an NVIDIA card of capability 7.0" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert "rtx-5080, " in str(caught.value), "all that are known"


@pytest.mark.parametrize("name", ["rtx-2080", "rtx-3080", "rtx-5085", "mi300x", "h300"])
def test_another_number_is_another_card(name):
    with pytest.raises(SettingsError, match=f"card '{name}' is unknown: use one of gb10") as caught:
        card_named(name)
    assert "did you mean" not in str(caught.value)
