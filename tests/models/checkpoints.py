"""Tiny checkpoints as transformers writes them, and a way to run a target over a cache by hand."""

import itertools
import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from blockdraft.cache.cache import SCRATCH_PAGE, Cache
from blockdraft.cache.recurrent import RecurrentState
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import NUM_RESERVED_PAGES
from blockdraft.kernels.kernels import kernels_for
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models

CPU = torch.device("cpu")


def write_target(folder, config, seed):
    """Save a model of `config` with random weights, norms and biases included; returns it, in float32."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return model


def randomise(model, seed):
    """Random weights that say something: norms around their neutral value, the rest scaled to its inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight")):
                parameter.copy_(parameter.mean() + 0.3 * noise)  # around 1, or 0 where that is neutral
            elif parameter.ndim == 1 or "embed" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(1, generator=generator))


def write_tokenizer(folder, vocab_size):
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_draft(folder, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def load(target, draft=None, **settings):
    """Both folders through the real loader."""
    return load_pair(target, draft, **settings)[0]


def load_pair(target, draft=None, **settings):
    """Models and plan."""
    draft = None if draft is None else str(draft)
    settings = {"device": "cpu", **settings}
    return load_models(Settings(model=str(target), draft=draft, **settings), lambda _: None)


class Bench:
    """A cache and rows for `num_rows` sequences of at most `max_length` tokens, pages dealt at random.

    Slots that nobody wrote hold NaN: reading one shows.
    """

    def __init__(self, specs, *, num_rows, max_length, vocab_size, page_size, dtype, seed=0):
        max_pages = -(-max_length // page_size)
        num_pages = num_rows * max_pages + NUM_RESERVED_PAGES
        kernels = kernels_for(dtype, CPU)
        self.cache = Cache(
            specs,
            num_pages=num_pages,
            num_rows=num_rows + 1,
            page_size=page_size,
            dtype=dtype,
            device=CPU,
            kernels=kernels,
        )
        for storage in self.cache.storage:
            if isinstance(storage, RecurrentState):
                storage.state[:] = storage.tail[:] = float("nan")
            else:
                storage.keys[:, 1:] = storage.values[:, 1:] = float("nan")
        self.rows = Rows(
            max_rows=num_rows,
            max_pages=max_pages,
            vocab_size=vocab_size,
            scratch_page=SCRATCH_PAGE,
            device=CPU,
            kernels=kernels,
        )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_rows * max_pages, generator=generator) + NUM_RESERVED_PAGES
        for row, pages in enumerate(order.view(num_rows, max_pages).tolist()):
            self.rows.set_pages([(row, 0, pages)])

    def prefill(self, target, sequences, chunks):
        """Run token sequences in the given pieces (per row, equally many); logits and features of each."""
        logits = [[] for _ in sequences]
        features = [[] for _ in sequences]
        done = [0] * len(sequences)
        self.rows.activate(range(len(sequences)))
        for counts in zip(*chunks, strict=True):
            pieces = [ids[d : d + n] for ids, d, n in zip(sequences, done, counts, strict=True)]
            hidden, tapped = target(torch.cat(pieces), self.cache.view(self.rows, counts, is_known=True))
            self.rows.extend(counts)
            for row, (h, f) in enumerate(zip(hidden.split(counts), tapped.split(counts), strict=True)):
                logits[row].append(target.logits(h))
                features[row].append(f)
                done[row] += len(h)
        return [torch.cat(parts) for parts in logits], [torch.cat(parts) for parts in features]


def bench_of(models, num_rows, max_length, page_size):
    """A bench for a loaded target, or pair."""
    configs = [config for config in (models.config, models.draft_config) if config is not None]
    return Bench(
        sum((config.layer_specs() for config in configs), ()),
        num_rows=num_rows,
        max_length=max_length,
        vocab_size=models.config.vocab_size,
        page_size=page_size,
        dtype=getattr(torch, models.dtype),
    )


def cut(length, num_pieces, generator):
    """`length` as `num_pieces` positive numbers with random borders."""
    borders = torch.randperm(length - 1, generator=generator)[: num_pieces - 1].sort().values + 1
    return [b - a for a, b in itertools.pairwise([0, *borders.tolist(), length])]
