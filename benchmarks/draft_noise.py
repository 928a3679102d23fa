"""What drafts are worth at a temperature, by the noise that they are drawn with.

    python -m benchmarks.draft_noise NAME=DRAFTER … --out DIR --json FILE [--scales 1.25 1.5] [--limit 60]

DIR holds the answers that `python -m benchmarks.drafter_evaluate answers` wrote. Each drafter drafts for the
same sampled answers in several ways, and the tokens that a step commits are simulated at its whole width:
with the noise that the target drew with (as the engine does), with that noise and logits scaled first, with
other noise of the same kind, and without any (the likeliest token). `best` is what the best coupling of the
two distributions would commit: there a draft x is accepted with a chance of min(1, p(x) / q(x)), which for
the token that the target drew is min(1, q / p). It is expected steps that are counted there, exactly.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.drafter_evaluate import WARM, drafter_of, read_answers, sampling_of, target_of
from benchmarks.record import context, table
from blockdraft.cache.rows import RowSampling
from blockdraft.training.answers import Document, first_of_each
from blockdraft.training.evaluate import SLICE, anchor_places, simulate
from blockdraft.training.features import FeatureReader
from blockdraft.training.packing import DocumentPlace, PackedRows, TrainingBatch, pack, with_anchors
from blockdraft.training.trainer import BlockForward

OTHER_NOISE = 1 << 20  # added to seeds


def likelihoods(logits: Tensor, labels: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the probabilities [n] of labels [n] after the sampling filters on logits [n, V]."""
    scaled = logits.float() / temperature
    values = scaled.sort(dim=-1, descending=True).values
    chance = values.softmax(dim=-1)
    is_kept = (chance.cumsum(dim=-1) - chance < top_p) | (top_p >= 1)
    is_kept[:, 0] = True
    least = values.masked_fill(~is_kept, float("inf")).amin(dim=-1)
    total = values.masked_fill(~is_kept, float("-inf")).logsumexp(dim=-1)
    own = scaled.gather(1, labels[:, None])[:, 0]
    return torch.where(own >= least, torch.exp(own - total), 0.0)


def expected_steps(chances: Tensor) -> float:
    """Steps over an answer whose draft k behind token i is right with chances[i, k], if all before were."""
    num_tokens, width = chances.shape[0], chances.shape[1] + 1
    reach = functional.pad(chances, (1, 0), value=1.0).cumprod(dim=1).tolist()
    steps = [0.0] * (num_tokens + width)
    for place in reversed(range(num_tokens)):
        most = min(width, num_tokens - place)  # tokens that this step may commit
        rest = 0.0
        for count in range(1, most + 1):
            is_more = reach[place][count] if count < most else 0.0
            rest += (reach[place][count - 1] - is_more) * steps[place + count]
        steps[place] = 1.0 + rest
    return steps[0]


def best_coupling(
    forward: BlockForward,
    documents: Sequence[Document],
    args: argparse.Namespace,
    temperature: float,
    top_p: float,
) -> dict[str, float]:
    """Tokens per step by category, were drafts accepted as often as the two distributions allow."""
    rows, places = pack(documents, args.length)
    chances = _chances(forward, rows, args, temperature, top_p)
    tokens: dict[str, float] = defaultdict(float)
    steps: dict[str, float] = defaultdict(float)
    for place in places:
        mine = chances[place.row, _answer(place, documents, rows)]
        name = documents[place.document].category
        tokens[name] += len(mine)
        steps[name] += expected_steps(mine)
    return {name: tokens[name] / steps[name] for name in tokens}


def _answer(place: DocumentPlace, documents: Sequence[Document], rows: PackedRows) -> slice:
    first = place.begin + len(documents[place.document].prompt_ids) - 1
    return slice(first, int(rows.ends[place.row, place.begin]) - 1)


def _chances(
    forward: BlockForward, rows: PackedRows, args: argparse.Namespace, temperature: float, top_p: float
) -> Tensor:
    """[rows, L, B - 1]: of every place as an anchor, how often the best coupling accepts each draft."""
    device, head = forward.head().weight.device, forward.head()
    rows = rows.to(device)
    length = rows.tokens.shape[1]
    reader = FeatureReader(forward.target, num_rows=args.rows_per_step, length=length)
    out = torch.zeros((*rows.tokens.shape, forward.block - 1))
    for first in range(0, len(rows), args.rows_per_step):
        chosen = list(range(first, min(first + args.rows_per_step, len(rows))))
        chosen += [chosen[-1]] * (args.rows_per_step - len(chosen))
        hidden, features = reader.read(rows, chosen)
        wanted = rows.tokens[torch.tensor(chosen, device=device)].long().roll(-1, dims=1).flatten()
        told = [  # of the token after each place
            likelihoods(head.logits(part), label, temperature, top_p)
            for part, label in zip(hidden.split(8192), wanted.split(8192), strict=True)
        ]
        target = torch.cat(told).view(args.rows_per_step, length)
        for anchors in torch.split(anchor_places(rows, chosen), args.anchors, dim=1):
            anchors = functional.pad(anchors, (0, args.anchors - anchors.shape[1]), value=length)
            batch = with_anchors(rows, chosen, anchors, forward.block)
            drafted = _drafted(forward, batch, features, temperature, top_p)
            offset = torch.arange(forward.block - 1, device=device)
            behind = (batch.anchors[..., None] + offset).clamp(max=length - 1)
            own = target.gather(1, behind.flatten(1)).view(behind.shape)
            chance = (drafted.view(behind.shape) / own.clamp(min=1e-9)).clamp(max=1.0)
            row = torch.tensor(chosen)[:, None].expand(batch.anchors.shape)
            is_real = batch.is_real.cpu()
            out[row[is_real], batch.anchors.cpu()[is_real]] = chance.cpu()[is_real]
    return out


def _drafted(
    forward: BlockForward, batch: TrainingBatch, features: Tensor, temperature: float, top_p: float
) -> Tensor:
    """[blocks, B - 1]: the drafter's chance of each label."""
    hidden = forward(batch, features).detach()
    labels, before = batch.labels.flatten(0, 1).clamp(min=0), batch.tokens_before()
    found = []
    for part in torch.split(torch.arange(len(hidden), device=hidden.device), SLICE // 4):
        logits = forward.draft_logits(forward.head(), hidden[part], before[part]).detach()
        flat = likelihoods(logits.flatten(0, 1), labels[part].flatten(), temperature, top_p)
        found.append(flat.view(len(part), -1))
    return torch.cat(found)


def ways(scales: Sequence[float]) -> dict[str, tuple[bool, float]]:
    """By name: whether the noise is the target's, and what logits are scaled by."""
    found = {"shared": (True, 1.0), "independent": (False, 1.0), "likeliest": (True, 1e4)}
    return found | {f"shared x {scale:g}": (True, scale) for scale in scales}


def measure(
    forward: BlockForward, answers: dict[str, list[Document]], args: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per step by temperature, way and category."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (temperature, top_p) in WARM.items():
        documents = answers[name]
        told = sampling_of(documents, temperature, top_p)
        results[name] = {}
        for way, (is_shared, scale) in ways(args.scales).items():
            noise = told if is_shared else _elsewhere(told)
            fits = simulate(
                forward,
                documents,
                length=args.length,
                rows_per_step=args.rows_per_step,
                num_anchors=args.anchors,
                sampling=[replace(one, temperature=one.temperature / scale) for one in noise],
            )
            results[name][way] = {key: round(fit.committed, 3) for key, fit in fits.items()}
        best = best_coupling(forward, documents, args, temperature, top_p)
        results[name]["best"] = {key: round(value, 3) for key, value in best.items()}
    return results


def _elsewhere(sampling: Sequence[RowSampling]) -> list[RowSampling]:
    return [replace(one, seed=one.seed + OTHER_NOISE) for one in sampling]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", metavar="NAME=DRAFTER")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scales", type=float, nargs="*", default=[0.8, 1.25, 1.5, 2.0])
    parser.add_argument("--limit", type=int, default=300, help="answers of each set (default: 300, all)")
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-bytes", type=lambda text: int(float(text)), default=int(1e9))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows-per-step", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=768)
    args = parser.parse_args()
    models = target_of(args)
    answers = {name: first_of_each(read_answers(args.out / name), args.limit)[0] for name in WARM}
    results: dict[str, object] = {**context(), "drafters": {}}
    for item in args.drafters:
        name, _, source = item.partition("=")
        begin = time.monotonic()
        found = measure(drafter_of(source, models, args.length), answers, args)
        assert isinstance(results["drafters"], dict)
        results["drafters"][name] = found
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}, {time.monotonic() - begin:.1f} s")
        columns = sorted({key for of in found.values() for way in of.values() for key in way})
        lines = [
            [temperature, way, *(of[way].get(key, "") for key in columns)]
            for temperature, of in found.items()
            for way in of
        ]
        print(table(["answers", "drafts", *columns], lines), flush=True)


if __name__ == "__main__":
    main()
