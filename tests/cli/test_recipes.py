"""`blockdraft recipes`: the list and its filters, one recipe whole, and what is refused."""

import json
import re

import pytest

from blockdraft.cli.main import main
from blockdraft.settings.recipe import load_recipe, recipe_names


def printed(capsys, *words):
    assert main(["recipes", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def names_of(text):
    return re.findall(r"^(\S+)", text, re.MULTILINE)


def test_the_list_has_every_recipe_with_its_engine_and_title(capsys):
    text = printed(capsys)
    assert names_of(text) == list(recipe_names())
    assert re.search(r"^qwen3-8b +native +Qwen3-8B with z-lab's drafter.*\(rtx-5090, gb10, ", text, re.M)


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (["--card", "dgx-spark"], "qwen3.5-27b-nvfp4", "gemma-4-31b"),
        (["--card", "dgx-spark"], "smollm2", "gpt-oss-20b"),  # a recipe for any card
        (["--card", "gh200"], "gpt-oss-20b", "gpt-oss-120b"),  # larger than an H100, smaller than an H200
        (["--model", "QWEN3.5-27B"], "qwen3.5-27b-nvfp4", "qwen3-8b"),  # by name, in any case
        (["--model", "ultrachat"], "llama-3.1-8b", "qwen3-8b"),  # by drafter
        (["--model", "rdtand", "--card", "rtx-5090"], "qwen3.5-27b-nvfp4-5090", "qwen3.5-27b-nvfp4"),
    ],
)
def test_filters_leave_recipes_of_a_card_and_of_a_model(capsys, words, has, lacks):
    found = names_of(printed(capsys, *words))
    assert has in found
    assert lacks not in found


def test_one_recipe_is_shown_whole(capsys):
    text = printed(capsys, "show", "gemma-4-26b-a4b")
    recipe = load_recipe("gemma-4-26b-a4b")
    assert text.startswith(recipe.title)
    assert "\ncards: A100 80 GB, H100 SXM, H200, B200, B300\n" in text
    assert re.search(r"^  width +16$", text, re.M)
    assert re.search(r"^with --engine vllm\n  max_prefill_tokens +32768$", text, re.M)
    assert "\npublished (RavChat: " in text
    assert "\n  H100 SXM, code, 1 user, vllm: 222.3 tok/s, 3.4 times plain decoding" in text


def test_what_is_missing_or_excluded_is_said(capsys):
    assert "not on ampere, ada, hopper: only Blackwell" in printed(capsys, "show", "qwen3-coder-next-nvfp4")
    assert printed(capsys, "show", "smollm2").endswith("published: no results of this pair are known\n")


def test_a_file_of_ones_own_is_shown_with_its_own_results(capsys, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'title = "Mine"\nmodel = "a/b"\n[engine]\nname = "vllm"\nenv = { A = "1" }\n'
        '[[expect]]\ntokens_per_second = 7\nsource = "my desk"\n'
    )
    text = printed(capsys, "show", str(path))
    assert "Mine\ncards: any, and CPUs\n" in text
    assert re.search(r"^  engine_env +A=1$", text, re.M)
    assert text.endswith("published (my desk)\n  1 user: 7 tok/s\n")


@pytest.mark.parametrize("words", [[], ["show", "qwen3-8b"]])
def test_json_has_the_recipe_and_what_was_published(capsys, words):
    recipes = json.loads(printed(capsys, *words, "--json"))["recipes"]
    (one,) = (recipe for recipe in recipes if recipe["name"] == "qwen3-8b")
    assert one["settings"]["draft"] == "z-lab/Qwen3-8B-DFlash-b16"
    assert 422 in [run["tokens_per_second"] for run in one["published"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["qwen3-8b"],
            "'qwen3-8b' is not an action of `blockdraft recipes`: `blockdraft recipes show ",
        ),
        (["qwen"], "'qwen' is not an action of `blockdraft recipes`: use --model"),
        (["show"], "recipes show needs one name and no filter: `blockdraft recipes` lists names"),
        (["show", "smollm2", "--card", "h100"], "recipes show needs one name and no filter"),
        (["show", "smolm2"], "there is no recipe 'smolm2': did you mean smollm2?"),
        (["--card", "h2000"], "card 'h2000' is unknown: did you mean h200?"),
        (["--model", "zzz"], "no recipe is for a model 'zzz': `blockdraft recipes` lists all"),
        (
            ["--card", "h100", "--model", "coder-next"],
            "card 'h100' and a model 'coder-next'",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(capsys, words, message):
    assert main(["recipes", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_command_that_is_almost_its_name_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["recipe"])
    assert capsys.readouterr().err.endswith("did you mean recipes?\n")
