"""Measures how well a drafter fits a target and a workload, and what would improve the fit.

The engine measures the tokens per step. Possible mistakes in config.json are then tried in a simulation on
greedy answers (training/probe.py). With config.json unchanged, the simulation must give the engine's number.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blockdraft.bench.records import Prompt
from blockdraft.bench.workloads import load_all
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.engine.request import Metrics, SamplingParams
from blockdraft.errors import SettingsError
from blockdraft.llm import LLM
from blockdraft.models.draft_config import DraftConfig
from blockdraft.planner.draft_title import drafting_title
from blockdraft.settings.settings import NGRAM
from blockdraft.start.memory import release
from blockdraft.training.answers import (
    Document,
    encode_conversation,
    encode_plain,
    first_of_each,
    read_conversations,
)
from blockdraft.training.evaluate import DrafterFit, fit_of_metrics, fit_of_steps, run_engine
from blockdraft.training.fit_report import (
    LOW,
    RAISES_ELSEWHERE,
    Cost,
    FitKind,
    FitQuestion,
    FitReport,
    SimulationAgreement,
    Tried,
    has_prospect,
    likely_cause,
    prospect_of,
)
from blockdraft.training.packing import MIN_ANSWER
from blockdraft.training.probe import AcceptanceProbe
from blockdraft.training.variations import variations

# Number of greedy answers for trials, and tokens per answer. One trial of a 135M target takes about 6 s on
# one CPU core.
PROBES = {"cpu": (6, 64), "cuda": (16, 128)}
TIMED_STEPS = 16
GPU_SHARE = 0.8  # of the GPU's memory for the engine; the trials need the rest

Show = Callable[[str, float | None, str], None]  # gets a stage, the share done, and a text


def fit(
    question: FitQuestion,
    conversations: Iterable[Prompt],
    show: Show = lambda stage, share, detail: None,
) -> FitReport:
    """Measure a drafter's fit on `conversations`, and try possible causes unless `question.is_quick`."""
    conversations, _ = first_of_each(conversations, question.limit)
    session = _Session(question, show)
    usable = session.prompts(conversations)
    if not usable:
        raise SettingsError(
            f"every prompt of '{question.source}' is longer than the context of {session.max_prompt} tokens."
        )
    answers = session.answer("answer", usable, question.max_tokens, question.temperature)
    overall = _fit_of(answers)
    categories = {name: _fit_of(group) for name, group in sorted(_by_category(answers).items())}
    costs = session.costs(usable[0], overall)
    agreement, tried, config = None, list[Tried](), session.config
    is_tried = config is not None and not question.is_quick
    if is_tried:
        probes = session.probes(answers)
        agreement, tried = session.diagnose(probes, is_low=overall.committed < LOW)
        if agreement is not None and session.quantization in ("fp8", "int8", "int4"):
            tried.append(session.unquantised(probes, agreement.engine))
    prospect = None
    if config is not None and likely_cause(tried) is None and has_prospect(config, categories, overall):
        greedy = agreement.engine if agreement is not None and question.temperature > 0 else None
        prospect = prospect_of(question, config, categories, costs, overall, greedy)
    return FitReport(
        question=question,
        kind=session.kind,
        title=session.title,
        width=session.width,
        dtype=session.dtype,
        quantization=session.quantization,
        num_left_out=len(conversations) - len(usable),
        categories=categories,
        overall=overall,
        costs=costs,
        agreement=agreement,
        tried=tuple(tried),
        untried=_untried(question) if is_tried else (),
        prospect=prospect,
    )


# ---- prompts


def conversations_of(question: FitQuestion) -> list[Prompt]:
    """Return the prompts of the question's file, or by default the benchmark's prompts."""
    if question.prompts is not None:
        return read_conversations(question.prompts)
    return [one for workload in load_all() for one in workload.prompts]


@dataclass(frozen=True, slots=True)
class _FirstTurn:
    """A conversation and the token ids of its first prompt."""

    conversation: Prompt
    ids: list[int]


# ---- the engine


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of the engine, as the tokens of each step."""

    prompt: _FirstTurn
    steps: tuple[tuple[int, ...], ...]  # the tokens that each step committed
    metrics: Metrics

    def first(self, count: int) -> list[tuple[int, ...]]:
        """Return the steps that committed the first `count` tokens; the last step may be cut."""
        kept = []
        for step in self.steps:
            kept.append(step[:count])
            count -= len(kept[-1])
        return [step for step in kept if step]


class _Session:
    """Runs the measurements of one target and drafter in an engine."""

    def __init__(self, question: FitQuestion, show: Show) -> None:
        self._question, self._show = question, show
        self._llm = _load(question, question.quantization, show)
        models, plan = self._llm.engine.models, self._llm.engine.plan
        config = models.draft_config
        self.kind: FitKind = "ngram" if config is None else config.kind
        # None: drafts of n-grams or of an MTP head; neither has a simulation, or is trained here
        self.config = config if isinstance(config, DraftConfig) else None
        title = drafting_title(config, plan.draft_ngram)
        if title is None:
            raise SettingsError(f"no drafter ships for '{question.target}': give one, or '{NGRAM}'.")
        self.title = title
        self.width = question.width or models.drafter.block
        self.dtype = plan.dtype
        self.quantization = plan.quantization
        self._num_probes, max_tokens = PROBES[models.device.type]
        self._probe_tokens = min(max_tokens, question.max_tokens)
        # Leave space for only one token: short answers are fine.
        self.max_prompt = plan.max_model_len - 1

    def prompts(self, conversations: Sequence[Prompt]) -> list[_FirstTurn]:
        """Return the encoded first prompts that leave space for an answer."""
        tokenizer = self._llm.tokenizer
        return self._with_room(_FirstTurn(one, encode_conversation(tokenizer, one)) for one in conversations)

    def _with_room(self, prompts: Iterable[_FirstTurn]) -> list[_FirstTurn]:
        return [one for one in prompts if 1 <= len(one.ids) <= self.max_prompt]

    def answer(
        self, stage: str, prompts: Sequence[_FirstTurn], max_tokens: int, temperature: float
    ) -> list[_Answer]:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, width=self.width)
        steps: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        finished: dict[str, Metrics] = {}
        num_done, num_all = 0, max_tokens * len(prompts)
        for deltas in run_engine(self._llm.engine, ((prompt.ids, params) for prompt in prompts)):
            for delta in deltas:
                if delta.token_ids:
                    steps[delta.request_id].append(delta.token_ids)
                    num_done += len(delta.token_ids)
                if delta.metrics is not None:
                    finished[delta.request_id] = delta.metrics
                    num_done += max_tokens - delta.metrics.num_tokens
            self._show(stage, num_done / num_all, f"{len(finished)} of {len(prompts)} prompts answered")
        names = map(str, range(len(prompts)))
        return [
            _Answer(prompt, tuple(steps[name]), finished[name])
            for name, prompt in zip(names, prompts, strict=True)
        ]

    def probes(self, answers: Sequence[_Answer]) -> list[_Answer]:
        """Return greedy answers to the shortest prompts of each category, up to the limit in `PROBES`."""
        groups = _by_category(sorted(answers, key=lambda one: len(one.prompt.ids)))
        rounds = itertools.zip_longest(*groups.values())
        chosen = [one for each in rounds for one in each if one is not None][: self._num_probes]
        if self._question.temperature == 0:
            return chosen
        return self._greedy("probe", [one.prompt for one in chosen])

    def _greedy(self, stage: str, prompts: Sequence[_FirstTurn]) -> list[_Answer]:
        return self.answer(stage, prompts, self._probe_tokens, 0.0)

    # ---- what steps cost

    def costs(self, prompt: _FirstTurn, overall: DrafterFit) -> tuple[Cost, ...]:
        """Return the cost of a step relative to width 1, at each width that the engine runs at full speed."""
        widths = {self.width}
        if self._llm.engine.models.device.type == "cpu":  # on a GPU other widths have no graph
            widths |= {width for width in (2, 4, 8, 16) if width < self.width}
        times_ms: dict[int, float] = {}
        for width in (1, *sorted(widths)):
            self._show("time", len(times_ms) / (1 + len(widths)), f"steps of width {width}")
            step_ms = self._step_ms(prompt.ids, width)
            if step_ms is None:
                return ()
            times_ms[width] = step_ms
        plain_ms, costs = times_ms.pop(1), []
        for width, step_ms in times_ms.items():
            committed = overall.committed
            if width < self.width:
                committed = 1 + sum(overall.by_position[: width - 1])
            break_even = step_ms / plain_ms
            costs.append(Cost(width, step_ms, break_even, committed, committed / break_even))
        return tuple(costs)

    def _step_ms(self, prompt_ids: list[int], width: int) -> float | None:
        """Return the median step time of one sequence, or None if the context is too short to measure it."""
        room = self.max_prompt - len(prompt_ids)
        max_tokens = min(TIMED_STEPS * width, room)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, width=width, ignore_eos=True)
        times = []
        before_s = time.perf_counter()
        for _ in self._llm.stream(prompt_ids, params) if max_tokens > 0 else ():
            now_s = time.perf_counter()
            times.append(now_s - before_s)
            before_s = now_s
            if len(times) == TIMED_STEPS:
                break
        steady = times[2:]  # the first steps include prefill and warm-up
        return 1000 * statistics.median(steady) if steady else None

    # ---- possible causes of a bad fit

    def diagnose(
        self, answers: Sequence[_Answer], *, is_low: bool
    ) -> tuple[SimulationAgreement | None, list[Tried]]:
        tokenizer, models = self._llm.tokenizer, self._llm.engine.models
        probes = [one for one in answers if one.metrics.num_tokens >= MIN_ANSWER]
        if not probes:
            return None, []
        steps = [one.first(self._probe_tokens) for one in probes]
        documents = [
            Document(tuple(one.prompt.ids), tuple(itertools.chain(*mine)), "probe", True)
            for one, mine in zip(probes, steps, strict=True)
        ]
        engine = fit_of_steps([[len(step) for step in mine] for mine in steps], self.width).committed
        assert self.config is not None
        assert models.block_drafter is not None
        suspects = list(variations(self.config, models.config, tokenizer, documents))
        taps = [tap for config in (self.config, *(one.config for one in suspects)) for tap in config.taps]
        self._show("read", None, f"{len(documents)} answers, for the target's features")
        probe = AcceptanceProbe(models.block_drafter, documents, taps)
        self._show("try", 0.0, "the drafter as it is")
        simulated = probe.walk(self.config, self.width).committed
        tried = []
        for number, one in enumerate(suspects, 1):
            self._show("try", number / (len(suspects) + 1), f"{one.name}: {one.what}")
            after = probe.walk(one.config, self.width).committed
            tried.append(Tried(one.name, one.what, simulated, after, one.advice, one.key, one.value))
        self._show("try", 1.0, f"{len(suspects)} changes")
        if is_low:
            tried += self._other_prompts([one.prompt for one in answers], engine)
        return SimulationAgreement(len(documents), engine, simulated), tried

    def _other_prompts(self, prompts: Sequence[_FirstTurn], engine: float) -> list[Tried]:
        """Try the prompt formats that the drafter may have been trained on.

        The target's answers change with the format, so the engine runs again.
        """
        tokenizer, tried = self._llm.tokenizer, []
        if not tokenizer.has_chat_template:
            return []
        conversations = [one.conversation for one in prompts]
        ways: dict[str, tuple[list[list[int]], str]] = {
            "chat template": (
                [encode_plain(tokenizer, one) for one in conversations],
                "ask without the chat template (/v1/completions), or train further with it",
            )
        }
        for flag in (False, True):
            ways[f"thinking {'on' if flag else 'off'}"] = (
                [tokenizer.encode_chat(one.messages(), enable_thinking=flag) for one in conversations],
                f'ask with chat_template_kwargs {{"enable_thinking": {str(flag).lower()}}}',
            )
        for name, (others, advice) in ways.items():
            usable = self._with_room(map(_FirstTurn, conversations, others))
            if others == [one.ids for one in prompts] or not usable:
                continue
            what = "gets raw prompts" if name == "chat template" else f"gets prompts with {name}"
            after = _fit_of(self._greedy(name, usable)).committed
            tried.append(Tried(name, what, engine, after, advice, needed=RAISES_ELSEWHERE))
        return tried

    def unquantised(self, answers: Sequence[_Answer], engine: float) -> Tried:
        """Answer the prompts with the target's weights as stored. Call this last: it replaces the engine."""
        self._llm.engine.drop_graphs()
        del self._llm
        release()
        self._llm = _load(self._question, "none", self._show)
        after = _fit_of(self._greedy("as stored", [one.prompt for one in answers])).committed
        advice = f"serve without --quantization {self.quantization}, or train further with it"
        what = f"has the target as stored, not in {self.quantization}"
        return Tried("quantised target", what, engine, after, advice, needed=RAISES_ELSEWHERE)


def _load(question: FitQuestion, quantization: str, show: Show) -> LLM:
    return LLM(
        question.target,
        question.drafter,
        report=lambda line: show("load", None, line),
        draft_ngram="auto" if question.draft_ngram is None else question.draft_ngram,
        width="auto" if question.width is None else question.width,
        device=question.device,
        dtype=question.dtype,
        quantization=quantization,
        prefix_cache=False,  # every answer must prefill its whole prompt
        gpu_memory_utilization=GPU_SHARE,
    )


def _by_category(answers: Sequence[_Answer]) -> dict[str, list[_Answer]]:
    groups: dict[str, list[_Answer]] = defaultdict(list)
    for one in answers:
        groups[one.prompt.conversation.category].append(one)
    return groups


def _fit_of(answers: Sequence[_Answer]) -> DrafterFit:
    return fit_of_metrics([one.metrics for one in answers])


def _untried(question: FitQuestion) -> tuple[str, ...]:
    """Return possible causes that only a test with another checkpoint could confirm."""
    checkpoint = open_checkpoint(question.target)
    try:
        found = read_quantization(checkpoint.config, checkpoint.quant_file, name=checkpoint.name)
        is_packed = any(checkpoint.ggml_type(name) is not None for name in checkpoint.tensors())
    finally:
        checkpoint.close()
    if found is None and not is_packed:
        return ()
    method = "GGUF" if found is None else found.name
    return (f"the target's file is quantised ({method}): ask again with the unquantised one to compare",)
