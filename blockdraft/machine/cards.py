"""The table of known graphics cards (cards.toml): memory, bandwidth, capability.

Plans for other machines, recipes and estimates use these numbers. For a card in this machine, the driver's
numbers take precedence (machine.py).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import SettingsError

Capability = tuple[int, int]
# GeForce GTX 6xx to 10xx, Titan X and Xp, and Tesla K, M and P: Kepler, Maxwell and Pascal.
_BEFORE_VOLTA = r"\bgtx ?([679]\d\d|10\d\d)\b|\btitan xp?\b|\b[kmp](4|6|40|60|80|100)\b"

FILE = Path(__file__).with_name("cards.toml")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A model of card with its maker's numbers, except for memory: the total that the driver reports."""

    key: str  # as recipes and `--card` write it
    title: str
    pattern: str  # searched in the driver's name of the card in lower case; the first match counts
    capability: Capability
    memory_bytes: int
    bandwidth: float  # bytes a second
    bf16_flops: float  # a second, dense, summed in float32
    is_unified: bool = False  # CPU and card share one memory
    aliases: tuple[str, ...] = ()


def _read_cards() -> tuple[Card, ...]:
    return tuple(
        Card(
            key,
            capability=tuple(entry.pop("capability")),
            memory_bytes=entry.pop("memory") * MIB,
            bandwidth=entry.pop("bandwidth") * 1e9,
            bf16_flops=entry.pop("flops") * 1e12,
            aliases=tuple(entry.pop("aliases", ())),
            **entry,
        )
        for key, entry in tomllib.loads(FILE.read_text(encoding="utf-8")).items()
    )


CARDS = _read_cards()


def find_card(name: str, memory_bytes: int = 0) -> Card | None:
    """Return the card that a driver calls `name` ("NVIDIA H200"); None if it is not in our table.

    Among cards of one name, `memory_bytes` chooses the one with the closest memory.
    """
    text = name.lower().replace("-", " ")
    found = [card for card in CARDS if re.search(card.pattern, text)]
    if not found:
        return None
    same = [card for card in found if card.pattern == found[0].pattern]
    if not memory_bytes:
        return same[0]
    return min(same, key=lambda card: abs(card.memory_bytes - memory_bytes))


def card_by_key(key: str) -> Card | None:
    """Return the card that a recipe or flag calls `key` ("dgx-spark", "h200")."""
    wanted = key.strip().lower().replace(" ", "-").replace("_", "-")
    return next((card for card in CARDS if wanted in (card.key, *card.aliases)), None)


def card_named(name: str) -> Card:
    """Return the card as `card_by_key` does; raise SettingsError if it is unknown."""
    card = card_by_key(name)
    if card is None:
        raise SettingsError(f"card '{name}' is unknown{_too_old(name)}{card_hint(name)}")
    return card


def card_hint(name: str) -> str:
    """Return ": did you mean x?" if a card's name is similar to `name`, else ": use one of …"."""
    keys = [key for known in CARDS for key in (known.key, *known.aliases)]
    alike = {_bare(key): key for key in keys if _is_near(_bare(name), _bare(key))}
    close = difflib.get_close_matches(_bare(name), alike, 1)
    return f": did you mean {alike[close[0]]}?" if close else f": use one of {', '.join(keys)}."


def _is_near(wrong: str, key: str) -> bool:
    """Return True if `wrong` is probably a typo of `key`.

    If their numbers differ, only one missing or extra character counts as a typo.
    """
    if re.findall(r"\d+", wrong) == re.findall(r"\d+", key):
        return difflib.SequenceMatcher(None, wrong, key).ratio() >= 0.8
    short, long = sorted((wrong, key), key=len)
    return any(long[:place] + long[place + 1 :] == short for place in range(len(long)))


def _bare(name: str) -> str:
    """Return a name in lower case without spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", name.lower())


def _too_old(name: str) -> str:
    if not re.search(_BEFORE_VOLTA, name.lower().replace("-", " ").replace("_", " ")):
        return ""
    return ", and older than our kernels: they need an NVIDIA card of capability 7.0 (Volta) or later"


# ---- names and hardware features of capabilities

FAMILIES = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")


def family_of(capability: Capability) -> str | None:
    """Return NVIDIA's name of a capability's generation in lower case; None if it is not supported."""
    named = {(7, 5): "turing", (8, 9): "ada"}
    by_major = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
    return named.get(capability) or by_major.get(capability[0])


def has_bf16(capability: Capability) -> bool:
    return capability >= (8, 0)


def has_fp8(capability: Capability) -> bool:
    """Return True if the card multiplies fp8 by fp8."""
    return capability >= (8, 9)


def has_fp4(capability: Capability) -> bool:
    """Return True if the card multiplies NVFP4 and MXFP4; older cards unpack weights to bf16 or fp8."""
    return capability >= (10, 0)


def has_tma(capability: Capability) -> bool:
    """Return True if the card has the tensor memory accelerator, which copies whole tiles."""
    return capability >= (9, 0)
