"""Asks a server every question in every way, and compares the answers with the baseline's.

The baseline sends one request at a time, not streamed, with drafts off if the server can switch them off.
Each request has its own salt, so that no prefix is reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from blockdraft.prove.asking import Asker, Form, Reply
from blockdraft.prove.findings import WayResult, first_difference, tie_at
from blockdraft.prove.questions import ProveQuestion

COMPANY = 16  # questions at a time
FEW = 5  # questions at a time in the reversed order
NUM_CHOICES = 3
OTHER_SEED = 7_777
MAX_ERRORS = 8  # failed answers in a row, after which the server counts as gone
WITH_DRAFTS = "with drafts"
NO_SWITCH = "the server cannot switch drafts off for a request: give --plain-url"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask all questions."""

    name: str
    form: Form = field(default_factory=Form)
    at_once: int = 1
    is_reversed: bool = False
    is_twice: bool = False  # send each prompt first, with the same salt


WAYS = (
    Way("again"),
    Way("in company", at_once=COMPANY),
    Way("in another order", at_once=FEW, is_reversed=True),
    Way("with a prefix hit", is_twice=True),
    Way("streamed", Form(is_streamed=True)),
    Way("with log-probabilities", Form(has_logprobs=True)),
)


class ProveWatcher:
    """Receives the progress; this base class ignores it."""

    def begin(self, way: str, num_questions: int) -> None:
        """Called when a way begins."""

    def step(self) -> None:
        """Called when a question was answered."""

    def end(self, finding: WayResult) -> None:
        """Called when a way has ended."""


class Gone(Exception):
    """The server does not answer any more."""


class Prover:
    """Asks one server. `plain` is the baseline's server, which may be a different one."""

    def __init__(
        self,
        questions: Sequence[ProveQuestion],
        asker: Asker,
        plain: Asker | None = None,
        *,
        declared: Mapping[str, float] | None = None,
        watcher: ProveWatcher | None = None,
    ) -> None:
        """Prepare to ask. `declared` has the sampling defaults that the server reports."""
        self.questions = questions
        self.asker = asker
        self.plain = plain or asker
        self.findings: list[WayResult] = []
        self._declared = dict(declared or {})
        self._watcher = watcher or ProveWatcher()
        self._baseline: dict[ProveQuestion, Reply] = {}
        self._with_logprobs: dict[ProveQuestion, Reply] = {}
        self._with_drafts: dict[ProveQuestion, Reply] = {}  # empty if the baseline has drafts, too
        self._ids: dict[str, None] = {}
        self._num_repeated_ids = 0
        self._num_errors = 0  # consecutive failed answers

    @property
    def can_switch(self) -> bool:
        return self.plain is not self.asker or self.asker.endpoint.can_switch

    async def run(self, restart: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ask in every way. `restart` restarts the server. Raises Gone if the server stops answering."""
        await self._learn_baseline()
        if not self.can_switch:
            self.findings.append(WayResult(WITH_DRAFTS, untested=NO_SWITCH))
        for way in self._ways():
            await self._way(way)
        await self._choices()
        await self._other_seed()
        await self._defaults()
        if restart is None:
            self.findings.append(WayResult("after a restart", untested="give --restart COMMAND"))
        else:
            await restart()
            await self._way(Way("after a restart"))
        self._repeated_ids()

    def _ways(self) -> Iterator[Way]:
        first, *others = WAYS
        if not self.can_switch:
            yield from WAYS
            return
        yield replace(first, name="again, without drafts", form=Form(has_drafts=False))
        yield replace(first, name=WITH_DRAFTS)
        yield from others

    # ---- asking

    async def _learn_baseline(self) -> None:
        form = Form(has_drafts=False) if self.can_switch else Form()
        self._baseline = await self._ask_all("the baseline: alone", self.questions, form, asker=self.plain)
        errors = {reply.error for reply in self._baseline.values() if reply.error is not None}
        if len(errors) == 1 and all(reply.error for reply in self._baseline.values()):
            raise Gone(f"no question was answered: {errors.pop()}")

    async def _ask_all(
        self,
        name: str,
        questions: Sequence[ProveQuestion],
        form: Form,
        *,
        at_once: int = 1,
        asker: Asker | None = None,
    ) -> dict[ProveQuestion, Reply]:
        self._watcher.begin(name, len(questions))
        queue, replies = iter(questions), dict[ProveQuestion, Reply]()
        asker = asker or (self.asker if form.has_drafts else self.plain)

        async def work() -> None:
            for question in queue:
                its_form = form if form.salt is None else replace(form, salt=f"{form.salt}-{question.number}")
                replies[question] = reply = await asker.ask(question, its_form)
                self._note(reply)
                self._watcher.step()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(at_once, len(questions))):
                tasks.create_task(work())
        if self._num_errors >= max(MAX_ERRORS, at_once):
            last = next(reply.error for reply in reversed(replies.values()) if reply.error is not None)
            raise Gone(f"{self._num_errors} answers in a row failed, the last one with: {last}")
        return replies

    def _note(self, reply: Reply) -> None:
        self._num_errors = 0 if reply.error is None else self._num_errors + 1
        if reply.id is not None:
            self._num_repeated_ids += reply.id in self._ids
            self._ids[reply.id] = None

    # ---- the ways

    async def _way(self, way: Way) -> None:
        questions = list(self.questions)[:: -1 if way.is_reversed else 1]
        form = way.form
        if way.is_twice:
            form = replace(form, salt=f"hit-{id(self)}")
            # Alone, as the baseline: prompts computed in company may have other values.
            prompts = [replace(question, max_tokens=1) for question in questions]
            await self._ask_all(f"{way.name}: before", prompts, form)
        replies = await self._ask_all(way.name, questions, form, at_once=way.at_once)
        if form.has_logprobs:
            self._with_logprobs = replies
            self._add_ties()
        finding = WayResult(way.name)
        for question in self.questions:
            self._compare(finding, question, self._baseline[question], replies[question])
        if way.is_twice:
            self._note_hits(finding, [reply.num_cached for reply in replies.values() if reply.error is None])
        if way.name == WITH_DRAFTS:
            self._with_drafts = replies
        self._end(finding)

    def _add_ties(self) -> None:
        """Add to the differences of earlier ways how close the likeliest tokens were."""
        for question, reply in self._with_logprobs.items():
            expected = _text(self._baseline[question])
            if expected is None or not reply.choices:
                continue
            tokens = reply.choices[0].tokens
            for finding in self.findings:
                counts = finding.counts(is_seeded=question.is_seeded)
                for place, one in enumerate(counts.differences):
                    if one.question == question.number:
                        counts.differences[place] = replace(one, tie=tie_at(expected, one.at, tokens))

    def _note_hits(self, finding: WayResult, nums_cached: Sequence[int | None]) -> None:
        """Note how many prompts were in the prefix cache. vLLM reports it only if started with a flag."""
        num_found = sum(bool(num_cached) for num_cached in nums_cached)
        if not self.asker.endpoint.switches.keeps_caches_out:
            finding.note = "the server has no cache salt, so other ways may have had prefix hits, too"
        elif 0 < num_found < len(nums_cached):
            finding.note = f"the server found {num_found} of {len(nums_cached)} prompts in its prefix cache"
        elif nums_cached and not num_found and None in nums_cached:
            finding.note = "the server does not say whether it found a prefix"
        if nums_cached and all(num_cached == 0 for num_cached in nums_cached):
            finding.untested = "the server found no prefix"

    def _compare(
        self, finding: WayResult, question: ProveQuestion, expected: Reply, reply: Reply, *, index: int = 0
    ) -> None:
        counts = finding.counts(is_seeded=question.is_seeded)
        error = expected.error or reply.error
        if error is not None:
            counts.errors.append(error)
            return
        known = self._with_logprobs.get(question, Reply()).choices
        found = reply.choices[min(index, len(reply.choices) - 1)]
        difference = first_difference(
            question.number,
            question.prompt,
            expected.choices[min(index, len(expected.choices) - 1)],
            found,
            known[0].tokens if known else (),
        )
        counts.add(difference)
        if difference is not None and expected is self._baseline[question]:
            drafted = self._with_drafts.get(question, Reply())
            finding.num_as_drafted += found.text == _text(drafted)

    async def _choices(self) -> None:
        """Check that greedy choices equal the baseline, and that seeded choices are equal every time."""
        finding = WayResult(f"with n = {NUM_CHOICES}")
        form = Form(num_choices=NUM_CHOICES)
        first = await self._ask_all(finding.way, self.questions, form)
        seeded = [question for question in self.questions if question.is_seeded]
        again = await self._ask_all(f"{finding.way}, in company", seeded, form, at_once=COMPANY)
        greedy_errors = [reply.error for question, reply in first.items() if not question.is_seeded]
        if all(error is not None and error.startswith("HTTP 400") for error in greedy_errors):
            finding.note = f"not asked at T 0: {greedy_errors[0]}"  # vLLM refuses it
            first = {question: reply for question, reply in first.items() if question.is_seeded}
        for question, reply in first.items():
            if reply.error is None and len(reply.choices) != NUM_CHOICES:
                finding.untested = f"the server gives {len(reply.choices)} choices"
                break
            for index in range(NUM_CHOICES):
                if question.is_seeded:
                    self._compare(finding, question, reply, again[question], index=index)
                else:
                    self._compare(finding, question, self._baseline[question], reply, index=index)
        self._end(finding)

    async def _other_seed(self) -> None:
        """Check that another seed gives different answers; otherwise seeds have no effect."""
        seeded = [question for question in self.questions if question.is_seeded]
        replies = await self._ask_all(
            "with another seed", seeded, Form(seed_step=OTHER_SEED), at_once=COMPANY
        )
        finding = WayResult("with another seed")
        texts = [(_text(self._baseline[one]), _text(replies[one])) for one in seeded]
        told = [(old, new) for old, new in texts if old is not None and new is not None]
        num_other = sum(old != new for old, new in told)
        finding.seeded.errors = [reply.error for reply in replies.values() if reply.error is not None]
        finding.note = f"{num_other} of {len(told)} answers are others, as they should be"
        if told and not num_other:
            finding.problem = "every seed gives the same answers: seeds, or the temperature, are ignored"
            finding.note = None
        self._end(finding, len(told))

    async def _defaults(self) -> None:
        """Check that omitted sampling fields mean the server's declared defaults, else OpenAI's defaults."""
        finding = WayResult("with defaults left out")
        seeded = [question for question in self.questions if question.is_seeded]
        said = {"temperature": 1.0, "top_p": 1.0, **self._declared}
        left_out = await self._ask_all(finding.way, seeded, Form(said={}), at_once=COMPANY)
        spoken = await self._ask_all(f"{finding.way}: said", seeded, Form(said=said), at_once=COMPANY)
        # In company, answers may differ for another reason: ask these questions again, each alone.
        unlike = [one for one in seeded if _is_different(left_out[one], spoken[one])]
        if unlike:
            left_out |= await self._ask_all(f"{finding.way}: alone", unlike, Form(said={}))
            spoken |= await self._ask_all(f"{finding.way}: said, alone", unlike, Form(said=said))
        for question in seeded:
            self._compare(finding, question, spoken[question], left_out[question])
        shown = ", ".join(f"{name} {value:g}" for name, value in said.items())
        if self._declared:
            finding.note = f"the server declares {shown}"
        elif finding.differences:
            finding.note = (
                f"a request without sampling fields is not answered with {shown}: the server takes other "
                "defaults, perhaps from generation_config.json"
            )
        self._end(finding)

    def _repeated_ids(self) -> None:
        finding = WayResult("every answer is new")
        if not self._ids:
            finding.untested = "the server gives its answers no ids"
        elif self._num_repeated_ids:
            finding.problem = (
                f"{self._num_repeated_ids} answers have the id of an earlier one: something between you and "
                "the model keeps answers, so this test says nothing about the model"
            )
        self.findings.append(finding)

    def _end(self, finding: WayResult, num_answered: int | None = None) -> None:
        """End a way. `num_answered`: its answered requests, if it compares none of them."""
        if num_answered is None:
            num_answered = finding.greedy.num_answered + finding.seeded.num_answered
        if finding.errors and not num_answered:
            finding.untested = f"every request failed: {finding.errors[0]}"
        self.findings.append(finding)
        self._watcher.end(finding)


def _is_different(one: Reply, other: Reply) -> bool:
    return one.error is None and other.error is None and one.choices != other.choices


def _text(reply: Reply) -> str | None:
    return reply.choices[0].text if reply.choices else None
