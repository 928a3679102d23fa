"""Ranges of versions, as the lists of known problems write them."""

import pytest

from blockdraft.machine.versions import is_in_range, read_range


@pytest.mark.parametrize(
    ("version", "text", "expected"),
    [
        ("2.13.0+cu130", ">=2.13", True),
        ("2.13.0+cu130", ">2.13", False),
        ("2.9", "<2.10", True),
        ("0.24.1", "<=0.24", False),
        ("7.0.0-1019-nvidia", "==7.0.0.1019.*", True),
        ("7.0.0-1019.20~24.04-generic", "==7.0.0.1019.*", True),
        ("7.0.0-1019-nvidia", "==7.0.0.101.*", False),
        ("7.0.0-1019-nvidia", "==7.0.*", True),
        ("12.1", ">=12.0,<12.1", False),
        ("12.1", ">=11,<12 | >=12.1", True),
        ("11.0", ">=11,<12 | >=12.1", True),
        ("12.0", ">=11,<12 | >=12.1", False),
        ("3.6.0rc1", ">=3.6", True),
        ("anything", "*", True),
        ("unknown", ">=0.1", False),
    ],
)
def test_ranges(version, text, expected):
    assert is_in_range(version, text) is expected


@pytest.mark.parametrize("text", ["1.0", "=>1.0", ">= 1.0 <2", "==1.0 | two"])
def test_a_range_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="Invalid specifier"):
        read_range(text)
