"""What is looked into before another engine is started, or its command is printed."""

import json
from dataclasses import replace

import pytest

from blockdraft.cli.main import main
from blockdraft.errors import CapacityError, FetchError, ModelError, SettingsError
from blockdraft.launch import preflight as module
from blockdraft.launch.preflight import BUILT_FIRST, SPARK_WHEELS, check_launch, check_to_print
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Machine
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.stored import Size, open_stored
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.recipe import load_recipe, recipe_names
from blockdraft.settings.settings import Settings
from blockdraft.start import preflight as native
from blockdraft.start.preflight import check_native
from tests.server.test_life import PAIR

TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
WHOLE = Settings(engine="vllm", model=TARGET, draft=DRAFT)


def on(monkeypatch, *cards):
    machines = [machine_of(card_by_key(card)) for card in cards]
    machine = Machine(memory_bytes=1 << 34)
    if machines:
        machine = replace(machines[0], gpus=tuple(gpu for found in machines for gpu in found.gpus))
    monkeypatch.setattr(module, "read_machine", lambda: machine)


def away(monkeypatch):
    """A hub that cannot be reached; folders are opened as ever."""

    def opened(source, *, needs_weights, what="model"):
        if source.startswith("org/"):
            raise FetchError(f"the hub cannot be reached for '{source}'.")
        return open_stored(source, needs_weights=needs_weights)

    monkeypatch.setattr(module, "open_stored", opened)


def test_a_pair_that_fits_and_matches_is_taken_and_its_kind_told(monkeypatch):
    on(monkeypatch, "h200")
    found = check_launch(WHOLE, "x")
    assert found.warnings == ()
    assert found.target["model_type"] == json.loads((PAIR / "target/config.json").read_text())["model_type"]
    assert found.facts()["draft_kind"] == "DFlash"
    assert replace(found, draft={"architectures": ["Other"]}).facts()["draft_kind"] is None
    assert replace(found, draft=None).facts()["draft_kind"] is None


def test_files_are_given_by_their_whole_path_and_a_chat_template_must_be_there_for_a_start(
    monkeypatch, tmp_path
):
    on(monkeypatch, "h200")
    monkeypatch.chdir(PAIR.parent)
    asked = replace(WHOLE, model="pair/target", draft="pair/draft", chat_template="mine.jinja")
    with pytest.raises(SettingsError, match=r"--chat-template mine\.jinja is no file"):
        check_launch(asked, "x")
    printed = check_to_print(asked, "x", None)  # it may be in the image
    command = printed.command(port=1, api_key=None)
    assert command.argv.count("mine.jinja") == 1
    assert command.argv[2] == TARGET
    assert command.mounts == (TARGET, DRAFT)
    assert "mine.jinja is no file here" in printed.warnings[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    asked = replace(WHOLE, chat_template="mine.jinja")
    for found in (check_launch(asked, "x"), check_to_print(asked, "x", None)):
        command = found.command(port=1, api_key=None)
        assert str(tmp_path / "mine.jinja") in command.argv
        assert command.mounts == (TARGET, DRAFT, str(tmp_path / "mine.jinja"))
        assert found.warnings == ()


@pytest.mark.parametrize("prints", [False, True])
def test_a_pair_that_does_not_match_is_refused(monkeypatch, tmp_path, prints):
    on(monkeypatch, "h200")
    draft = tmp_path / "draft"
    draft.mkdir()
    config = json.loads((PAIR / "draft/config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    settings = replace(WHOLE, draft=str(draft))
    with pytest.raises(ModelError, match="match"):
        check_to_print(settings, "x", None) if prints else check_launch(settings, "x")


def test_what_only_the_engine_can_read_is_left_to_it(monkeypatch, tmp_path):
    on(monkeypatch, "h200")
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "of-tomorrow"}')
    found = check_launch(replace(WHOLE, model=str(tmp_path / "target"), draft=str(tmp_path / "draft")), "x")
    assert found.warnings == ()


def test_weights_that_are_too_large_are_refused_and_a_cache_that_is_too_small_is_a_warning(monkeypatch):
    on(monkeypatch, "rtx-5090")
    stored = open_stored(TARGET, needs_weights=True)

    def pair_of(num_bytes):
        def opened(source, *, needs_weights, what="model"):
            found = open_stored(source, needs_weights=needs_weights)
            if source != TARGET:
                return found
            name = next(iter(stored.tensors))
            return replace(stored, tensors={**stored.tensors, name: Size(num_bytes // 2, num_bytes, False)})

        monkeypatch.setattr("blockdraft.planner.pair.open_stored", opened)

    pair_of(40 * 10**9)
    with pytest.raises(CapacityError, match=r"the weights take 40\.0 GB of .*5090.*blockdraft plan"):
        check_launch(WHOLE, "x")
    (warning,) = check_to_print(WHOLE, "x", "rtx-5090").warnings
    assert "the weights take 40.0 GB" in warning
    assert check_to_print(WHOLE, "x", "h200").warnings == ()
    pair_of(30 * 10**9)
    (warning,) = check_to_print(WHOLE, "x", "rtx-5090").warnings
    assert "by the plan it does not fit" in warning
    (warning,) = check_launch(WHOLE, "x").warnings
    assert "by the plan it does not fit" in warning
    on(monkeypatch)  # nothing is known of a machine without a GPU
    assert check_launch(replace(WHOLE, draft=None), "x").warnings == ()


def test_more_cards_than_there_are_are_refused(monkeypatch):
    on(monkeypatch, "h200", "h200")
    check_launch(replace(WHOLE, tensor_parallel=2), "x")
    two = replace(WHOLE, tensor_parallel=4, num_nodes=2, head_address="10.0.0.1")
    check_launch(two, "x")
    with pytest.raises(SettingsError, match="takes 4 GPUs of each, but this one has 2"):
        check_launch(replace(WHOLE, tensor_parallel=4), "x")


def test_a_revision_in_our_words_is_refused(monkeypatch):
    on(monkeypatch, "h200")
    for settings in (replace(WHOLE, model="org/name@v1"), replace(WHOLE, draft="org/name@v1")):
        with pytest.raises(SettingsError, match="--engine-args='--revision v1'"):
            check_launch(settings, "x")


def test_a_start_needs_the_hub_and_a_printed_command_does_not(monkeypatch):
    on(monkeypatch, "h200")
    away(monkeypatch)
    settings = replace(WHOLE, model="org/target", draft="org/draft", width=16)
    with pytest.raises(FetchError):
        check_launch(settings, "x")
    found = check_to_print(settings, "x", None)
    assert "config.json of org/target was not read" in found.warnings[0]
    assert "config.json of org/draft was not read" in found.warnings[1]
    assert '"num_speculative_tokens":15' in " ".join(found.command(port=1, api_key=None).argv)
    unknown = check_to_print(replace(settings, width="auto"), "x", None)
    with pytest.raises(SettingsError, match="give --width"):
        unknown.command(port=1, api_key=None)


def test_a_command_is_printed_for_a_card_that_is_not_here(monkeypatch):
    on(monkeypatch)
    settings = Settings(engine="sglang", model=TARGET, attention_backend="flash_attn")
    for card, backend in (("h200", "fa3"), ("b200", "fa4")):
        assert backend in check_to_print(settings, "x", card).command(port=1, api_key=None).argv
    unknown = check_to_print(settings, "x", None)
    assert unknown.machine is None
    assert "--card" in unknown.warnings[0]
    with pytest.raises(SettingsError, match="did you mean h200"):
        check_to_print(settings, "x", "h2000")


def test_without_a_gpu_a_printed_command_is_not_taken_for_one_of_the_cpu(monkeypatch):
    """SGLang has no DFLASH on a CPU, which is nothing against a command for elsewhere."""
    on(monkeypatch)
    settings = replace(WHOLE, engine="sglang")
    check_to_print(settings, "x", None)
    with pytest.raises(SettingsError, match="no DFLASH on a CPU"):
        check_to_print(replace(settings, device="cpu"), "x", None)
    with pytest.raises(SettingsError, match="no DFLASH on a CPU"):
        check_launch(settings, "x")


@pytest.mark.parametrize("command", [("plan",), ("serve", "--dry-run"), ("serve", "--dry-run", "docker")])
def test_a_recipe_on_a_card_that_it_excludes_is_one_line_and_nothing_starts(monkeypatch, capsys, command):
    for name in ("open_stored", "open_pair"):
        monkeypatch.setattr(module, name, lambda *words, **more: pytest.fail("it is opened"))
    assert main([*command, "--recipe", "qwen3.5-27b-nvfp4", "--card", "h100"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: recipe 'qwen3.5-27b-nvfp4' will not work on H100 SXM (Hopper): only" in captured.err
    assert captured.err.count("\n") == 1
    on(monkeypatch, "h100")
    with pytest.raises(SettingsError, match="will not work on H100"):
        check_launch(merge_settings({"recipe": "qwen3.5-27b-nvfp4"}).settings, "x")


@pytest.mark.parametrize("version", ["main", "refs/pull/41703/head", "0.32.0+prhead"])
def test_a_git_ref_that_is_no_version_is_one_line_and_nothing_starts(monkeypatch, capsys, version):
    on(monkeypatch, "h200")
    argv = ["serve", TARGET, "--draft", DRAFT, "--engine", "vllm", "--engine-version", version, "--dry-run"]
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert version in captured.err


def test_a_recipe_is_printed_for_its_first_card_where_none_is_here(monkeypatch):
    on(monkeypatch)
    away(monkeypatch)
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.settings.get("engine", "native") == "native":
            continue
        settings = replace(merge_settings({"recipe": name}).settings, model="org/x", draft="org/y")
        found = check_to_print(settings, "x", None)
        found.command(port=1, api_key=None)
        first = card_by_key(recipe.cards[0])
        assert f"for the recipe's {first.title}; --card names another" in found.warnings[-1]


# ---- our own engine


NATIVE = Settings(model=TARGET, draft=DRAFT)


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (Machine(memory_bytes=1000), "free"),
        (Machine(memory_bytes=1 << 34, gpu_bytes=4096, gpu_free_bytes=4096), "gpu-memory-utilization"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_our_own_server_starts(monkeypatch, capsys, machine, what):
    monkeypatch.setattr(native, "read_machine", lambda: machine)
    monkeypatch.setattr("blockdraft.cli.serve._serve", lambda *words: pytest.fail("it starts"))
    assert main(["serve", TARGET, "--draft", DRAFT, "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert what in errors
    assert "`blockdraft plan` with the same flags" in errors


def test_our_own_engine_says_on_which_cards_a_recipe_was_tried(monkeypatch):
    said = []
    settings = replace(NATIVE, recipe="qwen3-8b")
    for card in ("h200", "rtx-4090"):
        monkeypatch.setattr(native, "read_machine", lambda card=card: machine_of(card_by_key(card)))
        check_native(settings, said.append)
    (warning,) = said
    assert warning.endswith("nobody has reported it to run on RTX 4090")


def test_what_may_fit_is_left_to_the_start_which_measures(monkeypatch):
    monkeypatch.setattr(native, "read_machine", lambda: Machine(memory_bytes=1 << 34))
    check_native(NATIVE)
    small = Machine(
        memory_bytes=1 << 34, gpu_bytes=1 << 29, gpu_free_bytes=1 << 29
    )  # the driver alone is more
    monkeypatch.setattr(native, "read_machine", lambda: small)
    check_native(NATIVE)
    monkeypatch.setattr(native, "read_machine", lambda: Machine(memory_bytes=1000))
    check_native(replace(NATIVE, device="cuda"))
    check_native(replace(NATIVE, device="cuda:1"))
    check_native(Settings(model="default"))


def test_a_hub_out_of_reach_is_left_to_the_start_and_a_pair_that_does_not_match_is_not(monkeypatch, tmp_path):
    def unreachable(settings):
        raise FetchError("the hub cannot be reached.")

    with monkeypatch.context() as patch:
        patch.setattr(native, "open_pair", unreachable)
        check_native(replace(NATIVE, model="org/name"))
    config = json.loads((PAIR / "draft/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    (tmp_path / "model.safetensors").write_bytes((PAIR / "draft/model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="does not match"):
        check_native(replace(NATIVE, draft=str(tmp_path)))


@pytest.mark.parametrize(
    ("card", "quantization", "version", "build"),
    [
        ("gb10", "fp8", None, "spark"),
        ("gb10", "fp8", "0.32.0+pr38484", "spark"),
        ("gb10", "fp8", "0.32.1rc1.dev7", None),  # a nightly has no tag to build
        ("gb10", "keep", None, None),
        ("rtx-5090", "fp8", None, None),
    ],
)
def test_an_image_has_kernels_for_a_spark_or_a_warning_that_it_has_none(
    monkeypatch, card, quantization, version, build
):
    on(monkeypatch)
    settings = replace(WHOLE, quantization=quantization, engine_version=version)
    found = check_to_print(settings, "x", card).in_image()
    command = found.command(port=1, api_key=None)
    assert (command.build, "pr38484" in command.source) == (build, False)
    told = BUILT_FIRST in found.warnings
    assert told == (build is not None and version is None)
    is_lacking = SPARK_WHEELS in {finding.id for finding in found.findings}
    assert is_lacking == (card == "gb10" and quantization == "fp8" and build is None)
