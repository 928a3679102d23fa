"""Warm-up leaves everything ready and nothing behind; verification passes good engines and names faults."""

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockdraft.check import drafts as draftcheck
from blockdraft.check import selfcheck
from blockdraft.check.operations import check_kernels
from blockdraft.check.selfcheck import MIN_TOKENS_PER_STEP, verify_engine, without_drafter
from blockdraft.engine import engine as engine_module
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams, TokenLogprobs
from blockdraft.errors import ModelError, RequestError
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm import jit, pointwise
from blockdraft.kernels.pick import attention, products, recurrent
from blockdraft.models.packed import Scaled
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.start.warm import every_round, few_rounds, warm
from blockdraft.step.drafter import Weightless
from blockdraft.step.step_sizes import even
from tests import tiny
from tests.faults import FAULTS, with_kernels
from tests.models.checkpoints import load_pair, write_target
from tests.models.families import BASE, CASES, CONFIGS

needs_llvm = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)
REQUESTS = [
    ([3, 5, 7, 9], SamplingParams(max_tokens=10, ignore_eos=True)),
    ([1, 2], SamplingParams(max_tokens=6, ignore_eos=True, width=3, top_p=0.9, repetition_penalty=1.2)),
    (list(range(40)), SamplingParams(max_tokens=5, logprobs=2, n=2)),
]


def ignore(text):
    pass


def family_engine(name, folder, sizes=(), **settings):
    family, overrides = CASES[name]
    write_target(folder, CONFIGS[family](**BASE | overrides | dict(sizes)), seed=5)
    settings = {
        "dtype": "float32",
        "max_model_len": 200,
        "max_num_seqs": 3,
        "max_prefill_tokens": 16,
        **settings,
    }
    models, plan = load_pair(folder, **settings)
    return Engine(models, replace(plan, num_pages=100))


def damaged(damage, dtype="float32", **plan):
    """An engine on the pair, without a drafter, whose target was changed by `damage`."""
    engine = tiny.engine("none", dtype=dtype, **plan)
    target = copy.deepcopy(engine.models.target)
    with torch.no_grad():
        damage(target)
    return Engine(replace(engine.models, target=target), engine.plan)


# ---- warm-up


@pytest.mark.parametrize("plan", [{"overlap": True}, {"max_model_len": 9, "max_num_seqs": 1}], ids=str)
def test_warming_leaves_no_trace(plan):
    cold, engine = (tiny.engine(prefix_cache=True, page_size=2, **plan) for _ in range(2))
    requests = REQUESTS[:2] if "max_model_len" in plan else REQUESTS
    warm(engine, ignore, few_rounds)
    verify_engine(engine, ignore)
    pages = engine.scheduler.pages
    assert not engine.has_work
    assert pages.num_free == pages.num_pages
    assert all(pages.match(prompt) == [] for prompt, _ in requests)
    assert not pages._nodes
    counters = [replace(e.snapshot(), time_s=0.0, recent=()) for e in (engine, cold)]
    assert counters[0] == counters[1]
    assert not any(point.tokens or point.steps for point in engine.snapshot().recent)
    assert engine.add([1], SamplingParams(max_tokens=1)) == cold.add([1], SamplingParams(max_tokens=1))
    # Requests without a seed draw it from their number: the same as without a warm-up.
    assert tiny.run(engine, requests) == tiny.run(cold, requests)


def test_warming_runs_every_width_and_number_of_rows(monkeypatch):
    engine = tiny.engine(width=5, max_num_seqs=6, max_prefill_tokens=16)
    decoded, prefilled = set(), set()

    def decode_parts(**arguments):
        needs = arguments["rows"].sampling().needs
        kinds = (needs.random, needs.filter, needs.penalty, needs.bias, needs.min_end)
        decoded.add((len(arguments["rows"].active), arguments["width"]))
        decoded.update(zip(["random", "filter", "penalty", "bias", "minimum"], kinds, strict=True))
        decoded.add(("logprobs", arguments["num_logprobs"] is not None))
        return original_decode(**arguments)

    def prefill_step(**arguments):
        prefilled.add(arguments["counts"])
        return original_prefill(**arguments)

    original_decode, original_prefill = engine_module.decode_parts, engine_module.prefill_step
    monkeypatch.setattr(engine_module, "decode_parts", decode_parts)
    monkeypatch.setattr(engine_module, "prefill_step", prefill_step)
    warm(engine, ignore, every_round)
    assert decoded >= {(1, 1), (1, 5), (1, 8), (4, 1), (4, 5), (4, 8), (6, 1), (6, 5), (6, 8)}
    kinds = ("random", "filter", "penalty", "bias", "minimum", "logprobs")
    assert decoded >= {(kind, is_asked) for kind in kinds for is_asked in (True, False)}
    assert {(1,), (16,)} <= prefilled
    assert any(len(set(counts)) == 2 for counts in prefilled)


@needs_llvm
@pytest.mark.parametrize("name", [None, "qwen3_5-whole"])
def test_after_warming_nothing_is_left_to_compile(name, tmp_path, monkeypatch):
    cold = tiny.engine(dtype="float32") if name is None else family_engine(name, tmp_path)
    kept = (attention._llvm_kernel, recurrent._llvm_delta, products._llvm_linear, pointwise.llvm_rows)
    for compiled_once in kept:
        compiled_once.cache_clear()
    compiled = []
    compile_kernel = jit._Compiler.address

    def address(self, kernel, known):
        compiled.append(kernel)
        return compile_kernel(self, kernel, known)

    monkeypatch.setattr(jit._Compiler, "address", address)
    kernels = kernels_for(torch.float32, torch.device("cpu"))
    engine = Engine(cold.models.with_kernels(kernels), cold.plan)
    warm(engine, ignore, few_rounds)
    assert compiled
    compiled.clear()
    vocab = engine.models.config.vocab_size
    tiny.run(engine, [([i % vocab for i in prompt], replace(p, width=None)) for prompt, p in REQUESTS])
    assert compiled == []


# ---- what passes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trained_pair_passes_and_keeps_its_drafter(dtype):
    notes = []
    found = verify_engine(tiny.engine(dtype=dtype), notes.append)
    assert found.keeps_drafter
    assert found.reason is None
    assert found.tokens_per_step > 3
    assert all(check.is_passed for check in found.checks)
    names = [check.name for check in found.checks]
    kernels = ["linear", "attention", "norm", "rotation", "activation", "gated product", "heads", "slots"]
    kernels += ["sampling", "acceptance"]
    assert names == ["weights", *(f"kernel {kernel}" for kernel in kernels), "model", "drafter", "bits"]
    assert [note.split(":")[0] for note in notes] == names


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_next-whole", "float32"),
        pytest.param("qwen3_5_moe-tied", "bfloat16", marks=pytest.mark.slow),
        ("gpt_oss-whole", "float32"),
        pytest.param("gemma4-shared", "float32", marks=pytest.mark.slow),
        ("gemma4-mixture", "bfloat16"),
        pytest.param("qwen2-layer-types", "float32", marks=pytest.mark.slow),
    ],
)
def test_families_pass(name, dtype, tmp_path):
    engine = family_engine(name, tmp_path, dtype=dtype, width=4)
    warm(engine, ignore, few_rounds)
    found = verify_engine(engine, ignore)
    assert found.keeps_drafter
    assert found.tokens_per_step is None
    has_delta = any(check.name == "kernel gated delta" for check in found.checks)
    assert has_delta == engine.models.config.is_hybrid


# ---- the drafter


def test_a_drafter_that_does_not_fit_is_dropped_with_its_number():
    engine = tiny.engine("random")
    found = verify_engine(engine, ignore)
    assert not found.keeps_drafter
    assert found.tokens_per_step < MIN_TOKENS_PER_STEP
    assert f"{found.tokens_per_step:.2f} tokens per step" in found.reason
    assert engine.models.draft_config.name in found.reason
    assert [check.name for check in found.checks if not check.is_passed] == ["drafter"]


def test_the_floor_can_be_chosen():
    assert not verify_engine(tiny.engine(), ignore, min_tokens_per_step=8.5).keeps_drafter


def test_without_its_drafter_a_target_decodes_plainly():
    engine = tiny.engine()
    models = engine.models
    plain, plan = without_drafter(models, engine.plan)
    assert (plan.width, plan.block, plain.draft_config) == (1, 1, None)
    engine = Engine(plain, plan)
    assert len(engine.cache.storage) == plain.config.num_layers
    assert plain.target.taps == ()
    assert models.target.taps != ()
    requests = [(prompt, replace(params, width=1)) for prompt, params in REQUESTS]
    assert tiny.run(engine, requests) == tiny.run(tiny.engine("none", width=1), requests)
    assert verify_engine(engine, ignore).keeps_drafter


class Meddler(Weightless):
    """A drafter that writes where it must not: into the target's committed keys and values."""

    block = tiny.BLOCK

    def __init__(self, drafter, name):
        self.drafter = drafter
        self.name = name

    def draft(self, rows, cache, view, width):
        self.meddle("draft", view)
        return self.drafter.draft(rows, cache, view, width)

    def absorb(self, features, view):
        self.meddle("absorb", view)
        self.drafter.absorb(features, view)

    def follow(self, hidden, next_ids, num_kept, view, rows):
        self.meddle("follow", view)

    def meddle(self, name, view):
        if name == self.name:
            view._storage[1].values.mul_(-1)


@pytest.mark.parametrize(
    ("name", "dtype"), [("draft", "float64"), ("absorb", "bfloat16"), ("follow", "float64")]
)
def test_a_drafter_that_touches_the_targets_cache_stops_the_start(name, dtype):
    engine = tiny.engine(Meddler(tiny.load(dtype).drafter, name), dtype=dtype)
    with pytest.raises(ModelError, match=r"writes into layer 1 of the target's cache"):
        verify_engine(engine, ignore)
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_pages


def answered(*token_ids, logprob=-1.0):
    logprobs = tuple(TokenLogprobs(token, logprob, ()) for token in token_ids)
    return draftcheck.CheckedAnswer(token_ids, logprobs, metrics=None)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=needs_llvm), "bfloat16"])
def test_where_bits_are_kept_an_answer_must_be_equal_and_elsewhere_it_is_counted(dtype):
    models = tiny.engine(dtype=dtype).models
    is_kept = dtype == "float32"
    assert draftcheck.keeps_bits(models, 8) == is_kept
    assert draftcheck._is_equal(models, 0, answered(4, 5, 6), answered(4, 5), 8)
    for plain, message in (
        (answered(4, 7), "changes the answer: token 2 of built-in prompt 1 is 5 with it and 7"),
        (answered(4, logprob=-1.000001), "probabilities: by up to 1.0e-06 nats in built-in prompt 1"),
    ):
        with pytest.raises(ModelError, match=message) if is_kept else contextlib.nullcontext():
            found = draftcheck._is_equal(models, 0, answered(4, 5, 6), plain, 8)
            assert found == (len(plain.token_ids) == 1), "equal tokens count as equal"


def test_a_captured_step_that_gives_other_tokens_stops_the_start(monkeypatch):
    engine = tiny.engine("none")
    engine.graphs = SimpleNamespace(
        find=lambda *_: None, size=lambda *_: None, has=lambda *_: False, places=[even(1, 1), even(1, 8)]
    )
    assert "graphs" in [check.name for check in verify_engine(engine, ignore).checks]
    right = draftcheck.answer

    def answer(*arguments, num_logprobs=None):
        found = right(*arguments, num_logprobs=num_logprobs)
        return found if num_logprobs is not None else replace(found, token_ids=(0, *found.token_ids[1:]))

    monkeypatch.setattr(draftcheck, "answer", answer)
    with pytest.raises(ModelError, match=r"captured step of width 1 gives other tokens .* use --no-graphs"):
        verify_engine(engine, ignore)


@pytest.mark.parametrize("fault", ["a drafter's context one token late", "a drafter's block that is causal"])
def test_a_drafter_whose_layers_are_wrong_is_dropped(fault, monkeypatch):
    engine = FAULTS[fault][1](monkeypatch, tiny.engine(dtype="float32"))
    found = verify_engine(engine, ignore)
    assert not found.keeps_drafter
    assert "of the drafter of" in found.reason


# ---- the checkpoint


def undefined(target):
    target.layers[2].mlp.down.weight[3, 4] = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (undefined, r"holds 1 values in layers\.2\.mlp\.down\.weight that are infinite"),
        (
            lambda target: target.layers[1].mlp.down.weight.fill_(3e38),
            r"what layer 1 of .* is infinite or undefined: the checkpoint",
        ),
        (lambda target: target.embedding.weight.zero_(), "every token the same logit"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage, message):
    with pytest.raises(ModelError, match=message):
        verify_engine(damaged(damage), ignore)


# ---- kernels


def test_a_wrong_kernel_is_named_with_its_error(tmp_path):
    """tests/check/test_kernels.py has those of every operation."""
    engine = family_engine("qwen3_5-whole", tmp_path)
    right = engine.models.target.kernels.rms_norm
    engine = with_kernels(engine, rms_norm=lambda *arguments: right(*arguments) * 1.001)
    with pytest.raises(ModelError, match=r"^norm is wrong on this machine: .*off by \d\.\de-0\d"):
        verify_engine(engine, ignore)


@needs_llvm
def test_attention_that_ignores_the_window_is_named(tmp_path):
    engine = family_engine("qwen3-slides", tmp_path)
    right = engine.models.target.kernels.attend

    def attend(q, keys, values, blocks, mask, sinks=None):
        return right(q, keys, values, blocks, replace(mask, window=None), sinks)

    engine = with_kernels(engine, attend=attend)
    with pytest.raises(ModelError, match=r"attention is wrong on this machine: .*window 7"):
        verify_engine(engine, ignore)


@pytest.mark.parametrize("is_whole", [pytest.param(True, marks=needs_llvm), False])
def test_packed_products_are_checked(is_whole, monkeypatch):
    if not is_whole:
        monkeypatch.setattr("blockdraft.checkpoints.weights.why_no_llvm", lambda *_: "as on a card")
    names = {"model": tiny.TARGET, "draft": tiny.DRAFT, "device": "cpu", "dtype": "float32"}
    settings = Settings(**names, max_model_len=200, quantization="int8", width=8)
    engine = Engine(*load_models(settings, ignore))
    found = {result.operation: result.is_passed for result in check_kernels(engine)}
    assert found["packed product"]
    assert found["linear"]  # the drafter's
    kind = Int8Matrix if is_whole else Scaled
    matmul = kind.matmul
    monkeypatch.setattr(kind, "matmul", lambda self, x, *bias, **onto: matmul(self, x, *bias, **onto) * 1.01)
    with pytest.raises(ModelError, match=f"packed product is wrong on this machine: at {kind.__name__}"):
        verify_engine(engine, ignore)


def test_a_path_that_only_the_whole_model_shows_is_caught(monkeypatch):
    """Chunks that overwrite one another: every operation is right by itself."""
    engine = tiny.engine("none", dtype="float32")
    monkeypatch.setattr(engine.rows, "extend", ignore)
    with pytest.raises(ModelError, match=r"layer \d of .* is off by .* at position \d+, among"):
        verify_engine(engine, ignore)


# ---- prompts


def test_prompts_are_a_chat_plain_text_or_ids():
    def models(has_template, render=None):
        tokenizer = SimpleNamespace(
            has_chat_template=has_template,
            encode_chat=render,
            encode=lambda text: [5, 6, 7, 8] if "Python" in text else [1] * 9,
        )
        return SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=50))

    def refuse(messages):
        raise RequestError("no user may speak")

    assert selfcheck.prompts_of(models(True, lambda messages: [9, 8, 7, 6, 60]))[0] == [9, 8, 7, 6]
    assert selfcheck.prompts_of(models(True, refuse))[0] == [5, 6, 7, 8]
    plain = selfcheck.prompts_of(models(False))
    assert plain[0] == [5, 6, 7, 8]
    assert all(len(set(ids)) >= 4 and max(ids) < 50 for ids in plain)


def test_a_right_engine_that_compresses_keys_passes_and_is_left_as_it_was():
    engine = tiny.engine(dtype="float32", num_pages=128, kv_dtype="tq4", draft_kv_dtype="tq4")
    rules = [layer.pages.rule for layer in engine.cache.storage if hasattr(layer, "pages")]
    free = engine.scheduler.exact.num_free
    found = verify_engine(engine, lambda text: None)
    assert all(check.is_passed for check in found.checks)
    assert engine.scheduler.exact.num_free == free
    assert [layer.pages.rule for layer in engine.cache.storage if hasattr(layer, "pages")] == rules
