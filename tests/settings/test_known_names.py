"""Names of vLLM, SGLang and llama.cpp: taken where they mean the same, else explained; never ignored."""

import pytest

from blockdraft import LLM
from blockdraft.cli.flags import settings_from
from blockdraft.cli.main import parse
from blockdraft.errors import SettingsError
from blockdraft.settings.known_names import OTHERWISE, SAME, as_our_flags, as_our_settings, explained
from blockdraft.settings.settings import SETTING_NAMES

SAMPLING = {"temperature", "repetition_penalty", "max_tokens", "grammar", "served_model_name"}


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["--max-context", "4096"], "max_model_len", 4096),
        (["--ctx-size", "4096"], "max_model_len", 4096),
        (["-c", "4096"], "max_model_len", 4096),
        (["--chunk", "512"], "max_prefill_tokens", 512),
        (["--fast"], "allow_batch_variance", True),
        (["--no-enable-prefix-caching"], "prefix_cache", False),
        (["--engine", "vllm", "--tensor-parallel-size", "2"], "tensor_parallel", 2),
        (["-m", "default"], "model", "default"),
    ],
)
def test_a_flag_that_means_the_same_is_taken_with_a_note(capsys, words, setting, value):
    found = settings_from(parse(["serve", *words]))
    assert getattr(found, setting) == value
    assert f"is --{setting.replace('_', '-')} here" in capsys.readouterr().err.replace("--no-", "--")


def test_sampling_has_its_own_and_our_flags_and_what_follows_two_dashes_are_left_alone():
    args = parse(["generate", "hi", "--temp", "0.5", "-n", "7"])
    assert (args.temperature, args.max_tokens) == (0.5, 7)
    words = ["serve", "--ctx-size", "9", "--", "--ctx-size", "8"]
    assert as_our_flags(words, {"--ctx-size", "-c"}) == (words, [])
    assert as_our_flags(["-c", "8"], {"--max-model-len", "-c"}) == (["-c", "8"], [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculative-config", "{}"], "vLLM's --speculative-config is our --draft and --width"),
        (["--num-speculative-tokens", "7"], "is our --width, which counts the token before the drafts too"),
        (["-ngl", "99"], "llama.cpp's -ngl is our --device"),
        (["--temp", "1"], "llama.cpp's --temp is our --temperature, which is not for this command"),
    ],
)
def test_a_flag_that_means_something_else_is_explained(capsys, words, told):
    with pytest.raises(SystemExit):
        parse(["serve", *words])
    assert told in capsys.readouterr().err


def test_llm_takes_vllms_names_with_a_note():
    notes = []
    given = {"context_length": 64, "max_rows": 2, "seed": 1}
    assert as_our_settings(given, notes.append) == {"max_model_len": 64, "max_num_seqs": 2, "seed": 1}
    assert notes == [
        "SGLang's context_length is max_model_len here.",
        "an earlier blockdraft's max_rows is max_num_seqs here.",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_modell_len": 8}, "did you mean max_model_len?"),
        ({"speculative_config": {}}, "vLLM's speculative_config is our draft and width"),
        ({"temp": 0.5}, r"our SamplingParams\(temperature=…\)"),
        ({"max_model_len": 8, "ctx_size": 8}, "are the same setting: give one"),
        ({"quux": 8}, "LLM has no setting 'quux'"),
    ],
)
def test_llm_refuses_in_one_line_what_it_cannot_take(given, told):
    with pytest.raises(SettingsError, match=told):
        LLM(**given, warn=lambda text: None)


def test_the_table_names_what_exists_and_nothing_of_ours():
    assert {ours for _, ours in SAME.values()} <= SAMPLING | set(SETTING_NAMES)
    assert not set(SETTING_NAMES) & {*SAME, *OTHERWISE}
    for theirs in OTHERWISE:
        assert explained(theirs, str).startswith("is "), theirs
