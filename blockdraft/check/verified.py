"""Records what a start has verified, so that later starts check only what has changed since.

There are two records in the cache folder. The name of the kernels' record is a hash of all that they depend
on: this package's own sources, the libraries, the device, the plan and the shapes. The name of the models'
record is a hash of that and of every byte of both models' weights. So a change has no record, and is checked.

A built-in prompt, answered plainly and with drafts, must give the recorded tokens. If it does not, or if a
record is damaged, everything is checked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from blockdraft import __version__
from blockdraft.check.drafts import answer, checked_widths
from blockdraft.check.selfcheck import Check, Verification, prompts_of, verify_engine
from blockdraft.engine.engine import Engine
from blockdraft.engine.trial_engine import max_tokens, trial_engine
from blockdraft.machine.machine import read_machine
from blockdraft.planner.plan import Plan
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir

PACKAGE = Path(__file__).parent.parent
LIBRARIES = ("torch", "triton", "llvmlite", "numpy")
# Fields of a plan that choose neither kernels nor the sizes they are checked at. Pages and context follow the
# memory that happens to be free, and the width is measured: they would differ at every start.
NOT_OF_PLAN = {
    *("num_pages", "max_model_len", "max_positions", "max_queue", "prefix_cache", "seed"),
    *("width", "step_costs", "is_sure_of_costs", "draft_chances", "reasons", "start"),
}
# Words of a checksum at a time: on a CPU few enough to stay in its cache, on a card enough to keep it busy.
CPU_WORDS, CARD_WORDS = 1 << 15, 1 << 24
FOLD = 29  # bits by which a word is shifted before it is added to itself
NUM_PROMPT, NUM_TOKENS = 16, 6  # of the prompt and the answer that has to be the same again

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a prompt, by width."""

    prompt: list[int]
    tokens: dict[str, list[int]]


class RecordDamaged(Exception):
    """A record is not as it was written."""


@dataclass(frozen=True, slots=True)
class Record:
    """A verification, its day and our version."""

    day: str
    version: str
    answers: Answers | None = None  # None, both: of the kernels alone
    verification: Verification | None = None

    def __str__(self) -> str:
        return f"verified on {self.day} by blockdraft {self.version}"


def verify_changes(engine: Engine, note: Note, *, is_full: bool = False) -> Verification:
    """Check everything on an idle engine that has no record. ModelError: its answers would be wrong."""
    kernels_file, models_file = _files(engine)
    kernels = models = None
    if not is_full:
        try:
            kernels, models = _read(kernels_file), _read(models_file)
        except RecordDamaged as error:
            note(f"{error}: everything is checked again")
    if models is not None and models.answers is not None:
        if _answers(engine, models.answers.prompt) == models.answers:
            note(f"kernels and models: {models}")
            return _as_recorded(models)
        note("a built-in prompt has another answer than when it was verified: everything is checked again")
        kernels = None
    verification = verify_engine(engine, note, kernels_are=None if kernels is None else str(kernels))
    today = Record(datetime.now(UTC).date().isoformat(), __version__)
    if kernels is None:
        _write(kernels_file, today)
    num_prompt = max(1, min(NUM_PROMPT, max_tokens(engine) // 2))
    answers = _answers(engine, prompts_of(engine.models)[0][-num_prompt:])
    _write(models_file, replace(today, answers=answers, verification=replace(verification, checks=())))
    return verification


def _as_recorded(record: Record) -> Verification:
    """Return the recorded verification if the answers still equal the recorded ones."""
    assert record.answers is not None
    assert record.verification is not None
    num_tokens = sum(map(len, record.answers.tokens.values()))
    checks = (
        Check("kernels and models", str(record)),
        Check("answers", f"{num_tokens} tokens as they were then"),
    )
    return replace(record.verification, checks=checks, taken=str(record))


def _answers(engine: Engine, prompt: list[int]) -> Answers:
    """Answer plainly and at the widest width. A prompt longer than the context has no answer."""
    is_synthetic = engine.models.labels.synthetic_acceptance is not None
    widths = {1} if is_synthetic else {1, checked_widths(engine)[-1]}
    if len(prompt) >= max_tokens(engine):
        return Answers(prompt, {})
    tokens = {
        width: answer(trial_engine(engine), prompt, width, NUM_TOKENS).token_ids for width in sorted(widths)
    }
    return Answers(prompt, {str(width): list(found) for width, found in tokens.items()})


# ---- the names of the records


def _files(engine: Engine) -> tuple[Path, Path]:
    """Return the files of the kernels' record and of the models'."""
    kernels = digest_of([sources(), libraries(), _device(engine), _shapes(engine)])
    weights = [checksum(model) for model in engine.models.models()]
    vocab_map = engine.models.drafter.vocab_map
    ids = "none" if vocab_map is None else digest_of(vocab_map.tolist())
    labels = engine.models.labels
    models = digest_of([kernels, weights, ids, labels.is_dummy, labels.synthetic_acceptance])
    folder = cache_dir() / "verified"
    return folder / f"kernels-{kernels}.json", folder / f"models-{models}.json"


def sources() -> str:
    """Return a hash of every module of this package, as it is on the disk."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def libraries() -> list[str]:
    """Return the versions of Python and of the libraries that compute."""
    versions = [platform.python_version()]
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


def card_facts(device: torch.device) -> list[object]:
    """Return the facts of the card and of its driver."""
    driver = next((gpu.driver for gpu in read_machine().gpus), "")
    properties = torch.cuda.get_device_properties(device)
    card = [properties.name, properties.major, properties.minor, properties.total_memory]
    return [*card, driver, torch.version.cuda]


def plan_facts(plan: Plan) -> dict[str, object]:
    return {item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in NOT_OF_PLAN}


def digest_of(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _device(engine: Engine) -> list[object]:
    """Return the processor and its threads, or the card."""
    device, cpu = engine.models.device, read_machine().cpu
    if device.type == "cpu":
        return [cpu.name, sorted(cpu.features), torch.get_num_threads()]
    return [*card_facts(device), engine.graphs is not None]


def _shapes(engine: Engine) -> list[object]:
    """Return the models' shapes, the kernels, those left out, the plan and the widths."""
    models = engine.models
    config = replace(models.config, name="")
    drafted = None if models.draft_config is None else replace(models.draft_config, name="")
    parts = [_parts(model) for model in engine.models.models()]
    chosen = models.target.kernels.available
    kernels = [str(getattr(chosen, item.name)) for item in fields(chosen) if item.name != "off"]
    off = list(models.target.kernels.off)
    widths = checked_widths(engine)
    return [repr(config), repr(drafted), plan_facts(engine.plan), widths, kernels, off, parts]


def _parts(model: nn.Module) -> list[str]:
    return [f"{name} {tuple(part.shape)} {part.dtype}" for name, part in sorted(model.state_dict().items())]


# ---- the files


def _read(file: Path) -> Record | None:
    """Return the record; None if there is none. RecordDamaged: it is not as it was written."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    except ValueError:
        raise RecordDamaged(f"{file} is damaged") from None
    try:
        raw = json.loads(text)
        if raw.pop("sha256") != digest_of(raw):
            raise ValueError("not what was written")
        answers, found = raw.pop("answers"), raw.pop("verification")
        if answers is not None:
            found |= {"checks": (), "accepted": tuple(found["accepted"])}
            return Record(**raw, answers=Answers(**answers), verification=Verification(**found))
        return Record(**raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordDamaged(f"{file} is damaged") from None


def _write(file: Path, record: Record) -> None:
    raw = asdict(record)
    keep(file, json.dumps({**raw, "sha256": digest_of(raw)}).encode())


# ---- the checksum of weights


@torch.inference_mode()
def checksum(model: nn.Module) -> str:
    """Return 16 hex digits of the model's weights: names, shapes, dtypes and all bytes.

    Each 64-bit word of a tensor is multiplied by a random odd factor that belongs to its place, and the
    products are added modulo 2**64. Factors by place detect swapped words; odd factors lose no bit of a word.
    Before that, a word's upper bits are added to its lower ones. Otherwise swapping two words that differ
    only in their highest bit would go unnoticed, because the difference of two odd factors is even.
    """
    digest, sums = hashlib.sha256(), []
    adders: dict[torch.device, _Adder] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device not in adders:
            adders[tensor.device] = _Adder(tensor.device)
        sums += adders[tensor.device].sums(tensor)
    if sums:  # one wait for the device
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Adder:
    """The factors of each place, and memory for the products: fresh memory takes longer than adding."""

    def __init__(self, device: torch.device) -> None:
        self._size = CPU_WORDS if device.type == "cpu" else CARD_WORDS
        place = torch.arange(1, self._size + 1, dtype=torch.int64, device=device)
        mixed = place * -7046029254386353131  # SplitMix64's mix of a number
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        self._factors = mixed | 1
        self._products = torch.empty_like(mixed)

    def sums(self, tensor: Tensor) -> list[Tensor]:
        """Return a number for each piece of a tensor."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        if len(raw) % 8 or raw.storage_offset() % 8:
            raw = torch.cat((raw, raw.new_zeros(-len(raw) % 8)))
        words = raw.view(torch.int64)
        return [self._sum(words[at : at + self._size]) for at in range(0, len(words), self._size)]

    def _sum(self, words: Tensor) -> Tensor:
        products = torch.bitwise_right_shift(words, FOLD, out=self._products[: len(words)])
        return products.add_(words).mul_(self._factors[: len(words)]).sum()
