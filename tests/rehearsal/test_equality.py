"""The equality table, on the tiny pair: all is equal there, and what is not is told."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import equality
from benchmarks.equality import Agreement, Difference, Equality, Line, ReplayingDrafter, Way
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from tests import tiny
from tests.lossless import families
from tests.stepping import KernelByKernel

VOCAB = 60
PROMPTS = [[(start + 7 * index) % VOCAB for index in range(40)] for start in (3, 11)]


def models(**plan):
    return tiny.load("float32"), replace(tiny.plan("float32"), **{"max_num_seqs": 4, **plan})


def started(num_tokens=12, prompts=PROMPTS, *, replays=True):
    table = Equality(*models(), prompts, num_tokens, replays=replays)
    table.learn_baseline()
    return table


@pytest.mark.slow
@pytest.mark.parametrize("replays", [True, False])
def test_on_a_cpu_every_way_gives_the_same_answers(replays):
    lines = list(started(replays=replays).lines())
    assert all(line.is_well for line in lines), equality.table(lines)
    assert not list(equality.remarks(lines))
    assert equality.verdict(lines) == "36 of 36 answers equal"


@pytest.mark.slow
def test_so_it_is_in_rows_that_are_filled_up_and_steps_that_overlap(monkeypatch):
    """As on a card, where graphs run the steps."""

    def capture(engine, sizes, widths):
        engine.graphs = KernelByKernel(engine.decode, engine.rows)
        engine.graphs.capture(sizes, widths)

    monkeypatch.setattr(LoadedPair, "why_not_captured", lambda models: None)
    monkeypatch.setattr(Engine, "capture", capture)
    prompts = [*PROMPTS, PROMPTS[0][5:]]  # six rows of eight
    table = Equality(*models(max_num_seqs=8, overlap=True), prompts, 12, replays=True)
    table.learn_baseline()
    lines = list(table.lines())
    assert len(table.engine.graphs) == 3 * 4
    assert all(line.is_well for line in lines), equality.table(lines)


@pytest.mark.slow  # tests/lossless has these layers in every run
def test_so_it_is_with_recurrent_layers_and_experts():
    models, plan = families.pair("qwen3_5_moe-whole")
    table = Equality(models, replace(plan, state_grid=16), PROMPTS, 20, replays=True)
    table.learn_baseline()
    lines = list(table.lines())
    assert all(line.is_well for line in lines), equality.table(lines)
    assert table.left_out() == []


def test_an_answer_that_differs_is_told_with_its_place():
    table = started()
    table.answers[1][5] ^= 1  # greedy, the second prompt
    table.answers[2][0] ^= 1  # sampled, the first
    line = table.line(Way("alone, width 4", (4,), is_alone=True))
    assert line.greedy == Agreement(2, (Difference(prompt=1, token=5),))
    assert line.sampled == Agreement(2, (Difference(prompt=0, token=0),))
    assert not line.is_well
    assert "1 of 2 equal, the first parts at token 5" in equality.table([line])
    assert list(equality.remarks([line])) == [
        "alone, width 4, greedy: prompt 1 at token 5",
        "alone, width 4, T 0.7: prompt 0 at token 0",
    ]
    assert equality.verdict([line]) == "2 of 4 answers equal"


def test_an_answer_of_another_length_differs_where_the_shorter_one_ends():
    assert equality._first_difference([1, 2], [1, 2, 3]) == 2
    assert equality._first_difference([1, 2, 3], [1, 2]) == 2
    assert equality._first_difference([1, 2], [1, 2]) is None


def test_a_way_that_did_not_happen_is_no_success():
    table = started(prompts=[prompt[:3] for prompt in PROMPTS])
    line = table.line(Way("with a prefix hit", (8,), finds_prefix=True))
    assert line.untested == "not every prompt was found in the prefix cache"
    assert not line.is_well
    assert equality.verdict([line]) == "4 of 4 answers equal; ways not tested: 1"
    assert list(equality.remarks([line])) == [f"with a prefix hit: NOT TESTED, {line.untested}"]
    metrics = [answer.metrics for answer in table._serve(Way("one", (1,)))]
    assert Way("preempted", (1,), is_preempted=True).why_untested(metrics) == "nothing was preempted"
    assert Way("wide", (4,)).why_untested(metrics) == "no draft was accepted"


def test_a_pair_without_a_prefix_cache_says_what_it_leaves_out():
    table = Equality(*models(prefix_cache=False), PROMPTS, 2, replays=True)
    assert "with a prefix hit" not in [way.name for way in table.ways()]
    assert table.left_out() == ["with a prefix hit: it is switched off"]


def test_the_replayed_drafts_are_accepted_at_every_length():
    table = started(60)
    drafter = table.engine.models.drafter
    assert isinstance(drafter, ReplayingDrafter)
    known = torch.tensor([[*ask.prompt_ids, *table.answers[ask.number]] for ask in table.asks])
    is_wrong = drafter._drafts[:, : known.shape[1]] != known
    assert 0.08 < is_wrong.float().mean() < 0.22
    deltas = table._run(Way("wide", (8,)))
    assert {len(delta.token_ids) for delta in deltas} >= set(range(1, 9))


def test_the_command_writes_what_it_prints_and_ends_with_its_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(equality, "load", lambda pair, device: models())
    file = tmp_path / "equality.json"
    words = ["--pair", "qwen3-8b", "--prompts", "2", "--tokens", "24", "--out", str(file)]
    assert equality.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "36 of 36 answers equal"
    written = json.loads(file.read_text())
    assert [line["way"] for line in written["lines"]] == [
        *("alone, width 4", "alone, width 8"),
        *("among 4 rows, width 1", "among 4 rows, width 4", "among 4 rows, width 8"),
        *("a changing batch, widths 1, 4, 8", "with a prefix hit", "in chunks of 48 tokens"),
        "after preemption",
    ]
    assert written["lines"][0]["greedy"] == {"equal": 2, "of": 2, "prompt_and_token": []}
    assert (written["settings"]["prompts"], written["settings"]["tokens"]) == (2, 24)
    unequal = Line("one", Agreement(2, (Difference(0, 1),)), Agreement(2), 1.0, 1.0)
    monkeypatch.setattr(Equality, "lines", lambda self: iter([unequal]))
    assert equality.main(words) == 1
