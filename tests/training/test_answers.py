"""Prompts that are read, answers that are kept, and the stage that asks for them and can be interrupted."""

import json
import lzma
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from blockdraft.bench.records import Prompt
from blockdraft.errors import SettingsError
from blockdraft.training import regenerate as module
from blockdraft.training.answers import (
    Document,
    read_conversations,
    read_shard,
    write_shard,
)
from blockdraft.training.job import AnswerOptions
from blockdraft.training.offline_batch import OfflineAnswer, make_offline_batch
from blockdraft.training.regenerate import regenerate
from tests.training import pairs

# ---- files of prompts

LINE = {"messages": [{"role": "user", "content": "hello"}], "category": "chat"}


def test_conversations_are_read_packed(tmp_path):
    lines = [
        LINE,
        {"prompt": "just this"},
        {
            "id": "third",
            "category": "turns",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "of somebody else: dropped"},
                {"role": "user", "content": "two"},
            ],
        },
    ]
    path = tmp_path / "prompts.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps(line) for line in lines))
    assert read_conversations(path) == [
        Prompt("1", "chat", ("hello",)),
        Prompt("3", "all", ("just this",)),
        Prompt("third", "turns", ("one", "two"), "be brief"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("[]", "line 3: an empty list, where an object was expected"),
        ("{}", "line 3: a message of role 'user' whose content is null"),
        ('{"messages": null}', "line 3: 'messages' is not a list of objects"),
        ('{"messages": ["hello"]}', "line 3: 'messages' is not a list of objects"),
        ('{"messages": []}', "line 3: no user message"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 3: no user message"),
        (
            '{"messages": [{"role": "tool", "content": "x"}]}',
            "a message of role 'tool' whose content is a string",
        ),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "role 'user' whose content is a list"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "a message of role"),
        ('{"prompt": 5}', "role 'user' whose content is a number"),
    ],
)
def test_a_bad_line_is_named_with_its_number_in_the_file(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n\n{line}\n")
    with pytest.raises(SettingsError, match=r"prompts\.jsonl") as error:
        read_conversations(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [("", "holds no prompts"), ("\n  \n", "holds no prompts"), (None, "")]
)
def test_a_file_without_prompts_is_refused(tmp_path, content, message):
    """Packed and damaged files are those of tests/bench/test_workloads.py: one reader serves both."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=f"{path}.*{message}"):
        read_conversations(path)


# ---- shards


def test_a_shard_gives_back_what_was_written(tmp_path):
    documents = [
        Document((1, 2, 3), (4, 5), "math", is_greedy=True, key=7),
        Document((9,), (70_000,), "code", is_greedy=False, key=1 << 40),
        Document((9, 9), (), "math", is_greedy=False, key=0),
    ]
    write_shard(tmp_path / "shard-0000.npz", documents)
    assert read_shard(tmp_path / "shard-0000.npz") == documents
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0000.npz"]


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "other"])
def test_a_damaged_shard_is_refused(tmp_path, damage):
    path = tmp_path / "shard-0000.npz"
    write_shard(path, [Document((1, 2, 3) * 50, (4, 5) * 50, "math", is_greedy=True, key=7)])
    whole = path.read_bytes()
    contents = {"empty": b"", "text": b"hello", "cut": whole[: len(whole) // 2], "other": whole}
    path.write_bytes(contents[damage])
    if damage == "other":
        with path.open("wb") as file:
            np.savez(file, tokens=np.zeros(3))
    with pytest.raises(SettingsError, match="not a shard of answers"):
        read_shard(path)


# ---- regeneration

END = 20
OPTIONS = AnswerOptions(max_tokens=24)
CONVERSATIONS = [
    *(Prompt(str(n), "runs", (f"t{n} t{n + 2} t{n + 4}",)) for n in range(0, 12, 2)),
    Prompt("turns", "turns", ("t2 t4 t6", "t10 t12", "t1 t4")),
    Prompt("system", "turns", ("t4 t6", "t8"), "t0 t2"),
    *(Prompt(str(n), "threes", (f"t{n} t{n + 3} t{n + 6} t{n + 9}",)) for n in range(1, 6)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = pairs.write_ending_target(tmp_path_factory.mktemp("ending"), END)
    return pairs.load_target(folder, max_num_seqs=3, max_model_len=120)


@pytest.fixture
def bulk(models):
    return Spy(make_offline_batch(*models))


class Parrot:
    """In place of an OfflineBatch: answers every question with the end token, without a model."""

    max_model_len = 120

    def answer(self, questions):
        return (OfflineAnswer(question, (END,), is_whole=True) for question in questions)


class Spy:
    """An OfflineBatch that remembers what it was asked."""

    def __init__(self, bulk):
        self._bulk, self.max_model_len, self.asked = bulk, bulk.max_model_len, []

    def answer(self, questions):
        asker = iter(questions)

        class Heard:
            def __iter__(mine):
                return mine

            def __next__(mine):
                self.asked.append(next(asker))
                return self.asked[-1]

        return self._bulk.answer(Heard())


def ask(bulk, models, folder, conversations=CONVERSATIONS, options=OPTIONS, **more):
    return regenerate(bulk, models[0].tokenizer, conversations, folder, options, **more)


def test_every_turn_is_a_document_with_all_before_it_as_its_prompt(bulk, models, tmp_path):
    documents = {one.key: one for one in ask(bulk, models, tmp_path)}
    encode, decode = models[0].tokenizer.encode_chat, models[0].tokenizer.decode
    num_turns = []
    for index, one in enumerate(CONVERSATIONS):
        messages = [] if one.system is None else [{"role": "system", "content": one.system}]
        for turn, text in enumerate(one.turns):
            document = documents.pop(index * module.MAX_TURNS + turn, None)
            if document is None:
                break
            messages.append({"role": "user", "content": text})
            assert document.prompt_ids == tuple(encode(messages))
            assert document.category == one.category
            messages.append({"role": "assistant", "content": decode(document.answer_ids)})
            is_whole = document.answer_ids[-1] == END
            assert is_whole or len(document.answer_ids) == OPTIONS.max_tokens
            num_turns.append(turn + 1)
            assert is_whole or index * module.MAX_TURNS + turn + 1 not in documents
    assert documents == {}
    assert max(num_turns) == 3
    assert num_turns.count(1) == len(CONVERSATIONS)


def test_an_interrupted_stage_ends_with_the_same_documents_in_the_same_order(
    bulk, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SHARD", 5)
    options = AnswerOptions(max_tokens=24, sampled=0.5, temperature=(1.0, 1.0), seed=3)
    whole = ask(bulk, models, tmp_path / "whole", options=options)
    assert {one.is_greedy for one in whole} == {True, False}
    folder = tmp_path / "stopped"

    def stop(tally):
        if tally.is_filed and tally.num_documents == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(bulk, models, folder, options=options, report=stop)
    assert len(list(folder.iterdir())) == 2
    bulk = Spy(make_offline_batch(*models))
    assert ask(bulk, models, folder, options=options) == whole
    assert len(bulk.asked) < len(whole)


def test_what_is_known_is_not_asked_again_and_never_kept_twice(models, tmp_path):
    short = [Prompt(str(n), "runs", (f"t{n} t{n + 2}",)) for n in range(6)]
    ask(Spy(make_offline_batch(*models)), models, tmp_path, short[:4])
    bulk = Spy(make_offline_batch(*models))
    documents = ask(bulk, models, tmp_path, short)
    assert sorted(one.key // module.MAX_TURNS for one in bulk.asked) == [4, 5]
    assert [one.key // module.MAX_TURNS for one in documents] == list(range(6))
    kept = [one for path in sorted(tmp_path.iterdir()) for one in read_shard(path)]
    assert sorted(one.key for one in kept) == [one.key for one in documents]


def test_a_shard_that_was_deleted_is_made_anew_and_none_is_overwritten(models, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 4)
    whole = ask(Spy(make_offline_batch(*models)), models, tmp_path)
    (tmp_path / "shard-0001.npz").unlink()
    bulk = Spy(make_offline_batch(*models))
    assert ask(bulk, models, tmp_path) == whole
    assert 0 < len(bulk.asked) < len(whole)
    kept = [one for path in sorted(tmp_path.iterdir()) for one in read_shard(path)]
    assert sorted(one.key for one in kept) == [one.key for one in whole]


def test_no_thread_is_left_behind(models, tmp_path):
    bulk = Parrot()
    before = threading.active_count()
    ask(bulk, models, tmp_path)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_shards_of_a_stage_are_reported_and_add_up(models, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 5)
    heard = []
    documents = ask(Parrot(), models, tmp_path, report=heard.append)
    filed = [(tally.num_documents, tally.num_answer_tokens) for tally in heard if tally.is_filed]
    assert [count for count, _ in filed[:-1]] == list(range(5, len(documents), 5))
    assert filed[-1] == (len(documents), sum(len(one.answer_ids) for one in documents))
    assert [one.num_documents for one in heard if not one.is_filed] == list(range(1, len(documents) + 1))


def test_prompts_that_no_row_holds_are_left_out(models, tmp_path):
    bulk = Parrot()
    longest = bulk.max_model_len - OPTIONS.max_tokens
    texts = [" ".join(["t5"] * size) for size in (longest + 1, longest, 1, 2)]
    documents = ask(bulk, models, tmp_path, [Prompt("", "all", (text,)) for text in texts])
    assert [len(one.prompt_ids) for one in documents] == [longest, 2]


def test_a_later_turn_that_is_too_long_ends_its_conversation(models, tmp_path):
    bulk = Parrot()
    one = Prompt("", "all", ("t2 t4 t6", " ".join(["t5"] * bulk.max_model_len), "t1"))
    assert [document.key for document in ask(bulk, models, tmp_path, [one])] == [0]


def test_once_time_is_over_no_conversation_begins_and_those_under_way_end(
    bulk, models, tmp_path, monkeypatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    conversations = [Prompt("", "turns", ("t2 t4 t6", "t10 t12", "t2 t4"))] * 9

    def answer(questions):
        for answer in bulk.answer(questions):
            clock.now = 11.0
            yield answer

    limited = SimpleNamespace(answer=answer, max_model_len=bulk.max_model_len)
    documents = ask(limited, models, tmp_path, conversations, seconds=10.0)
    begun = {one.key // module.MAX_TURNS for one in documents}
    assert len(begun) == 3, "the rows there are"
    assert len(documents) == 9, "and each with all of its turns"
    clock.now = 0.0
    assert ask(bulk, models, tmp_path / "none", conversations, seconds=0.0) == []


def test_a_share_of_the_conversations_is_sampled_at_temperatures_of_the_range(models, tmp_path):
    bulk = Spy(Parrot())
    conversations = [Prompt("", "all", (f"t{n} t{n + 1}",)) for n in range(60)]
    options = AnswerOptions(max_tokens=4, sampled=0.5, temperature=(0.2, 1.0), top_p=0.8)
    documents = ask(bulk, models, tmp_path, conversations, options)
    sampled = sorted(one.temperature for one in bulk.asked if one.temperature)
    assert 20 <= len(sampled) == len(set(sampled)) == sum(not one.is_greedy for one in documents) <= 40
    assert 0.2 <= sampled[0] < 0.4
    assert 0.8 < sampled[-1] <= 1.0
    assert {(one.temperature > 0, one.top_p) for one in bulk.asked} == {(False, 1.0), (True, 0.8)}
    assert len({one.seed for one in bulk.asked}) == 60
