"""blockdraft kv on the tiny pair, as if its heads were too small to be rotated: table, files and refusals."""

import json
import random
import re

import pytest

from blockdraft.cli import kv
from blockdraft.cli.main import main
from blockdraft.kernels import kv_formats
from blockdraft.kernels.kv_codec import FORMATS
from tests.tiny import DRAFT, TARGET

TINY = ["kv", TARGET, "--device", "cpu", "--length", "400", "--quiet"]


@pytest.fixture(autouse=True)
def small_heads(monkeypatch):
    monkeypatch.setattr(kv_formats, "SMALLEST_BLOCK", 16)


@pytest.fixture
def texts(tmp_path):
    choice = random.Random(0)
    rows = [{"text": " ".join(f"t{choice.randrange(60)}" for _ in range(420))} for _ in range(3)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_it_prints_a_table_and_a_sentence_for_each_format(capsys, tmp_path, texts):
    report = tmp_path / "kv.json"
    assert main([*TINY, "--texts", texts, "--tokens", "300", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "2 texts of 400 tokens" in out
    assert "400 tokens counted from depth 200 on" in out
    assert re.search(r"^int8: \d+\.\d % same likeliest token, .+: .+\.$", out, re.M)
    assert "tq4v3: heads of this model cannot be rotated: use int8." in out
    assert "committed" not in out, "there is no drafter"
    saved = json.loads(report.read_text())
    assert [one["name"] for one in saved["formats"]] == ["int8"]
    assert saved["formats"][0]["num_bytes"] == 4 * 2 * (2 * 8 + 4)
    assert saved["exact_bytes"] == 4 * 2 * (2 * 8 * 4)


def test_with_a_drafter_a_column_says_what_a_step_commits_through_each_cache(capsys, tmp_path, texts):
    report = tmp_path / "kv.json"
    flags = ["--texts", texts, "--draft", DRAFT, "--answers", "1", "--kv-dtype", "int8"]
    assert main([*TINY, *flags, "--tokens", "200", "--json", str(report)]) == 0
    out, saved = capsys.readouterr().out, json.loads(report.read_text())
    (int8,) = saved["formats"]
    assert saved["num_answers"] == 1
    assert 1 <= saved["committed"] <= 8
    assert f"{saved['committed']:.2f} tokens committed per step" in out
    assert re.search(rf"^ *int8 .* {int8['committed']:.2f}$", out, re.M)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-dtype", "tq4"], "Heads of 8 values cannot be rotated"),
        (["--tokens", "0"], "--tokens 0 is not at least 1"),
        (["--json", "/no/such/folder/kv.json"], "there is no such folder"),
        (["--length", "300"], "nothing is compressed long enough to be read: use --length 320 or more"),
        (["--length", "430"], "the longest has 420: use a lower --length"),
        (["--length", "9000"], "knows 512 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(capsys, texts, flags, words):
    assert main([*TINY, "--texts", texts, *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_command_knows_every_format(capsys):
    assert tuple(FORMATS) == kv.FORMATS
    with pytest.raises(SystemExit):
        main(["kv", "--kv-dtype", "tq"])
    assert "tq4" in capsys.readouterr().err
