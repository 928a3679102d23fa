"""The graphics cards we know: memory, bandwidth and capability, for a machine that is not at hand.

A plan for another machine, a recipe and an estimate take their numbers from here. What a driver says about
the card that is there goes before what is written here: see `machine`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blockdraft.errors import SettingsError
from blockdraft.settings.settings import suggestion

Capability = tuple[int, int]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of card, as its maker publishes it; the memory is what the driver calls the total."""

    key: str  # as recipes and `--card` write it
    title: str
    pattern: str  # found in the driver's name of the card, in small letters
    capability: Capability
    memory_bytes: int
    bandwidth: float  # bytes a second
    bf16_flops: float  # a second, dense, summed in float32
    is_unified: bool = False  # the CPU's memory is the card's
    aliases: tuple[str, ...] = ()


def _card(
    key: str,
    title: str,
    pattern: str,
    capability: Capability,
    sizes: tuple[int, float, float],
    *,
    is_unified: bool = False,
    aliases: tuple[str, ...] = (),
) -> Card:
    """`sizes`: MiB of memory, gigabytes a second, teraflops a second."""
    memory, bandwidth, flops = sizes[0] * MIB, sizes[1] * 1e9, sizes[2] * 1e12
    return Card(key, title, pattern, capability, memory, bandwidth, flops, is_unified, aliases)


# Of cards whose patterns both match, the one earlier in the list is meant; where several share a pattern
# (one name, two sizes of memory), the one nearest in memory.
CARDS: tuple[Card, ...] = (
    # Blackwell, consumer and workstation: capability 12.x
    _card("gb10", "DGX Spark (GB10)", r"\bgb10\b|dgx spark", (12, 1), (122_500, 273, 125),
          is_unified=True, aliases=("dgx-spark", "spark")),
    _card("rtx-5090-laptop", "RTX 5090 Laptop", r"5090 (laptop|mobile)", (12, 0), (24_463, 896, 115)),
    _card("rtx-5090", "RTX 5090", r"\b5090\b", (12, 0), (32_607, 1792, 209)),
    _card("rtx-5080", "RTX 5080", r"rtx 5080", (12, 0), (16_303, 960, 112)),
    _card("rtx-5070-ti", "RTX 5070 Ti", r"rtx 5070 ti", (12, 0), (16_303, 896, 88)),
    _card("rtx-5070", "RTX 5070", r"rtx 5070", (12, 0), (12_227, 672, 61)),
    _card("rtx-5060-ti", "RTX 5060 Ti 16 GB", r"rtx 5060 ti", (12, 0), (16_311, 448, 47)),
    _card("rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server", r"rtx pro 6000.*server", (12, 0),
          (97_887, 1597, 500)),
    _card("rtx-pro-6000", "RTX PRO 6000 Blackwell", r"rtx pro 6000", (12, 0), (97_887, 1792, 500)),
    _card("rtx-pro-5000", "RTX PRO 5000 Blackwell", r"rtx pro 5000", (12, 0), (48_935, 1344, 265)),
    _card("rtx-pro-4500", "RTX PRO 4500 Blackwell", r"rtx pro 4500", (12, 0), (32_623, 896, 200)),
    # Blackwell, data centre: capability 10.x; Thor is 11.0 from CUDA 13 on, 10.1 before
    _card("gb300", "GB300", r"\bgb300\b", (10, 3), (284_208, 8000, 2500)),
    _card("b300", "B300", r"\bb300\b", (10, 3), (275_040, 8000, 2250)),
    _card("gb200", "GB200", r"\bgb200\b", (10, 0), (189_471, 8000, 2500)),
    _card("b200", "B200", r"\bb200\b", (10, 0), (183_359, 8000, 2250)),
    _card("thor", "Jetson AGX Thor", r"\bthor\b", (11, 0), (125_700, 273, 125), is_unified=True),
    # Hopper
    _card("gh200", "GH200 96 GB", r"\bgh200\b", (9, 0), (97_871, 4000, 989)),
    _card("gh200-144gb", "GH200 144 GB", r"\bgh200\b", (9, 0), (147_456, 4900, 989)),
    _card("h200", "H200", r"\bh200\b", (9, 0), (143_771, 4800, 989)),
    _card("h20", "H20", r"\bh20\b", (9, 0), (97_871, 4000, 148)),
    _card("h100-nvl", "H100 NVL", r"\bh100 nvl\b", (9, 0), (95_830, 3938, 835)),
    _card("h100-pcie", "H100 PCIe", r"\bh100 pcie\b", (9, 0), (81_559, 2039, 756)),
    _card("h100", "H100 SXM", r"\bh100\b", (9, 0), (81_559, 3350, 989), aliases=("h100-sxm",)),
    # Ada
    _card("l4", "L4", r"\bl4\b", (8, 9), (23_034, 300, 121)),
    _card("l40s", "L40S", r"\bl40s\b", (8, 9), (46_068, 864, 362)),
    _card("l40", "L40", r"\bl40\b", (8, 9), (46_068, 864, 181)),
    _card("rtx-6000-ada", "RTX 6000 Ada", r"rtx 6000 ada", (8, 9), (49_140, 960, 364)),
    _card("rtx-4090-laptop", "RTX 4090 Laptop", r"4090 (laptop|mobile)", (8, 9), (16_376, 576, 80)),
    _card("rtx-4090", "RTX 4090", r"\b4090\b", (8, 9), (24_564, 1008, 165)),
    _card("rtx-4080", "RTX 4080", r"rtx 4080", (8, 9), (16_376, 717, 97)),
    # Ampere
    _card("a100-80gb", "A100 80 GB", r"\ba100\b", (8, 0), (81_920, 2039, 312), aliases=("a100",)),
    _card("a100-40gb", "A100 40 GB", r"\ba100\b", (8, 0), (40_960, 1555, 312)),
    _card("a30", "A30", r"\ba30\b", (8, 0), (24_576, 933, 165)),
    _card("a40", "A40", r"\ba40\b", (8, 6), (46_068, 696, 150)),
    _card("a10g", "A10G", r"\ba10g\b", (8, 6), (23_028, 600, 70)),
    _card("a10", "A10", r"\ba10\b", (8, 6), (23_028, 600, 125)),
    _card("rtx-a6000", "RTX A6000", r"\ba6000\b", (8, 6), (49_140, 768, 155)),
    _card("rtx-3090", "RTX 3090", r"\b3090\b", (8, 6), (24_576, 936, 71)),
    _card("orin", "Jetson AGX Orin 64 GB", r"\borin\b", (8, 7), (62_800, 204.8, 42), is_unified=True),
    # Before Ampere: no bfloat16 in hardware
    _card("t4", "T4", r"\bt4\b", (7, 5), (15_360, 320, 65)),
    _card("v100", "V100 32 GB", r"\bv100\b", (7, 0), (32_768, 900, 125)),
)  # fmt: skip


def find_card(name: str, memory_bytes: int = 0) -> Card | None:
    """The card that a driver calls `name` ("NVIDIA H200"); None: not one of ours."""
    text = name.lower().replace("-", " ")
    found = [card for card in CARDS if re.search(card.pattern, text)]
    if not found:
        return None
    same = [card for card in found if card.pattern == found[0].pattern]
    if not memory_bytes:
        return same[0]
    return min(same, key=lambda card: abs(card.memory_bytes - memory_bytes))


def card_by_key(key: str) -> Card | None:
    """The card that a recipe or a flag calls `key` ("dgx-spark", "h200")."""
    wanted = key.strip().lower().replace(" ", "-").replace("_", "-")
    for card in CARDS:
        if wanted == card.key or wanted in card.aliases:
            return card
    return None


def card_named(name: str) -> Card:
    """The same. Raises SettingsError for a card that we do not know."""
    card = card_by_key(name)
    if card is None:
        keys = [key for known in CARDS for key in (known.key, *known.aliases)]
        hint = suggestion(name.lower(), keys) or f": use one of {', '.join(keys)}"
        raise SettingsError(f"card '{name}' is unknown{hint}")
    return card


# ---- what a capability has in hardware


def has_bf16(capability: Capability) -> bool:
    return capability >= (8, 0)


def has_fp8(capability: Capability) -> bool:
    """Products of fp8 by fp8."""
    return capability >= (8, 9)


def has_fp4(capability: Capability) -> bool:
    """Products of NVFP4 and MXFP4; older cards unpack the weights and multiply in bf16 or fp8."""
    return capability >= (10, 0)


def has_tma(capability: Capability) -> bool:
    """The tensor memory accelerator: copies of whole tiles."""
    return capability >= (9, 0)
