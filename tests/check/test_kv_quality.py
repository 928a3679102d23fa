"""What compressed keys do to a model: the fast attention, what is counted, needles, and verdicts."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from blockdraft.cache.spec import Paged
from blockdraft.check import kv_study, kv_texts
from blockdraft.check.kv_quality import (
    Loss,
    LossTally,
    attend_mixed,
    depths,
    exact_arm,
    formats_for,
    hidden_states,
    loss_of,
    of_format,
)
from blockdraft.check.kv_study import Needles, instead_of, sentence, verdict_of
from blockdraft.check.uncached_view import WholeView
from blockdraft.errors import ModelError, SettingsError
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_codec import FORMATS
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels.dense_compressed import reference_attend_compressed

VOCAB, LENGTH, HEAD = 40, 700, 16
CPU = torch.device("cpu")


class Target:
    """One layer of attention, random, over an embedding that is the head, too."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, 2 * HEAD, generator=generator)

    def __call__(self, tokens, view):
        x = self.embedding[tokens]
        q, k, v = x.view(-1, 2, HEAD), x[:, None, :HEAD], x[:, None, HEAD:]
        read = view.attend(0, q, k, v, Mask(scale=0.25), angles=None)
        return read.reshape(len(tokens), -1) + x, x[:, :0]

    def logits(self, hidden):
        return hidden @ self.embedding.T


def models_of(head_dim=HEAD):
    return SimpleNamespace(
        config=SimpleNamespace(name="fake", layer_specs=lambda: (Paged(1, head_dim),)),
        draft_config=None,
        device=CPU,
        target=Target(),
        dtype="float32",
    )


def text_of(seed):
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- attention


@pytest.mark.parametrize("rule", [PositionRule(), PositionRule(96), PositionRule(64)])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("length", [64, 513, 1100])
def test_many_groups_at_a_time_are_what_the_reference_says(rule, window, length):
    generator = torch.Generator().manual_seed(length)
    q, *stores = (
        torch.randn(length, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 2, 2)
    )
    exact, cold, mask = (stores[0], stores[1]), (stores[2], stores[3]), Mask(scale=0.3, window=window)
    expected = reference_attend_compressed(q, exact, cold, rule, mask)
    torch.testing.assert_close(attend_mixed(q, exact, cold, rule, mask), expected)


def test_a_sink_takes_its_share_as_in_the_oracle():
    q, k, v = (torch.randn(300, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    sinks, mask = torch.randn(4, dtype=torch.float64), Mask(scale=0.3)
    view = WholeView((Paged(2, 16),), count=300, device=CPU)
    expected = view.attend(0, q, k, v, mask, angles=None, sinks=sinks)
    torch.testing.assert_close(attend_mixed(q, (k, v), (k, v), PositionRule(), mask, sinks), expected)


# ---- what is counted


def test_exact_keys_lose_nothing_and_fewer_bits_lose_more(monkeypatch):
    monkeypatch.setattr(kv_study, "served_centres", lambda *_: {0: torch.zeros(1, HEAD)})
    formats = [FORMATS["int8"], FORMATS["tq4"], FORMATS["tq4v3"]]
    report = kv_study.study(
        models_of(),
        SimpleNamespace(max_model_len=LENGTH),
        formats,
        [text_of(0), text_of(1)],
        begin=350,
        num_needles=0,
        num_answers=4,
        note=lambda line: None,
    )
    assert report.committed is report.formats[0].committed is None  # nobody drafts
    int8, tq4, tq4v3 = report.formats
    assert report.num_tokens == 700
    assert report.exact_bytes == 2 * 4 * HEAD
    assert [one.num_bytes for one in report.formats] == [
        2 * HEAD + 4,
        HEAD + 4,
        HEAD // 2 + HEAD // 8 * 3 + 4,
    ]
    assert 0 < int8.loss.divergence < tq4.loss.divergence < tq4v3.loss.divergence
    assert report.depths == ((350, 512), (512, 700))
    both = [2 * 162 * tq4.by_depth[0].divergence, 2 * 188 * tq4.by_depth[1].divergence]
    assert sum(both) / 700 == pytest.approx(tq4.loss.divergence)


def test_before_the_window_is_left_nothing_changes():
    models, arm = models_of(), of_format(FORMATS["tq4v3"])
    exact, found = (hidden_states(models, text_of(0), one) for one in (exact_arm(4), arm))
    is_other = (exact - found).abs().amax(dim=1) > 1e-5
    assert not is_other[:256].any()
    assert is_other[256:].any()


def test_a_centre_that_keys_have_in_common_helps():
    models = models_of()
    models.target.embedding[:, :HEAD] += 20
    means = {0: models.target.embedding[:, :HEAD].mean(dim=0)[None]}
    plain, centred = (of_format(FORMATS["tq4"], centres=one) for one in (None, means))
    exact, *found = (hidden_states(models, text_of(0), one) for one in (exact_arm(4), plain, centred))
    loss = [(exact - one).square().mean() for one in found]
    assert loss[1] < loss[0] / 2


def test_a_loss_has_the_error_of_its_blocks():
    base = LossTally(10, [torch.zeros(128)], [torch.zeros(128)], [torch.ones(128)])
    change = torch.cat((torch.full((64,), 0.02), torch.full((64,), 0.04)))
    loss = loss_of(LossTally(10, [change], [change], [torch.ones(128)]), base)
    assert loss.perplexity_percent == pytest.approx(3.0455, abs=1e-3)
    assert loss.error_percent == pytest.approx(1.0, rel=1e-3)
    assert loss_of(base, base, 74).num_tokens == 64


def test_depths_double():
    assert depths(512, 4096) == [(512, 1024), (1024, 2048), (2048, 4096)]
    assert depths(300, 600) == [(300, 512), (512, 600)]


# ---- texts and needles


def encode(text):
    return [ord(letter) % VOCAB for letter in text]


def test_the_shipped_text_reaches_any_depth_the_same_way_each_time():
    first, second = itertools.islice(kv_texts.built_in(encode, 20_000), 2)
    assert len(first) == len(second) == 20_000
    assert first != second
    assert first == next(kv_texts.built_in(encode, 20_000))


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(SettingsError, match=r"No text of F has 9 tokens; the longest has 3"):
        kv_texts.long_enough([[1, 2, 3]], 9, "F")
    with pytest.raises(SettingsError, match="nothing is compressed long enough"):
        kv_texts.begin_of(300)


def test_needles_are_compressed_when_they_are_asked_for_and_counted():
    text = kv_texts.hide(list(range(VOCAB)), encode, length=2400, count=10, seed=3)
    assert len(text.tokens) <= 2400
    questions = text.answers[0][0]
    for begin, end in text.answers:
        answer = text.tokens[begin:end]
        places = [i for i in range(questions - 10) if text.tokens[i : i + len(answer)] == answer]
        assert places, "an answer is in the text"
        assert min(places) >= 64
        assert max(places) + len(answer) <= PositionRule().compressed_end_at(questions - 40)
    written = torch.tensor([*text.tokens[1:], 0])
    assert kv_texts.found(text, lambda tokens: written) == [True] * 10
    written[text.answers[4][1] - 2] += 1  # the last token of the fifth answer
    assert kv_texts.found(text, lambda tokens: written) == [i != 4 for i in range(10)]


def test_needles_need_room():
    with pytest.raises(SettingsError, match=r"10 needles need a text of \d+ tokens, not 500"):
        kv_texts.hide([1], encode, length=500, count=10, seed=0)


# ---- verdicts


def loss(same=99.0, change=0.0, error=0.1):
    return Loss(1000, same, 10.0, change, error, 1.0, 5.0)


@pytest.mark.parametrize(
    ("found", "needles", "verdict"),
    [
        (loss(), None, "use"),
        (loss(), Needles(20, 15, 14, 14), "use"),
        (loss(), Needles(20, 15, 12, 12), "care"),
        (loss(), Needles(20, 15, 5, 5), "harms"),
        (loss(), Needles(20, 5, 1, 1), "use"),  # too few to say
        (loss(same=94), None, "care"),
        (loss(same=80), None, "harms"),
        (loss(change=2), None, "care"),
        (loss(change=9), None, "harms"),
        (loss(change=9, error=4), None, "unknown"),
        (loss(change=40, error=4), None, "harms"),
    ],
)
def test_verdicts_follow_from_limits(found, needles, verdict):
    assert verdict_of(found, needles) == verdict


def test_a_format_that_harms_names_the_smallest_that_does_not():
    verdicts = {"int8": "use", "tq4": "harms", "tq4v3": "harms"}
    instead = instead_of(verdicts, {"int8": 20, "tq4": 10, "tq4v3": 9})
    assert sentence("tq4", loss(80, 9), None, "harms", instead).endswith("harms this model: use int8.")
    assert instead_of({"tq4": "harms"}, {"tq4": 10}) is None
    assert sentence("tq4", loss(80, 9), None, "harms", None).endswith("keep exact ones.")


def test_heads_that_cannot_be_rotated_leave_eight_bits():
    found, refused = formats_for(models_of(head_dim=12), None)
    assert [one.name for one in found] == ["int8"]
    assert refused == ["tq4", "tq4v3"]
    with pytest.raises(ModelError, match="Heads of 12 values cannot be rotated"):
        formats_for(models_of(head_dim=12), ["tq4"])
