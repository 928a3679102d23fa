"""Engines over the fixture pair: loaded once per dtype, then replanned for each test."""

import copy
import functools
import json
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.engine.chunks import Chunks, share
from blockdraft.engine.engine import Engine
from blockdraft.kernels.llvm.jit import repeat
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.kernels.tree import Choices
from blockdraft.models.kernel_module import with_kernels
from blockdraft.planner.kv_choice import KvChoice, KvRequest
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_dflash, load_models
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.drafter import NoDrafter, Weightless
from blockdraft.step.ngram import NgramDrafter
from blockdraft.step.step_sizes import all_means, uneven_places
from tests.fixtures import make_pair

PAIR = Path(__file__).parent / "fixtures" / "pair"
TARGET, DRAFT, SPARK = (str(PAIR / name) for name in ("target", "draft", "spark"))
BLOCK = 8


def load(dtype, device="cpu", weights="auto", max_model_len=200):
    """The pair in `dtype`, with a short context and rope tables past it; `weights`: how they are stored."""
    return loaded(dtype, device, weights, max_model_len)[0]


def plan(dtype, device="cpu", weights="auto", max_model_len=200):
    return loaded(dtype, device, weights, max_model_len)[1]


@functools.cache
def loaded(dtype, device, weights, max_model_len):
    settings = Settings(
        model=TARGET,
        draft=DRAFT,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        width=BLOCK,
        quantization=weights,
        draft_quantization=weights,
    )
    return load_models(settings, lambda _: None)


@functools.cache
def random_drafter(dtype, device="cpu"):
    """The drafter's shape with weights that know nothing."""
    trained = load(dtype, device).drafter
    model = type(trained.model)(
        trained.model.config, first_layer=4, max_positions=512, has_head=False, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    model = model.to(device=device, dtype=getattr(torch, dtype)).requires_grad_(False)
    return DFlashDrafter(with_kernels(model, trained.target.kernels), trained.target)


def write_dflash2(folder, *, is_convolved=True):
    config, extra = _dflash2(is_convolved=is_convolved)
    save_file(load_file(f"{DRAFT}/model.safetensors") | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_head(folder):
    """The same in a folder inside a copy of the drafter's, of which it takes the body, as it ships."""
    shutil.copytree(DRAFT, folder)
    (head := folder / "dflash2").mkdir()
    config, extra = _dflash2()
    save_file(extra, head / "head.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "../model.safetensors")
    index = {"weight_map": names | dict.fromkeys(extra, "head.safetensors")}
    (head / "model.safetensors.index.json").write_text(json.dumps(index))
    (head / "config.json").write_text(json.dumps(config))
    return head


def _dflash2(*, is_convolved=True):
    """config.json, and the weights that it has beside the body's."""
    config = make_pair.dflash2_config(selector_skips_first=True)
    extra = make_pair.dflash2_weights(config, torch.Generator().manual_seed(4))
    for name, weight in extra.items():
        if name.endswith("base_kernel"):
            share = 0.1 if is_convolved else 0.0  # how far from the identity
            weight.mul_(share).select(1, 0).add_(1 - share)
        elif "kernel_projection" in name:
            weight.mul_(0.1 if is_convolved else 0.0)
    return config, extra


def write_xpress(folder):
    """The trained drafter with a refiner that has a say."""
    config = make_pair.xpress_config(xpress_num_passes=5)  # fewer than drafts
    extra = make_pair.xpress_weights(config, torch.Generator().manual_seed(4))
    save_file(load_file(f"{DRAFT}/model.safetensors") | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_domino(folder):
    """The trained drafter with Domino's head, which has a say."""
    config = make_pair.domino_config(shift_label=False)  # as the drafter was trained
    extra = make_pair.domino_weights(config, torch.Generator().manual_seed(4))
    save_file(load_file(f"{DRAFT}/model.safetensors") | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_lilicorr(folder):
    """The trained drafter with LiLiCorr's head, which has a say."""
    config = make_pair.lilicorr_config()
    extra = make_pair.lilicorr_weights(config, torch.Generator().manual_seed(4))
    save_file(load_file(f"{DRAFT}/model.safetensors") | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@functools.cache
def written_drafter(write, dtype, device="cpu"):
    """The drafter that `write` writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        trained = load(dtype, device)
        checkpoint = open_checkpoint(folder)
        read = read_draft_config(checkpoint.config, name="written")
        wide = replace(plan(dtype, device), max_positions=512)
        return load_dflash(checkpoint, read, trained.target, wide, trained.device)


@functools.cache
def changed_drafter(dtype, device="cpu", **config):
    """The trained weights under a configuration that differs in these fields."""
    trained = load(dtype, device).drafter
    model = type(trained.model)(
        replace(trained.model.config, **config),
        first_layer=4,
        max_positions=512,
        has_head=False,
        device=torch.device("cpu"),
    )
    model.load_state_dict(trained.model.state_dict())
    model = model.to(device=device, dtype=getattr(torch, dtype)).requires_grad_(False)
    return DFlashDrafter(with_kernels(model, trained.target.kernels), trained.target)


@functools.cache
def spark_drafter(dtype, device="cpu"):
    """The trained DSpark drafter."""
    settings = Settings(model=TARGET, draft=SPARK, dtype=dtype, device=device, max_model_len=480, width=BLOCK)
    return load_models(settings, lambda _: None)[0].drafter.beside(load(dtype, device).target)


# Kinds of drafters: the written ones, DSpark's, and what the trained one would be if its config.json said so.
CHANGED = {
    "causal": {"is_causal": (True, True)},
    "from the anchor": {"drafts_from_anchor": True},
    "causal, from the anchor": {"is_causal": (True, True), "drafts_from_anchor": True},
}
SELECTOR = "a selector alone"
# The kinds that are written, by who writes them.
WRITTEN = {
    "DFlash2": lambda folder: write_dflash2(folder),
    SELECTOR: lambda folder: write_dflash2(folder, is_convolved=False),
    "XPress": write_xpress,
    "Domino": write_domino,
    "LiLiCorr": write_lilicorr,
}
KINDS = (*WRITTEN, *CHANGED, "DSpark")
# What config.json calls each of them, and what people read.
TITLES = {
    "DFlash2": ("dflash2", "DFlash2"),
    SELECTOR: ("dflash2", "DFlash2"),
    "causal": ("dflash", "causal DFlash"),
    "from the anchor": ("dflash", "DFlash from the anchor"),
    "causal, from the anchor": ("dflash", "causal DFlash from the anchor"),
    "DSpark": ("dspark", "DSpark"),
    "XPress": ("xpress", "XPress"),
    "Domino": ("domino", "Domino"),
    "LiLiCorr": ("lilicorr", "LiLiCorr"),
}


def write_kind(folder, name):
    """A checkpoint of a drafter of any of KINDS for the pair's target, with weights as those have them."""
    folder.mkdir()
    if name in WRITTEN:
        WRITTEN[name](folder)
        return folder
    source = Path(SPARK if name == "DSpark" else DRAFT)
    config, weights = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    if "from the anchor" in name:
        config["block_size"] = BLOCK - 1
        config["dflash_config"]["sample_from_anchor"] = True
    if "causal" in name:
        config["dflash_config"]["causal_head"] = True
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked_again(draft, rows, width):
    """A block of the active rows whose drafts Python writes, at every replay of a captured step too."""
    active, block = rows.active, torch.empty(len(rows.active), width, dtype=torch.int64)
    seeds = rows.sampling().whole

    def run():
        block.copy_(rows.anchor[active][:, None])
        draft(block, rows.length[active].tolist(), seeds[active, Whole.SEED].tolist())

    repeat(run)
    return block


class HintedDrafter(Weightless):
    """Knows the answers and corrupts each draft with probability 1 - `rate`: any accepted count occurs."""

    block = BLOCK

    def __init__(self, answers, rate):
        self.answers = answers  # seed -> prompt and answer
        self.rate = rate
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, rows, cache, view, width):
        return asked_again(self._draft, rows, width)

    def _draft(self, block, lengths, seeds):
        width = block.shape[1]
        for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
            for column in range(1, width):
                answer = self.answers.get(seed, ())
                right = answer[length + column] if length + column < len(answer) else 0
                is_wrong = torch.rand((), generator=self.generator) > self.rate
                block[row, column] = (right + 1) % 60 if is_wrong else right


HINTS = 4  # choices of a column


def hint_trees(engine, answers, *, is_beside=False):
    """Let trees grow from chances by chance, among which is the answer's token in a place by chance.

    Return a list of lists: how many choices are likelier than the answer's token, tree by tree. With
    `is_beside`, the engine weighs the drafter's own choices, too, but takes none.
    """
    generator, told, own = torch.Generator().manual_seed(0), [], engine.rows.kernels.weigh

    def weigh(logits, pairs, starts, anchor, batch):
        num_rows, num_columns, vocab_size = logits.shape
        if is_beside:
            assert own(logits, pairs, starts, anchor, batch).chances.isfinite().any()
        ids = (
            torch.rand(num_rows, num_columns, vocab_size, generator=generator)
            .argsort(dim=-1)[..., :HINTS]
            .contiguous()
        )
        chances = torch.rand(num_rows, num_columns, 1, HINTS, generator=generator).log()
        chances, places = chances.sort(dim=-1, descending=True)
        for row, (start, seed) in enumerate(
            zip(starts.tolist(), batch.integers(Whole.SEED).tolist(), strict=True)
        ):
            told.append([])
            for column, token in enumerate(answers.get(seed, ())[start + 1 : start + 1 + num_columns]):
                rank = max(0, int(torch.randint(-HINTS, HINTS, (), generator=generator)))
                told[-1].append(rank)
                ids[row, column][ids[row, column] == token] = (token + 1) % vocab_size
                ids[row, column, places[row, column, 0, rank]] = token
        return Choices(ids, chances, places)

    engine.rows.kernels = replace(engine.rows.kernels, weigh=weigh)
    return told


class AnyChunks(Chunks):
    """Changes its mind from step to step, as a clock might make it: sizes, turns and whose prompts."""

    def __init__(self, most, seed):
        super().__init__(most)
        self.random = random.Random(seed)

    def take(self, left, *, is_decoding):
        self._num_owed = self.random.randint(0, 3)
        if self.random.random() < 0.3:
            return share(left, self.random.randint(1, self.most), self.most)
        room, counts = self.random.randint(1, self.most), [0] * len(left)
        for prompt in self.random.sample(range(len(left)), len(left)):
            counts[prompt] = min(self.random.randint(0, left[prompt]), room)
            room -= counts[prompt]
        return counts if any(counts) else [1, *counts[1:]]


def with_exact_pages(plan):
    """As many as resolve would take."""
    asked = KvRequest(plan.kv_dtype, plan.draft_kv_dtype, plan.kv_window, plan.page_size)
    choice = KvChoice(asked, plan.kv_dtype, plan.draft_kv_dtype, {})
    count = choice.num_exact_pages(
        plan.max_num_seqs, plan.block, plan.max_prefill_tokens * (1 + plan.overlap)
    )
    return replace(plan, num_exact_pages=count)


def drafter_named(name, models, dtype, device, plan):
    if name == "none":
        return NoDrafter(BLOCK)
    if name == "ngram":
        return NgramDrafter(BLOCK, plan["draft_ngram"])
    if name == "trained":
        return models.drafter
    if name == "random":
        return random_drafter(dtype, device)
    if name in WRITTEN:
        return written_drafter(WRITTEN[name], dtype, device)
    if name == "DSpark":
        return spark_drafter(dtype, device)
    return changed_drafter(dtype, device, **CHANGED[name])


def engine(
    drafter="trained",
    *,
    dtype="float64",
    device="cpu",
    weights="auto",
    kernels=None,
    chunks=None,
    widths=None,
    tokenizer=None,
    is_captured=False,
    max_model_len=200,
    **plan,
):
    """An engine on the pair, on its own kernels or on others; `plan` overrides fields of the Plan.

    `chunks`: a seed, for prompts that are cut by chance. `widths`: a seed, for a width of its own for each
    row and step. `tokenizer`: another one than the pair's own.
    """
    models, planned = loaded(dtype, device, weights, max_model_len)
    if tokenizer is not None:
        models = replace(models, tokenizer=tokenizer)
    if isinstance(drafter, str):
        drafter = drafter_named(drafter, models, dtype, device, plan)
    if isinstance(drafter, DFlashDrafter) and "draft_ngram" in plan:
        drafter = copy.copy(drafter)
        drafter.draft_ngram = plan["draft_ngram"]
    if plan.get("tree") and not (isinstance(drafter, DFlashDrafter) and drafter.grows_trees):
        plan["tree"] = 0
    plan = {"num_pages": 512, "max_num_seqs": 8, "max_prefill_tokens": 64, **plan}
    models = replace(models, drafter=drafter)
    if isinstance(drafter, DFlashDrafter):
        models = replace(models, draft_config=drafter.model.config)
    if kernels is not None:
        models = models.with_kernels(kernels)
    made = Engine(models, with_exact_pages(replace(planned, **plan)))
    if is_captured:
        capture(made)
    if widths is not None:
        with_any_widths(made, widths)
    return made if chunks is None else with_any_chunks(made, chunks)


def capture(engine):
    """Every step when it is first wanted, where steps of this model can be captured."""
    plan = engine.plan
    if engine.models.why_not_captured() is None:
        rows, widths = range(1, plan.max_num_seqs + 1), range(1, plan.block + 1)
        engine.capture(rows, widths, now=(), uneven=uneven_places(rows, plan.block, all_means))


def with_any_widths(engine, seed):
    """Draw a width for every row and step, if its request set none."""
    drawn = random.Random(seed)

    def widths(sequences):
        return [
            drawn.randint(1, engine.plan.block) if one.may_change_width else one.width for one in sequences
        ]

    engine.scheduler._widths = widths
    return engine


def with_any_chunks(engine, seed):
    engine.scheduler.chunks = AnyChunks(engine.plan.max_prefill_tokens, seed)
    return engine


def run(engine, requests):
    """Serve (prompt_ids, params) pairs together; per request, per choice: (token_ids, text, reason)."""
    return watched_run(engine, requests)[0]


def watched_run(engine, requests):
    """The results that `run` returns, and the deltas that they were made of."""
    ids = [engine.add(prompt, params) for prompt, params in requests]
    deltas = drain(engine)
    results = []
    for request_id, (_, params) in zip(ids, requests, strict=True):
        choices = []
        for index in range(params.n):
            mine = [d for d in deltas if (d.request_id, d.index) == (request_id, index)]
            tokens = [token for delta in mine for token in delta.token_ids]
            choices.append((tokens, "".join(d.text for d in mine), mine[-1].finish_reason))
        results.append(choices)
    return results, deltas


def drain(engine):
    """Step until nothing is left to do, and check that no page was leaked or shared wrongly."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_pages
    return deltas


def to_speculators(config, extra):
    """The same drafter in the other layout."""
    body = {k: v for k, v in config.items() if k not in ("architectures", "block_size", "dflash_config")}
    dflash = dict(config["dflash_config"])
    taps = dflash.pop("target_layer_ids")
    return {
        "speculators_model_type": "dflash2" if "selector_rank" in dflash else "dflash",
        "architectures": config["architectures"],
        "transformer_layer_config": body,
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [k + 1 for k in taps],
        "draft_vocab_size": config["vocab_size"],
        **dflash,
        **extra,
    }


def to_deepspec(config):
    """A drafter that drafts from the anchor, as DeepSpec writes it: everything at the top."""
    body = {k: v for k, v in config.items() if k != "dflash_config"}
    dflash = {k: v for k, v in config["dflash_config"].items() if k != "sample_from_anchor"}
    heads = {"markov_rank": 0, "enable_confidence_head": False}
    return body | {"architectures": ["Qwen3DSparkModel"]} | heads | dflash


def to_dspark_speculators(config):
    """The same as speculators writes it."""
    heads = {"markov_rank": 0, "enable_confidence_head": False}
    own = {"speculators_model_type": "dspark", "sample_from_anchor": True}
    return to_speculators(config | {"dflash_config": heads | config["dflash_config"]}, own)


def to_specforge(config):
    """The same as SpecForge writes it: everything in dflash_config."""
    dflash = {k: v for k, v in config["dflash_config"].items() if k != "sample_from_anchor"}
    dflash |= {"projector_type": "dspark", "attention_mode": "gqa"}
    return config | {"architectures": ["DSparkDraftModel"], "dflash_config": dflash}
