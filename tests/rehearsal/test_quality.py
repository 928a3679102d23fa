"""The counts of benchmarks/quality.py, on the fixture pair: the same model twice, and another one."""

import json
import math

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Arm, Reading, Talk, Work
from blockdraft.bench.records import Prompt
from blockdraft.training.evaluate import fit_of_steps
from tests import tiny

TEXTS = {"one": [[3, 5, 8, 13, 21], [3, 5, 9]], "two": [[3, 5, 7, 11]]}


def measured(**changed):
    work = Work(
        **({"texts": TEXTS, "num_common": 2, "asked": {"code": [[3, 5, 8]], "qa": [[3, 9]]}} | changed)
    )
    return quality.measure(tiny.load("float32"), tiny.plan("float32"), work, 12)


def test_a_model_against_itself_costs_nothing():
    base, again = measured(), measured()
    for line in quality.perplexities(base, again):
        assert (line["change_percent"], line["same_likeliest_percent"]) == (0, 100)
    for line in quality.commits(base, again):
        assert line["same_answers"] == line["answers"]
        assert line["change_percent"] == 0


def test_only_tokens_behind_the_common_ones_are_counted_each_by_those_before_it():
    arm = measured()
    assert {name: len(one.losses) for name, one in arm.readings.items()} == {"one": 4, "two": 2, "all": 6}
    engine = tiny.engine(dtype="float32")
    params = quality.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.add([3, 5, 7, 11], params)
    (found,) = [delta.prompt_logprobs for delta in tiny.drain(engine) if delta.prompt_logprobs]
    expected = [-one.logprob for one in found[2:]]
    assert arm.readings["two"].losses.tolist() == pytest.approx(expected, abs=1e-4)
    assert list(arm.fits) == ["code", "qa", "all"]
    assert arm.fits["all"].num_tokens == arm.fits["code"].num_tokens + arm.fits["qa"].num_tokens


def test_a_change_is_that_of_the_whole_and_its_error_that_of_the_differences():
    def arm(losses, steps):
        reading = Reading(torch.tensor(losses, dtype=torch.float64), torch.tensor([1, 2]))
        return Arm({"all": reading}, {"all": fit_of_steps([steps], 8)}, {"all": [tuple(steps)]}, "")

    base, worse = arm([1.0, 3.0], [4, 4]), arm([1.1, 3.1], [4, 2, 2])
    (line,) = quality.perplexities(base, worse)
    assert line["before"] == pytest.approx(math.exp(2))
    assert line["change_percent"] == pytest.approx(100 * math.expm1(0.1))
    assert line["error_percent"] == pytest.approx(0, abs=1e-6)
    (line,) = quality.commits(base, worse)
    assert (line["before"], line["same_answers"]) == (4, 0)
    assert line["change_percent"] == pytest.approx(100 * (8 / 3 / 4 - 1))


def test_a_folder_brings_its_answers(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "answer": "b", "category": "maths"},
        {"turns": ["a", "b"], "reference": ["c", "d"]},
        {"turns": ["a", "b"], "reference": ["c"]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "reference": None},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    talks = quality.in_folder(tmp_path)
    said = ["".join(str(message["content"]) for message in talk.messages()) for talk in talks]
    assert said == ["ab", "acbd", "acb", "ab", "a"]
    assert [talk.prompt.category for talk in talks] == ["maths", *["mine"] * 4]


def test_what_ships_is_read_and_asked_in_every_class():
    work = quality.prepare(
        [*quality.shipped(), Talk("long", Prompt("1", "long", ("word " * 9999,)))],
        tiny.load("float32"),
        tiny.plan("float32"),
        tokens_per_set=40,
        prompts_per_category=1,
        max_tokens=8,
    )
    assert set(work.texts) == {*quality.workloads.CLASSES, "long"}
    assert all(len(ids) <= quality.TEXT for texts in work.texts.values() for ids in texts)
    assert "qa" in work.asked
    assert "long" not in work.asked  # no room for an answer


@pytest.mark.slow  # the whole of a benchmark
def test_the_command_loads_both_arms_and_keeps_what_it_found(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "a b c d", "answer": "e f"}, {"prompt": "a b", "category": "qa"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out.json"
    words = ["--model", tiny.TARGET, "--draft", tiny.DRAFT, "--data", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["quality", *words, "--max-tokens", "4", "--device", "cpu"])
    quality.main()
    found = json.loads(out.read_text())
    assert found["arms"]["before"] == "cpu, float32, weights none, the drafter's none"
    assert found["arms"]["after"] == "cpu, float32, weights int8, the drafter's int8"
    assert [line["set"] for line in found["perplexity"]] == ["mine", "all"]
    assert [line["category"] for line in found["tokens_per_step"]] == ["mine", "qa", "all"]
    assert str(tmp_path) not in out.read_text()
    assert "same likeliest, %" in capsys.readouterr().out
