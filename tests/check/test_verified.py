"""A start checks only what has changed since it was checked here, and believes no record blindly."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from blockdraft.check import selfcheck, verified
from blockdraft.check.verified import checksum, verify_changes
from blockdraft.engine.engine import Engine
from blockdraft.errors import ModelError
from tests import tiny
from tests.matrix import slow_but

KERNELS, MODELS = "the kernels", "the models"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "verified"


@pytest.fixture
def checked(monkeypatch):
    """What was compared since the list was last cleared."""
    found = []

    def spied(name, what):
        original = getattr(selfcheck, name)

        def call(*args, **kwargs):
            found.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(selfcheck, name, call)

    spied("check_kernels", KERNELS)
    spied("check_layers", MODELS)
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The records of a start of the tiny pair that checked everything."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKDRAFT_CACHE", str(folder))
        verify(tiny.engine())
    return folder / "verified"


@pytest.fixture
def recorded(records, folder):
    """A cache with those records."""
    shutil.copytree(records, folder)


def verify(engine, **options):
    notes = []
    return verify_changes(engine, notes.append, **options), notes


def changed(engine, change):
    """The same engine with a target that was changed by `change`."""
    target = copy.deepcopy(engine.models.target)
    with torch.no_grad():
        change(target)
    models = replace(engine.models, target=target, drafter=engine.models.drafter.beside(target))
    return Engine(models, engine.plan)


def rewrite(folder, kind, change):
    (file,) = folder.glob(f"{kind}-*.json")
    raw = json.loads(file.read_text())
    change(raw)
    raw.pop("sha256")
    file.write_text(json.dumps({**raw, "sha256": verified.digest_of(raw)}))


def test_what_was_verified_is_not_checked_again(checked):
    first, _ = verify(tiny.engine())
    assert checked == [KERNELS, MODELS]
    assert first.taken is None
    again, notes = verify(tiny.engine())
    assert checked == [KERNELS, MODELS], "nothing more"
    assert again.taken.startswith("verified on 20")
    assert again.taken.endswith(f"by blockdraft {verified.__version__}")
    assert notes == [f"kernels and models: {again.taken}"]
    kept = ("tokens_per_step", "keeps_drafter", "reason", "accepted")
    assert all(getattr(again, name) == getattr(first, name) for name in kept)


def test_everything_is_checked_when_that_is_asked_for(recorded, checked):
    found, _ = verify(tiny.engine(), is_full=True)
    assert checked == [KERNELS, MODELS]
    assert found.taken is None


def test_a_changed_weight_has_the_models_checked_but_not_the_kernels(recorded, checked):

    def flip(target):
        weight = next(target.parameters())
        weight.view(-1)[7] = -weight.view(-1)[7]

    found, notes = verify(changed(tiny.engine(), flip))
    assert checked == [MODELS]
    assert found.taken is None
    assert any(note.startswith("kernels: verified on ") for note in notes)


def test_a_changed_drafter_is_checked(recorded, checked):
    found, _ = verify(tiny.engine("random"))
    assert checked == [MODELS]
    assert not found.keeps_drafter
    again, _ = verify(tiny.engine("random"))
    assert checked == [MODELS]
    assert (again.keeps_drafter, again.reason) == (False, found.reason)


@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch: monkeypatch.setattr(verified, "sources", lambda: "another kernel"),
        lambda monkeypatch: monkeypatch.setattr(verified, "libraries", lambda: ["torch 9.0"]),
        lambda monkeypatch: monkeypatch.setattr(verified, "_device", lambda engine: ["another CPU"]),
    ],
    ids=["sources", "libraries", "device"],
)
def test_a_change_of_what_computes_has_everything_checked(recorded, checked, monkeypatch, change):
    change(monkeypatch)
    verify(tiny.engine())
    assert checked == [KERNELS, MODELS]


@pytest.mark.parametrize("plan", [{"page_size": 4}, {"max_num_seqs": 3}, {"max_prefill_tokens": 32}], ids=str)
def test_another_plan_has_everything_checked(recorded, checked, plan):
    verify(tiny.engine(**plan))
    assert checked == [KERNELS, MODELS]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("width", [1, 3, tiny.BLOCK])
def test_another_width_that_was_measured_is_no_change(checked, width, is_captured):
    how = {"dtype": "float32", "is_captured": is_captured}
    first, _ = verify(tiny.engine(width=5, **how))
    checked.clear()
    again, _ = verify(tiny.engine(width=width, step_costs={(1, 1): 1.0}, draft_chances=(0.5,), **how))
    assert checked == []
    assert again.taken is not None
    assert (again.accepted, again.tokens_per_step) == (first.accepted, first.tokens_per_step)


def test_widths_that_nobody_else_serves_have_everything_checked(checked):
    """Where a user has asked for one width, its steps alone are captured."""
    verify(tiny.engine(dtype="float32", is_captured=True))
    checked.clear()
    engine = tiny.engine(dtype="float32", width=5)
    engine.capture([1], [1, 5], now=())
    verify(engine)
    assert checked == [KERNELS, MODELS]


def test_another_number_of_pages_is_no_change(recorded, checked):
    verify(tiny.engine(num_pages=400))
    assert checked == []


DAMAGED = (b"", b"{}", b"\xff\xfe", b'["a list"]', None)  # None: as it was, but for a day


def test_every_line_of_the_package_is_part_of_the_key(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(verified, "PACKAGE", tmp_path)
    before = verified.sources()
    (tmp_path / "kernels" / "a.py").write_text("x = 2\n")
    assert verified.sources() != before


@pytest.mark.parametrize(
    ("kind", "content"),
    slow_but(
        [(kind, content) for kind in ("kernels", "models") for content in DAMAGED],
        *(("kernels", content) for content in DAMAGED),
        ("models", None),
    ),
    ids=repr,
)
def test_a_damaged_record_has_everything_checked(recorded, checked, folder, kind, content):
    (file,) = folder.glob(f"{kind}-*.json")
    file.write_bytes(file.read_bytes().replace(b'"day": "20', b'"day": "19') if content is None else content)
    found, notes = verify(tiny.engine())
    assert checked == [KERNELS, MODELS]
    assert found.taken is None
    assert notes[0] == f"{file} is damaged: everything is checked again"
    checked.clear()
    assert verify(tiny.engine())[0].taken is not None, "it was written anew"


@pytest.mark.parametrize("width", ["1", "8"])
def test_a_recorded_token_that_is_not_answered_has_everything_checked(recorded, checked, folder, width):

    def change(raw):
        raw["answers"]["tokens"][width][-1] ^= 1

    rewrite(folder, "models", change)
    found, notes = verify(tiny.engine())
    assert checked == [KERNELS, MODELS]
    assert found.taken is None
    assert "another answer" in notes[0]


def test_what_is_wrong_is_not_recorded(folder):
    def spoil(target):
        next(target.parameters()).view(-1)[0] = float("nan")

    with pytest.raises(ModelError):
        verify(changed(tiny.engine(), spoil))
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_the_record_only(tmp_path, checked, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    verify(tiny.engine())
    verify(tiny.engine())
    assert checked == [KERNELS, MODELS] * 2


# ---- the checksum


def model_of(*tensors):
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=False))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_flipped_bit_of_a_weight_shows(dtype):
    values = torch.arange(37).to(dtype)
    before = checksum(model_of(values))
    assert checksum(model_of(values.clone())) == before
    raw = values.view(torch.uint8)
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert checksum(model_of(values)) != before, (place, bit)
            raw[place] ^= 1 << bit


def test_swapped_values_show():
    """Also those that differ by their sign alone, which is the first bit of a word or of its half."""
    values = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 2.0, 1.0]).repeat(5)
    before = checksum(model_of(values))
    for one in range(len(values)):
        for other in range(one):
            swapped = values.clone()
            swapped[[one, other]] = values[[other, one]]
            assert (checksum(model_of(swapped)) == before) == (values[one] == values[other])


def test_pieces_and_tensors_that_change_places_show(monkeypatch):
    monkeypatch.setattr("blockdraft.check.verified.CPU_WORDS", 4)
    one, other = torch.arange(8.0), torch.arange(8.0, 16.0)
    found = {
        checksum(model_of(torch.cat((one, other)))),
        checksum(model_of(torch.cat((other, one)))),
        checksum(model_of(one, other)),
        checksum(model_of(other, one)),
        checksum(model_of(torch.cat((one, other)).view(2, 8))),
    }
    assert len(found) == 5
