"""Resolves settings: only this module replaces "auto" by a value, and changes settings.

`resolve` is a pure function of settings, machine and models. It returns a Plan with the reason for each
value, and raises an error for a setup that cannot work. A start makes another plan after its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from blockdraft.cache.spec import (
    NUM_RESERVED_SLOTS,
    STATE_GRID,
    bytes_per_row,
    bytes_per_token,
    exact_bytes_per_token,
    state_bytes,
    tree_bytes_per_token,
)
from blockdraft.errors import CapacityError, SettingsError
from blockdraft.kernels.tree_size import MAX_ROWS, NUM_CHOICES, tree_size, trees_for
from blockdraft.machine.machine import Machine
from blockdraft.models.config import ModelConfig, Storage
from blockdraft.models.draft_config import TREE_KINDS, DraftConfig
from blockdraft.models.mtp_config import AnyDraftConfig, MtpConfig
from blockdraft.planner.known_pairs import KnownDrafter, known_drafter
from blockdraft.planner.kv_choice import KvChoice, KvRequest, check_on_card, kv_choice
from blockdraft.planner.plan import (
    ASKED,
    CACHE_HOLDS,
    ELEMENT_BYTES,
    LEFT_OVER,
    LOGIT_BYTES,
    NGRAM_BLOCK,
    STATES_SHARE,
    Plan,
    StartRules,
    Weights,
)
from blockdraft.planner.storage_choice import StorageChoice, StorageRequest
from blockdraft.settings import shipped
from blockdraft.settings.model_source import known_name
from blockdraft.settings.settings import DEFAULTS, DFLASH2, NGRAM, TREES, Settings

CPU_WIDTH = 8  # the widest block that costs little more than a narrow one (docs/benchmarks.md)
CPU_ROWS = 16
# The default draft_ngram: without a drafter, where a wrong draft costs nothing; and with one (0: its drafts
# are never replaced). 12 gains 2.5 % with the default pair at width 16 (benchmarks/ngram.py).
ALONE, BESIDE = 1, 0
GPU_ROWS = (256, 192, 128, 64)
FEWER_ROWS = (192, 128, 96, 64, 48, 32, 24, 16, 12, 8)  # if the exact windows of more rows take too much
WINDOW_SHARE = 0.25  # of the cache, for the exact windows of all rows if keys are compressed
ROWS_SHARE = 0.05  # of a GPU's budget, for the logits of every row's block and the rows' recurrent states
MAX_STATES = 512  # beyond, finding the state to evict would take long
CACHE_SHARE = 0.25  # the largest share of a CPU's free memory, because the machine has other work too
CPU_CACHE_BYTES = 1 << 30  # on a CPU, unless two full contexts take more: old prompts fill any cache
MEMORY_FOR_LARGE_CHUNKS = 64 << 30  # of a GPU: activations of large chunks take some GB
WORK_BYTES = 1 << 30  # of a GPU, for activations and graphs; a measurement replaces it
# Of unified memory: above it whole machines froze (vllm#46307), because the system's programs use it too.
UNIFIED_SHARE = 0.85
NO_GAIN = "there is no other device to hide behind"
ALL_POSITIONS = "all the positions that the model knows"
ALL_ROWS = "every row at full context"
CPU_CACHE = "1 GiB or two full contexts, at most a quarter of the free memory; taken as it is used"
T = TypeVar("T")


# ---- settings, changed


def asked_otherwise(settings: Settings, **changes: object) -> Settings:
    """Return the settings as if the user had also set `changes`."""
    return replace(settings, **changes)  # type: ignore[arg-type]


def with_drafter(
    settings: Settings, report: Callable[[str], None] = lambda line: None, *, on_card: bool = False
) -> Settings:
    """Return the settings with a drafter by name, or "none".

    `on_card`: our engine drafts on a GPU. There "auto" means the DFlash2 head, because its later drafts are
    better.
    """
    takes_head = on_card and settings.load_format != "dummy"  # random convolutions would not be left out
    draft = named_drafter(settings.model, settings.draft, report, takes_head=takes_head)
    return asked_otherwise(settings, draft=draft)


def named_drafter(
    model: str,
    asked: str | None,
    report: Callable[[str], None] = lambda line: None,
    *,
    takes_head: bool = False,
) -> str | None:
    """Return the drafter that `asked` means: "auto" and "dflash2" become a shipped drafter's folder.

    Call `report` if the shipped drafter is missing. Raise SettingsError if the DFlash2 head is missing.
    """
    if asked not in ("auto", DFLASH2):
        return asked
    folder = shipped.shipped_drafter(model, part=DFLASH2) if takes_head or asked == DFLASH2 else None
    if folder is None and asked == DFLASH2:
        raise SettingsError(
            f"no DFlash2 head ships for '{model}', only for {' and '.join(map(repr, shipped.DRAFTERS))}: "
            f"name a drafter, or 'auto'. A folder of that name is ./{DFLASH2}."
        )
    folder = folder or shipped.shipped_drafter(model)
    known = known_name(model)
    if folder is None and known in shipped.DRAFTERS:
        report(f"no drafter: '{shipped.DRAFTERS[known]}' is not in {shipped.FOLDER}, so decoding is plain")
    return "none" if folder is None else str(folder)


def known_drafter_for(settings: Settings, names: Iterable[str]) -> KnownDrafter | None:
    """Return the drafter that "auto" means for a GGUF file whose metadata gives its model one of `names`."""
    is_auto = settings.draft == "auto" and settings.engine == "native" and settings.load_format != "dummy"
    return known_drafter(names) if is_auto else None


def device_for(asked: str, *, has_gpu: bool) -> str:
    """Return the device that `asked` means: "auto" is the GPU, or the CPU without a GPU."""
    if "," in asked:
        raise SettingsError(f"device '{asked}' is a list, which only `blockdraft serve` takes: name one.")
    return asked if asked != "auto" else "cuda" if has_gpu else "cpu"


# ---- the plan


def resolve(
    settings: Settings,
    machine: Machine,
    model: ModelConfig,
    draft: AnyDraftConfig | None,
    *,
    weights: Weights,
    draft_weights: Weights | None = None,
    has_int8: bool = True,
) -> Plan:
    """Return the plan for this machine and pair. `has_int8`: whether the CPU's int8 kernels run."""
    resolver = _Resolver(settings, machine, model, draft)
    return resolver.plan((weights, draft_weights or Weights(0)), has_int8=has_int8)


@dataclass(frozen=True, slots=True)
class _Needs:
    """The bytes that the cache needs, over all layers."""

    token: int
    row: int  # states, and the tape of a block
    window: int  # of a row's exact tokens in compressing layers
    state: int  # a saved state
    exact_page: int
    num_exact_pages: Callable[[int], int]  # by the number of rows
    tree: int  # bytes of the pages of trees' branches

    def windows(self, max_num_seqs: int) -> int:
        """Return the bytes of all exact pages: for rows, for prompt tokens in flight, for cached prefixes."""
        return self.num_exact_pages(max_num_seqs) * self.exact_page

    def states(self, num_states: int) -> int:
        """Return the bytes of so many saved states."""
        return (num_states + NUM_RESERVED_SLOTS) * self.state if num_states else 0

    def beside(self, max_num_seqs: int, num_states: int) -> int:
        """Return the bytes that a start allocates in addition to the pages of tokens."""
        rows = (max_num_seqs + 1) * self.row + self.windows(max_num_seqs)
        return rows + self.states(num_states) + self.tree


class _Resolver:
    """Replaces each "auto" of the settings by a value, and records the reason."""

    def __init__(
        self, settings: Settings, machine: Machine, model: ModelConfig, draft: AnyDraftConfig | None
    ) -> None:
        self.settings, self.machine, self.model, self.draft = settings, machine, model, draft
        self.is_cpu = runs_on_cpu(settings, machine)
        self.reasons: dict[str, str] = {}

    @property
    def _is_mtp(self) -> bool:
        return isinstance(self.draft, MtpConfig)

    @property
    def _block(self) -> int:
        """The widest block that drafts fill: 1 without drafts."""
        return self.draft.block if self.draft else NGRAM_BLOCK if self.settings.draft == NGRAM else 1

    def take(self, name: str, otherwise: T, why: str) -> T:
        """Return the user's value, or `otherwise` for "auto". Record the reason."""
        asked = getattr(self.settings, name)
        self.reasons[name] = why if asked == "auto" else ASKED
        return otherwise if asked == "auto" else cast(T, asked)

    def take_by_device(self, name: str, on_cpu: tuple[T, str], on_gpu: tuple[T, str]) -> T:
        return self.take(name, *(on_cpu if self.is_cpu else on_gpu))

    def plan(self, both: tuple[Weights, Weights], *, has_int8: bool) -> Plan:
        settings, model, take = self.settings, self.model, self.take_by_device
        self._explain_devices()
        dtype = take(
            "dtype",
            ("float32", "the CPU's kernels are fastest in it"),
            ("bfloat16", "GPUs multiply it natively"),
        )
        memory = self.machine.memory_bytes if self.is_cpu else gpu_budget(settings, self.machine)
        quantization, draft_quantization, held = self._storages(both, memory, dtype, has_int8=has_int8)
        width, block = self._width()
        asked = KvRequest(settings.kv_dtype, settings.draft_kv_dtype, settings.kv_window, settings.page_size)
        kv = kv_choice(asked, dtype, model, self.draft, block)
        if not self.is_cpu:
            check_on_card(kv, dtype, model, self.draft, self.machine)
        self.reasons |= kv.reasons
        overlap = take("overlap", (False, NO_GAIN), (True, "it hides the host's work"))
        chunk = take("max_prefill_tokens", (256, "the default on a CPU"), self._chunk_on_gpu(memory))
        tree = self._tree(block)
        needs = self._needs(kv, dtype, block, chunk * (1 + overlap), tree)
        contexts = 2 * model.max_positions * needs.token
        total = self._cache_bytes(held, contexts)
        max_num_seqs = self.take("max_num_seqs", *self._rows(memory, needs, total, block * model.vocab_size))
        num_states = self._num_states(needs, total - needs.beside(max_num_seqs, 0))
        beside = needs.beside(max_num_seqs, num_states)
        room = _cache_tokens(self._cache_bytes(held, contexts + beside), needs.token, beside)
        max_model_len, num_pages = self._cache(room, max_num_seqs, block)
        return Plan(
            dtype=dtype,
            quantization=quantization,
            draft_quantization=draft_quantization,
            width=width,
            block=block,
            draft_ngram=self._draft_ngram(),
            tree=tree,
            max_model_len=max_model_len,
            max_positions=max_model_len + 2 * block,
            max_num_seqs=max_num_seqs,
            max_queue=settings.max_queue,
            page_size=settings.page_size,
            num_pages=num_pages,
            kv_dtype=kv.target,
            draft_kv_dtype=kv.draft,
            kv_window=settings.kv_window,
            num_exact_pages=needs.num_exact_pages(max_num_seqs),
            num_states=num_states,
            state_grid=math.lcm(STATE_GRID, settings.page_size),
            max_prefill_tokens=chunk,
            prefix_cache=self._prefix_cache(num_states),
            overlap=overlap,
            seed=settings.seed,
            same_bits=self._same_bits(),
            start=StartRules(
                graphs=settings.graphs,
                verify=settings.verify,
                memory_share=memory_share(settings, self.machine),
                max_stall_ms=settings.max_stall_ms,
            ),
            reasons=self.reasons,
        )

    def _chunk_on_gpu(self, memory: int) -> tuple[int, str]:
        if any(layer.moe for layer in self.model.layers) and memory >= MEMORY_FOR_LARGE_CHUNKS:
            return 8192, "each chunk reads all experts, and the GPU has memory for large ones"
        return 2048, "the default on a GPU"

    def _explain_devices(self) -> None:
        """Record the reasons for drafter, device and memory share, which are resolved before the plan."""
        made = "it was made for the model"
        if self._is_mtp:
            made = "the model's own MTP head, as no drafter ships for it"
        self.take("draft", "", made if self.draft else "none is known for it")
        why, error = "the driver finds no GPU", self.machine.gpu_error
        if error is not None:
            why = f"the driver does not answer ({error})"
        self.take_by_device("device", ("", why), ("", "a GPU is there, or named by --card"))
        if not self.is_cpu:
            share, limit = memory_share(self.settings, self.machine), f"never above {UNIFIED_SHARE}"
            self.reasons["gpu_memory_utilization"] = share_reason(self.settings, share, limit)

    def _storages(
        self, both: tuple[Weights, Weights], memory: int, dtype: str, *, has_int8: bool
    ) -> tuple[Storage, Storage, int]:
        settings = self.settings
        asked = StorageRequest(
            model=settings.model,
            dtype=settings.dtype,
            is_dummy=settings.load_format == "dummy",
            wanted={name: getattr(settings, name) for name in ("quantization", "draft_quantization")},
            max_num_seqs=settings.max_num_seqs,
            block=self._block,
        )
        choice = StorageChoice(asked, self.machine, self.model, is_cpu=self.is_cpu, take=self.take)
        found = choice.choose(both, memory, dtype, has_int8=has_int8)
        if self.draft is None:
            del self.reasons["draft_quantization"]
        return found

    def _width(self) -> tuple[int, int]:
        """Return how many tokens a step verifies, and the most that it may write."""
        draft, asked = self.draft, self.settings.width
        if draft is not None and asked != "auto" and asked > draft.block:
            raise SettingsError(
                f"width = {asked}, but draft '{draft.name}' was trained for blocks of {draft.block}: "
                f"use --width {draft.block} or less."
            )
        block = self._block
        width = min(block, CPU_WIDTH) if self.is_cpu else block
        is_trained = draft is not None and not self._is_mtp
        width = self.take("width", width, width_reason(width, block, is_trained=is_trained))
        return width, max(width, block)

    def _draft_ngram(self) -> int:
        if self.settings.draft == NGRAM:
            return self.take("draft_ngram", ALONE, "a wrong draft costs no more than none")
        if self.draft is None:
            return 0
        return self.take("draft_ngram", BESIDE, "the drafter alone, unless asked for")

    def _tree(self, block: int) -> int:
        """Return the most tokens of a tree of drafts. Refuse trees that nothing can grow or verify."""
        asked, draft = self.settings.tree, self.draft
        if asked in ("auto", 0):
            return self.take("tree", 0, "chains, as trees were not timed on a card")
        why, sizes = None, tuple[int, ...]()
        if self.model.is_hybrid:
            why = f"'{self.model.name}' has recurrent layers, whose states belong to one path"
        elif not isinstance(draft, DraftConfig) or draft.kind not in TREE_KINDS:
            named = "there is no drafter" if draft is None else f"draft '{draft.name}' makes chains"
            why = f"{named}: DFlash, DFlash2 and DSpark drafters grow trees"
        else:
            num_choices = NUM_CHOICES if draft.kind == "dflash" else draft.num_candidates
            num_choices = min(num_choices, draft.draft_vocab_size)
            sizes = trees_for(TREES[: TREES.index(asked) + 1], block, num_choices)
            if not sizes:
                why = f"draft '{draft.name}' drafts {block - 1} tokens of {num_choices} candidates each"
        if why is not None:
            raise SettingsError(f"tree = {asked}, but {why}: leave out --tree.")
        most = max(sizes)
        too_many = f"blocks of {block} tokens cannot always fill {asked}"
        self.reasons["tree"] = ASKED if most == asked else too_many
        return most

    def _needs(self, kv: KvChoice, dtype: str, block: int, chunk: int, tree: int) -> _Needs:
        """Return the sums over all layers. `chunk`: prompt tokens of all steps in flight."""
        specs, element_bytes = kv.specs(self.model, self.draft), ELEMENT_BYTES[dtype]
        exact, page_size = exact_bytes_per_token(specs, element_bytes), kv.asked.page_size
        num_tree_pages = tree_size(tree, block).num_pages(MAX_ROWS, page_size) if tree else 0
        return _Needs(
            bytes_per_token(specs, element_bytes),
            bytes_per_row(specs, element_bytes, block),
            kv.row_tokens(block) * exact,
            state_bytes(specs, element_bytes),
            page_size * exact,
            partial(kv.num_exact_pages, block=block, chunk=chunk),
            num_tree_pages * page_size * tree_bytes_per_token(specs, element_bytes),
        )

    def _rows(self, budget: int, needs: _Needs, total: int, logits: int) -> tuple[int, str]:
        """Return the number of rows, limited by the share of the cache for exact windows, and the reason."""
        rows, why = self._usual_rows(budget, needs.row + needs.window, logits)
        if needs.windows(rows) <= WINDOW_SHARE * total:
            return rows, why
        fewer = [count for count in FEWER_ROWS if count < rows]
        for count in fewer:
            if needs.windows(count) <= WINDOW_SHARE * total:
                return count, f"exact windows of more would take over {WINDOW_SHARE:.0%} of the cache"
        return fewer[-1], f"the least, though their exact windows take over {WINDOW_SHARE:.0%} of the cache"

    def _usual_rows(self, budget: int, row_bytes: int, logits: int) -> tuple[int, str]:
        """Return the number of rows, limited by the budget's share for logits and states, and the reason."""
        if self.is_cpu:
            return CPU_ROWS, "the default on a CPU"
        each = row_bytes + 2 * LOGIT_BYTES * logits  # once while a step runs, once in graphs
        for rows in GPU_ROWS:
            if rows * each <= ROWS_SHARE * budget:
                return rows, f"logits and states of so many take at most {ROWS_SHARE:.0%} of the memory"
        return GPU_ROWS[-1], "the least on a GPU: logits and states of more would take too much of its memory"

    def _cache_bytes(self, weight_bytes: int, contexts: int) -> int:
        """Return the cache's bytes: the user's value, or a default.

        On a CPU the default is 1 GiB or `contexts` bytes if they are more, but at most a quarter of the free
        memory. On a GPU it is the rest of the budget; start/memory.py measures it with the weights loaded.
        """
        settings, machine = self.settings, self.machine
        if settings.cache_bytes != "auto":
            return settings.cache_bytes
        if self.is_cpu:
            return min(int(machine.memory_bytes * CACHE_SHARE), max(CPU_CACHE_BYTES, contexts))
        budget = gpu_budget(settings, machine)
        room = budget - weight_bytes - WORK_BYTES
        if room <= 0:
            share = f"--gpu-memory-utilization {settings.gpu_memory_utilization}"
            raise CapacityError(
                f"weights of {weight_bytes / 1e9:.1f} GB and about {WORK_BYTES / 1e9:.1f} GB for a step: the "
                f"budget is {budget / 1e9:.1f} GB ({share} of {machine.gpu_bytes / 1e9:.1f} GB, less what "
                "others use): use --quantization fp8 or a smaller model, or raise it."
            )
        return room

    def _cache(self, room: int, max_num_seqs: int, block: int) -> tuple[int, int]:
        """Return the context and the number of pages: enough for all rows, but at most `room` tokens."""
        beside = 2 * block + self.settings.page_size  # scratch, and a partly filled page
        max_model_len = self._max_context(room - beside)
        wanted = max_num_seqs * (max_model_len + beside)
        self.take("cache_bytes", 0, CPU_CACHE if self.is_cpu else ALL_ROWS if wanted <= room else LEFT_OVER)
        return max_model_len, min(room, wanted) // self.settings.page_size

    def _max_context(self, room: int) -> int:
        """Return the user's context, or by default the model's limit or the cache's, whichever is less."""
        known, asked = self.model.max_positions, self.settings.max_model_len
        if asked != "auto" and asked > known:
            raise SettingsError(
                f"max_model_len = {asked}, but '{self.model.name}' knows {known} positions: "
                f"use --max-model-len {known} or less."
            )
        why = ALL_POSITIONS if room >= known else CACHE_HOLDS
        max_model_len = self.take("max_model_len", min(known, room), why)
        if max_model_len < 2 or max_model_len > room:
            raise CapacityError(
                f"the cache holds {max(room, 0)} tokens beside its scratch space, too few for a context of "
                f"{max(max_model_len, 2)}: raise --cache-bytes or lower --max-model-len."
            )
        return max_model_len

    def _num_states(self, needs: _Needs, room: int) -> int:
        """Return how many recurrent states can be saved; `room`: bytes of the cache beside the rows'."""
        asked = self.settings.prefix_state_bytes
        if not needs.state or not self.settings.prefix_cache:
            return 0
        room = room // STATES_SHARE if asked == "auto" else asked
        num_states = max(0, min(room // needs.state - NUM_RESERVED_SLOTS, MAX_STATES))
        each = f"{needs.state / 1e6:,.1f} MB"
        self.take("prefix_state_bytes", 0, f"1/{STATES_SHARE} of the cache, in states of {each}")
        if not num_states:
            why = f"--prefix-state-bytes is too little for a recurrent state of {each} and a spare one"
            self.reasons["prefix_cache"] = why
        return num_states

    def _prefix_cache(self, num_states: int) -> bool:
        return self.settings.prefix_cache and (num_states > 0 or not self.model.is_hybrid)

    def _same_bits(self) -> bool:
        is_fast = self.settings.allow_batch_variance and not self.is_cpu
        taken = "--allow-batch-variance takes the fastest kernels"
        self.reasons["same_bits"] = taken if is_fast else "a start tests it"
        return not is_fast


def _cache_tokens(total: int, token_bytes: int, beside: int) -> int:
    """Return the tokens that fit in the cache after the states and exact windows of all rows."""
    if beside and beside >= total:
        raise CapacityError(
            f"the states and exact windows of all rows take {beside:,} bytes, but the cache has "
            f"{total:,}: raise --cache-bytes or lower --max-num-seqs."
        )
    return (total - beside) // max(token_bytes, 1)


def runs_on_cpu(settings: Settings, machine: Machine) -> bool:
    return device_for(settings.device, has_gpu=machine.gpu_bytes > 0).startswith("cpu")


def memory_share(settings: Settings, machine: Machine) -> float:
    """Return the share of the GPU's memory that may be in use; at most UNIFIED_SHARE of unified memory."""
    return min(settings.gpu_memory_utilization, UNIFIED_SHARE if machine.is_unified else 1.0)


def gpu_budget(settings: Settings, machine: Machine) -> int:
    """Return the GPU bytes that we may take: our share of the total, minus the bytes in use."""
    used = machine.gpu_bytes - machine.gpu_free_bytes
    return int(machine.gpu_bytes * memory_share(settings, machine)) - used


def share_reason(settings: Settings, share: float, limit: str) -> str:
    """Return the reason for the share of a GPU's memory. `limit`: text on the limit of unified memory."""
    if share < settings.gpu_memory_utilization:
        return f"unified memory: the system lives in it too, so {limit}"
    is_default = settings.gpu_memory_utilization == DEFAULTS["gpu_memory_utilization"]
    return "the default" if is_default else ASKED


def width_reason(width: int, block: int, *, is_trained: bool = True) -> str:
    """Return the reason for a planned width. `block`: the drafter's block, 1 without a drafter."""
    if block == 1:
        return "no drafter: plain decoding"
    if width < block:
        return f"wider than {CPU_WIDTH} costs more than it commits on a CPU; a start measures it"
    return f"the block that the drafter was trained for ({block})" if is_trained else "to begin with"
