"""Parses versions and version ranges by the rules of Python packages (PEP 440)."""

from __future__ import annotations

import re

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ANY = "*"
_NUMBERS = re.compile(r"v?(\d+(?:[.-]\d+)*)")


def release_of(version: str) -> Version | None:
    """Return only the numbers: 3.6.0 for 3.6.0rc1 and 3.6.0+cu130, 7.0.0.1019 for 7.0.0-1019-nvidia.

    Return None if the text does not begin with a number.
    """
    found = _NUMBERS.match(version)
    return None if found is None else Version(found[1].replace("-", "."))


def read_range(text: str) -> list[SpecifierSet]:
    """Parse alternatives between bars, as in "==10.3 | >=12.1,<13"; raise ValueError if one is wrong."""
    return [SpecifierSet(part) for part in text.split("|")]


def is_in_range(version: str, text: str) -> bool:
    """Return True if the release of `version` is in the range; "*" matches everything."""
    release = release_of(version)
    return text == ANY or (release is not None and any(release in part for part in read_range(text)))
