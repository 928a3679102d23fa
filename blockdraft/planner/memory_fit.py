"""Fits a pair into a machine: computes the plan of an engine, and the memory that it would take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from blockdraft.cache.spec import bytes_per_token, state_bytes
from blockdraft.errors import CapacityError, ModelError, SettingsError
from blockdraft.machine.cards import Card, has_bf16
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.models.config import Storage
from blockdraft.planner.memory import (
    DRIVER_BYTES,
    Item,
    cache_item,
    cache_slots,
    cache_specs,
    held_parts,
    saved_item,
    state_item,
    step_items,
    table_items,
    tree_item,
    weight_how,
    window_item,
)
from blockdraft.planner.pair import Case, Pair
from blockdraft.planner.plan import ELEMENT_BYTES, MARGIN_BYTES, Plan
from blockdraft.planner.resolver import gpu_budget, memory_share, resolve
from blockdraft.planner.stored import WeightParts

_BOUNDLESS = 1 << 60  # bytes of cache, for a plan that always fits


@dataclass(frozen=True, slots=True)
class Footprint:
    """The cache bytes of one sequence."""

    per_token: int
    per_row: int = 0  # states that are not allocated at the start
    windows: tuple[tuple[int, int], ...] = ()  # for sliding layers: the most tokens, and bytes of each token
    scratch: int = 0  # tokens past the context
    page_size: int = 16

    def at(self, context: int) -> int:
        """Return the bytes of a sequence of `context` tokens."""
        tokens = -(-(context + self.scratch) // self.page_size) * self.page_size
        kept = sum(min(tokens, window) * num_bytes for window, num_bytes in self.windows)
        return self.per_row + tokens * self.per_token + kept


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of one setting, and the reason."""

    name: str
    value: str
    reason: str

    @staticmethod
    def of(name: str, value: object, reason: str) -> Choice:
        """Make a choice with its value as readable text."""
        if isinstance(value, bool):
            return Choice(name, "on" if value else "off", reason)
        layout = "," if isinstance(value, int) else "g" if isinstance(value, float) else ""
        return Choice(name, f"{value:{layout}}", reason)


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on a machine, served by one engine. If several GPUs share the model, sizes are for one GPU."""

    engine: str
    device: str  # "cpu", or the GPU's name
    plan: Plan | None  # our own engine's; None: another engine
    items: tuple[Item, ...]  # the cache comes last
    budget: int
    budget_how: str
    footprint: Footprint
    cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    width: int
    chunk: int
    parts: tuple[WeightParts, ...]  # the weights of target and drafter
    choices: tuple[Choice, ...]
    problem: str | None = None  # why it cannot start
    kv_dtype: str = "auto"  # of other engines; our own engine's is in the plan

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def weight_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items if item.name.endswith("weights"))

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def sequences(self, context: int) -> int:
        """Return how many sequences of `context` tokens run at once."""
        each = self.footprint.at(context)
        return min(self.max_num_seqs, self.cache_bytes // each if each else self.max_num_seqs)

    def longest(self, num_sequences: int, limit: int) -> int:
        """Return the longest context up to `limit` at which `num_sequences` fit, or 0 if none fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.footprint.at(middle) * num_sequences <= self.cache_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def machine_of(card: Card) -> Machine:
    """Return a machine with only this card, and all of its memory free."""
    gpu = Gpu(card.title, card.capability, card.memory_bytes, card.memory_bytes, "", card.is_unified)
    return Machine(
        memory_bytes=card.memory_bytes,
        gpu_bytes=card.memory_bytes,
        gpu_free_bytes=card.memory_bytes,
        gpus=(gpu,),
    )


def fit_native(case: Case) -> Fit:
    """Fit as start/memory.py does. Raise SettingsError or ModelError for an impossible request.

    The fit's `problem` says why a start would fail.
    """
    machine = case.machine
    if case.pair.config is None:
        name = case.pair.target.shape.name
        raise ModelError(f"our engine does not support '{name}': use --engine vllm.")
    if not case.is_cpu and not machine.gpu_bytes:
        device = case.settings.device
        raise SettingsError(f"device = {device}, but there is no GPU here: name one with --card.")
    problem = None
    try:
        plan = _plan(case)
    except CapacityError as error:
        problem = str(error)
        plan = _plan(case.asking(cache_bytes=_BOUNDLESS))
    found = _cpu_fit(case, plan) if case.is_cpu else _gpu_fit(case, plan)
    problem = found.problem or problem if case.is_cpu else _too_old(machine) or problem
    return found if problem is None else replace(found, problem=problem)


def _too_old(machine: Machine) -> str | None:
    """Return why our kernels do not run on the machine's GPU, or None if they do."""
    capability = machine.gpus[0].capability if machine.gpus else (0, 0)  # (0, 0): not known
    if capability == (0, 0) or has_bf16(capability):
        return None
    found = ".".join(map(str, capability))
    return (
        f"{gpu_name(machine)} has capability {found}, and our kernels need 8.0 (Ampere) or newer: "
        "use --device cpu, or another card."
    )


def _plan(case: Case) -> Plan:
    pair = case.pair
    assert pair.config is not None
    draft_weights = None if pair.draft is None else pair.draft.weights
    return resolve(
        case.settings,
        case.machine,
        pair.config,
        pair.draft_config,
        weights=pair.target.weights,
        draft_weights=draft_weights,
    )


def _parts(pair: Pair, plan: Plan) -> tuple[WeightParts, ...]:
    storages = (plan.quantization, plan.draft_quantization)
    element_bytes = ELEMENT_BYTES[plan.dtype]
    return tuple(
        held_parts(model, storage, element_bytes)
        for model, storage in zip(pair.models, storages, strict=False)
    )


def _read(storage: Storage) -> Storage:
    """Return the form of the weights that large steps read."""
    return "none" if storage == "both" else storage


def _fixed_items(pair: Pair, plan: Plan, *, has_graphs: bool) -> list[Item]:
    """Return the items of all memory but the cache."""
    element_bytes, notes = ELEMENT_BYTES[plan.dtype], {"none": plan.dtype, "keep": "packed as stored"}
    notes["both"] = f"packed and in {plan.dtype}"
    names = ("target weights", "drafter weights")
    storages = (plan.quantization, plan.draft_quantization)
    items = []
    for name, model, parts, storage in zip(names, pair.models, _parts(pair, plan), storages, strict=False):
        how = weight_how(model.shape.values, parts, notes.get(storage, storage))
        items.append(Item(name, parts.text, how))
    items += table_items(plan, pair, element_bytes)
    specs = tuple(spec for specs in cache_specs(pair, plan) for spec in specs)
    items += [
        item
        for make in (state_item, window_item, tree_item)
        if (item := make(plan, specs, element_bytes)) is not None
    ]
    return items + step_items(
        pair,
        tokens=plan.max_prefill_tokens,
        logits=plan.step_tokens * pair.target.shape.vocab_size,
        element_bytes=element_bytes,
        has_graphs=has_graphs,
    )


def _cache_items(pair: Pair, plan: Plan) -> list[Item]:
    names, slots = ("target cache", "drafter cache"), cache_slots(plan)
    saved = saved_item(plan, _state_bytes(pair, plan))
    return [
        *([] if saved is None else [saved]),
        *(
            cache_item(name, specs, ELEMENT_BYTES[plan.dtype], slots)
            for name, specs in zip(names, cache_specs(pair, plan), strict=False)
        ),
    ]


def _state_bytes(pair: Pair, plan: Plan) -> int:
    """Return the bytes of one saved state."""
    return sum(state_bytes(specs, ELEMENT_BYTES[plan.dtype]) for specs in cache_specs(pair, plan))


def _footprint(pair: Pair, plan: Plan) -> Footprint:
    element_bytes = ELEMENT_BYTES[plan.dtype]
    per_token = sum(bytes_per_token(specs, element_bytes) for specs in cache_specs(pair, plan))
    return Footprint(per_token, scratch=plan.scratch, page_size=plan.page_size)


def _cpu_fit(case: Case, plan: Plan) -> Fit:
    machine = case.machine
    fixed = _fixed_items(case.pair, plan, has_graphs=False)
    needed = sum(item.num_bytes for item in fixed)
    problem = None
    if needed > machine.memory_bytes:
        problem = (
            f"weights and working memory take {needed / 1e9:.1f} GB, but {machine.memory_bytes / 1e9:.1f} GB "
            "are free: use --quantization int8 or a smaller model."
        )
    free = "free, as the kernel estimates it"
    return _fit(case, plan, fixed, budget=(machine.memory_bytes, free), problem=problem)


def _gpu_fit(case: Case, plan: Plan) -> Fit:
    """Fit on a GPU: the cache gets the memory that weights, tables and steps leave.

    The steps' memory is an estimate; a start measures it.
    """
    settings, machine, pair = case.settings, case.machine, case.pair
    fixed = _fixed_items(pair, plan, has_graphs=settings.graphs)
    fixed.append(Item("driver", DRIVER_BYTES, "a CUDA context and its libraries", is_exact=False))
    fixed.append(Item("reserve", MARGIN_BYTES, "for shapes that are captured or planned later"))
    budget, problem = gpu_budget(settings, machine), None
    if settings.cache_bytes == "auto":
        page_bytes = plan.page_size * _footprint(pair, plan).per_token
        room = budget - sum(item.num_bytes for item in fixed)
        asked, needed = plan.max_model_len, plan.pages_of_one * page_bytes
        plan, is_enough = plan.divided(
            room,
            page_bytes=page_bytes,
            state_bytes=_state_bytes(pair, plan),
            shrinks=settings.max_model_len == "auto",
        )
        if not is_enough:
            problem = (
                f"a context of {asked} tokens needs {needed / 1e9:.1f} GB of cache, "
                f"and {_left(room)} of {budget / 1e9:.1f} GB beside weights and working memory."
            )
    how = budget_how(memory_share(settings, machine), machine)
    return _fit(case, plan, fixed, budget=(budget, how), problem=problem)


def _fit(case: Case, plan: Plan, fixed: list[Item], *, budget: tuple[int, str], problem: str | None) -> Fit:
    pair, footprint = case.pair, _footprint(case.pair, plan)
    storages = _read(plan.quantization), _read(plan.draft_quantization)
    device = "cpu" if case.is_cpu else gpu_name(case.machine)
    cache_bytes = plan.num_pages * plan.page_size * footprint.per_token
    values = {
        **asdict(plan),
        "draft": pair.draft_name,
        "device": device,
        "gpu_memory_utilization": memory_share(case.settings, case.machine),
        "cache_bytes": cache_bytes,
        "prefix_state_bytes": plan.states_bytes(_state_bytes(pair, plan)),
    }
    return Fit(
        engine="native",
        device=device,
        plan=plan,
        items=(*fixed, *_cache_items(pair, plan)),
        budget=budget[0],
        budget_how=budget[1],
        footprint=footprint,
        cache_bytes=cache_bytes,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        width=plan.width,
        chunk=plan.max_prefill_tokens,
        parts=_parts(pair, replace(plan, quantization=storages[0], draft_quantization=storages[1])),
        choices=tuple(Choice.of(name, values[name], reason) for name, reason in plan.reasons.items()),
        problem=problem,
    )


def gpu_name(machine: Machine) -> str:
    return machine.gpus[0].name if machine.gpus else "GPU"


def budget_how(share: float, machine: Machine) -> str:
    used = machine.gpu_bytes - machine.gpu_free_bytes
    less = f", less {used / 1e9:.1f} GB in use" if used > 0 else ""
    return f"{share:g} of {machine.gpu_bytes / 1e9:.1f} GB{less}"


def _left(room: int) -> str:
    return f"{room / 1e9:.1f} GB are left" if room > 0 else f"{-room / 1e9:.1f} GB too much is taken"
