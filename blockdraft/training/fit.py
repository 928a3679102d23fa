"""Does a drafter fit a target and a workload? What it commits, and what it would commit otherwise.

The numbers are the engine's own. The suspects of a low one are then tried on greedy answers without the
engine (training/probe.py); the same answers, tried with nothing changed, must give the engine's number.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.engine.memory import release
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.tokenizer import Tokenizer
from blockdraft.errors import SettingsError
from blockdraft.llm import LLM, Result
from blockdraft.models.checkpoint import open_checkpoint
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.quantization import read_quantization
from blockdraft.training.answers import Conversation, Document, read_conversations
from blockdraft.training.evaluate import Fit
from blockdraft.training.fit_report import (
    LOW,
    RAISES_ELSEWHERE,
    Agreement,
    Cost,
    Question,
    Report,
    Tried,
    likely,
    prospect_of,
)
from blockdraft.training.packing import MIN_ANSWER
from blockdraft.training.probe import Probe
from blockdraft.training.variations import variations

# Greedy answers on which the suspects are tried, and their tokens: on two CPU cores a trial of a 135M target
# takes some 15 s.
PROBES = {"cpu": (6, 64), "cuda": (16, 128)}
TIMED_STEPS = 16
GPU_SHARE = 0.8  # of the GPU's memory for the engine: the trials need some beside it

Say = Callable[[str], None]


def fit(question: Question, say: Say = lambda line: None) -> Report:
    """Measure, and find out why where it is low."""
    conversations = _chosen(read_conversations(question.prompts), question.limit)
    session = _Session(question, say)
    usable = [one for one in conversations if session.has_room(one)]
    if not usable:
        raise SettingsError(
            f"every prompt of '{question.prompts}' is longer than the context of {session.max_prompt} tokens."
        )
    say(f"answering {len(usable)} prompts")
    overall, categories = session.measure(usable)
    costs = session.costs(usable[0], overall)
    agreement, tried = None, list[Tried]()
    if not question.is_quick:
        probes = session.probes(usable)
        agreement, tried = session.diagnose(probes, is_low=overall.committed < LOW)
        if agreement is not None and session.is_quantised_here:
            tried.append(session.unquantised(probes, agreement.engine))
    untried = () if question.is_quick else _untried(question)
    prospect = None
    if likely(tried) is None and min(one.committed for one in categories.values()) < LOW:
        greedy = agreement.engine if agreement is not None and question.temperature > 0 else None
        prospect = prospect_of(question, session.config, categories, costs, overall, greedy)
    return Report(
        question=question,
        width=session.width,
        dtype=session.dtype,
        num_left_out=len(conversations) - len(usable),
        categories=categories,
        overall=overall,
        costs=costs,
        agreement=agreement,
        tried=tuple(tried),
        untried=untried,
        prospect=prospect,
    )


# ---- prompts


def _chosen(conversations: Iterable[Conversation], limit: int) -> list[Conversation]:
    """The first `limit` of each category."""
    seen: dict[str, int] = defaultdict(int)
    chosen = []
    for one in conversations:
        seen[one.category] += 1
        if seen[one.category] <= limit:
            chosen.append(one)
    return chosen


def _spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """`count` of them, of as many categories as there are."""
    groups: dict[str, list[Conversation]] = defaultdict(list)
    for one in conversations:
        groups[one.category].append(one)
    rounds = itertools.zip_longest(*groups.values())
    return [one for each in rounds for one in each if one is not None][:count]


def _messages(one: Conversation) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "user", "content": one.turns[0]}]
    if one.system is not None:
        messages.insert(0, {"role": "system", "content": one.system})
    return messages


def _raw_ids(tokenizer: Tokenizer, one: Conversation) -> list[int]:
    return tokenizer.encode("\n".join(text for text in (one.system, one.turns[0]) if text is not None))


def _prompt_ids(tokenizer: Tokenizer, one: Conversation) -> list[int]:
    """The first turn, through the chat template where there is one."""
    if not tokenizer.has_chat_template:
        return _raw_ids(tokenizer, one)
    return tokenizer.encode_chat(_messages(one))


# ---- the engine


class _Session:
    """The pair in an engine, and everything that is measured with it."""

    def __init__(self, question: Question, say: Say) -> None:
        self._question, self._say = question, say
        self._llm = _load(question, question.quantization, say)
        models = self._llm.engine.models
        assert models.draft_config is not None
        assert isinstance(models.drafter, DFlashDrafter)
        self.config: DraftConfig = models.draft_config
        self.width = question.width or self.config.block
        self.dtype = models.plan.dtype
        self._num_probes, max_tokens = PROBES[models.device.type]
        self._probe_tokens = min(max_tokens, question.max_tokens)
        # Room for one token at least: shorter answers than asked for are answers, too.
        self.max_prompt = models.plan.max_context - 1

    def has_room(self, one: Conversation) -> bool:
        return 1 <= len(_prompt_ids(self._llm.tokenizer, one)) <= self.max_prompt

    def probes(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Some of each category; short ones, which are read in every trial."""
        tokenizer = self._llm.tokenizer
        ordered = sorted(conversations, key=lambda one: len(_prompt_ids(tokenizer, one)))
        return _spread(ordered, self._num_probes)

    def measure(self, conversations: Sequence[Conversation]) -> tuple[Fit, dict[str, Fit]]:
        question = self._question
        prompts = [_prompt_ids(self._llm.tokenizer, one) for one in conversations]
        results = self._answer(prompts, question.max_tokens, question.temperature)
        groups: dict[str, list[Result]] = defaultdict(list)
        for one, result in zip(conversations, results, strict=True):
            groups[one.category].append(result)
        categories = {name: _fit_of(groups[name]) for name in sorted(groups)}
        return _fit_of(results), categories

    def _answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> list[Result]:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, width=self.width)
        return self._llm.generate([list(ids) for ids in prompts], params)

    # ---- what steps cost

    def costs(self, one: Conversation, overall: Fit) -> tuple[Cost, ...]:
        """Of width 1, and of each width that the engine runs at full speed."""
        prompt_ids = _prompt_ids(self._llm.tokenizer, one)
        widths = {self.width}
        if self._llm.engine.models.device.type == "cpu":  # on a GPU other widths have no graph
            widths |= {width for width in (2, 4, 8, 16) if width < self.width}
        self._say(f"timing steps of width 1 and {', '.join(map(str, sorted(widths)))}")
        plain_ms = self._step_ms(prompt_ids, 1)
        if plain_ms is None:
            return ()
        costs = []
        for width in sorted(widths):
            step_ms = self._step_ms(prompt_ids, width)
            if step_ms is None:
                return ()
            committed = overall.committed
            if width < self.width:
                committed = 1 + sum(overall.by_position[: width - 1])
            break_even = step_ms / plain_ms
            costs.append(Cost(width, step_ms, break_even, committed, committed / break_even))
        return tuple(costs)

    def _step_ms(self, prompt_ids: list[int], width: int) -> float | None:
        """The median step of one stream; None where there is no room for enough steps."""
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
        steady = times[2:]  # the first ones read the prompt and warm up
        return 1000 * statistics.median(steady) if steady else None

    # ---- why it is low

    def diagnose(
        self, conversations: Sequence[Conversation], *, is_low: bool
    ) -> tuple[Agreement | None, list[Tried]]:
        tokenizer, models = self._llm.tokenizer, self._llm.engine.models
        prompts = [_prompt_ids(tokenizer, one) for one in conversations]
        results = self._answer(prompts, self._probe_tokens, 0.0)
        results = [one for one in results if len(one.token_ids) >= MIN_ANSWER]
        if not results:
            return None, []
        documents = [Document(one.prompt_token_ids, one.token_ids, "probe", True) for one in results]
        engine = _fit_of(results).committed
        drafter = models.drafter
        assert isinstance(drafter, DFlashDrafter)
        suspects = list(variations(self.config, models.config, tokenizer, documents))
        taps = [tap for config in (self.config, *(one.config for one in suspects)) for tap in config.taps]
        probe = Probe(drafter, documents, taps)
        simulated = probe.walk(self.config, self.width).committed
        tried = []
        for one in suspects:
            self._say(f"trying {one.name}: {one.what}")
            after = probe.walk(one.config, self.width).committed
            tried.append(Tried(one.name, one.what, simulated, after, one.advice, one.key, one.value))
        if is_low:
            tried += self._other_prompts(conversations, prompts, engine)
        return Agreement(len(documents), engine, simulated), tried

    def _other_prompts(
        self, conversations: Sequence[Conversation], prompts: Sequence[list[int]], engine: float
    ) -> list[Tried]:
        """The same questions as the drafter may have learnt them. The answers differ: the engine runs."""
        tokenizer, tried = self._llm.tokenizer, []
        if not tokenizer.has_chat_template:
            return []
        ways: dict[str, tuple[list[list[int]], str]] = {
            "chat template": (
                [_raw_ids(tokenizer, one) for one in conversations],
                "ask without the chat template (/v1/completions), or train further with it",
            )
        }
        for flag in (False, True):
            ways[f"thinking {'on' if flag else 'off'}"] = (
                [tokenizer.encode_chat(_messages(one), enable_thinking=flag) for one in conversations],
                f'ask with chat_template_kwargs {{"enable_thinking": {str(flag).lower()}}}',
            )
        for name, (others, advice) in ways.items():
            usable = [ids for ids in others if 1 <= len(ids) <= self.max_prompt]
            if others == list(prompts) or not usable:
                continue
            what = "gets raw prompts" if name == "chat template" else f"gets prompts with {name}"
            self._say(f"trying {name}: {what}")
            after = _fit_of(self._answer(usable, self._probe_tokens, 0.0)).committed
            tried.append(Tried(name, what, engine, after, advice, needed=RAISES_ELSEWHERE))
        return tried

    @property
    def is_quantised_here(self) -> bool:
        return self._llm.engine.models.plan.quantization in ("fp8", "int8")

    def unquantised(self, conversations: Sequence[Conversation], engine: float) -> Tried:
        """The same prompts without it. Comes last: the engine makes room for another."""
        quantization = self._llm.engine.models.plan.quantization
        prompts = [_prompt_ids(self._llm.tokenizer, one) for one in conversations]
        self._say(f"trying the target without --quantization {quantization}")
        self._llm.engine.graphs = None  # they hold the engine, and with it the cache
        del self._llm
        release()
        self._llm = _load(self._question, "none", self._say)
        after = _fit_of(self._answer(prompts, self._probe_tokens, 0.0)).committed
        advice = f"serve without --quantization {quantization}, or train further with it"
        what = f"has the target as stored, not in {quantization}"
        return Tried("quantised target", what, engine, after, advice, needed=RAISES_ELSEWHERE)


def _load(question: Question, quantization: str, say: Say) -> LLM:
    return LLM(
        question.target,
        question.drafter,
        report=say,
        width="auto" if question.width is None else question.width,
        device=question.device,
        dtype=question.dtype,
        quantization=quantization,
        prefix_cache=False,  # each answer is to be measured from its own prompt
        gpu_memory_utilization=GPU_SHARE,
    )


def _fit_of(results: Sequence[Result]) -> Fit:
    """The engine's counters of these answers together."""
    metrics = [result.metrics for result in results]
    positions = itertools.zip_longest(*(one.accepted for one in metrics), fillvalue=0)
    return Fit(
        num_documents=len(metrics),
        num_tokens=sum(one.num_tokens for one in metrics),
        num_steps=sum(one.steps for one in metrics),
        accepted=tuple(sum(each) for each in positions),
    )


def _untried(question: Question) -> tuple[str, ...]:
    """What only another checkpoint could show."""
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
