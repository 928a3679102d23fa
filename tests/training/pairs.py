"""The fixture's target, drafters of any shape for it, and packed rows: what the tests of training share."""

import functools
import json
import shutil

import torch
from safetensors.torch import save_file

from blockdraft import SamplingParams
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from blockdraft.training.answers import Document
from blockdraft.training.drafter import load_weights, new_drafter
from blockdraft.training.evaluate import DrafterFit
from blockdraft.training.export import named_weights
from blockdraft.training.offline_batch import ROUND
from tests import tiny

CPU = torch.device("cpu")
TAPS = (0, 1, 2)
HIDDEN, VOCAB = 32, 64


def load_target(path=tiny.TARGET, **settings):
    """A target alone, as training loads it, and its plan."""
    settings = {"device": "cpu", "dtype": "float64", "max_model_len": 128, "prefix_cache": False, **settings}
    return load_models(Settings(model=str(path), draft="none", **settings), lambda _: None)


@functools.cache
def target():
    models, _ = load_target()
    models.target.taps = TAPS
    return models.target


def write_ending_target(folder, *end_ids):
    """The fixture's target in `folder`, but these tokens end a text: it says them often."""
    shutil.copytree(tiny.TARGET, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(end_ids)}))
    return folder


def cut_circles(tokens, count):
    """Up to the first end of a round whose last `count` tokens stand somewhere before it, too."""
    for end in range(ROUND, len(tokens), ROUND):
        last = tokens[end - count : end]
        if any(tokens[at : at + count] == last for at in range(end - count)):
            return tokens[:end]
    return tokens


def draft_json(*, top=(), dflash=(), speculators=None):
    """config.json of a drafter for the fixture's target, in z-lab's layout or in the other one."""
    config = json.loads((tiny.PAIR / "draft" / "config.json").read_text()) | dict(top)
    config["dflash_config"] |= dict(dflash)
    return config if speculators is None else tiny.to_speculators(config, speculators)


def new_one(raw, *, weights=None, init="random"):
    """A drafter for the fixture's target as training makes it, with the weights of a drafter, if given."""
    config = read_draft_config(raw, name="new")
    model = new_drafter(config, target(), max_positions=256, device=CPU, init=init, seed=0)
    if weights is not None:
        load_weights(model, weights, CPU)
    return model


def random_drafter(raw, *, dtype=torch.float64, seed=6, max_positions=256, decoder=None):
    """A drafter to be trained, every weight random: norms around one, the rest scaled to its inputs."""
    config = read_draft_config(raw, name="random")
    model = new_drafter(
        config, decoder or target(), max_positions=max_positions, device=CPU, init="random", seed=0
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
    return model.to(dtype)


def write_drafter(folder, raw, model, dtype=torch.float32):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named_weights(model, dtype), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def random_documents(sizes, *, seed=0, category="all"):
    """Documents of (prompt, answer) sizes, tokens drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            tuple(torch.randint(0, 60, (prompt,), generator=generator).tolist()),
            tuple(torch.randint(0, 60, (answer,), generator=generator).tolist()),
            category,
            is_greedy=True,
            key=index,
        )
        for index, (prompt, answer) in enumerate(sizes)
    ]


def random_features(batch, *, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.tokens.numel(), len(TAPS) * HIDDEN, generator=generator, dtype=dtype)


def engine_steps(engine, asked, *, max_tokens, **params):
    """What `engine` answers, as documents, and the fit that its own steps have."""
    steps, documents = {}, []
    for number, prompt in enumerate(asked):
        limit = max_tokens if isinstance(max_tokens, int) else max_tokens[number]
        one = SamplingParams(seed=number, ignore_eos=True, max_tokens=limit, **params)
        steps[engine.add(prompt, one)] = []
    for delta in tiny.drain(engine):
        if delta.token_ids:
            steps[delta.request_id].append(delta.token_ids)
    for prompt, mine in zip(asked, steps.values(), strict=True):
        documents.append(Document(tuple(prompt), sum(mine, ()), "all", is_greedy=True))
    lengths = [len(step) for mine in steps.values() for step in mine]
    accepted = tuple(sum(length > place for length in lengths) for place in range(1, tiny.BLOCK))
    return documents, DrafterFit(len(documents), sum(lengths), len(lengths), accepted)
