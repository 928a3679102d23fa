"""The keys of an MTP head survive everything the scheduler does: its drafts are those of the whole text.

The key at a position depends on the token after it. So the last key of a page is another one if two texts
part at the page's end: others ship the wrong one, and only the acceptance shows it.
"""

from dataclasses import replace

import pytest

from blockdraft.engine.request import SamplingParams
from tests.lossless import families
from tests.matrix import slow_but
from tests.models.checkpoints import load_pair
from tests.models.families import FULL, widen
from tests.models.mtp import assert_drafts_of_reference, write_mtp_target

PAGE = 4
PROMPT = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25]  # three pages
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


LAYERS = ("all layers attend", "states")
PLANS = ({}, {"prefix_cache": False}, {"max_prefill_tokens": 3}, {"page_size": 1})


@pytest.fixture(scope="module", params=LAYERS)
def served(request, tmp_path_factory):
    """A head in transformers, and the pair; without states any page can be shared."""
    changes = {} if request.param == "states" else {"layer_types": [FULL] * 4}
    with pytest.MonkeyPatch.context() as monkeypatch:
        widen(monkeypatch)
        folder = tmp_path_factory.mktemp("target")
        hf, head = write_mtp_target(folder, "qwen3_5-mrope", **changes)
        pair = load_pair(folder, "mtp", dtype="float64", max_model_len=100, max_num_seqs=3)
        hf.double()
        yield head.double(), pair


class Served:
    """An engine whose drafts are compared with the reference's after every step."""

    def __init__(self, served, monkeypatch, **plan):
        self.head, pair = served
        self.monkeypatch = monkeypatch
        plan = {"page_size": PAGE, "width": 5, "prefix_cache": True, **plan}
        self.engine = families.engine(pair, **plan)

    def finds(self, num_pages, prompt):
        """Serve a prompt of which so many pages are known; with states, the last saved state counts."""
        [found] = self.serve(prompt)
        states = self.engine.scheduler.states
        if states is None:
            assert found == num_pages * PAGE
        else:
            assert found == num_pages * PAGE // states.grid * states.grid

    def serve(self, *prompts, disturb=lambda engine: None, **params):
        """Serve prompts together; returns how many of each one's tokens were found in the cache."""
        for prompt in prompts:
            self.engine.add(prompt, replace(PARAMS, **params))
        found, num_compared = [], 0
        while self.engine.has_work:
            deltas = self.engine.step()
            found += [one.metrics.num_cached_tokens for one in deltas if one.metrics is not None]
            num_compared += assert_drafts_of_reference(self.engine, self.head, self.monkeypatch)
            disturb(self.engine)
        assert num_compared > 2
        return found


def test_texts_that_part_at_a_page_s_end_do_not_share_that_page(served, monkeypatch):
    one = Served(served, monkeypatch)
    one.finds(0, [*PROMPT, 40, 41, 42])
    one.finds(2, [*PROMPT, 50, 51, 52])
    for prompt in ([*PROMPT, 40, 60], [*PROMPT, 50, 60]):
        one.finds(3, prompt)


def test_the_last_known_token_is_computed_although_its_page_is_known(served, monkeypatch):
    one = Served(served, monkeypatch)
    one.finds(0, [*PROMPT, 40])
    one.finds(2, [*PROMPT, 40])
    one.finds(3, [*PROMPT, 40, 41])


def test_choices_of_a_request_share_its_prompt(served, monkeypatch):
    one = Served(served, monkeypatch)
    one.serve([*PROMPT, 40, 41], n=3, temperature=1.0, seed=5)


@pytest.mark.parametrize(
    ("served", "plan"),
    slow_but([(layers, plan) for layers in LAYERS for plan in PLANS], *zip(LAYERS, PLANS[1:3], strict=True)),
    ids=str,
    indirect=["served"],
)
def test_a_preempted_sequence_drafts_as_before(served, monkeypatch, plan):
    steps = []

    def preempt(engine):
        steps.append(1)
        running = engine.scheduler.running
        if len(steps) in (2, 4) and running:
            engine.scheduler._preempt(running[0])

    one = Served(served, monkeypatch, **plan)
    one.serve([*PROMPT, 40], max_tokens=30, disturb=preempt)
    assert one.engine.scheduler.num_preemptions == 2


def test_the_next_turn_of_a_conversation_finds_the_answer(served, monkeypatch):
    one = Served(served, monkeypatch)
    (_, deltas) = families.tiny.watched_run(one.engine, [(PROMPT[:7], PARAMS)])
    turn = PROMPT[:7] + [token for delta in deltas for token in delta.token_ids]
    one.finds(len(turn) // PAGE, [*turn, 60, 61])


def test_rows_of_width_1_leave_the_keys_of_their_tokens(served, monkeypatch):
    one = Served(served, monkeypatch)
    one.serve([*PROMPT, 40], [*PROMPT[:5]], width=1, temperature=1.0)
