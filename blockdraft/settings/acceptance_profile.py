"""Profiles of synthetic acceptance, which accepts drafts at random, for timing only.

A profile is a list, "0.9,0.8,0.7": entry j is the probability that draft j is accepted. The list never rises,
because a draft counts only if all drafts before it are accepted. Or it is "mean:4.5", the mean number of
tokens committed per step. If the drafts before it are accepted, each draft is then accepted with the same
chance p, which gives p, p^2, p^3, and so on.
"""

from __future__ import annotations

from blockdraft.errors import SettingsError

_MEAN = "mean:"
_HALVINGS = 64  # halvings of [0, 1]: more do not change a float


def read_profile(text: str) -> tuple[float, ...] | float:
    """Return the probabilities of a list, or the mean. Raise SettingsError if the text is neither."""
    if not isinstance(text, str):
        raise _error(text, "it is not text")
    if text.startswith(_MEAN):
        mean = _number(text, text.removeprefix(_MEAN))
        if not mean >= 1:
            raise _error(text, "a step commits at least 1 token")
        return mean
    rates = tuple(_number(text, part) for part in text.split(","))
    for rate, before in zip(rates, (1.0, *rates), strict=False):
        if not 0 <= rate <= 1:
            raise _error(text, f"{rate} is not a probability between 0 and 1")
        if rate > before:
            raise _error(text, f"{rate} follows {before}, but a draft counts only if all before it do")
    return rates


def acceptance_rates(text: str, *, width: int, block: int) -> tuple[float, ...]:
    """Return the probability of each of the `block` - 1 drafts. A mean is that of steps of `width` tokens."""
    if width < 2:
        raise _error(text, f"width = {width} leaves no draft to accept: use --width 2 or more")
    profile = read_profile(text)
    if isinstance(profile, float):
        if profile > width:
            raise _error(text, f"a step of width {width} commits at most {width} tokens")
        chance = _chance(profile, width)
        return tuple(chance**draft for draft in range(1, block))
    if len(profile) > block - 1:
        raise _error(text, f"it has {len(profile)} rates, but a block of {block} has {block - 1} drafts")
    return profile + (0.0,) * (block - 1 - len(profile))


def _chance(mean: float, width: int) -> float:
    """Return the p for which the `width` terms 1 + p + p^2 + ... add up to `mean`."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(middle**draft for draft in range(width)) < mean:
            low = middle
        else:
            high = middle
    return high


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise _error(text, f"'{part}' is not a number") from None


def _error(text: object, why: str) -> SettingsError:
    return SettingsError(
        f"synthetic_acceptance = {text!r}: {why}. Give probabilities that do not rise, such as 0.9,0.8,0.6, "
        "or the mean tokens per step, such as mean:4.5."
    )
