"""Records the results of the checks at the start, so that later starts only check what has changed.

There are two records in the cache folder. The name of the kernels' record is a hash of everything that
kernels depend on: the sources of this package, the libraries, the device, the plan and the shapes. The name
of the models' record is a hash of these and of every byte of both models' weights. After a change there is no
record of that name, so the check runs.

A built-in prompt, answered with and without drafts, must give the recorded tokens. If the tokens differ, or
if a record is damaged, everything is checked again.
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
# Fields of a plan that affect neither the kernels nor the checked sizes. Pages and context depend on the free
# memory, and the width is measured, so they would differ at every start.
NOT_OF_PLAN = {
    *("num_pages", "max_model_len", "max_positions", "max_queue", "prefix_cache", "num_states"),
    "seed",
    *("width", "step_costs", "is_sure_of_costs", "chosen_share", "draft_chances", "reasons", "start"),
}
# Words that a checksum adds at a time: few enough for a CPU's cache, or enough to keep a GPU busy.
CPU_WORDS, CARD_WORDS = 1 << 15, 1 << 24
FOLD = 29  # a word is shifted right by so many bits and added to itself
NUM_PROMPT, NUM_TOKENS = 16, 6  # tokens of the prompt, and of the answer that must be repeated

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one prompt, by width."""

    prompt: list[int]
    tokens: dict[str, list[int]]


class RecordDamaged(Exception):
    """Raised if a record is not as it was written."""


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a verification, with its date and the version of blockdraft."""

    day: str
    version: str
    answers: Answers | None = None  # both None in the kernels' record
    verification: Verification | None = None

    def __str__(self) -> str:
        return f"verified on {self.day} by blockdraft {self.version}"


def verify_changes(engine: Engine, note: Note, *, is_full: bool = False) -> Verification:
    """Run all checks that have no record, on an idle engine. Raise ModelError if answers would be wrong."""
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
    """Return the recorded verification, with checks that name the record."""
    assert record.answers is not None
    assert record.verification is not None
    num_tokens = sum(map(len, record.answers.tokens.values()))
    checks = (
        Check("kernels and models", str(record)),
        Check("answers", f"{num_tokens} tokens as they were then"),
    )
    return replace(record.verification, checks=checks, taken=str(record))


def _answers(engine: Engine, prompt: list[int]) -> Answers:
    """Answer `prompt` at width 1 and at the widest width; return no tokens if the prompt is too long."""
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
    """Return the paths of the kernels' record and of the models' record."""
    kernels = digest_of([sources(), libraries(), _device(engine), _shapes(engine)])
    weights = [checksum(model) for model in engine.models.models()]
    engine.target_checksum = weights[0]
    vocab_map = engine.models.drafter.vocab_map
    ids = "none" if vocab_map is None else digest_of(vocab_map.tolist())
    labels = engine.models.labels
    models = digest_of([kernels, weights, ids, labels.is_dummy, labels.synthetic_acceptance])
    folder = cache_dir() / "verified"
    return folder / f"kernels-{kernels}.json", folder / f"models-{models}.json"


def sources() -> str:
    """Return a hash of all Python files of this package."""
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
    """Return the properties of the GPU and the versions of its driver and CUDA."""
    driver = next((gpu.driver for gpu in read_machine().gpus), "")
    properties = torch.cuda.get_device_properties(device)
    card = [properties.name, properties.major, properties.minor, properties.total_memory]
    return [*card, driver, torch.version.cuda]


def plan_facts(plan: Plan) -> dict[str, object]:
    return {item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in NOT_OF_PLAN}


def digest_of(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _device(engine: Engine) -> list[object]:
    """Return the CPU with its number of threads, or the GPU and whether graphs are used."""
    device, cpu = engine.models.device, read_machine().cpu
    if device.type == "cpu":
        return [cpu.name, sorted(cpu.features), torch.get_num_threads()]
    return [*card_facts(device), engine.graphs is not None]


def _shapes(engine: Engine) -> list[object]:
    """Return the configurations, plan, checked widths, kernels, kernels left out, and weight shapes."""
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
    """Return the record, or None if the file cannot be opened. Raise RecordDamaged if it was changed."""
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
    """Return 16 hex digits: a hash of the names, shapes, dtypes and all bytes of the model's weights.

    Each 64-bit word of a tensor is multiplied by a random odd factor for its place, and the products are
    added modulo 2**64. Different factors detect swapped words; odd factors lose no bit of a word. Before
    this, a word's upper bits are added to its lower bits. Otherwise a swap of two words that differ only in
    the highest bit would go unnoticed, because the difference of two odd factors is even.
    """
    digest, sums = hashlib.sha256(), []
    adders: dict[torch.device, _Adder] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device not in adders:
            adders[tensor.device] = _Adder(tensor.device)
        sums += adders[tensor.device].sums(tensor)
    if sums:  # wait for the device only once
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Adder:
    """Holds the factors, and memory for the products, as new memory would take longer than the sums."""

    def __init__(self, device: torch.device) -> None:
        self._size = CPU_WORDS if device.type == "cpu" else CARD_WORDS
        place = torch.arange(1, self._size + 1, dtype=torch.int64, device=device)
        mixed = place * -7046029254386353131  # SplitMix64's mixing function
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        self._factors = mixed | 1
        self._products = torch.empty_like(mixed)

    def sums(self, tensor: Tensor) -> list[Tensor]:
        """Return one sum for each piece of a tensor."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        if len(raw) % 8 or raw.storage_offset() % 8:
            raw = torch.cat((raw, raw.new_zeros(-len(raw) % 8)))
        words = raw.view(torch.int64)
        return [self._sum(words[at : at + self._size]) for at in range(0, len(words), self._size)]

    def _sum(self, words: Tensor) -> Tensor:
        products = torch.bitwise_right_shift(words, FOLD, out=self._products[: len(words)])
        return products.add_(words).mul_(self._factors[: len(words)]).sum()
