"""What compressed keys and values do to a model: against the same model, on the same texts, with exact ones.

    python -m benchmarks.kv_quality --texts FILE.jsonl.gz [--count 8] [--length 2048] [--json FILE]

Every arm reads every text whole, without a cache, by the rule of positions (kernels/kv_positions.py): what a
serving engine would compute, by references. Counted are tokens at depth 512 and beyond. The file has a prompt
per line ("messages" or "prompt"); texts that are too short are left out, the others are cut. Key centres are
means over the first tokens of a text that is not among those that count.

The result is written after each text, so a run that is stopped early has a result, too: of fewer texts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import kvarn, record  # noqa: E402
from blockdraft.bench import prompt_files  # noqa: E402
from blockdraft.check.whole_view import WholeView  # noqa: E402
from blockdraft.engine.loaded import Models  # noqa: E402
from blockdraft.errors import BenchError  # noqa: E402
from blockdraft.kernels.attention import Mask  # noqa: E402
from blockdraft.kernels.kv_codec import FORMATS, KvFormat, Turned  # noqa: E402
from blockdraft.kernels.kv_positions import PositionRule, reference_attend_cold  # noqa: E402
from blockdraft.settings.settings import Settings  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.text.tokenizer import Tokenizer  # noqa: E402

SHALLOW, DEEP = 512, 1024  # counted from here; the totals from there
DEPTHS = 512  # tokens of one class of depths
CENTRED = 512  # tokens whose keys make a centre
SLICE = 128  # tokens whose logits are there at a time
TQ4V2 = KvFormat("tq4v2", Turned(4, "unbiased"), Turned(2, "matched"))

DEFAULT = PositionRule()
Back = Callable[[Tensor], Tensor]  # keys or values [L, G, D], as they come back
Centres = Mapping[int, Tensor]  # [G, D] of each layer


# ---- arms


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to keep keys and values. Bytes are one token's, of one head, compressed."""

    name: str
    keys_back: Callable[[Tensor, Tensor | None], Tensor]
    values_back: Back
    num_bytes: Callable[[int], float]
    rule: PositionRule = DEFAULT
    is_centred: bool = False


def of_format(form: KvFormat, name: str = "", **options: object) -> Arm:
    return Arm(name or form.name, form.keys_back, form.values_back, form.bytes_per_token, **options)  # type: ignore[arg-type]


def of_tiles(form: KvFormat, tile: int = 64) -> Arm:
    """Keys less the mean of each `tile` positions, which is kept beside them in float16."""

    def keys_back(k: Tensor, _: Tensor | None) -> Tensor:
        centre = [part.mean(dim=0).half().float() for part in torch.split(k, tile)]
        parts = zip(torch.split(k, tile), centre, strict=True)
        return torch.cat([form.keys_back(part, mean) for part, mean in parts])

    def num_bytes(head_dim: int) -> float:
        return form.bytes_per_token(head_dim) + 2 * head_dim / tile

    rule = PositionRule(stride=tile)
    return Arm(f"{form.name} centred by tile", keys_back, form.values_back, num_bytes, rule)


def of_kvarn(key_bits: int, value_bits: int) -> Arm:
    """Its first tile is exact. Behind it as many tokens are, on average, as by the default rule."""
    window = DEFAULT.window + DEFAULT.stride // 2 - kvarn.TILE // 2
    return Arm(
        f"kvarn k{key_bits}v{value_bits}",
        lambda k, _: kvarn.keys_back(k, bits=key_bits),
        functools.partial(kvarn.values_back, bits=value_bits),
        functools.partial(kvarn.bytes_per_token, key_bits=key_bits, value_bits=value_bits),
        PositionRule(window=window, stride=kvarn.TILE, sinks=kvarn.TILE),
    )


EXACT = Arm("exact", lambda k, _: k, lambda v: v, lambda head_dim: 4 * head_dim)
_TQ4 = FORMATS["tq4"]
ARMS = [
    Arm("bf16", lambda k, _: k.bfloat16(), lambda v: v.bfloat16(), lambda head_dim: 4 * head_dim),
    *map(of_format, FORMATS.values()),
    of_format(TQ4V2),
    of_kvarn(4, 2),
    of_kvarn(4, 4),
    of_format(_TQ4, "tq4 centred", is_centred=True),
    of_format(FORMATS["tq4v3"], "tq4v3 centred", is_centred=True),
    of_tiles(_TQ4),
    of_tiles(FORMATS["tq4v3"]),
    of_format(_TQ4, "tq4 sinks 0", rule=PositionRule(sinks=0)),
    of_format(_TQ4, "tq4 sinks 16", rule=PositionRule(sinks=16)),
    of_format(_TQ4, "tq4 window 64", rule=PositionRule(window=64)),
]


class ArmView(WholeView):
    """A whole text whose queries read keys and values as an arm keeps them."""

    def __init__(self, models: Models, count: int, arm: Arm, centres: Centres) -> None:
        super().__init__(models.config.layer_specs(), count=count, device=models.device)
        self._arm, self._centres = arm, centres

    def _attend_row(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None
    ) -> Tensor:
        if sinks is not None:
            raise BenchError("A model whose attention has sink logits is not measured here.")
        centre = self._centres.get(layer) if self._arm.is_centred else None
        compressed = self._arm.keys_back(k, centre), self._arm.values_back(v)
        return reference_attend_cold(q, (k, v), compressed, self._arm.rule, mask)


# ---- what is read


def texts(path: Path, tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Those of at least `length` tokens, in an order that is the same every time, cut there."""
    prompts = prompt_files.prompts_of(prompt_files.read(path).rows, name="kv", category="kv")
    for prompt in random.Random("kv").sample(prompts, len(prompts)):
        ids = tokenizer.encode_chat(prompt.messages(), add_generation_prompt=False)
        if len(ids) >= length:
            yield ids[:length]


@torch.inference_mode()
def centres(models: Models, text: Sequence[int]) -> Centres:
    tokens = torch.tensor(text[:CENTRED], device=models.device)
    view = ArmView(models, len(tokens), EXACT, {})
    models.target(tokens, view)
    return {layer: keys.float().mean(dim=0) for layer, (keys, _) in view.kept.items()}


@torch.inference_mode()
def read(models: Models, text: Sequence[int], arm: Arm, means: Centres) -> Iterator[Tensor]:
    """Logarithms of probabilities [SLICE, V] after each token from SHALLOW on, in slices."""
    tokens = torch.tensor(text, device=models.device)
    hidden, _ = models.target(tokens, ArmView(models, len(text), arm, means))
    for part in torch.split(hidden[SHALLOW - 1 : -1], SLICE):
        yield models.target.logits(part).float().log_softmax(dim=-1)


# ---- what is counted


@dataclass(slots=True)
class Tally:
    """Of every token that counts: surprise and divergence in nats, and whether the likeliest is the same."""

    losses: list[Tensor] = field(default_factory=list)  # a tensor for each text, as long as it is deep
    divergence: list[Tensor] = field(default_factory=list)
    is_same: list[Tensor] = field(default_factory=list)

    def add(self, parts: Iterator[Tensor], exact: Sequence[Tensor], wanted: Tensor) -> None:
        losses, divergence, is_same = [], [], []
        for logs, truth, token in zip(parts, exact, torch.split(wanted, SLICE), strict=True):
            losses.append(-logs.gather(1, token[:, None])[:, 0].double())
            divergence.append((truth.exp() * (truth - logs)).sum(dim=1).double())
            is_same.append((logs.argmax(dim=1) == truth.argmax(dim=1)).double())
        self.losses.append(torch.cat(losses).cpu())
        self.divergence.append(torch.cat(divergence).cpu())
        self.is_same.append(torch.cat(is_same).cpu())


def line_of(arm: Arm, tally: Tally, base: Tally, head_dim: int) -> dict[str, object]:
    """Totals of tokens at depth DEEP and beyond, and divergence by depth."""
    losses, divergence, is_same = (torch.stack(x) for x in (tally.losses, tally.divergence, tally.is_same))
    change = (losses - torch.stack(base.losses))[:, DEEP - SHALLOW :].flatten()
    deep = divergence[:, DEEP - SHALLOW :].flatten()
    return {
        "arm": arm.name,
        "rule": f"window {arm.rule.window}, stride {arm.rule.stride}, sinks {arm.rule.sinks}",
        "bytes": arm.num_bytes(head_dim),
        "ratio": 4 * head_dim / arm.num_bytes(head_dim),
        "tokens": len(deep),
        "same_likeliest_percent": 100 * is_same[:, DEEP - SHALLOW :].mean().item(),
        "perplexity": math.exp(losses[:, DEEP - SHALLOW :].mean().item()),
        "perplexity_change_percent": 100 * math.expm1(change.mean().item()),
        "error_percent": 100 * change.std().item() / math.sqrt(len(change)),
        "divergence_milli": 1000 * deep.mean().item(),
        "divergence_99th_milli": 1000 * deep.quantile(0.99).item(),
        "divergence_milli_by_depth": {
            SHALLOW + i * DEPTHS: 1000 * part.mean().item()
            for i, part in enumerate(divergence.split(DEPTHS, dim=1))
        },
    }


COLUMNS = {
    "arm": "keys and values",
    "bytes": "bytes",
    "ratio": "ratio",
    "same_likeliest_percent": "same likeliest, %",
    "perplexity_change_percent": "perplexity, %",
    "error_percent": "+-",
    "divergence_milli": "KL, 1/1000 nat",
    "divergence_99th_milli": "99th",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="a file of prompts, one per line")
    parser.add_argument("--count", type=int, default=8, help="texts that are read (default: %(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="texts that are left out first")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these, by name")
    parser.add_argument("--model", default="default")
    parser.add_argument("--quantization", default="auto", help="of the weights, as for serving")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    arms = [arm for arm in ARMS if args.arms is None or arm.name in args.arms]
    settings = Settings(
        model=args.model, draft="none", device=args.device, quantization=args.quantization, graphs=False
    )
    models = load_models(settings, print)
    head_dim = models.target.layers[0].mixer.head_dim
    found = texts(args.texts, models.tokenizer, args.length)
    means = centres(models, next(found))
    tallies = {arm.name: Tally() for arm in (EXACT, *arms)}
    result: dict[str, object] = {"settings": vars(args) | {"texts": args.texts.name}, **record.context()}
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    result["command"] = shlex.join(["python", "-m", "benchmarks.kv_quality", *words])
    result["weights"] = f"{models.device}, {models.plan.dtype}, {models.plan.quantization}"
    for number, text in enumerate(itertools.islice(found, args.skip, args.skip + args.count), 1):
        wanted = torch.tensor(text[SHALLOW:], device=models.device)
        exact = list(read(models, text, EXACT, means))
        tallies[EXACT.name].add(iter(exact), exact, wanted)
        for arm in arms:
            tallies[arm.name].add(read(models, text, arm, means), exact, wanted)
        base = tallies[EXACT.name]
        lines = [line_of(arm, tallies[arm.name], base, head_dim) for arm in (EXACT, *arms)]
        record.save(args.json, result | {"texts": number, "arms": lines})
        print(f"\n{number} texts of {args.length} tokens, depth {DEEP} and beyond")
        rows = [[line[key] for key in COLUMNS] for line in lines]
        print(record.table(list(COLUMNS.values()), rows), flush=True)


if __name__ == "__main__":
    main()
