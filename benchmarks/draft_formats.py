"""What a drafter's format costs in committed tokens: `python -m benchmarks.draft_formats --json FILE`.

The drafter's projections are rounded to a format and widened again, as a card's kernels widen them. The
target answers the same prompts greedily with each drafter, so all answers are equal, and only the number of
steps differs. The error is a standard error over prompts, by leaving one out.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockdraft.settings.settings import pin_threads

pin_threads()

from torch import nn  # noqa: E402

from benchmarks import record  # noqa: E402
from benchmarks.quality import ROWS, Talk, answer, prepare, report, shipped  # noqa: E402
from blockdraft.checkpoints.weights import QUANTISERS, slots_of  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.models.dflash import DFlash  # noqa: E402
from blockdraft.settings.settings import Settings  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.training.evaluate import DrafterFit  # noqa: E402


def round_weights(model: DFlash, storage: str) -> None:
    """Round the weights that a start would convert to `storage`; embeddings and heads stay."""
    for slot in slots_of(model, {}):
        if slot.may_be_quantised and slot.module is not model.head:
            weight = slot.parameter
            rounded = QUANTISERS[storage](weight.detach()).dequantise(weight.dtype)
            slot.put(nn.Parameter(rounded, requires_grad=False))


def change_percent(before: Sequence[DrafterFit], after: Sequence[DrafterFit]) -> tuple[float, float]:
    """Return the change of committed tokens per step and its error, of the fits of the same prompts."""

    def change(keep: Sequence[int]) -> float:
        first, second = (
            sum(one[i].num_tokens for i in keep) / sum(one[i].num_steps for i in keep)
            for one in (before, after)
        )
        return 100 * (second / first - 1)

    count = len(before)
    without = [change([j for j in range(count) if j != i]) for i in range(count)]
    mean = sum(without) / count
    error = math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in without))
    return change(range(count)), error


def lines(name: str, fits: Mapping[str, Mapping[str, DrafterFit]]) -> list[dict[str, object]]:
    """A line for every format; `fits`: of every prompt, by format."""
    base = list(fits["none"].values())
    found = []
    for storage, each in fits.items():
        percent, error = change_percent(base, list(each.values()))
        tokens = sum(one.num_tokens for one in each.values())
        steps = sum(one.num_steps for one in each.values())
        found.append(
            {
                "drafter": name,
                "format": storage,
                "prompts": len(each),
                "tokens": tokens,
                "committed": tokens / steps,
                "change_percent": percent,
                "error_percent": error,
            }
        )
    return found


def measure(draft: str, args: argparse.Namespace, talks: Sequence[Talk]) -> list[dict[str, object]]:
    models, plan = load_models(
        Settings(
            model=args.model, draft=draft, device="cpu", draft_quantization="none", width=args.width,
            max_num_seqs=ROWS, graphs=False,
        ),
        print,
    )  # fmt: skip
    work = prepare(
        talks, models, plan, tokens_per_set=0, prompts_per_category=args.prompts, max_tokens=args.max_tokens
    )
    asked = {f"{name} {i}": [ids] for name, each in work.asked.items() for i, ids in enumerate(each)}
    fits, written = {}, []
    for storage in ("none", *QUANTISERS):
        some = rounded_pair(models, storage)
        found, answers = answer(some, plan, asked, args.max_tokens)
        fits[storage] = {name: fit for name, fit in found.items() if name != "all"}
        written.append(answers["all"])
        print(f"{draft} in {storage}: {found['all'].committed:.3f} tokens per step")
    assert all(one == written[0] for one in written), "a drafter changes no token"
    return lines(draft, fits)


def rounded_pair(models: LoadedPair, storage: str) -> LoadedPair:
    """Return the pair with its drafter's weights rounded; the pair itself keeps them."""
    if storage == "none":
        return models
    drafter = copy.copy(models.block_drafter)
    assert drafter is not None, "a drafter of blocks"
    memo = {id(module): module for module in models.target.modules()}
    memo |= {id(one): one for one in (*models.target.parameters(), *models.target.buffers())}
    drafter.model = copy.deepcopy(drafter.model, memo)
    round_weights(drafter.model, storage)
    return replace(models, drafter=drafter)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", nargs="+", default=["auto", "dflash2"])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8, help="of each category (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--json")
    args = parser.parse_args()
    result: dict[str, object] = {"settings": vars(args), **record.context()}
    found: list[dict[str, object]] = []
    for draft in args.draft:
        found += measure(draft, args, shipped())
        record.save(args.json, {**result, "tokens_per_step": found})
    names = {"drafter": "drafter", "format": "format", "prompts": "prompts", "tokens": "tokens"}
    names |= {"committed": "tokens per step", "change_percent": "%", "error_percent": "+-"}
    print("\n" + report(found, names))


if __name__ == "__main__":
    main()
