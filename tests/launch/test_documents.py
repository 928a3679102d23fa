"""The commands of the five documents that this project began from come out of recipes, flag by flag."""

import argparse
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from blockdraft.bench.options import find_preset
from blockdraft.cli.flags import add_settings, given_settings
from blockdraft.cli.main import parse
from blockdraft.launch import translate
from blockdraft.launch.issues import check_settings, refuse
from blockdraft.launch.launch_request import Combination, LaunchRequest
from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.recipe import check_recipe_card
from tests.launch.golden import machine_with

FILE = Path(__file__).with_name("documents.toml")
COMMANDS = tomllib.loads(FILE.read_text())["command"]
ALWAYS = {  # where it listens and under which name, how much memory, drafts counted per request
    *("--host", "--port", "--served-model-name", "--gpu-memory-utilization"),
    "--per-request-spec-decode-metrics",
}


def settings_of(entry):
    parser = argparse.ArgumentParser()
    add_settings(parser)
    merged = merge_settings(given_settings(parser.parse_args(entry["words"].split())), uses_environment=False)
    assert merged.notes == ()
    return with_drafter(merged.settings)


def command_of(entry):
    order = LaunchRequest(
        settings=settings_of(entry),
        served_name=entry.get("served_name", "name"),
        port=entry.get("port", 8000),
        host=entry.get("host", "127.0.0.1"),
        machine=machine_with(entry["card"]),
        target=entry.get("target"),
    )
    return translate(order)


def flags_of(argv):
    """Flags with their values, true where they have none."""
    found, flag = {}, None
    for word in argv:
        if word.startswith("--"):
            flag = word
            assert flag not in found, f"{flag} is there twice"
            found[flag] = True
        elif flag is not None:
            found[flag] = word
    return found


def alike(value):
    """Backends are written in any case."""
    return value.lower() if isinstance(value, str) else value


PAGE = Path(__file__).parents[2] / "docs" / "source-documents.md"
ON_THE_PAGE = [
    shlex.split(line, comments=True) for line in re.findall(r"^blockdraft (.+)$", PAGE.read_text(), re.M)
]


def name_of(entry):
    return f"{entry['document']}: {entry['about'].partition(':')[0]}"


@pytest.mark.parametrize("entry", COMMANDS, ids=name_of)
def test_a_documents_command_comes_out_of_a_recipe(entry):
    command = command_of(entry)
    found = flags_of(command.argv)
    assert entry["model"] in command.argv
    spec = json.loads(found.pop("--speculative-config", "{}"))
    published = {key: alike(value) for key, value in entry.get("spec", {}).items()}
    assert {key: alike(spec.get(key)) for key in published} == published
    assert spec.keys() - published.keys() == set(entry.get("spec_added", ()))
    for flag, value in entry["flags"].items():
        assert alike(found.get(flag)) == alike(value), flag
    for flag, value in entry.get("left_out", {}).items():
        assert (found.get(flag), value) == (None, "1")
    more = found.keys() - entry["flags"].keys() - ALWAYS - {"--model-path"}
    assert more == set(entry["added"])
    assert entry.get("env", {}).items() <= command.env.items()


@pytest.mark.parametrize("entry", COMMANDS, ids=name_of)
def test_nothing_that_is_known_is_against_it(entry):
    settings, machine = settings_of(entry), machine_with(entry["card"])
    refuse(check_settings(Combination(settings=settings, machine=machine)))
    assert check_recipe_card(settings.recipe, settings.model, settings.device, machine) == ()


def test_every_document_has_a_command():
    assert {entry["document"] for entry in COMMANDS} == {"000", "001", "002", "003", "004"}


def test_code_of_a_checkpoint_is_trusted_by_no_recipe_of_ours():
    for entry in COMMANDS:
        if "--trust-remote-code" not in entry["words"]:
            assert "--trust-remote-code" not in command_of(entry).argv


@pytest.mark.parametrize("words", ON_THE_PAGE, ids=" ".join)
def test_a_command_of_the_page_is_read_and_nothing_is_against_it_on_the_recipes_card(words):
    args = parse(words)
    if words[0] == "bench" and args.table is not None:
        find_preset(args.table)
    merged = merge_settings(given_settings(args), uses_environment=False)
    if merged.recipe is None:  # a benchmark of a running server
        assert "http://127.0.0.1:8000" in words
        return
    settings = with_drafter(merged.settings)
    machine = machine_with(merged.recipe.cards[-1])
    check_recipe_card(merged.recipe.name, settings.model, "auto", machine)
    refuse(check_settings(Combination(settings=settings, machine=machine)))


def test_the_page_has_commands_for_each_document():
    titles = re.findall(r"^## (\d+)", PAGE.read_text(), re.M)
    assert len(ON_THE_PAGE) >= 2 * len(titles) == 10
