"""An engine that has read its prefixes from a folder answers as one that has never stopped."""

import json
from dataclasses import replace

import pytest

from blockdraft.engine import prefix_disk
from blockdraft.engine.prefix_disk import PrefixDisk
from tests import tiny
from tests.lossless import families
from tests.matrix import slow_but
from tests.models.families import CASES

PARTS = {"engine": "one and the same"}
LONG = {"lengths": (170, 90), "max_tokens": 8}
SHORT = {"lengths": (34, 17), "max_tokens": 8}  # one greedy, one sampled


def compressed(name, kv_dtype):
    pair = families.make_pair(*CASES[name], seed=1, max_model_len=300)
    return pair, {"kv_dtype": kv_dtype, "draft_kv_dtype": "int8", "kv_window": 16}, LONG


KINDS = {
    "attention": lambda: (families.pair("qwen3-slides"), {}, SHORT),
    "shared layers": lambda: (families.pair("gemma4-shared"), {}, SHORT),
    "hybrid": lambda: (families.pair("qwen3_next-whole"), {"num_states": 20}, SHORT),
    "compressed": lambda: compressed("llama-llama3", "tq4v3"),
    "compressed hybrid": lambda: compressed("qwen3_next-whole", "tq4v3"),
    "MTP": lambda: (families.mtp_pair("qwen3_5-whole"), {"num_states": 20}, SHORT),
    "MTP, all attend": lambda: (families.mtp_pair("qwen3_5-whole", attends=True), {}, SHORT),
}


def serve(engine, requests):
    """The results, and how many tokens of each prompt were found."""
    results, deltas = tiny.watched_run(engine, requests)
    engine.check()
    return results, [d.metrics.num_cached_tokens for d in deltas if d.metrics is not None]


def write(engine, folder):
    """What a folder holds of an engine: the index without the times of use, and the bytes."""
    disk = PrefixDisk(folder, PARTS)
    assert "are kept in" in disk.write(engine.cache, engine.scheduler)
    disk.close()
    engine.check()
    index = json.loads((folder / "index.json").read_text())
    pages = [(*page[:3], page[3] and page[3][0], page[4]) for page in index["pages"]]
    return pages, (folder / index["file"]).read_bytes()


def states_of(engine):
    """Length, the length of the state before, and the rank of the last use, of each saved state."""
    states, latest = engine.scheduler.states, engine.scheduler.pages.latest()
    if states is None:
        return []
    found = [one for _, node in latest if (one := states.state_of(node.id)) is not None]
    times, before = sorted({one.used for one in found}), map(states._parent, found)
    return [
        (one.length, parent and parent.length, times.index(one.used))
        for one, parent in zip(found, before, strict=True)
    ]


def restart(make, folder):
    engine, disk = make(), PrefixDisk(folder, PARTS)
    restored = disk.read(engine.cache, engine.scheduler)
    disk.close()
    engine.check()
    return engine, restored


@pytest.mark.parametrize("kind", slow_but(KINDS, "compressed", "hybrid", "MTP, all attend"))
def test_the_first_answers_after_a_restart_are_those_of_an_engine_that_never_stopped(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(prefix_disk, "BATCH_BYTES", 1 << 15)  # some pages
    pair, plan, shape = KINDS[kind]()
    plan = {"page_size": 16 if shape is LONG else 4, "width": 8, **plan}

    def make():
        return families.engine(pair, **plan)

    never_stopped, requests = make(), families.make_requests(**shape)
    first = [serve(never_stopped, [request])[0][0] for request in requests]  # one after the other
    written = write(never_stopped, tmp_path / "one")
    restarted, restored = restart(make, tmp_path / "one")
    assert (restored.num_pages, restored.num_refused) == (len(written[0]), 0)
    assert write(restarted, tmp_path / "two") == written  # every bit, in the order of use
    assert states_of(restarted) == states_of(never_stopped)
    exact, latest = restarted.scheduler.exact, restarted.scheduler.pages.latest()
    if exact is not None:  # those of the pages that were used last are forgotten last
        pages = [page for _, node in reversed(latest) if (page := exact.page_of(node.id)) is not None]
        assert list(exact._kept) == pages
    more = [
        ([*prompt, *tokens, 7], replace(params, seed=params.seed + 50))
        for (prompt, params), [(tokens, _, _)] in zip(requests, first, strict=True)
    ]
    expected, _ = serve(make(), more)
    results, found = serve(restarted, more)
    assert results == expected
    assert (results, found) == serve(never_stopped, more)
    assert min(found) > 0
