"""Workloads: the prompts asked for, the same every time, and what is wrong with a file named by its line."""

import gzip
import json
import lzma
import re
import sys
from hashlib import sha256
from pathlib import Path

import pytest

import blockdraft
from blockdraft.bench import datasets
from blockdraft.bench.datasets import DATASETS
from blockdraft.bench.filler import filler
from blockdraft.bench.records import Prompt
from blockdraft.bench.workloads import (
    APART,
    CLASSES,
    deepened,
    load,
    load_all,
    salted,
    with_turns,
)
from blockdraft.errors import BenchError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
PROMPT = Prompt(id="p-1", category="qa", turns=("Why?", "And then?"))
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(path, rows, packing=""):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packing](text)
    path = path.with_name(path.name + packing)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return path


def numbered(tmp_path, count):
    return str(write(tmp_path / "mine.jsonl", [{"prompt": f"question {i}"} for i in range(count)]))


def texts(workload):
    return [prompt.turns[0] for prompt in workload.prompts]


# The built-in classes


def test_built_in_classes_have_twelve_prompts_each_and_no_two_are_alike():
    found = [load(name) for name in (*CLASSES, *APART)]
    for workload in found:
        name, prompts = workload.name, workload.prompts
        assert len({prompt.id for prompt in prompts}) == len(prompts) == (1 if name == "page" else 12)
        assert {prompt.category for prompt in prompts} == {name}
        assert (workload.source, workload.is_raw) == (f"built in, blockdraft {blockdraft.__version__}", False)
        assert {len(prompt.turns) for prompt in prompts} == ({2, 3} if name == "dialogue" else {1}), name
    openings = [text[:60] for workload in found for prompt in workload.prompts for text in prompt.turns]
    assert len(set(openings)) == len(openings)
    for workload in found:
        first = [prompt.turns[0] for prompt in workload.prompts]
        if workload.name in ("long_code", "summarise"):  # they carry a text
            assert all(300 <= len(text.split("\n\n", 1)[1].split()) <= 800 for text in first)
        if workload.name == "program":  # a short order for a long answer, of about 37 tokens
            assert all(20 <= len(text.split()) <= 30 for text in first)


def test_all_is_every_class_once_and_in_order():
    assert tuple(workload.name for workload in load_all()) == CLASSES
    again = load_all(["prose", "all", "Prose".lower()], limit=2)
    assert [workload.name for workload in again] == ["prose", *(name for name in CLASSES if name != "prose")]
    assert {len(workload.prompts) for workload in again} == {2}
    with pytest.raises(BenchError, match="several workloads"):
        load("all")


def test_two_workloads_of_one_name_are_refused(tmp_path):
    mine = write(tmp_path / "code.jsonl", [{"prompt": "a"}])
    with pytest.raises(BenchError, match="two workloads are called 'code'"):
        load_all(["code", str(mine)])


# Samples


def test_a_limit_takes_one_prompt_of_each_stretch_by_the_seed(tmp_path):
    path = numbered(tmp_path, 100)
    picked = [int(text.split()[1]) for text in texts(load(path, limit=10, seed=3))]
    assert [number // 10 for number in picked] == list(range(10))
    assert load(path, limit=10, seed=3) == load(path, limit=10, seed=3) != load(path, limit=10, seed=4)
    for limit in (1, 99, 100, 1000):
        found = texts(load(path, limit=limit))
        assert len(found) == len(set(found)) == min(limit, 100)


# Random words


def test_random_words_are_as_many_as_asked_and_depend_on_the_seed():
    workload = load("random:50", limit=3, seed=1)
    assert workload.is_raw
    assert [len(text.split()) for text in texts(workload)] == [50, 50, 50]
    assert len(set(texts(workload))) == 3
    assert texts(workload) == texts(load("random:50", limit=5, seed=1))[:3]
    assert not set(texts(workload)) & set(texts(load("random:50", limit=3, seed=2)))
    assert len({word for text in texts(workload) for word in text.split()}) > 140
    assert {len(text.split()) for text in texts(load("random"))} == {256}
    assert len(load("random").prompts) == 12


@pytest.mark.parametrize("name", ["random:0", "random:-5", "random:many", "random:1.5"])
def test_random_needs_a_number_of_words(name):
    with pytest.raises(BenchError, match="not a number of words"):
        load(name)


# A user's own file


@pytest.mark.parametrize(
    ("row", "system", "turns"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            None,
            ("a", "b"),
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            "s",
            ("a",),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "x"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
                    },
                ]
            },
            None,
            ("a", "bc"),
        ),
        ({"prompt": "a", "system": "s"}, "s", ("a",)),
        ({"prompt": ["a", "b"]}, None, ("a", "b")),
        ({"turns": ["a", "b", "c"]}, None, ("a", "b", "c")),
        ({"text": "a"}, None, ("a",)),
        ({"question": "a", "answer": "4"}, None, ("a",)),
    ],
)
def test_rows_of_every_layout_are_read(tmp_path, row, system, turns):
    (prompt,) = load(str(write(tmp_path / "mine.jsonl", [row]))).prompts
    assert (prompt.system, prompt.turns) == (system, turns)
    assert (prompt.id, prompt.category) == ("mine-1", "mine")


def test_ids_and_categories_of_a_file_are_kept(tmp_path):
    rows = [
        {"id": "x", "category": "law", "prompt": "a"},
        {"question_id": 7, "prompt": "b"},
        {"prompt": "c"},
    ]
    prompts = load(str(write(tmp_path / "mine.jsonl", rows))).prompts
    assert [(prompt.id, prompt.category) for prompt in prompts] == [
        ("x", "law"),
        ("mine-7", "mine"),
        ("mine-3", "mine"),
    ]


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_packed_files_are_read_and_named_by_their_hash(tmp_path, packing):
    path = write(tmp_path / "mine.jsonl", [{"prompt": "a"}], packing)
    workload = load(str(path))
    assert texts(workload) == ["a"]
    assert workload.name == "mine"
    assert workload.source == f"{path.name}, sha256 {sha256(path.read_bytes()).hexdigest()[:12]}"


def test_a_list_in_a_json_file_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1))
    assert texts(load(str(path))) == ["a", "b"]
    path.write_text('[\n{"prompt": "a"},\n{"prompt": }]')
    with pytest.raises(BenchError, match=r"row 3: not JSON"):
        load(str(path))


def test_the_source_says_that_assistant_messages_were_left_out(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    path = write(tmp_path / "mine.jsonl", [{"messages": messages}] * 3)
    assert "(3 assistant messages left out" in load(str(path)).source


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    workload = load(str(path))
    assert texts(workload) == ["a", "b"]
    assert [prompt.id for prompt in workload.prompts] == ["mine-1", "mine-4"]


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "a"} {}', "not JSON (Extra data at column 17)"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 13)"),
        (b'["a"]', "a list, where an object was expected"),
        (b"7", "a number, where an object was expected"),
        (b"null", "missing or null, where an object was expected"),
        (
            b'{"promt": "a"}',
            'no prompt: one of "messages", "turns", "prompt", "question", "text" was expected',
        ),
        (b'{"prompt": 3}', '"prompt" is a number, where a text was expected'),
        (b'{"prompt": "  "}', '"prompt" is empty'),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "system": 1}', '"system" is a number'),
        (b'{"turns": []}', '"turns" is an empty list'),
        (b'{"turns": "a"}', '"turns" is a text, where a list of texts was expected'),
        (b'{"turns": ["a", null]}', '"turns[1]" is missing or null'),
        (b'{"messages": []}', '"messages" is an empty list'),
        (b'{"messages": {"role": "user"}}', '"messages" is an object'),
        (b'{"messages": ["a"]}', "messages[0] is a text, where an object was expected"),
        (b'{"messages": [{"role": "user"}]}', '"messages[0].content" is missing or null'),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "messages[0] has the role 'tool'"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}]}',
            "messages[1] has the role 'system'",
        ),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no user message"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "only text can be sent",
        ),
        (b'{"id": "first", "prompt": "b"}', "the id 'first' is that of line 1"),
        (b"[" * 100_000, "not"),
    ],
)
def test_a_malformed_line_is_named_with_what_is_wrong(tmp_path, line, fact):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"id": "first", "prompt": "a"}\n\n' + line + b'\n{"prompt": "c"}\n')
    with pytest.raises(BenchError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert fact in str(caught.value) or (fact == "not" and "nested too deeply" in str(caught.value))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz"])
def test_a_packed_file_that_is_cut_off_or_damaged_is_refused(tmp_path, suffix):
    whole = write(tmp_path / "mine.jsonl", [{"prompt": f"text {i}"} for i in range(50)], suffix[-3:])
    content, bad = whole.read_bytes(), tmp_path / f"bad{suffix}"
    for wrong in (content[:-20], content[:20] + b"\xff" * 20, b'{"prompt": "not packed"}'):
        bad.write_bytes(wrong)
        with pytest.raises(BenchError, match="is not a whole"):
            load(str(bad))


def test_an_empty_file_a_missing_one_and_a_folder_are_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(BenchError, match="holds no prompts"):
        load(str(empty))
    with pytest.raises(BenchError, match="does not exist"):
        load(str(tmp_path / "missing.jsonl"))
    with pytest.raises(BenchError, match="cannot be read"):
        load(str(tmp_path))


def test_a_parquet_file_without_pyarrow_is_explained(tmp_path, monkeypatch):
    path = tmp_path / "mine.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(BenchError, match="pip install pyarrow"):
        load(str(path))


def test_a_parquet_file_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "mine.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}]), path)
    assert texts(load(str(path))) == ["a", "b"]
    path.write_bytes(b"PAR1")
    with pytest.raises(BenchError, match="cannot be read as Parquet"):
        load(str(path))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gsm8", "did you mean 'gsm8k'?"),
        ("Summarize-it", "did you mean 'summarise'?"),
        ("human-evel", "did you mean 'humaneval'?"),
        ("xyzzy", "one of code, reasoning"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name, hint):
    with pytest.raises(BenchError, match=re.escape(f"unknown workload '{name}': {hint}")):
        load(name)


# Public data sets

GSM8K = {"question": "Two and two?", "answer": "#### 4"}
MATH500 = {"problem": "Solve $x=1$.", "answer": "1", "subject": "Algebra", "unique_id": "test/algebra/1.json"}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n"}
MBPP = {"task_id": 11, "text": "Write f.", "code": "f = 1"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
SPEC_BENCH = {"question_id": 161, "category": "translation", "turns": ["Translate."]}


@pytest.mark.parametrize(
    ("name", "file", "packing", "row", "wanted"),
    [
        ("gsm8k", "gsm8k/test.jsonl", "", GSM8K, ("gsm8k-1", "math", ("Two and two?" + STEP_BY_STEP,))),
        (
            "gsm8k",
            "grade_school_math/data/test.jsonl",
            "",
            GSM8K,
            ("gsm8k-1", "math", ("Two and two?" + STEP_BY_STEP,)),
        ),
        (
            "math500",
            "MATH-500/test.jsonl",
            "",
            MATH500,
            ("test/algebra/1.json", "math", ("Solve $x=1$." + STEP_BY_STEP,)),
        ),
        (
            "humaneval",
            "HumanEval.jsonl",
            ".gz",
            HUMANEVAL,
            (
                "HumanEval/0",
                "code",
                (
                    "Write a solution to the following problem and make sure that it passes the tests:\n"
                    "```python\ndef f():\n\n```",
                ),
            ),
        ),
        ("mbpp", "mbpp.jsonl", "", MBPP, ("mbpp-11", "code", ("Write f.",))),
        ("mt_bench", "question.jsonl", "", MT_BENCH, ("mt_bench-81", "writing", ("Write.", "Rewrite."))),
        (
            "spec_bench",
            "spec_bench/question.jsonl",
            ".xz",
            SPEC_BENCH,
            ("spec_bench-161", "translation", ("Translate.",)),
        ),
    ],
)
def test_original_layouts_get_the_wording_of_the_paper(tmp_path, name, file, packing, row, wanted):
    path = write(tmp_path / file, [row], packing)
    workload = load(name, data_dir=tmp_path, is_offline=True)
    (prompt,) = workload.prompts
    assert (prompt.id, prompt.category, prompt.turns) == wanted
    assert workload.name == name
    assert workload.source.startswith(f"{path.name}, sha256 ")


@pytest.mark.parametrize("folder", ["", "eval"])
def test_rows_in_our_layout_are_not_wrapped_again(tmp_path, folder):
    text = "Two and two?" + STEP_BY_STEP
    row = {"id": "gsm8k-0", "category": "math", "messages": [{"role": "user", "content": text}], "raw": "?"}
    write(tmp_path / folder / "gsm8k_test.jsonl", [row], ".gz")
    assert texts(load("gsm8k", data_dir=tmp_path, is_offline=True)) == [text]


def test_files_of_one_name_are_told_apart_by_their_rows(tmp_path):
    write(tmp_path / "test.jsonl", [GSM8K])
    assert len(load("gsm8k", data_dir=tmp_path, is_offline=True).prompts) == 1
    with pytest.raises(BenchError, match="MATH-500"):
        load("math500", data_dir=tmp_path, is_offline=True)
    write(tmp_path / "question.jsonl", [MT_BENCH, SPEC_BENCH])
    assert len(load("spec_bench", data_dir=tmp_path, is_offline=True).prompts) == 2
    with pytest.raises(BenchError, match="MT-Bench"):
        load("mt_bench", data_dir=tmp_path, is_offline=True)


def test_spec_bench_counts_its_mt_bench_classes_as_one_task(tmp_path):
    write(tmp_path / "spec_bench.jsonl", [MT_BENCH, SPEC_BENCH])
    prompts = load("spec_bench", data_dir=tmp_path, is_offline=True).prompts
    assert [prompt.category for prompt in prompts] == ["mt_bench", "translation"]


def test_only_the_test_split_of_mbpp_is_asked(tmp_path):
    write(tmp_path / "mbpp.jsonl", [MBPP | {"task_id": task} for task in (10, 11, 510, 511)])
    prompts = load("mbpp", data_dir=tmp_path, is_offline=True).prompts
    assert [prompt.id for prompt in prompts] == ["mbpp-11", "mbpp-510"]


def test_a_malformed_row_of_a_data_set_is_named(tmp_path):
    path = write(tmp_path / "gsm8k.jsonl", [GSM8K, {"answer": "4"}])
    with pytest.raises(BenchError, match=re.escape(f"{path}, line 2: no prompt")):
        load("gsm8k", data_dir=tmp_path, is_offline=True)


@pytest.mark.parametrize("name", ["math500", "MATH-500", "Math_500"])
def test_a_set_that_is_not_here_comes_from_the_hub(tmp_path, monkeypatch, name):
    import huggingface_hub

    asked = []

    def download(repo, path, **options):
        asked.append((repo, path, options))
        return str(write(tmp_path / "hub.jsonl", [MATH500]))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    workload = load(name, data_dir=tmp_path)
    assert asked == [("HuggingFaceH4/MATH-500", "test.jsonl", {"repo_type": "dataset"})]
    assert workload.name == "math500"
    assert workload.source.startswith("hub HuggingFaceH4/MATH-500 test.jsonl, sha256 ")


@pytest.mark.parametrize("name", list(DATASETS))
def test_a_hub_that_cannot_be_reached_says_which_file_to_put_where(tmp_path, monkeypatch, name):
    import huggingface_hub

    def download(*args, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "_can_read_parquet", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(BenchError) as caught:
        load(name, data_dir=tmp_path)
    dataset = DATASETS[name]
    assert f"put {dataset.home} into {tmp_path} as {dataset.files[0]}" in str(caught.value)
    assert ("no route to host" in str(caught.value)) == (dataset.hub is not None)


@pytest.mark.parametrize(
    ("is_offline", "message"),
    [
        (True, "downloads are off"),
        (False, r"'pip install pyarrow' to read it, or put .* as gsm8k_test.jsonl"),
    ],
)
def test_the_hub_is_not_asked_in_vain(monkeypatch, is_offline, message):
    import huggingface_hub

    def download(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(datasets, "_can_read_parquet", lambda: False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(BenchError, match=message):
        load("gsm8k", is_offline=is_offline)


def test_a_data_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(BenchError, match="is not a folder"):
        load("gsm8k", data_dir=tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "rows"), [("gsm8k", 1319), ("humaneval", 164), ("mbpp", 256), ("mt_bench", 80)]
)
def test_the_shared_files_are_read_whole(name, rows):
    if not SHARED.is_dir():
        pytest.skip("no shared data")
    assert len(load(name, data_dir=SHARED, is_offline=True).prompts) == rows


# What is done to a prompt


def test_turns_can_be_cut():
    workload = load("dialogue")
    assert {len(prompt.turns) for prompt in with_turns(workload, 1).prompts} == {1}
    assert with_turns(workload, None) == workload


def test_a_salt_is_the_first_line_and_nothing_else_changes():
    assert salted(PROMPT, "5f3a").turns == ("[run 5f3a]\nWhy?", "And then?")
    assert salted(PROMPT, "5f3a") == salted(PROMPT, "5f3a") != salted(PROMPT, "5f3b")
    with_system = Prompt(id="p", category="qa", turns=("Why?",), system="Be brief.")
    assert salted(with_system, "5f3a").system == "[run 5f3a]\nBe brief."
    assert salted(with_system, "5f3a").turns == ("Why?",)


@pytest.mark.parametrize(("num_tokens", "tokens_per_word"), [(200, 1.0), (4096, 1.3), (32_768, 1.45)])
def test_a_deepened_prompt_has_about_as_many_tokens_more(num_tokens, tokens_per_word):
    deep = deepened(PROMPT, num_tokens=num_tokens, tokens_per_word=tokens_per_word)
    added = deep.turns[0].removesuffix("\n\nWhy?")
    assert added != deep.turns[0]
    assert deep.turns[0].startswith("Background notes (not needed for the task):\n\n")
    assert len(added.split()) == pytest.approx(num_tokens / tokens_per_word, abs=1)
    assert deep.turns[1:] == PROMPT.turns[1:]
    assert (deep.id, deep.category) == (PROMPT.id, PROMPT.category)


def test_notes_are_the_same_for_a_seed_and_differ_between_prompts():
    other = Prompt(id="p-2", category="qa", turns=PROMPT.turns)
    first = deepened(PROMPT, num_tokens=500, tokens_per_word=1.3)
    assert first == deepened(PROMPT, num_tokens=500, tokens_per_word=1.3)
    assert first.turns != deepened(other, num_tokens=500, tokens_per_word=1.3).turns
    assert first != deepened(PROMPT, num_tokens=500, tokens_per_word=1.3, seed=1)


def test_no_depth_leaves_the_prompt_alone():
    assert deepened(PROMPT, num_tokens=0, tokens_per_word=1.3) == PROMPT


def test_notes_are_varied_and_complete_sentences():
    notes = filler(20_000, seed="x")
    assert len(notes.split()) == 20_000
    assert not set("{}_") & set(notes)
    sentences = re.split(r"(?<=\.)\s", notes)
    assert len(set(sentences)) > 0.97 * len(sentences)
    assert filler(500, seed="x").split() == notes.split()[:500]
    assert len({note[:40] for note in notes.split("\n\n")}) == len(notes.split("\n\n"))
