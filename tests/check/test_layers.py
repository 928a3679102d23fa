"""The check of layers: sound models pass in every dtype, and each fault is refused in every dtype."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from blockdraft.check.layers import LayerError, Part, check_layers
from blockdraft.check.piece_sizes import pieces_for
from blockdraft.check.selfcheck import prompts_of
from blockdraft.checkpoints.weights import QUANTISERS, slots_of
from blockdraft.doctor.shapes import SHAPES
from blockdraft.engine.engine import Engine
from blockdraft.models.draft_heads import PrefixHead, Refiner
from blockdraft.models.lattice import Lattice
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.step.mtp import MtpDrafter
from tests import tiny
from tests.faults import FAULTS, engine, prompt, worst
from tests.lossless import families
from tests.lossless.families import NAMES
from tests.matrix import slow_but

DTYPES = ["float32", "bfloat16", "float16"]
SOUND = ("pair", "int8", "fp8", *NAMES)
KEPT = ("pair", "int8", "fp8", "qwen3-slides", "qwen3_next-whole", "gemma4-mixture", "gpt_oss-whole")
ROOM = 0.6  # of the bound: what a sound model may use of it here, so that it has room elsewhere


# ---- what passes


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [(name, dtype) for name in SOUND for dtype in DTYPES],
        ("pair", "float32"),
        ("qwen3_next-whole", "float32"),
        *((name, "bfloat16") for name in KEPT),
    ),
)
def test_sound_models_pass(name, dtype):
    found = worst(engine(name, dtype))
    assert found.off < ROOM, found


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_5-mrope", "float32"), ("qwen3_next-whole", "bfloat16")])
def test_a_model_s_own_head_is_checked(name, dtype, monkeypatch):
    """Also the keys that it leaves behind: here, of pairs with another token."""
    models, plan = families.mtp_pair(name, dtype=dtype, max_model_len=500, cache_bytes=64 << 20)

    def worst_of_head():
        found = check_layers(Engine(models, plan), lambda count: [(7 * i) % 90 for i in range(count)])
        assert "the MTP head" in {one.part for one in found if one.is_draft}
        return max(one.off for one in found if one.is_draft)

    assert worst_of_head() < ROOM
    follow = MtpDrafter.follow
    monkeypatch.setattr(
        MtpDrafter, "follow", lambda one, hidden, next_ids, *rest: follow(one, hidden, next_ids - 1, *rest)
    )
    assert worst_of_head() > 1


def test_an_exact_model_is_exact():
    assert worst(engine("qwen3_next-whole", "float64")).off < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [*((dtype, "none") for dtype in DTYPES), ("bfloat16", "fp8"), ("float32", "int8")],
)
def test_the_shipped_pair_passes(dtype, quantization):
    found = worst(shipped(dtype, quantization))
    assert found.off < ROOM, found


@pytest.mark.slow
def test_the_shipped_pair_passes_as_it_is_served():
    """In int8: a value that is rounded the other way changes what layer 11 adds by some hundredths."""
    settings = Settings(model="default", device="cpu", max_model_len=400, width=16)
    one = Engine(*load_models(settings, lambda text: None))
    assert any(isinstance(part, Int8Matrix) for part in one.models.target.modules())
    ids = [token for prompt in prompts_of(one.models) for token in prompt]
    found = check_layers(one, lambda count: ids[:count])
    assert max(finding.off for finding in found) < ROOM
    assert next(finding for finding in found if finding.part == "layer 11").inside > 0.02


def shipped(dtype, quantization, device="cpu"):
    """The default model with its drafter. Its file is quantised: to be stored otherwise, it is unpacked."""
    settings = Settings(
        model="default", dtype=dtype, device=device, quantization="none", max_model_len=400, width=16
    )
    models, plan = load_models(settings, lambda text: None)
    quantise = QUANTISERS.get(quantization)
    for slot in slots_of(models.target, {}) if quantise else ():
        if slot.may_be_quantised and slot.module is not models.target.head:
            weight = getattr(slot.module, slot.attribute)
            del slot.module._parameters[slot.attribute]
            setattr(slot.module, slot.attribute, quantise(weight.data))
    return Engine(models, plan)


def dummy(shape, dtype, folder, device="cpu"):
    """One of the doctor's shapes with random weights, target and drafter."""
    settings = {"dtype": dtype, "device": device, "load_format": "dummy", "quantization": shape.quantization}
    for name, config in (("model", shape.target), ("draft", shape.draft)):
        settings[name] = "none"
        if config is not None:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
            settings[name] = str(folder / name)
    limits = {"max_model_len": 600, "max_num_seqs": 4, "width": 8, "cache_bytes": 64 << 20}
    return Engine(*load_models(Settings(**settings, **limits), lambda text: None))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    slow_but(
        [(shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")],
        *((shape, "bfloat16") for shape in SHAPES if shape.name in ("hybrid", "int8", "sinks")),
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_random_weights_of_real_shapes_pass(shape, dtype, tmp_path):
    found = worst(dummy(shape, dtype, tmp_path))
    assert found.off < ROOM, found


def massive(dtype, device="cpu"):
    """One token far larger than the others, as position 0 of real checkpoints is, and channels that are."""
    sound = engine("pair", dtype, device)
    target = copy.deepcopy(sound.models.target)
    with torch.no_grad():
        target.embedding.weight[prompt(sound)(1)[0], 3] = 2000
        target.layers[1].mlp.down.weight[7] *= 100
    return Engine(replace(sound.models, target=target), sound.plan)


@pytest.mark.parametrize("dtype", slow_but(DTYPES, "bfloat16"))
def test_massive_activations_pass(dtype):
    found = worst(massive(dtype))
    assert found.off < ROOM, found


@pytest.mark.parametrize("name", ["mask off by one", "a stale page", "two tokens swapped in a piece"])
def test_massive_activations_hide_no_fault(name, monkeypatch):
    one = FAULTS[name][1](monkeypatch, massive("bfloat16"))
    assert not worst(one).is_passed


@pytest.mark.parametrize("is_anchored", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_drafters_with_windows_pass(is_anchored, is_causal):
    sound = engine("pair", "float32")
    drafter = copy.copy(sound.models.drafter)
    drafter.model = copy.deepcopy(drafter.model)
    for layer in drafter.model.layers:
        layer.mask = replace(layer.mask, window=9, is_anchored=is_anchored, is_causal=is_causal)
    assert worst(Engine(replace(sound.models, drafter=drafter), sound.plan)).off < ROOM


# ---- what does not


@pytest.mark.parametrize("dtype", slow_but(DTYPES, "bfloat16"))  # whose bound is the widest
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name, dtype, monkeypatch):
    which, inject = FAULTS[name]
    found = worst(inject(monkeypatch, engine(which, dtype)))
    assert not found.is_passed, found


def damaged(damage, name="pair", dtype="float32"):
    sound = engine(name, dtype)
    target = copy.deepcopy(sound.models.target)
    with torch.no_grad():
        damage(target)
    return Engine(replace(sound.models, target=target), sound.plan)


def refused(one):
    with pytest.raises(LayerError) as error:
        worst(one)
    return error.value.part, error.value.why


def test_an_overflow_inside_a_layer_is_named():
    def damage(target):
        target.layers[2].mlp.gate_up.weight *= 3000
        target.layers[2].mlp.down.weight *= 1e-7

    assert refused(damaged(damage, dtype="float16")) == ("layer 2", "overflow")
    assert worst(damaged(damage, dtype="bfloat16")).is_passed


def test_an_overflow_of_the_stream_is_named():
    def damage(target):
        target.embedding.weight[prompt(engine("pair", "float16"))(2)[1]] = torch.inf

    assert refused(damaged(damage, dtype="float16")) == ("the embedding", "overflow")


def test_a_head_of_zeros_is_flat():
    assert refused(damaged(lambda target: target.norm.weight.zero_())) == ("the head", "flat")


def test_a_router_of_zeros_is_unsure():
    def damage(target):
        target.layers[1].mlp.router.weight.zero_()

    assert refused(damaged(damage, name="qwen3_next-whole")) == ("layer 1", "unsure")


def test_a_dtype_that_loses_most_tokens_is_too_coarse_and_one_token_is_not():
    def part(*inside):
        return Part(
            "layer 7", torch.ones(3, 2), torch.ones(3), torch.tensor(inside), [torch.zeros(3)], ["here"]
        )

    assert part(0.1, 0.2, 9.0).finding().inside == 9
    assert part(0.1, 0.6, 0.7).why_not() == "coarse"
    assert part(0.1, 0.2, torch.inf).why_not() == "overflow"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["DFlash2", "DSpark", "XPress", "Domino", "LiLiCorr"])
def test_hints_of_sound_drafters_pass(kind, dtype):
    one = tiny.engine(kind, dtype=dtype)
    found = {finding.part: finding.off for finding in check_layers(one, prompt(one))}
    assert found["the drafter's hints"] < ROOM


@pytest.mark.parametrize(
    ("kind", "head", "method"),
    [("XPress", Refiner, "latents"), ("Domino", PrefixHead, "latent"), ("LiLiCorr", Lattice, "scores")],
)
def test_wrong_hints_are_refused(monkeypatch, kind, head, method):
    one, right = tiny.engine(kind, dtype="float32"), getattr(head, method)
    monkeypatch.setattr(
        head,
        method,
        lambda self, *given: right(self, *given) * (1.0 if self.kernels.is_reference else 1.001),
    )
    assert {finding.part for finding in check_layers(one, prompt(one)) if not finding.is_passed} == {
        "the drafter's hints"
    }


def test_a_drafter_that_overflows_is_left_out():
    sound = engine("pair", "float16")
    drafter = copy.copy(sound.models.drafter)
    drafter.model = copy.deepcopy(drafter.model)
    with torch.no_grad():
        drafter.model.layers[1].mlp.gate_up.weight *= 3000
    one = Engine(replace(sound.models, drafter=drafter), sound.plan)
    parts = [finding.part for finding in check_layers(one, prompt(one))]
    assert "layer 0 of the drafter" in parts
    assert "layer 1 of the drafter" not in parts
    assert "the head" in parts


def test_the_engine_is_left_as_it_was():
    one = engine("qwen3_next-whole", "float32")
    pages = one.scheduler.pages
    worst(one)
    assert pages.num_free == pages.num_pages
    assert not one.models.target.layers[0].mlp._forward_pre_hooks
    with pytest.raises(ZeroDivisionError):
        check_layers(one, lambda count: [1 // 0])
    assert pages.num_free == pages.num_pages


# ---- pieces


def planned(name="pair", device="cuda", **plan):
    sound = engine(name, "float32")
    one = Engine(sound.models, replace(sound.plan, **plan))
    one.models = replace(sound.models, device=torch.device(device))
    return one


def pieces(name="pair", device="cuda", **plan):
    return pieces_for(planned(name, device, **plan))


def test_on_a_card_every_size_with_code_of_its_own_is_there():
    known = [sum(piece.counts) for piece in pieces(block=16) if piece.is_known]
    blocks = [sum(piece.counts) for piece in pieces(block=16) if not piece.is_known]
    assert any(count > 128 for count in known)
    assert any(64 < count <= 128 for count in known)
    assert any(16 < count <= 64 for count in known)
    assert any(count <= 16 for count in known)
    assert {1 * 16, 3 * 16, 3 * 1} == set(blocks)
    assert any(len(set(piece.counts)) > 1 for piece in pieces(block=16)), "a ragged one"


def test_a_mixture_has_more_pairs_than_low_tiles_take():
    layers = engine("qwen3_moe-some-dense", "float32").models.config.layers
    num_chosen = min(layer.moe.num_chosen for layer in layers if layer.moe is not None)
    longest = max(sum(piece.counts) for piece in pieces("qwen3_moe-some-dense", max_prefill_tokens=512))
    assert longest * num_chosen > 512


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_prefill_tokens": 5},
        {"max_model_len": 9},
        {"max_model_len": 2},
        {"num_pages": 12},
        {"num_pages": 60, "width": 1},
    ],
    ids=str,
)
def test_pieces_stay_within_rows_chunks_pages_and_context(device, plan):
    found, limits = pieces(device=device, **plan), planned(device=device, **plan).plan
    lengths = {}
    assert found
    for piece in found:
        assert len(piece.rows) == len(set(piece.rows))
        assert not piece.is_known or sum(piece.counts) <= limits.max_prefill_tokens
        assert piece.is_known or len(set(piece.counts)) == 1
        for row, start, count, kept in zip(
            *(piece.rows, piece.starts, piece.counts, piece.kept), strict=True
        ):
            assert row < limits.max_num_seqs
            assert start == lengths.get(row, 0)
            assert start + count < limits.max_model_len
            lengths[row] = start + kept
    used = sum(-(-(length + limits.block) // limits.page_size) for length in lengths.values())
    assert used <= limits.num_pages


@pytest.mark.parametrize(
    "plan", [{}, {"max_num_seqs": 1}, {"max_model_len": 64}, {"max_num_seqs": 1, "max_model_len": 60}]
)
def test_rejected_drafts_are_written_over(plan):
    for device in ("cpu", "cuda"):
        found = pieces(device=device, **plan)
        rejected = [
            (row, s + k)
            for p in found
            for row, s, c, k in zip(p.rows, p.starts, p.counts, p.kept, strict=True)
            if k < c
        ]
        assert rejected
        for row, at in rejected:
            assert any(row in piece.rows and piece.starts[piece.rows.index(row)] == at for piece in found)


def test_the_tiny_pair_passes_with_hardly_any_room():
    for plan in ({"max_num_seqs": 1, "max_prefill_tokens": 1}, {"max_model_len": 9}, {"num_pages": 12}):
        one = Engine(tiny.load("float32"), replace(engine("pair", "float32").plan, **plan))
        assert worst(one).is_passed
