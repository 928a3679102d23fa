"""PrefixDisk: what is refused, what is dropped, and what is left when a write goes wrong."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace

import pytest

from blockdraft.check.fingerprint import fingerprint, prefix_parts
from blockdraft.engine import prefix_disk as module
from blockdraft.engine.loop import EngineLoop
from blockdraft.engine.prefix_disk import PrefixDisk, PrefixesRefused
from blockdraft.engine.request import SamplingParams
from blockdraft.machine.machine import read_machine
from blockdraft.phases import StartProgress
from blockdraft.start import stored_prefixes
from tests import tiny

PAGE, BLOCK = 8, tiny.BLOCK
HEAD = list(range(3, 27))  # three pages
PROMPTS = [[*HEAD, *range(30, 50)], [*HEAD, *range(40, 20, -1)], [7, *HEAD]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
REQUESTS = [
    (PROMPTS[0], PARAMS),
    (PROMPTS[1], replace(PARAMS, temperature=1.0, seed=5)),
    (PROMPTS[2], replace(PARAMS, cache_salt="someone's")),
]
NUM_PAGES = 6 + 3 + 3  # of six pages, six of which three are shared, and three


def make(**plan):
    engine = tiny.engine(page_size=PAGE, **plan)
    engine.fingerprint = fingerprint(engine)
    return engine


@pytest.fixture(scope="module")
def answers():
    return tiny.run(make(), REQUESTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder, engine = tmp_path_factory.mktemp("prefixes") / "0", make()
    for request in REQUESTS:
        tiny.run(engine, [request])
    disk = PrefixDisk(folder, prefix_parts(engine))
    disk.write(engine.cache, engine.scheduler)
    disk.close()
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "0")


def restart(folder, **plan):
    """An engine that has read the folder, and what users are told."""
    engine, startup = make(**plan), StartProgress()
    stored_prefixes.restore_prefixes(engine, str(folder), "auto", startup)
    engine.check()
    return engine, startup.snapshot()


def found(engine, request):
    """The answer and the tokens that were found in the cache."""
    [[answer]], deltas = tiny.watched_run(engine, [request])
    engine.check()
    return answer, deltas[-1].metrics.num_cached_tokens


def index_of(folder):
    return json.loads((folder / "index.json").read_text())


def data_of(folder):
    return folder / index_of(folder)["file"]


def rewrite(folder, change):
    """Change the index as if it had been written so."""
    index = index_of(folder)
    del index["digest"]
    change(index)
    (folder / "index.json").write_text(json.dumps({"digest": module._digest_of(index), **index}))


def test_answers_after_a_restart_are_equal_and_only_the_same_salt_finds_a_prefix(folder, answers):
    engine, told = restart(folder)
    assert (told["warnings"], engine.restored.num_pages) == ([], NUM_PAGES)
    assert found(engine, REQUESTS[0]) == (answers[0][0], 40)
    assert found(engine, REQUESTS[1]) == (answers[1][0], 40)
    assert sum(len(token_ids) for _, token_ids in engine.restored.tree) == NUM_PAGES * PAGE
    assert [parent for parent, _ in engine.restored.tree].count("someone's") == 1
    assert found(engine, (PROMPTS[2], PARAMS))[1] == 0
    assert found(engine, REQUESTS[2]) == (answers[2][0], 24)
    assert os.stat(folder).st_mode & 0o077 == os.stat(data_of(folder)).st_mode & 0o077 == 0


def test_a_page_that_is_wrong_with_a_right_hash_would_be_seen(folder, answers):
    """So the equal answers above are made of what was read."""
    raw = bytearray(data_of(folder).read_bytes())
    size = len(raw) // NUM_PAGES
    raw[:size] = b"\xff" * size  # not numbers
    data_of(folder).write_bytes(raw)
    rewrite(folder, lambda index: index["pages"][0].__setitem__(4, module._digest(bytes(raw[:size]))))
    engine, _ = restart(folder)
    assert engine.restored.num_refused == 0
    first = index_of(folder)["pages"][0]
    request = next(one for one in REQUESTS if one[0][:PAGE] == first[1])
    assert found(engine, request)[0] != answers[REQUESTS.index(request)][0]


PARTS = ("weights", "config", "tokenizer", "template", "grammar", "engine", "pytorch", "kernels", "device")
PARTS += ("formats", "drafter", "machine", "pages")


def test_each_part_is_refused_by_name(folder):
    engine, right = make(), index_of(folder)["parts"]
    disk = PrefixDisk(folder, prefix_parts(engine))
    assert set(right) == set(PARTS)
    for name in PARTS:
        rewrite(folder, lambda index, name=name: index.update(parts={**right, name: "another"}))
        with pytest.raises(PrefixesRefused, match=rf"are another engine's \({name}: another, now [^;]*\)$"):
            disk.read(engine.cache, engine.scheduler)
    later = {"parts": {**right, "engine": "another"}, "pages": [["another form"]]}
    rewrite(folder, lambda index: index.update(later))
    with pytest.raises(PrefixesRefused, match="engine: another, now "):
        disk.read(engine.cache, engine.scheduler)
    assert engine.scheduler.pages.latest() == []
    disk.close()
    _, told = restart(folder)
    assert re.search("^no prefix is restored: those in .* replaces them.$", told["warnings"][0])


def test_parts_tell_engines_apart_whose_tokens_are_equal():
    def parts(drafter="trained", **plan):
        return prefix_parts(make(drafter=drafter, **plan))

    compressed = {"kv_dtype": "int8", "kv_window": 16}
    for name, one, other in (
        ("drafter", parts(), parts("random")),
        ("drafter", parts(), parts("none")),
        ("pages", parts(), parts(dtype="float32")),
        ("pages", parts(**compressed), parts(**compressed, block=4)),
        ("pages", parts(**compressed), parts(**compressed, draft_kv_dtype="int8")),
    ):
        assert one[name] != other[name]
    assert parts() == parts(num_pages=40, width=3, max_num_seqs=2, block=4)


def test_parts_tell_processors_apart(monkeypatch):
    """Libraries choose their sums' order by more than the instruction set, such as the caches' sizes."""
    before, machine = prefix_parts(make()), read_machine()
    other = replace(machine, cpu=replace(machine.cpu, name="another"))
    monkeypatch.setattr("blockdraft.check.fingerprint.read_machine", lambda: other)
    assert {name for name, value in prefix_parts(make()).items() if value != before[name]} == {"machine"}


def flip(folder):
    raw = bytearray(data_of(folder).read_bytes())
    raw[len(raw) // NUM_PAGES + 3] ^= 1  # in the second page
    data_of(folder).write_bytes(raw)


def cut(folder):
    os.truncate(data_of(folder), data_of(folder).stat().st_size // 2)


def tamper(folder):
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace("[3, 4, 5", "[3, 4, 6", 1))


DAMAGES = {
    "a flipped bit": (flip, r"\d pages of prefixes in .* are damaged, or follow a damaged one: they are not"),
    "half a file": (cut, r"6 pages of prefixes in .* are damaged"),
    "no file": (lambda folder: data_of(folder).unlink(), r"pages-\d+.bin cannot be read \(No such file"),
    "another token": (tamper, r"index.json is damaged. This server's end replaces them.$"),
    "half an index": (lambda folder: os.truncate(folder / "index.json", 99), "index.json is damaged"),
    "no index": (lambda folder: (folder / "index.json").unlink(), None),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_told_in_one_sentence_and_computed_again(folder, answers, name):
    damage, sentence = DAMAGES[name]
    damage(folder)
    engine, told = restart(folder)
    assert len(told["warnings"]) == (sentence is not None)
    if sentence is not None:
        assert re.search(sentence, told["warnings"][0]), told
    assert engine.restored.num_pages < NUM_PAGES
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert found(engine, request)[0] == answer[0]
    assert "are kept in" in engine.keep_prefixes()
    assert restart_after(engine, folder).restored.num_pages == NUM_PAGES


def restart_after(engine, folder):
    engine.prefix_disk.close()
    return restart(folder)[0]


def test_less_memory_and_less_disk_keep_what_was_used_last(folder, answers):
    engine, told = restart(folder, num_pages=9, max_model_len=60)
    assert (told["warnings"], engine.restored.num_pages) == ([], 9)
    assert found(engine, REQUESTS[2]) == (answers[2][0], 24)
    assert found(engine, REQUESTS[1]) == (answers[1][0], 40)
    for request, answer in zip(REQUESTS * 2, answers * 2, strict=True):
        assert found(engine, request)[0] == answer[0]
    engine.prefix_disk._max_bytes = 5 * engine.cache.raw()[0].num_bytes
    assert "5 pages" in engine.keep_prefixes()
    assert len(list(folder.glob("pages-*.bin"))) == 1
    assert restart_after(engine, folder).restored.num_pages == 5
    assert sorted(file.suffix for file in folder.iterdir()) == ["", ".bin", ".json"]


def test_a_disk_with_less_room_than_was_asked_for_keeps_what_fits(folder, monkeypatch):
    engine, _ = restart(folder)
    engine.prefix_disk._max_bytes = 10**12
    usage = shutil.disk_usage(folder)._replace(free=6 * engine.cache.raw()[0].num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert re.search(r": 5 pages, .* s; 7 more are over", engine.keep_prefixes())
    engine.prefix_disk._max_bytes = engine.cache.raw()[0].num_bytes - 1
    assert engine.keep_prefixes() == f"prefixes could not be kept in {folder} (there is no room for one page)"
    assert restart_after(engine, folder).restored.num_pages == 5


def test_one_process_has_a_folder_and_others_serve_without(folder):
    disk = PrefixDisk(folder, {})
    engine, told = restart(folder)
    assert told["warnings"] == [
        f"--prefix-disk keeps nothing: another process keeps its prefixes in {folder}."
    ]
    assert engine.prefix_disk is None
    disk.close()
    with pytest.raises(PrefixesRefused, match=r"index.json/0 cannot be written \(Not a directory\)"):
        PrefixDisk(folder / "index.json" / "0", {})


def test_a_folder_of_an_unknown_user_is_a_name_like_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, told = restart("~no such user/0")
    assert told["warnings"] == []
    assert engine.prefix_disk.folder.is_dir()


def test_a_new_index_is_written_to_a_file_of_our_own(folder, tmp_path):
    """It holds what users have written: not through another's link, nor for whom a left file lets read."""
    engine, _ = restart(folder)
    (tmp_path / "another's").write_text("as it was")
    (folder / "index.json.partial").symlink_to(tmp_path / "another's")
    assert "are kept in" in engine.keep_prefixes()
    assert (tmp_path / "another's").read_text() == "as it was"
    (folder / "index.json.partial").touch(mode=0o644)
    assert "are kept in" in engine.keep_prefixes()
    assert os.stat(folder / "index.json").st_mode & 0o077 == 0


def test_nothing_is_kept_where_answers_cannot_be_repeated(folder):
    engine, startup = make(), StartProgress()
    engine.fingerprint = replace(engine.fingerprint, id=None, reason="sums differ")
    stored_prefixes.restore_prefixes(engine, str(folder), "auto", startup)
    assert startup.warnings == ("--prefix-disk keeps nothing: sums differ.",)
    assert engine.prefix_disk is None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_or_is_killed_leaves_the_prefixes_before(folder, monkeypatch, error, call):
    engine, _ = restart(folder)
    tiny.run(engine, [([1, *HEAD, *HEAD], PARAMS)])

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (module.Path, "replace")), fail)
        if isinstance(error, OSError):
            told = engine.keep_prefixes()
            assert told == f"prefixes could not be kept in {folder} (No space left on device)"
            assert sorted(file.suffix for file in folder.iterdir()) == ["", ".bin", ".json"]
        else:
            with pytest.raises(KeyboardInterrupt):
                engine.keep_prefixes()
    again = restart_after(engine, folder)
    assert again.restored.num_pages == NUM_PAGES
    assert len(list(folder.glob("pages-*.bin"))) == 1


def test_a_loop_keeps_prefixes_when_it_is_closed(tmp_path, answers):
    engine, _ = restart(tmp_path / "new")
    tiny.run(engine, REQUESTS)
    loop = EngineLoop(lambda startup: engine, None).wait()
    assert loop.engine_info.write_s == module.WRITE_S
    loop.close()
    assert found(restart_after(engine, tmp_path / "new"), REQUESTS[0]) == (answers[0][0], 40)
