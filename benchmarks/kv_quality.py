"""What compressed keys and values do to a model, as `blockdraft kv` measures it, with more ways to keep them.

    python -m benchmarks.kv_quality --texts FILE.jsonl.gz [--tokens 100000] [--length 4096] [--json FILE]

Beside the formats that are served: KVarN's scheme (benchmarks/kvarn.py), 2-bit values, other windows and
sinks, the first and last layer at int8, keys less the mean of their tile, keys less a mean from before rope
that is turned to their tile, and keys less a constant that comes from one of several calibration texts:
another text of the file, our own prose, our own code, random token ids, or 4,096 tokens of prose and code.

The file has a prompt per line; texts that are too short are left out, the others are cut.

On a card (float32: in bfloat16 rounding alone moves what is small):

    python -m benchmarks.kv_quality --texts FILE.jsonl.gz --tokens 100000 --length 4096 --needles 10 \
        --device cuda --dtype float32 --quantization none --json kv-quality.json

The result is written after each text, so a run that is stopped early has a result, too: of fewer texts.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import kvarn, record  # noqa: E402
from blockdraft.check import kv_quality as quality  # noqa: E402
from blockdraft.check import kv_study as study  # noqa: E402
from blockdraft.check import kv_texts  # noqa: E402
from blockdraft.check.kv_centre import served_centres  # noqa: E402
from blockdraft.check.kv_quality import Arm, Centres, LossTally, of_format  # noqa: E402
from blockdraft.cli.kv import texts_of  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.errors import BenchError  # noqa: E402
from blockdraft.kernels.kv_codec import FORMATS, KvFormat, Turned  # noqa: E402
from blockdraft.kernels.kv_compressed import KeysValues  # noqa: E402
from blockdraft.kernels.kv_positions import PositionRule  # noqa: E402
from blockdraft.kernels.pointwise import Angles, reference_rotate  # noqa: E402
from blockdraft.settings.settings import Settings  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402

DEFAULT = PositionRule()
TQ4, TQ4V3 = FORMATS["tq4"], FORMATS["tq4v3"]
TQ4V2 = KvFormat("tq4v2", Turned(4, "unbiased"), Turned(2, "matched"))
FENCE = "```"
LONG = 4096  # tokens of the longest calibration


# ---- arms


def of_tiles(form: KvFormat, tile: int = 64) -> Arm:
    """Keys less the mean of each `tile` positions, which is kept beside them in float16."""

    def compress(_: int, k: Tensor, v: Tensor) -> KeysValues:
        parts = torch.split(k, tile)
        means = torch.cat([part.mean(dim=0, keepdim=True).half().to(k.dtype) for part in parts])
        mean = means.repeat_interleave(tile, dim=0)[: len(k)]
        return form.keys_back(k - mean) + mean, form.values_back(v)

    def num_bytes(head_dim: int) -> float:
        return form.bytes_per_token(head_dim) + 2 * head_dim / tile

    return Arm(f"{form.name} centred by tile", compress, num_bytes, PositionRule(stride=tile))


def of_kvarn(key_bits: int, value_bits: int) -> Arm:
    """Its first tile is exact. Behind it as many tokens are, on average, as by the default rule."""

    def compress(_: int, k: Tensor, v: Tensor) -> KeysValues:
        return kvarn.keys_back(k, bits=key_bits), kvarn.values_back(v, bits=value_bits)

    window = DEFAULT.window + DEFAULT.stride // 2 - kvarn.TILE // 2
    num_bytes = functools.partial(kvarn.bytes_per_token, key_bits=key_bits, value_bits=value_bits)
    rule = PositionRule(window=window, stride=kvarn.TILE, sinks=kvarn.TILE)
    return Arm(f"kvarn k{key_bits}v{value_bits}", compress, num_bytes, rule)


def with_boundary(form: KvFormat, num_layers: int) -> Arm:
    """The first and the last layer at int8. Bytes are the mean of all layers."""
    int8 = FORMATS["int8"]
    ends = (0, num_layers - 1)

    def compress(layer: int, k: Tensor, v: Tensor) -> KeysValues:
        here = int8 if layer in ends else form
        return here.keys_back(k), here.values_back(v)

    def num_bytes(head_dim: int) -> float:
        share = 2 / num_layers
        return share * int8.bytes_per_token(head_dim) + (1 - share) * form.bytes_per_token(head_dim)

    return Arm(f"{form.name} boundary int8", compress, num_bytes)


def of_turned_centre(form: KvFormat, models: LoadedPair, text: list[int], tile: int = 64) -> Arm:
    """Keys less a mean of keys before rope, of another text, as rope turns it in the middle of their tile.

    It follows from the position: nothing is kept for a token, and depth does not wear it out.
    """
    means = {
        layer: _before_rope(models, layer, keys) for layer, keys in quality.keys_of(models, text).items()
    }

    def compress(layer: int, k: Tensor, v: Tensor) -> KeysValues:
        position = torch.arange(len(k), device=k.device)
        turned = reference_rotate(means[layer].expand(len(k), -1, -1), angles_of(models, layer, position))
        parts = [
            part.mean(dim=0, keepdim=True).expand(len(part), -1, -1) for part in torch.split(turned, tile)
        ]
        centre = torch.cat(parts).to(k.dtype)
        return form.keys_back(k - centre) + centre, form.values_back(v)

    return Arm(f"{form.name} centred before rope", compress, form.bytes_per_token)


def _before_rope(models: LoadedPair, layer: int, keys: Tensor) -> Tensor:
    """[G, D], the mean of keys turned back from positions 0, 1 and so on."""
    cos, sin = angles_of(models, layer, torch.arange(len(keys), device=keys.device))
    return reference_rotate(keys.float(), (cos, -sin)).mean(dim=0)


def angles_of(models: LoadedPair, layer: int, position: Tensor) -> Angles:
    rotary = models.target._rotary_of[layer]
    if rotary is None:
        raise BenchError("A layer without rope has no centre before it: leave that arm out (--arms).")
    cos, sin = models.target.angles(position)[rotary]
    return cos.float(), sin.float()


def rounded() -> Arm:
    return Arm("bf16", lambda _, k, v: (k.bfloat16(), v.bfloat16()), lambda head_dim: 4 * head_dim)


def arms_of(models: LoadedPair, calibrated: dict[str, Centres], max_model_len: int) -> list[Arm]:
    prose = models.tokenizer.encode(kv_texts.BUILT_IN.read_text(encoding="utf-8"))[: quality.CENTRED]
    return [
        rounded(),
        *map(of_format, FORMATS.values()),
        of_format(TQ4, "tq4 as served", centres=served_centres(models, max_model_len)),
        of_format(TQ4V3, "tq4v3 as served", centres=served_centres(models, max_model_len)),
        *(of_format(TQ4, f"tq4 centred by {name}", centres=means) for name, means in calibrated.items()),
        of_format(TQ4V3, "tq4v3 centred by our prose", centres=calibrated["our prose"]),
        of_turned_centre(TQ4, models, prose),
        of_turned_centre(TQ4V3, models, prose),
        of_tiles(TQ4),
        of_tiles(TQ4V3),
        of_kvarn(4, 2),
        of_kvarn(4, 4),
        of_format(TQ4V2),
        of_format(TQ4, "tq4 window 64", rule=PositionRule(window=64)),
        of_format(TQ4, "tq4 window 256", rule=PositionRule(window=256)),
        of_format(TQ4, "tq4 sinks 0", rule=PositionRule(sinks=0)),
        with_boundary(TQ4, models.config.num_layers),
    ]


# ---- calibration


def calibrations(models: LoadedPair, max_model_len: int, other: list[int]) -> dict[str, Centres]:
    """Centres by the text that they are means over; none of those counts."""
    text = kv_texts.BUILT_IN.read_text(encoding="utf-8")
    prose, code = text.split(FENCE, 1)
    generator = torch.Generator().manual_seed(24)
    # Below 256 are special tokens and single bytes in many vocabularies.
    ids = torch.randint(256, models.config.vocab_size, (quality.CENTRED,), generator=generator)
    ours = next(kv_texts.built_in(models.tokenizer.encode, min(LONG, max_model_len)))
    return {
        "another text": quality.centres(models, other),
        "our prose": quality.centres(models, models.tokenizer.encode(prose)),
        "our code": quality.centres(models, models.tokenizer.encode(code)),
        "4096 tokens": _means(quality.keys_of(models, ours)),
        "random ids": quality.centres(models, ids.tolist()),
    }


def _means(keys: Mapping[int, Tensor]) -> Centres:
    return {layer: one.float().mean(dim=0) for layer, one in keys.items()}


# ---- what is shown


def line_of(arm: Arm, tally: LossTally, base: LossTally, head_dim: int, length: int) -> dict[str, object]:
    loss = quality.loss_of(tally, base)
    classes = quality.depths(base.begin, length)
    return {
        "arm": arm.name,
        "rule": f"window {arm.rule.window}, stride {arm.rule.stride}, sinks {arm.rule.sinks}",
        "bytes": arm.num_bytes(head_dim),
        "ratio_to_bf16": 4 * head_dim / arm.num_bytes(head_dim),
        **asdict(loss),
        "by_depth": {first: asdict(quality.loss_of(tally, base, first, end)) for first, end in classes},
    }


COLUMNS = {
    "arm": "keys and values",
    "bytes": "bytes",
    "ratio_to_bf16": "ratio",
    "same_percent": "same, %",
    "perplexity_percent": "perplexity, %",
    "error_percent": "+-",
    "divergence": "KL, 1/1000 nat",
    "divergence_99th": "99th",
}


def show(lines: list[dict[str, object]]) -> str:
    rows = []
    for line in lines:
        by_depth = line["by_depth"]
        assert isinstance(by_depth, dict)
        rows.append([line[key] for key in COLUMNS] + [each["divergence"] for each in by_depth.values()])
    deep = lines[0]["by_depth"]
    assert isinstance(deep, dict)
    return record.table([*COLUMNS.values(), *(f"from {first}" for first in deep)], rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="a file of prompts, one per line")
    add("--tokens", type=int, default=8192, help="that count (default: %(default)s)")
    add("--skip", type=int, default=0, help="texts that are left out first")
    add("--length", type=int, default=2048, help="tokens of each text (default: %(default)s)")
    add("--needles", type=int, default=0, help="texts with ten needles each (default: %(default)s)")
    add("--arms", nargs="+", metavar="ARM", help="only these, by name")
    add("--model", default="default")
    add("--dtype", default="auto")
    add("--quantization", default="auto", help="of the weights, as for serving")
    add("--device", default="auto")
    add("--json")
    return parser.parse_args()


def chosen_arms(names: list[str] | None, arms: list[Arm]) -> list[Arm]:
    known = [arm.name for arm in arms]
    for name in names or ():
        if name not in known:
            raise BenchError(f"'{name}' is no arm: use some of {', '.join(known)}.")
    return [arm for arm in arms if names is None or arm.name in names]


def main() -> None:
    args, begun_s = arguments(), time.monotonic()
    settings = Settings(
        model=args.model,
        draft="none",
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        graphs=False,
    )
    models, plan = load_models(settings, print)
    begin = kv_texts.begin_of(args.length)
    other, *rest = kv_texts.long_enough(texts_of(args.texts, models.tokenizer), args.length, args.texts.name)
    texts = rest[args.skip :][: max(1, -(-args.tokens // (args.length - begin)))]
    exact = study.exact_of(models)
    heads = quality.kept_heads(models.config.layer_specs())
    every = arms_of(models, calibrations(models, plan.max_model_len, other), plan.max_model_len)
    arms = [exact, *chosen_arms(args.arms, every)]
    tallies = {arm.name: LossTally(begin) for arm in arms}
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    result: dict[str, object] = {
        "settings": vars(args) | {"texts": args.texts.name},
        **record.context(),
        "command": shlex.join(["python", "-m", "benchmarks.kv_quality", *words]),
        "weights": f"{models.device}, {plan.dtype}, {plan.quantization}",
    }
    for number, text in enumerate(texts, 1):
        quality.count_text(models, text, arms, tallies)
        lines = [
            line_of(arm, tallies[arm.name], tallies[exact.name], heads[0][1], args.length) for arm in arms
        ]
        result |= {"texts": number, "seconds": time.monotonic() - begun_s, "arms": lines}
        record.save(args.json, result)
        print(f"{number} of {len(texts)} texts, {time.monotonic() - begun_s:.0f} s", flush=True)
        if number in (1, len(texts)):
            print(show(lines), flush=True)
    if args.needles:
        found = study.count_needles(models, arms, args.needles, length=args.length, note=print)
        result |= {"needles": {name: asdict(each) for name, each in found.items()}}
        result["seconds"] = time.monotonic() - begun_s
        record.save(args.json, result)
        header = ["needles", "hidden", "found", "of exact's"]
        rows = [[name, one.num_hidden, one.num_found, one.num_both] for name, one in found.items()]
        print(record.table(header, [list[object](row) for row in rows]))


if __name__ == "__main__":
    main()
