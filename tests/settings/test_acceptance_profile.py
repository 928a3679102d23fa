"""Synthetic acceptance: profiles become rates, and what cannot be one is refused before anything loads."""

import pytest

from blockdraft.errors import SettingsError
from blockdraft.settings.acceptance_profile import acceptance_rates, read_profile
from blockdraft.settings.settings import Settings


def test_a_list_is_padded_with_zeros_up_to_the_block():
    assert acceptance_rates("0.9, 0.5,0.5", width=8, block=8) == (0.9, 0.5, 0.5, 0, 0, 0, 0)
    assert acceptance_rates("1", width=2, block=4) == (1, 0, 0)


@pytest.mark.parametrize("width", [2, 16])
@pytest.mark.parametrize("share", [0.0, 0.49, 1.0])
def test_a_mean_is_met_by_steps_of_the_planned_width(width, share):
    mean = 1 + share * (width - 1)
    rates = acceptance_rates(f"mean:{mean}", width=width, block=16)
    assert len(rates) == 15
    assert 1 + sum(rates[: width - 1]) == pytest.approx(mean, abs=1e-9)
    assert all(0 <= rate <= before for rate, before in zip(rates, (1.0, *rates), strict=False))
    assert rates[1] == pytest.approx(rates[0] ** 2)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ("", "'' is not a number"),
        ("0.9,,0.8", "'' is not a number"),
        ("mean:much", "'much' is not a number"),
        ("0.5,0.6", "0.6 follows 0.5"),
        ("1.1", "1.1 is not a probability"),
        ("0.5,-0.1", "-0.1 is not a probability"),
        ("nan", "nan is not a probability"),
        ("mean:0.99", "a step commits at least 1 token"),
        ("mean:nan", "a step commits at least 1 token"),
        (0.5, "it is not text"),
    ],
)
def test_what_is_no_profile_is_refused_by_the_settings(profile, reason):
    with pytest.raises(SettingsError) as caught:
        Settings(draft="some/drafter", synthetic_acceptance=profile)
    assert f"synthetic_acceptance = {profile!r}: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)
    for draft in (None, "none"):
        with pytest.raises(SettingsError, match="no drafter"):
            Settings(draft=draft, synthetic_acceptance="0.5")


@pytest.mark.parametrize(
    ("profile", "width", "reason"),
    [
        ("mean:4.1", 4, "a step of width 4 commits at most 4"),
        ("mean:inf", 4, "a step of width 4 commits at most 4"),
        ("0.5", 1, "width = 1 leaves no draft"),
        ("mean:1", 1, "width = 1 leaves no draft"),
        (",".join(["0.5"] * 8), 4, "has 8 rates, but a block of 8 has 7 drafts"),
    ],
)
def test_what_the_block_cannot_hold_is_refused(profile, width, reason):
    read_profile(profile)
    with pytest.raises(SettingsError, match=reason):
        acceptance_rates(profile, width=width, block=8)


def test_the_models_name_says_what_is_not_real():
    assert Settings().suffix == ""
    assert Settings(load_format="dummy").suffix == "+dummy"
    assert Settings(draft="d", synthetic_acceptance="0.5").suffix == "+synthetic"
    assert Settings(draft="d", load_format="dummy", synthetic_acceptance="0.5").suffix == "+dummy+synthetic"
