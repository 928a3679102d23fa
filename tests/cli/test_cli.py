"""The command line: what it prints where, its exit codes, and that its flags are the settings."""

import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import blockdraft
from blockdraft.cli import generate
from blockdraft.cli.flags import flags_of, sampling_from, settings_from
from blockdraft.cli.generate import speed_line
from blockdraft.cli.main import main, parse
from blockdraft.cli.server_terminal import ready_line, set_up_logs
from blockdraft.engine.request import Delta, Metrics, SamplingParams
from blockdraft.errors import SettingsError
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.llm import LLM
from blockdraft.server.http import listener
from blockdraft.settings.settings import Settings, pin_threads
from blockdraft.start import preflight
from tests.cli.conftest import PINS, Terminal
from tests.tiny import DRAFT, TARGET

ROOT = Path(__file__).parents[2]
MODEL = ["--model", TARGET, "--device", "cpu", "--dtype", "float64"]
GREEDY = ["--temperature", "0", "--max-tokens", "9"]


@pytest.fixture
def loggers():
    """What a test of logs changes is put back."""
    named = [logging.getLogger(name) for name in (None, "blockdraft", "blockdraft.access")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in named]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="module")
def expected():
    llm = LLM(model=TARGET, draft=DRAFT, device="cpu", dtype="float64")
    message = {"role": "user", "content": "t1 t2 t3"}
    return llm.chat([message], SamplingParams(temperature=0.0, max_tokens=9))[0]


def error_of(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# ---- generate


def test_text_goes_to_stdout_and_one_line_of_speed_to_stderr(capsys, expected):
    assert main(["generate", "t1 t2 t3", *MODEL, "--draft", DRAFT, *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    rate = r"[\d.]+ tok/s \([\d.]+ after the first step\)"
    found = re.fullmatch(rf"9 tokens in [\d.]+ s: {rate}, ([\d.]+) tokens per step\n", captured.err)
    assert found, captured.err
    assert float(found[1]) == round(expected.metrics.tokens_per_step, 2)


def test_without_a_drafter_the_line_says_so_and_verbose_tells_what_is_loaded(capsys, expected):
    assert main(["generate", "t1 t2 t3", *MODEL, *GREEDY, "--verbose"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err.startswith(f"opening {TARGET}\n")
    assert captured.err.endswith(", 1.00 tokens per step (no drafter)\n")


def test_json_is_one_object_with_everything(capsys, expected):
    flags = ["--draft", DRAFT, "--width", "4", *GREEDY, "--json", "--logprobs", "1"]
    assert main(["generate", "t1 t2 t3", *MODEL, *flags]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert answer["text"] == expected.text
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert answer["finish_reason"] == "length"
    assert answer["metrics"]["num_prompt_tokens"] == 3
    assert (answer["model"], answer["draft"], answer["width"]) == (TARGET, DRAFT, 4)
    assert [item["token_id"] for item in answer["logprobs"]] == answer["token_ids"]


def test_several_answers_are_told_apart(capsys):
    flags = [*MODEL, "--n", "2", "--temperature", "1.5", "--max-tokens", "9"]
    assert main(["generate", "t1 t2 t3", *flags, "--json"]) == 0
    first, second = (choice["text"] for choice in json.loads(capsys.readouterr().out)["choices"])
    assert first != second
    assert main(["generate", "t1 t2 t3", *flags]) == 0
    assert capsys.readouterr().out == f"[1 of 2]\n{first}\n[2 of 2]\n{second}\n"


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        ([], io.StringIO, ""),
        (["-"], io.StringIO, ""),
        (["-"], Terminal, "reading the prompt from this terminal"),
    ],
)
def test_the_prompt_may_come_from_stdin(capsys, monkeypatch, expected, words, stdin, said):
    monkeypatch.setattr(sys, "stdin", stdin("t1 t2 t3\n"))
    assert main(["generate", *words, *MODEL, *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err.startswith(said)


def test_files_are_part_of_the_prompt_and_the_system_message_stands_in_front(monkeypatch, tmp_path):
    asked = []

    def chat(self, messages, params):
        asked.append(messages)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "chat", chat)
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("first\n", encoding="utf-8")
    two.write_text("zwölf", encoding="utf-8")
    for words in (["Sum up:", "--file", str(one), "--file", str(two), "--system", "S"], ["--file", str(one)]):
        assert main(["generate", *words, *MODEL, "--json"]) == 130
    assert asked == [
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Sum up:\n\nfirst\n\nzwölf"}],
        [{"role": "user", "content": "first"}],
    ]


def test_what_no_flag_says_is_what_the_models_makers_recommend(capsys, monkeypatch, tmp_path):
    folder = shutil.copytree(TARGET, tmp_path / "recommended")
    recommended = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    seen, stream = [], LLM.stream

    def spy(self, prompt, params):
        seen.append(params)
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", spy)
    flags = ["generate", "t1", *MODEL, "--model", str(folder), "--max-tokens", "2"]
    for given in ([], ["--temperature", "0", "--top-k", "0"], ["--sampling-defaults", "openai"]):
        assert main([*flags, *given]) == 0
    assert seen == [
        SamplingParams(max_tokens=2, **recommended),
        SamplingParams(max_tokens=2, **recommended | {"temperature": 0.0, "top_k": 0}),
        SamplingParams(max_tokens=2),
    ]


def test_a_model_without_chat_template_asks_for_raw(capsys, tmp_path, expected):
    folder = shutil.copytree(TARGET, tmp_path / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = ["generate", "t1 t2 t3", *MODEL, "--model", str(folder), *GREEDY]
    assert main(flags) == 2
    assert "add --raw" in error_of(capsys)
    assert main([*flags, "--raw"]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_answers_that_are_for_timing_only_say_so_in_every_output(capsys, monkeypatch):
    monkeypatch.setattr("blockdraft.start.block_width._is_steady", lambda _: True)  # however busy it is here
    flags = [*MODEL, "--draft", DRAFT, "--max-tokens", "9", "--ignore-eos", "--load-format", "dummy"]
    flags += ["--synthetic-acceptance", "mean:2"]
    assert main(["generate", "t1 t2 t3", *flags]) == 0
    *warnings, line = capsys.readouterr().err.splitlines()
    told = [warning.split(":")[1] for warning in warnings if "was busy" not in warning]
    assert told == [" weights are random", " acceptance is synthetic (mean"]
    assert line.endswith("(timing only: +dummy+synthetic)")
    assert main(["generate", "t1 t2 t3", *flags, "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["model"] == f"{TARGET}+dummy+synthetic"
    assert captured.err == "".join(f"warning: {warning}\n" for warning in answer["warnings"])
    assert "nonsense" in answer["warnings"][-2]
    assert "mean:2" in answer["warnings"][-1]


@pytest.mark.parametrize(
    ("device", "has_gpu", "is_bound"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False)],
)
def test_threads_are_bound_where_the_model_will_run_on_the_cpu(monkeypatch, device, has_gpu, is_bound):
    monkeypatch.setattr(preflight, "may_have_gpu", lambda: has_gpu)
    preflight.pin_cpu_threads(device)
    assert ("OMP_PROC_BIND" in os.environ) == is_bound


def metrics(num_tokens, steps, first_token_s, seconds):
    unused = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "drafted": 0, "accepted": ()}
    times = {"queue_s": 0.0, "first_token_s": first_token_s, "seconds": seconds}
    return Metrics(num_tokens=num_tokens, steps=steps, preemptions=0, **unused, **times)


def test_the_speed_is_all_tokens_over_all_time_and_the_rate_after_the_first_step():
    last = Delta("r", 0, "", (4, 5), finish_reason="stop", metrics=metrics(12, 3, 1.0, 3.0))
    deltas = [Delta("r", 0, "", (1,) * 4), Delta("r", 0, "", (1,) * 6), last]
    line = "12 tokens in 3.0 s: 4.0 tok/s (4.0 after the first step), 4.00 tokens per step"
    assert speed_line(deltas, has_drafter=True) == line
    of_one_step = [Delta("r", 0, "", (1,), finish_reason="stop", metrics=metrics(1, 1, 2.0, 2.0))]
    line = "1 tokens in 2.0 s: 0.5 tok/s, 1.00 tokens per step (no drafter)"
    assert speed_line(of_one_step, has_drafter=False) == line


# ---- flags


def test_every_setting_has_a_flag():
    values = {"model": "m", "draft": "d", "device": "cuda", "dtype": "float16"}
    values |= {"quantization": "fp8", "draft_quantization": "keep", "draft_ngram": "0", "tree": "0"}
    values |= {"sampling_defaults": "openai", "tool_format": "hermes"}
    values |= {"load_format": "dummy", "synthetic_acceptance": "0.7", "gpu_memory_utilization": "0.5"}
    values |= {"recheck": "0.5"}
    values |= {"engine": "vllm", "node_rank": "6", "engine_args": "--a 'b c'", "engine_env": "A=b=c d"}
    flags = ["--no-prefix-cache", "--overlap", "--no-verify", "--no-graphs", "--allow-batch-variance"]
    flags += ["--trust-remote-code", "--recipe", "smollm2"]
    assert settings_from(parse(["serve"])) == Settings()
    switches = ("prefix_cache", "overlap", "verify", "graphs", "allow_batch_variance", "trust_remote_code")
    for item in fields(Settings):
        if item.name not in (*switches, "recipe"):
            flags += [f"--{item.name.replace('_', '-')}", values.get(item.name, "7")]
    settings = settings_from(parse(["serve", *flags]))
    for item in fields(Settings):
        assert getattr(settings, item.name) != item.default
    assert settings.max_prefill_tokens == 7
    assert (settings.quantization, settings.draft_quantization) == ("fp8", "keep")
    assert settings.engine_args == ("--a", "b c")
    assert settings.engine_env == (("A", "b=c d"),)
    again = settings_from(parse(["serve", *flags_of(settings)]))
    assert again == replace(settings, recipe=None), "flags_of leaves something out"


@pytest.mark.parametrize(
    ("flag", "wrong", "known"),
    [
        ("--dtype", "int4", "'bfloat16'"),
        ("--load-format", "int4", "'auto', 'dummy'"),
        ("--quantization", "int2", "'keep', 'none', 'both', 'fp8', 'int8', 'int4'"),
        ("--log-level", "warn", "'warning', 'error'): did you mean warning?"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(flag, wrong, known, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(["serve", flag, wrong])
    error = error_of(capsys)
    assert f"argument {flag}: invalid choice: '{wrong}'" in error
    assert known in error


def test_auto_is_accepted_where_the_setting_has_it(capsys):
    assert settings_from(parse(["serve", "--width", "auto"])).width == "auto"
    with pytest.raises(SystemExit, match="2"):
        parse(["serve", "--page-size", "auto"])
    with pytest.raises(SystemExit, match="2"):
        parse(["serve", "--width", "wide"])
    assert "'wide' is not a whole number or 'auto'" in error_of(capsys)


def test_sampling_flags_become_sampling_params():
    assert sampling_from(parse(["generate", "x"])) == SamplingParams(max_tokens=512)
    flags = (
        "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --presence-penalty 1 --frequency-penalty -1 "
        "--repetition-penalty 1.1 --seed 4 --stop a --stop b --max-tokens 8 --min-tokens 2 --ignore-eos "
        "--n 3 --logit-bias 3=-100 --logit-bias 4=1.5 --logprobs 2"
    )
    args = parse(["generate", "x", *flags.split()])
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 4, "stop": ["a", "b"]}
    expected |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1, "n": 3}
    expected |= {"max_tokens": 8, "min_tokens": 2, "ignore_eos": True, "logprobs": 2}
    assert sampling_from(args) == SamplingParams(**expected, logit_bias={3: -100.0, 4: 1.5})
    assert settings_from(args).seed == Settings().seed


# ---- errors and exits


def test_the_form_of_an_answer_is_read_from_its_flags(tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    for flags, form in (
        ([], None),
        (["--json-schema", str(schema)], StructuredOutputs(json='{"type": "boolean"}')),
        (["--regex", "a+"], StructuredOutputs(regex="a+")),
        (["--choice", "yes", "--choice", "no"], StructuredOutputs(choice=["yes", "no"])),
        (["--grammar", str(schema)], StructuredOutputs(grammar='{"type": "boolean"}')),
    ):
        assert generate._form(parse(["generate", "x", *flags])) == form
    assert main(["generate", "x", *MODEL, "--json-schema", str(tmp_path / "none")]) == 2
    assert "none cannot be read: No such file or directory." in capsys.readouterr().err
    assert main(["generate", "-", *MODEL, "--json-schema", "-"]) == 2
    assert "'-' was given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["generate", "x", "--max-model-ln=5"], "unknown flag --max-model-ln: did you mean --max-model-len?"),
        (["generate", "x", "--max"], "unknown flag --max"),  # no abbreviations
        (["generate", "x", "y"], "unexpected argument 'y'"),
        (["generat", "x"], "did you mean generate?"),
        (["list"], "'list' is `blockdraft models` here"),
        (["ps"], "'ps': every `blockdraft serve` serves one model in a process of its own"),
        (["--verson"], "unknown flag --verson: did you mean --version?"),
        (["generate", "x", "--ngl", "99"], "llama.cpp's --ngl is our --device"),
        (["serve", "--enforce-eager"], "vLLM's --enforce-eager is our --no-graphs"),
        (["serve", "--dtype", "float31"], "did you mean float"),
        (["generate", "x", "--logit-bias", "a"], "'a' is not ID=VALUE"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_is_explained(capsys, argv, part):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert part in error_of(capsys)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["generate", "x", "--model", "./missing"], "'./missing' does not exist"),
        (["generate", "x", "--top-p", "0"], "top_p"),
        (["generate", "x", "--max-num-seqs", "0"], "max_num_seqs"),
        (["generate", "x", "--logprobs", "1"], "add --json"),
        (["generate"], "no prompt was given: add PROMPT"),
        (["generate", "--file", "./missing.txt"], "--file ./missing.txt cannot be read: No such file"),
        (["generate", "-", "--file", "-"], "'-' was given twice"),
        (["generate", "x", "--raw", "--system", "y"], "--raw leaves out: give one"),
        (["generate", ""], "the prompt is empty"),
        (["fit", "a", "b", "--model", "c"], "two targets were given, 'a' and 'c': give one"),
        (["fit", "--model", "./missing", "--draft", "./none", "--quiet"], "'./missing' does not exist"),
        (["serve", "--tensor-parallel", "2"], "sglang, or leave out --tensor-parallel."),
        (["serve", "a", "--model", "b"], "two models"),
        (["serve", "./missing", "--port", "70000"], "--port 70000"),
        (["serve", "./missing", "--host", "256.0.0.1"], "cannot listen"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(capsys, monkeypatch, argv, part):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(argv) == 2
    error = error_of(capsys)
    assert error.startswith("blockdraft: error: ")
    assert part in error
    assert error.count("\n") == 1


def test_a_taken_port_is_found_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "./missing", "--port", str(other.getsockname()[1])]) == 2
    error = error_of(capsys)
    assert "already in use" in error
    assert "--port 0 takes a free port" in error


def test_an_interrupt_exits_with_130(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert main(["generate", "x", *MODEL]) == 130
    assert error_of(capsys) == ""


def test_an_interrupted_answer_has_its_figures_all_the_same(capsys, monkeypatch):
    def stopped(*_, **__):
        yield Delta("r", 0, "abc", (1, 2, 3))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stopped)
    assert main(["generate", "x", *MODEL]) == 130
    captured = capsys.readouterr()
    assert captured.out == "abc\n"
    assert re.fullmatch(
        r"stopped after 3 tokens in [\d.]+ s: [\d.]+ tok/s, 3\.00 tokens per step\n", captured.err
    )


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"blockdraft {blockdraft.__version__}\n"


def test_threads_are_pinned_unless_the_user_has_decided(monkeypatch):
    pin_threads()
    assert (os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"]) == ("true", "cores")
    for name in PINS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    pin_threads()
    assert "OMP_PROC_BIND" not in os.environ


# ---- as a process


def start(argv, **kwargs):
    command = [sys.executable, "-m", "blockdraft", *argv]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **kwargs)


def test_help_loads_no_torch():
    code = (
        "import sys\nfrom blockdraft.cli.main import main\n"
        "for words in ([], ['generate'], ['serve'], ['chat']):\n"
        "  try: main([*words, '--help'])\n  except SystemExit: pass\n"
        "print([n for n in ('torch', 'numpy', 'uvicorn', 'pydantic') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: blockdraft") == 4
    assert done.stderr == "[]\n"


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback():
    process = start(["generate", "t1", *MODEL, "--ignore-eos"], stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.slow
def test_serve_says_where_it_listens_answers_there_and_leaves_on_interrupt():
    flags = ["--port", "0", "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float64"]
    process = start(["serve", TARGET, *flags], stderr=subprocess.PIPE)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"'tiny' is ready: live page at (http://127\.0\.0\.1:\d+)/, API at .*\n", line)
        assert found, line
        message = {"role": "user", "content": "t1 t2 t3"}
        body = {"model": "tiny", "messages": [message], "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == " t4 t5"
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert rest[0] == ""
    assert "Traceback" not in rest[1]
    assert process.returncode == 0


@pytest.mark.parametrize("words", [["a", "b"], ["--model", "a", "--draft", "b"]])
def test_fit_takes_its_pair_by_place_or_by_flag_and_its_warnings_are_lines(capsys, monkeypatch, words):
    def asked(question, *_):
        warnings.warn(f"busy with {question.target} and {question.drafter}", stacklevel=2)
        raise SettingsError("enough.")

    monkeypatch.setattr("blockdraft.training.drafter_fit.fit", asked)
    assert main(["fit", *words, "--quiet"]) == 2
    assert error_of(capsys) == "warning: busy with a and b\nblockdraft: error: enough.\n"


@pytest.mark.parametrize(
    ("flags", "shown", "hidden"),
    [
        ([], {"info", "warning", "error"}, {"debug", "access"}),
        (["--log-level", "debug"], {"debug", "access", "info", "error"}, set()),
        (["--log-level", "warning"], {"warning", "error"}, {"debug", "info", "access"}),
        (["--log-level", "error", "--access-log"], {"error", "access"}, {"debug", "info", "warning"}),
        (["--access-log"], {"info", "access"}, {"debug"}),
    ],
)
@pytest.mark.usefixtures("loggers")
def test_the_log_has_what_its_level_asks_for(capsys, flags, shown, hidden):
    report = set_up_logs(parse(["serve", *flags]), ())
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("blockdraft.some"), level)(f"<{level}>")
    logging.getLogger("blockdraft.access").info("<access>")
    logging.getLogger("httpcore").debug("<secret>")  # libraries write headers there, keys included
    report("a phase")
    written = capsys.readouterr().err
    assert all(f"<{word}>" in written for word in shown)
    assert not any(f"<{word}>" in written for word in {*hidden, "secret"})
    assert ("a phase" in written) == ("info" in shown)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_is_printed_that_others_can_use(monkeypatch, host):
    monkeypatch.setattr(listener, "outward_host", lambda: "192.0.2.7")
    with listener.bind(host, 0) as bound:
        port = bound.getsockname()[1]
        here = f"http://127.0.0.1:{port}"
        others = f"; for other machines: http://192.0.2.7:{port}/" if host == "0.0.0.0" else ""
        assert ready_line("tiny", bound) == f"'tiny' is ready: live page at {here}/, API at {here}/v1{others}"


def test_the_address_for_others_is_one_of_this_machine():
    host = listener.outward_host()
    if host is not None:  # a machine without a network has none
        socket.create_server((host, 0)).close()


@pytest.mark.parametrize("flag", ["--step-timeout", "--drain-timeout"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
def test_time_outs_that_mean_nothing_are_refused(flag, value, capsys):
    assert main(["serve", TARGET, "--port", "0", flag, value]) == 2
    assert flag in capsys.readouterr().err
