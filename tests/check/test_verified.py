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


def test_a_changed_drafter_is_checked_but_not_the_kernels(recorded, checked):
    found, notes = verify(tiny.engine("random"))
    assert checked == [MODELS]
    assert any(note.startswith("kernels: verified on ") for note in notes)
    assert found.taken is None
    assert not found.keeps_drafter
    again, _ = verify(tiny.engine("random"))
    assert checked == [MODELS]
    assert (again.keeps_drafter, again.reason) == (False, found.reason)


# ---- which changes need new records


def test_a_changed_weight_has_a_new_record_of_the_models_alone(monkeypatch):
    def flip(target):
        weight = next(target.parameters())
        weight.view(-1)[7] = -weight.view(-1)[7]

    before, after = verified._files(tiny.engine()), verified._files(changed(tiny.engine(), flip))
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("sources", "another kernel"), ("libraries", ["torch 9.0"]), ("_device", ["another CPU"])],
)
def test_a_change_of_what_computes_has_new_records(monkeypatch, name, value):
    before = verified._files(tiny.engine())
    monkeypatch.setattr(verified, name, lambda *_: value)
    assert not {*before} & {*verified._files(tiny.engine())}


@pytest.mark.parametrize("plan", [{"page_size": 4}, {"max_num_seqs": 3}, {"max_prefill_tokens": 32}], ids=str)
def test_another_plan_has_new_records(plan):
    assert not {*verified._files(tiny.engine())} & {*verified._files(tiny.engine(**plan))}


def test_what_was_measured_and_the_number_of_pages_are_no_change():
    for is_captured in (False, True):
        how = {"dtype": "float32", "is_captured": is_captured}
        before = verified._files(tiny.engine(width=5, **how))
        assert verified._files(tiny.engine(num_pages=400, width=5, **how)) == before
        for width in (1, 3, tiny.BLOCK):
            one = tiny.engine(width=width, step_costs={(1, 1): 1.0}, draft_chances=(0.5,), **how)
            assert verified._files(one) == before


def test_widths_that_nobody_else_serves_have_new_records():
    """Where a user has asked for one width, its steps alone are captured."""
    engine = tiny.engine(dtype="float32", width=5)
    engine.capture([1], [1, 5], now=())
    assert not {*verified._files(tiny.engine(dtype="float32", is_captured=True))} & {*verified._files(engine)}


def test_every_line_of_the_package_is_part_of_the_key(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(verified, "PACKAGE", tmp_path)
    before = verified.sources()
    (tmp_path / "kernels" / "a.py").write_text("x = 2\n")
    assert verified.sources() != before


# ---- records that are wrong


@pytest.mark.parametrize("kind", ["kernels", "models"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'["a list"]', None], ids=repr)
def test_a_damaged_record_is_not_read(recorded, folder, kind, content):
    (file,) = folder.glob(f"{kind}-*.json")
    assert verified._read(file).day.startswith("20")
    file.write_bytes(file.read_bytes().replace(b'"day": "20', b'"day": "19') if content is None else content)
    with pytest.raises(verified.RecordDamaged, match=f"{file} is damaged"):
        verified._read(file)


def test_a_damaged_record_has_everything_checked(recorded, checked, folder):
    (file,) = folder.glob("kernels-*.json")
    file.write_bytes(b"")
    found, notes = verify(tiny.engine())
    assert checked == [KERNELS, MODELS]
    assert found.taken is None
    assert notes[0] == f"{file} is damaged: everything is checked again"
    assert verify(tiny.engine())[0].taken is not None, "it was written anew"


@pytest.mark.parametrize("width", ["1", "8"])
def test_a_recorded_token_that_is_not_answered_has_everything_checked(recorded, checked, folder, width):
    (file,) = folder.glob("models-*.json")
    raw = json.loads(file.read_text())
    raw["answers"]["tokens"][width][-1] ^= 1
    raw.pop("sha256")
    file.write_text(json.dumps({**raw, "sha256": verified.digest_of(raw)}))
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
    assert verify(tiny.engine())[0].taken is None
    assert checked == [KERNELS, MODELS]


# ---- the checksum


def model_of(*tensors):
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=False))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_flipped_bit_of_a_weight_shows(dtype):
    values = torch.arange(19).to(dtype)  # two words and a part of one, or more
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
    values = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 2.0, 1.0]).repeat(3)
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
