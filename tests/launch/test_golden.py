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


def test_the_pairs_that_were_asked_for_have_recipes():
    targets = {load_recipe(name).settings["model"] for name in recipe_names()}
    drafters = {load_recipe(name).settings.get("draft") for name in recipe_names()}
    assert {"google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it", "openai/gpt-oss-20b"} <= targets
    assert {"openai/gpt-oss-120b", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"} <= targets
    assert {"z-lab/gemma-4-31B-it-DFlash", "RedHatAI/gemma-4-31B-it-speculator.dflash"} <= drafters
    assert {"z-lab/Qwen3.5-27B-DFlash", "z-lab/Qwen3.5-35B-A3B-DFlash"} <= drafters
    assert "z-lab/Qwen3-Coder-Next-DFlash" in drafters


def test_every_recipe_is_on_its_page():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(recipe_names())
