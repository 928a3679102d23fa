"""Every recipe becomes the command that is kept beside it, and nothing known is against it."""

import json
import re
from pathlib import Path

import pytest

from blockdraft.launch.issues import check_settings
from blockdraft.launch.launch_request import Combination
from blockdraft.settings.recipe import load_recipe, recipe_names
from tests.launch.golden import FOLDER, golden_path, machine_with, recipe_golden, recipe_settings


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_becomes_its_golden_command(name):
    expected = json.loads(golden_path(name).read_text())
    assert recipe_golden(name) == expected, "if this is meant: python -m tests.launch.golden"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_is_refused_on_its_own_cards(name):
    recipe = load_recipe(name)
    if recipe.settings.get("engine", "native") == "native":
        return
    for settings in recipe_settings(name):
        for card in recipe.cards:
            findings = check_settings(Combination(settings=settings, machine=machine_with(card)))
            assert [finding.id for finding in findings if finding.severity == "refuse"] == []


def test_every_recipe_is_on_its_page():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(recipe_names())
