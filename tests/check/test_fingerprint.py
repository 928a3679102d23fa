"""A fingerprint changes with each thing that decides an answer's tokens, and with nothing else."""

from dataclasses import replace

import pytest
import torch

from blockdraft.check import fingerprint as module
from blockdraft.check import verified
from blockdraft.check.fingerprint import fingerprint
from tests import tiny


def with_plan(**changes):
    def change(monkeypatch, engine):
        engine.plan = replace(engine.plan, **changes)

    return change


def with_version(package):
    def change(monkeypatch, engine):
        right = module._version
        monkeypatch.setattr(module, "_version", lambda name: "0" if name == package else right(name))

    return change


def with_value(name, value):
    def change(monkeypatch, engine):
        monkeypatch.setattr(module, name, value)

    return change


def one_weight(monkeypatch, engine):
    weight = dict(engine.models.target.named_parameters())["layers.0.mlp.down.weight"]
    changed = weight.clone()
    changed.view(-1)[-1] += 1e-9
    monkeypatch.setattr(weight, "data", changed)


def another_tokenizer(monkeypatch, engine):
    monkeypatch.setattr(type(engine.models.tokenizer), "as_json", lambda self: "{}")


def another_end(monkeypatch, engine):
    monkeypatch.setattr(engine.models.tokenizer, "eos_ids", (1,))


def another_template(monkeypatch, engine):
    monkeypatch.setattr(engine.models.tokenizer, "chat_template", "{{ messages }}")


def another_config(monkeypatch, engine):
    """As if config.json had another epsilon, or other rotary angles, of which no weight tells."""
    config = replace(engine.models.config, norm_eps=1e-3)
    engine.models = replace(engine.models, config=config)


CHANGES = {
    "weights": one_weight,
    "config": another_config,
    "tokenizer": another_tokenizer,
    "tokenizer, end tokens": another_end,
    "template": another_template,
    "grammar": with_version("llguidance"),
    "engine": with_value("__version__", "9.9.9"),
    "engine, sources": with_value("sources", lambda: "0123456789"),
    "pytorch": lambda monkeypatch, engine: monkeypatch.setattr(torch, "__version__", "9.9.9"),
    "device": with_value("_device", lambda device: "another CPU"),
    "formats": with_plan(quantization="int8"),
    "formats, dtype": with_plan(dtype="float32"),
    "formats, keys": with_plan(kv_dtype="int8"),
}
NO_CHANGES = {
    "width": with_plan(width=2),
    "rows": with_plan(max_num_seqs=3),
    "memory": with_plan(num_pages=5),
    "chunk": with_plan(max_prefill_tokens=7),
    "prefix cache": with_plan(prefix_cache=False),
    "window of exact keys": with_plan(kv_window=64),
    "seed": with_plan(seed=7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_changes_it(monkeypatch, name):
    before, engine = fingerprint(tiny.engine()), tiny.engine()
    CHANGES[name](monkeypatch, engine)
    after = fingerprint(engine)
    assert after.id != before.id
    assert {part for part in before.parts if before.parts[part] != after.parts[part]} == {name.split(",")[0]}


@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_decides_no_token_does_not(monkeypatch, name):
    before, engine = fingerprint(tiny.engine()), tiny.engine()
    NO_CHANGES[name](monkeypatch, engine)
    assert fingerprint(engine) == before


def test_weights_that_the_checks_have_read_are_not_read_again(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    engine, expected = tiny.engine(), fingerprint(tiny.engine())
    verified._files(engine)
    monkeypatch.setattr(module, "checksum", None)
    assert fingerprint(engine) == expected


def test_the_drafter_does_not():
    assert fingerprint(tiny.engine()).id == fingerprint(tiny.engine(None)).id


def test_the_tail_of_exact_keys_counts_where_keys_are_compressed(monkeypatch):
    engine = tiny.engine()
    with_plan(kv_dtype="int8")(monkeypatch, engine)
    before = fingerprint(engine)
    with_plan(kv_window=64)(monkeypatch, engine)
    assert fingerprint(engine).id != before.id


def test_the_centre_of_rotated_keys_counts():
    """It depends on the context, which depends on the free memory."""
    engine = tiny.engine(kv_dtype="tq4", kv_window=64)
    before = fingerprint(engine)
    engine.cache.compressed[0].centre += 1e-3
    assert fingerprint(engine).id != before.id


@pytest.mark.parametrize("same_bits", [True, False])
def test_there_is_none_where_answers_cannot_be_repeated(same_bits):
    engine = tiny.engine()
    engine.plan = engine.plan.changed({"same_bits": "sums differ"}, same_bits=same_bits)
    found = fingerprint(engine)
    assert (found.id is None) == (not same_bits)
    assert ("sums differ" in found.reason) == (not same_bits)
