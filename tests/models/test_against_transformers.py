"""Targets against transformers on the same tiny weights: all logits, greedy text, tapped layers."""

import functools
import json
import os
import random
import secrets
from dataclasses import replace

import pytest
import torch

from blockdraft.checkpoints.folder_checkpoint import FolderCheckpoint
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.start.loading import load_target
from tests.fixtures import make_pair
from tests.lossless.families import NAMES
from tests.matrix import slow_but
from tests.models.checkpoints import CPU, bench_of, cut, load_pair, write_target
from tests.models.families import CASES, HYBRIDS, config_of, draw, widen

one_of_each_family = pytest.mark.parametrize(
    "case", slow_but(list(CASES), *NAMES), indirect=True, scope="module"
)


class Case:
    """One configuration in both implementations."""

    def __init__(self, name, folder):
        family, overrides = CASES[name]
        self.seed = int(os.environ.get("TEST_SEED", secrets.randbits(32))) if overrides is None else 1
        if overrides is None:
            overrides = draw(family, random.Random(self.seed))
        self.folder = folder
        # Of the largest logit. Delta layers divide by the size of what they read, which may be tiny, and
        # Gemma's norms after each part do the same: rounding in another order is seen up to 2e-4 there.
        self.rounding = {"gemma4": 1e-4}.get(family, 5e-4 if family in HYBRIDS else 2e-5)
        self.wide_rounding = 2e-5 if family in HYBRIDS else 1e-5
        self.hf = write_target(folder, config_of(name, overrides), self.seed)
        if "max_window_layers" in overrides:  # as older files say it, without layer_types
            file = folder / "config.json"
            raw = json.loads(file.read_text())
            del raw["layer_types"]
            file.write_text(json.dumps(raw))
        self.label = f"{name}, TEST_SEED={self.seed}, {overrides}"
        self.generator = torch.Generator().manual_seed(self.seed)

    @functools.cache  # noqa: B019 - lives as long as the module's fixture
    def loaded(self, dtype):
        """Models and plan."""
        name = str(dtype).removeprefix("torch.")
        return load_pair(
            self.folder, dtype=name, max_model_len=400, page_size=3, max_prefill_tokens=7, max_num_seqs=2
        )

    def tokens(self, length):
        return torch.randint(0, self.hf.config.vocab_size, (length,), generator=self.generator)

    @torch.no_grad()
    def expected(self, sequences, dtype):
        model = self.hf.to(dtype)
        return [model(ids[None]).logits[0] for ids in sequences]

    def logits(self, sequences, chunks, dtype, page_size):
        models, _ = self.loaded(dtype)
        bench = bench_of(models, len(sequences), max(map(len, sequences)), page_size)
        return bench.prefill(models.target, sequences, chunks)[0]

    def compare(self, sequences, chunks, *, dtype=torch.float32, page_size=5):
        # HF keeps softmax and rope in float32 in a float64 model too.
        tolerance = self.rounding if dtype == torch.float32 else self.wide_rounding
        actual = self.logits(sequences, chunks, dtype, page_size)
        for ids, mine, theirs in zip(sequences, actual, self.expected(sequences, dtype), strict=True):
            assert theirs.std() > 0.1, self.label  # logits that say something
            apart, largest = float((mine - theirs).abs().max()), float(theirs.abs().max())
            if dtype == torch.float32 and apart > tolerance * largest:
                # Drawn weights of few channels may lose more than others: then so does transformers.
                lost = float((theirs - self.expected([ids], torch.float64)[0]).abs().max())
                tolerance = max(tolerance, 5 * lost / largest)
            self.assert_close(mine, theirs, tolerance)

    def assert_close(self, mine, theirs, tolerance):
        """Equal up to `tolerance` of the largest value."""
        atol = tolerance * float(theirs.abs().max())
        label = self.label
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, msg=lambda text: f"{label}\n{text}")


# Cases that are drawn anew in every run are slow.
@pytest.fixture(
    scope="module",
    params=slow_but(CASES, *(name for name, (_, overrides) in CASES.items() if overrides is not None)),
)
def case(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        widen(monkeypatch)
        yield Case(request.param, tmp_path_factory.mktemp("target"))


def test_prefill_in_one_piece_gives_the_logits_of_transformers(case):
    case.compare([case.tokens(40)], [[40]], dtype=torch.float64)


@one_of_each_family
def test_prefill_past_one_chunk_of_keys_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(300), case.tokens(2)]
    case.compare(sequences, [[300], [2]], page_size=16)


@one_of_each_family
def test_prefill_of_two_rows_in_uneven_chunks_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(37), case.tokens(23)]
    chunks = [cut(len(ids), 4, case.generator) for ids in sequences]
    case.compare(sequences, chunks, page_size=7)


@one_of_each_family
def test_token_by_token_gives_the_logits_of_transformers(case):
    sequences = [case.tokens(16), case.tokens(16)]
    case.compare(sequences, [[1] * 16] * 2, page_size=1)


@one_of_each_family
def test_greedy_text_is_that_of_transformers(case):
    models, plan = case.loaded(torch.float64)
    engine = Engine(models, replace(plan, num_pages=60))
    num_tokens = 6
    prompts = [case.tokens(11), case.tokens(1), case.tokens(9)]
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    ids = [engine.add(prompt.tolist(), greedy) for prompt in prompts]
    answers = {request_id: [] for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
    for request_id, prompt in zip(ids, prompts, strict=True):
        # Greedy text in one forward: each token is the likeliest behind those before it.
        text = torch.cat((prompt, torch.tensor(answers[request_id][:-1])))
        [logits] = case.expected([text], torch.float64)
        assert answers[request_id] == logits[len(prompt) - 1 :].argmax(-1).tolist(), case.label


@one_of_each_family
def test_features_are_the_outputs_of_the_tapped_layers_in_the_order_asked(case):
    num_layers = case.hf.config.num_hidden_layers
    taps = list(reversed(range(num_layers)))
    raw = make_pair.draft_config() | {"num_target_layers": num_layers}
    raw["dflash_config"] = {"mask_token_id": 1, "target_layer_ids": taps}
    checkpoint = FolderCheckpoint(case.folder, name="target")
    models, plan = case.loaded(torch.float64)
    target = load_target(checkpoint, models.config, read_draft_config(raw, name="d"), plan, CPU)
    ids = case.tokens(12)
    _, [features] = bench_of(models, 1, 12, page_size=4).prefill(target, [ids], [[5, 7]])
    # Hooks: the last entry of output_hidden_states has been through the final norm already.
    outputs = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, k=index: outputs.update({k: out}))
        for index, layer in enumerate(case.hf.model.layers)
    ]
    with torch.no_grad():
        hidden = case.hf.double()(ids[None], output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    size = hidden[0].shape[-1]
    for place, tap in enumerate(taps):
        mine = features[:, place * size : (place + 1) * size]
        case.assert_close(mine, outputs[tap].squeeze(0), case.wide_rounding)
        if tap < num_layers - 1:
            case.assert_close(mine, hidden[tap + 1][0], case.wide_rounding)


@one_of_each_family
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float16], torch.bfloat16), ids=str)
def test_half_precision_stays_near_float32(case, dtype):
    """Loosely: a rounded router may choose another expert. What this catches is a wrong dtype."""
    ids = case.tokens(40)
    half = case.logits([ids], [[17, 23]], dtype, page_size=5)[0].float()
    full = case.logits([ids], [[40]], torch.float32, page_size=5)[0]
    assert torch.corrcoef(torch.stack((half.flatten(), full.flatten())))[0, 1] > 0.9, case.label
