"""Runs the stages of training; a folder stores the progress.

answers/shard-*.npz   the target's answers to the training prompts       (stage 1: regenerate)
held-out/shard-*.npz  its greedy answers to the held-out prompts
checkpoint.pt         weights, optimizer, step                           (stage 2: train)
drafter/              the export, with its numbers and its card          (stages 3 and 4: evaluate, export)
run.json              the options: a run can be resumed only with the same ones
log.txt               the log lines
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from blockdraft.bench.records import Prompt
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.errors import ModelError, SettingsError
from blockdraft.models.dflash import DFlash
from blockdraft.models.draft_config import DraftConfig, check_pair
from blockdraft.planner.plan import Plan
from blockdraft.start.loading import load_pair
from blockdraft.start.memory import release
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.pairs import drafter_type
from blockdraft.training.answers import Document, first_of_each, read_conversations, read_shard
from blockdraft.training.drafter import as_kind, draft_json, load_weights, new_drafter, train_only
from blockdraft.training.evaluate import DrafterFit, fit_in_engine
from blockdraft.training.export import DrafterCard, export
from blockdraft.training.job import Job
from blockdraft.training.offline_batch import make_offline_batch
from blockdraft.training.packing import pack
from blockdraft.training.probe import simulate
from blockdraft.training.regenerate import AnswerCount, regenerate
from blockdraft.training.run_messages import left, plan_lines, verdict_lines
from blockdraft.training.trainer import Trainer

HELD_OUT = 20  # prompts per category held out for evaluation, without --held-out
REGENERATE_SHARE = 0.2  # of the minutes given
NUM_CHECKED = 32  # held-out answers that the engine repeats as a check
DISAGREEMENT = 0.05  # relative difference of engine and simulation; a larger one causes a warning
CLOSING_S = 60.0  # for evaluation, export and check, in addition to the measured time; arbitrary
CHECKPOINT_S = 300.0
MANY_BLOCKS = 1.5  # per answer token; with 2.4 the drafter memorised the answers (docs/training.md)
SAY_S, SHOW_S = 5.0, 0.5  # between log lines, and between updates of a bar; arbitrary


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for progress.

    `say` logs a line. `tell` logs a line and shows it to the user, even while bars are drawn. `show` draws a
    bar from (stage, share done, text).
    """

    say: Callable[[str], None] = lambda line: None
    tell: Callable[[str], None] = lambda line: None
    show: Callable[[str, float | None, str], None] = lambda stage, share, detail: None


def train(job: Job, listener: Listener, *, resume: bool = False) -> dict[str, DrafterFit]:
    """Run the unfinished stages of `job`, and return the fit of the exported drafter by category."""
    begin_s = time.monotonic()
    training, held_out = _conversations(job)
    _open_folder(job, job.fingerprint() | _digest(training + held_out), resume=resume)
    budget_s = None if job.minutes is None else 60 * job.minutes
    answer_s = _answer_s(job)
    counts = {"num_training": len(training), "num_held_out": len(held_out)}
    for line in plan_lines(job, **counts, answer_s=answer_s, is_resumed=resume):
        listener.tell(line)
    models, plan = _load_target(job, listener)
    _drafter_config(job, models, ())  # raises its errors before the target answers for an hour
    documents, kept = _answers(job, (models, plan), training, held_out, listener, answer_s)
    raw, config = _drafter_config(job, models, documents)
    models.target.taps = config.taps
    trainer = _trainer(job, models, documents, config)
    measured_s = time.monotonic()
    before = None if job.start_from is None else _before(job, models, trainer, kept, listener)
    measured_s = time.monotonic() - measured_s
    if resume:
        _load_checkpoint(job, trainer, listener)
    end_s = None if budget_s is None else begin_s + budget_s - CLOSING_S - measured_s

    def save() -> None:
        _save_checkpoint(job, trainer)
        with trainer.averaged():  # a usable drafter, should the run end here
            export(job.out / "drafter", trainer.model, raw, {}, _model_card(job, documents, trainer))

    _run(job, trainer, listener, save, None if end_s is None else end_s - time.monotonic())
    trainer.features.forget()
    release()
    with trainer.averaged():
        fits = _measured(job, trainer.forward.drafter, kept, listener, "evaluate")
        export(job.out / "drafter", trainer.model, raw, fits, _model_card(job, documents, trainer))
        for name, fit in fits.items():
            listener.say(
                f"{name}: {fit.committed:.3f} tokens committed per step ({fit.num_documents} documents)"
            )
        listener.say(f"exported to {job.out / 'drafter'}")
        _check(job, trainer, kept, listener, models)
    for line in verdict_lines(job, fits, before):
        listener.tell(line)
    return fits


def _check(
    job: Job, trainer: Trainer, held_out: list[Document], listener: Listener, models: LoadedPair
) -> None:
    """Compare the exported drafter in the engine with the simulation, on a few held-out prompts."""
    few = random.Random(0).sample(held_out, min(NUM_CHECKED, len(held_out)))  # the same ones every time
    listener.show("check", None, f"{len(few)} answers in the engine")
    expected = simulate(trainer.forward.drafter, few, length=job.length)["all"].committed

    def report(num_done: int) -> None:
        listener.show("check", num_done / len(few), f"{num_done} of {len(few)} answers in the engine")

    folder, config = job.out / "drafter", trainer.model.config
    found = fit_in_engine(folder, few, model=job.model, config=config, like=models, report=report).committed
    line = f"{found:.3f} tokens committed per step in the engine, {expected:.3f} simulated"
    if abs(found / expected - 1) > DISAGREEMENT:
        line = f"warning: {line}: they should agree. Near-ties in half precision, or a bug: please report it"
    listener.say(line)


def _before(
    job: Job, models: LoadedPair, trainer: Trainer, kept: Sequence[Document], listener: Listener
) -> DrafterFit:
    """Return the fit of the drafter that the run starts from, measured in its original kind."""
    assert job.start_from is not None
    config = read_draft_config(open_checkpoint(job.start_from, what="drafter").config, name=job.start_from)
    drafter = trainer.forward.drafter
    if config.markov_rank != trainer.model.config.markov_rank:
        own = _new_model(job, models, config)
        load_weights(own, job.start_from, models.device)
        drafter = drafter_type(config)(own, models.target)
    return _measured(job, drafter, kept, listener, "start")["all"]


def _measured(
    job: Job, drafter: DFlashDrafter, kept: Sequence[Document], listener: Listener, stage: str
) -> dict[str, DrafterFit]:
    """Return the fit of `drafter` on the held-out answers, by category."""
    text = f"{len(kept)} held-out answers"
    listener.show(stage, None, text)
    return simulate(drafter, kept, length=job.length, report=lambda share: listener.show(stage, share, text))


# ---- the folder


def _open_folder(job: Job, asked: Mapping[str, object], *, resume: bool) -> None:
    job.out.mkdir(parents=True, exist_ok=True)
    path = job.out / "run.json"
    if not resume:
        has_answers = any(job.out.glob("*/shard-*.npz"))
        if (job.out / "checkpoint.pt").exists() or (path.exists() and has_answers):
            raise SettingsError(f"'{job.out}' holds a run already: add --resume, or choose another --out.")
        path.write_text(json.dumps(asked, indent=1), encoding="utf-8")
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(f"cannot resume '{job.out}': {error}. Start it without --resume.") from None
    wrong = sorted(name for name in asked if asked[name] != known.get(name))
    if wrong:
        raise SettingsError(
            f"cannot resume '{job.out}' with another {wrong[0]}: it began with {known.get(wrong[0])!r}, now "
            f"it is {asked[wrong[0]]!r}. Give the same, or start a new run with --from its drafter."
        )


def _digest(conversations: Sequence[Prompt]) -> dict[str, object]:
    """Return a hash of the prompts. A resumed run needs the same list, as answers are stored by index."""
    if not conversations:
        return {}
    digest = hashlib.sha256()
    for one in conversations:
        # The format of earlier versions, whose runs can be resumed.
        about = f"category={one.category!r}, turns={one.turns!r}, system={one.system!r}"
        digest.update(f"Conversation(name={one.id!r}, {about})".encode())
    return {"prompts": digest.hexdigest()[:16]}


def _save_checkpoint(job: Job, trainer: Trainer) -> None:
    partial = job.out / "checkpoint.partial"
    with partial.open("wb") as file:  # on a full disk our own file raises OSError; PyTorch's does not
        torch.save(trainer.state(), file)
    partial.replace(job.out / "checkpoint.pt")


def _load_checkpoint(job: Job, trainer: Trainer, listener: Listener) -> None:
    path = job.out / "checkpoint.pt"
    if path.exists():
        trainer.load_state(torch.load(path, map_location=trainer.device, weights_only=True))
        listener.say(f"continuing at step {trainer.step_number}")


# ---- stage 1: answers


def _load_target(job: Job, listener: Listener) -> tuple[LoadedPair, Plan]:
    on_gpu = torch.cuda.is_available() and job.device != "cpu"
    rows = job.bulk_rows or (2048 if on_gpu else 16)

    def report(line: str) -> None:
        listener.show("load", None, line)
        listener.say(line)

    listener.show("load", None, job.model)
    return load_pair(
        report,
        model=job.model,
        draft="none",
        device=job.device,
        dtype=job.dtype,
        quantization="none",
        max_num_seqs=rows,
        max_model_len=job.length,
        max_prefill_tokens=16384 if on_gpu else 512,
        prefix_cache=False,
    )


def _answer_s(job: Job) -> float | None:
    """Return the number of seconds for the target's answers, or None for no limit."""
    if job.answer_minutes is not None:
        return 60 * job.answer_minutes
    return None if job.minutes is None else REGENERATE_SHARE * 60 * job.minutes


def _answers(
    job: Job,
    pair: tuple[LoadedPair, Plan],
    training: list[Prompt],
    held_out: list[Prompt],
    listener: Listener,
    seconds: float | None,
) -> tuple[list[Document], list[Document]]:
    """Return the documents for training and the greedy held-out documents."""
    bulk, tokenizer = make_offline_batch(*pair), pair[0].tokenizer
    served = replace(job.answers, sampled=0.0, max_repeat=None)  # a server does not cut loops either
    watch = _AnswerWatch("held out", len(held_out), None, listener)
    kept = regenerate(bulk, tokenizer, held_out, job.out / "held-out", served, report=watch)
    watch = _AnswerWatch("regenerate", len(training), seconds, listener)
    documents = regenerate(
        bulk, tokenizer, training, job.out / "answers", job.answers, seconds=seconds, report=watch
    )
    shards = [path for folder in job.more_answers for path in sorted(folder.glob("shard-*.npz"))]
    documents += [document for path in shards for document in read_shard(path)]
    if not documents or not kept:
        room = job.length - job.answers.max_tokens
        raise SettingsError(
            f"no prompt was answered: all are longer than {room} tokens (--length minus --max-answer), or "
            "--minutes was too short."
        )
    bulk.close()
    del bulk
    release()
    return documents, kept


class _AnswerWatch:
    """Shows the target's progress: a bar twice a second, and a log line every few seconds and per shard."""

    def __init__(self, stage: str, num_prompts: int, seconds: float | None, listener: Listener) -> None:
        self._stage, self._num_prompts, self._seconds = stage, num_prompts, seconds
        self._listener = listener
        self._begin_s = self._shown_s = self._said_s = time.monotonic()
        listener.show(stage, 0.0, f"{num_prompts} prompts")

    def __call__(self, count: AnswerCount) -> None:
        now_s = time.monotonic()
        if count.is_filed or now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            self._listener.say(f"{self._stage}: {self._show(count)}, {now_s - self._begin_s:.0f} s so far")
        elif now_s - self._shown_s >= SHOW_S:
            self._show(count)

    def _show(self, count: AnswerCount) -> str:
        self._shown_s = time.monotonic()
        taken_s = self._shown_s - self._begin_s
        share = count.num_documents / max(self._num_prompts, 1)
        if self._seconds:
            share = max(share, taken_s / self._seconds)
        line = f"{count.num_documents} answers, {count.num_answer_tokens:,} tokens{left(share, taken_s)}"
        self._listener.show(self._stage, min(share, 1.0), line)
        return line


def _conversations(job: Job) -> tuple[list[Prompt], list[Prompt]]:
    """Return the shuffled training prompts and the held-out prompts."""
    found = [one for path in job.prompts for one in read_conversations(path)]
    random.Random(job.answers.seed).shuffle(found)
    held_out = [
        one if name is None else replace(one, category=name)
        for name, path in job.held_out
        for one in read_conversations(path)
    ]
    if not job.held_out:
        held_out, rest = first_of_each(found, max(1, min(HELD_OUT, len(found) // 20)))
        found = rest or found
    return found[: job.max_prompts], held_out


# ---- stage 2: training


def _drafter_config(
    job: Job, models: LoadedPair, documents: Sequence[Document]
) -> tuple[Mapping[str, object], DraftConfig]:
    """Return the drafter's config.json as stored, and parsed."""
    if job.start_from is not None:
        raw = open_checkpoint(job.start_from, what="drafter").config
    else:
        own = open_checkpoint(job.model).config
        raw = draft_json(job.shape, models.config, own, _mask_id(job, models, documents))
    name = job.start_from or "the new drafter"
    raw = as_kind(raw, job.kind, job.shape, name=name, scale=models.config.embedding_scale)
    config = read_draft_config(raw, name=name)
    check_pair(config, models.config, models.tokenizer.eos_ids)
    if config.draft_vocab_size != config.vocab_size:
        raise ModelError(f"'{config.name}' cannot be trained: it has its own head.")
    if job.recipe.short_blocks and not (all(config.is_causal) and config.block >= 4):
        raise SettingsError(
            f"--short-blocks {job.recipe.short_blocks} works only for causal drafters with blocks of 4 or "
            "more: leave it out."
        )
    return raw, config


def _mask_id(job: Job, models: LoadedPair, documents: Sequence[Document]) -> int:
    """Return the mask token: the highest special token that no document uses.

    Special tokens with high ids are seldom in the chat template.
    """
    if job.shape.mask_token_id is not None:
        return job.shape.mask_token_id
    tokenizer, size = models.tokenizer, models.config.vocab_size
    used = {token for one in documents for token in (*one.prompt_ids, *one.answer_ids)}
    unused = [one for one in (*tokenizer.special_ids, size - 1) if one not in used and one < size]
    free = [one for one in unused if one not in tokenizer.eos_ids]
    if not free:
        raise SettingsError("no unused special token is left for the mask: choose one with --mask-token.")
    special = [one for one in free if one in tokenizer.special_ids]
    return max(special or free)


def _new_model(job: Job, models: LoadedPair, config: DraftConfig) -> DFlash:
    return new_drafter(
        config,
        models.target,
        max_positions=job.length + config.block,
        device=models.device,
        init="random" if job.start_from is not None else job.init,
        seed=job.recipe.seed,
    )


def _trainer(job: Job, models: LoadedPair, documents: list[Document], config: DraftConfig) -> Trainer:
    model = _new_model(job, models, config)
    if job.start_from is not None:
        load_weights(model, job.start_from, models.device)
    train_only(model, job.recipe.trained)
    rows, _ = pack(documents, job.length)
    if not len(rows):
        raise SettingsError(f"--length {job.length}: every answer is longer. Raise it.")
    return Trainer(model, models.target, rows.to(models.device), job.recipe)


def _run(
    job: Job, trainer: Trainer, listener: Listener, save: Callable[[], None], seconds: float | None
) -> None:
    begin_s = said_s = saved_s = time.monotonic()
    first = trainer.step_number + 1
    listener.show("train", 0.0, "getting ready: the first step is the longest")
    listener.say(f"train: {job.recipe.rows_per_step} rows a step; the first step is the longest")
    for progress in trainer.run(steps=job.steps, seconds=seconds):
        now_s = time.monotonic()
        if progress.step == first:
            listener.say(
                f"features of {trainer.features.num_kept} of {len(trainer.rows)} rows are kept in memory"
            )
        if now_s - said_s >= SAY_S or progress.step == first:
            num_done = progress.step - first + 1
            done = num_done / (job.steps - first + 1) if job.steps else progress.share
            loss, committed = progress.loss.item(), progress.committed()
            line = f"loss {loss:.4f}, {committed:.3f} per step, rate {progress.rate:.2e}"
            line += left(done, now_s - begin_s)
            listener.show("train", progress.share, line)
            listener.say(f"step {progress.step}: {line}")
            said_s = now_s
        if now_s - saved_s >= CHECKPOINT_S:
            save()
            saved_s = now_s
    if seconds is not None and trainer.step_number < first:
        raise SettingsError(f"--minutes {job.minutes} are over before training began: give more.")
    save()
    _say_blocks(trainer, listener)


def _say_blocks(trainer: Trainer, listener: Listener) -> None:
    """Log the mean number of drafted blocks per answer token; warn if the drafter may memorise answers."""
    recipe, num_tokens = trainer.recipe, int(trainer.rows.is_anchor.sum())
    num_blocks = trainer.step_number * recipe.rows_per_step * recipe.num_anchors / num_tokens
    line = f"about {num_blocks:.1f} blocks were drafted for each token of an answer"
    if num_blocks > MANY_BLOCKS:
        listener.tell(f"{line}: more answers would probably teach more than more time")
    else:
        listener.say(line)


def _model_card(job: Job, documents: Sequence[Document], trainer: Trainer) -> DrafterCard:
    counts = Counter(one.category for one in documents)
    num_tokens = sum(len(one.answer_ids) for one in documents)
    num_greedy = sum(one.is_greedy for one in documents)
    kinds = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
    data = (
        f"{len(documents):,} answers of the target itself, {num_tokens / 1e6:.1f} M tokens, "
        f"{num_greedy / len(documents):.0%} of them greedy: {kinds}."
    )
    options = asdict(job.recipe)
    recipe = {
        **{name: value for name, value in options.items() if name != "objective"},
        **options["objective"],
        "steps": trainer.step_number,
        "length": job.length,
        "start": job.start_from or job.init,
    }
    return DrafterCard(target=job.model, command=job.command, data=data, recipe=recipe)
