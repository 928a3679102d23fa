"""Times a step on a GPU, against the time that its bytes need: `python -m benchmarks.gpu_step`.

Weights are random and acceptance plays no part in a step's time, so any published shape can be timed. Every
number is of graph replays, which is how the engine runs. `--prefill` times prompts instead, each kernel by
kernel and, where the engine captures it, by a graph. The ceiling is a device-to-device copy in the same
run, bytes read plus bytes written. What a step must read: every weight once (of experts, those that its
tokens chose), and the keys and values of its context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from unittest import mock

import torch

from benchmarks import record
from benchmarks.gpu_prompts import time_prompts
from benchmarks.on_card import copy_ceiling, freed, kernels_of, load, timed
from benchmarks.shapes import SHAPES
from blockdraft.cache.rows import RowSampling
from blockdraft.engine.chunks import Chunks
from blockdraft.engine.engine import Engine
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.width_controller import widths_for
from blockdraft.kernels.moe import ExpertChoice
from blockdraft.kernels.tree_size import MAX_ROWS
from blockdraft.models.moe import Experts
from blockdraft.planner.plan import Plan
from blockdraft.settings.acceptance_profile import acceptance_rates
from blockdraft.start.block_width import choose_widths
from blockdraft.start.memory import release
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.row_sizes import row_sizes
from blockdraft.step.step_sizes import few_means, uneven_places

REPLAYS = 20
SETTLING, CHOSEN = 40, 60  # steps in which the width controller learns, and that are timed


@dataclass
class Step:
    """One (rows, width) of one engine, captured and ready to be replayed."""

    engine: Engine
    num_rows: int
    width: int
    context: int
    temperature: float = 0.0
    tree: int = 0  # tokens of each row's tree of drafts; 0: a chain

    def __post_init__(self) -> None:
        rows, pages = self.engine.rows, self.engine.plan.num_pages // self.num_rows
        first, table = 2, rows.page_table.shape[1]  # the first ones are reserved
        for row in range(self.num_rows):
            rows.place(row, [1] * (self.context + 1), self.context, RowSampling(temperature=self.temperature))
            rows.set_pages([(row, 0, range(first + row * pages, first + (row + 1) * pages)[:table])])
            if rows.exact_table is not None:  # what is read of them are the last few
                each = self.engine.plan.num_exact_pages // self.num_rows
                own = [first + row * each + place % each for place in range(table)]
                rows.set_exact_pages([(row, 0, own)])
        self._fill()
        begin = time.perf_counter()
        self.engine.capture([self.num_rows], [self.width])
        torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - begin
        self.engine.rows.activate(range(self.num_rows))
        graph = self.engine.graphs.find(self.num_rows, self.width)
        if self.tree:
            graph = self.engine.tree_graphs.find(self.num_rows, self.tree)
            self.engine.rows.activate(range(self.num_rows))
        assert graph is not None
        self.replay = graph.replay

    def _fill(self) -> None:
        """Never time on zeros."""
        for storage in self.engine.cache.storage:
            for tensor in vars(storage).values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.normal_(std=0.1)
        for group in self.engine.cache.compressed:
            group.pages.exact_keys.normal_(std=0.1)
            group.pages.exact_values.normal_(std=0.1)
            for codes, scale in (group.pages.keys, group.pages.values):
                codes.random_()
                scale.uniform_(0, 0.01)

    def rewind(self) -> None:
        """Every row back at `context` tokens: a step's time depends on it."""
        self.engine.rows.length[: self.num_rows] = self.context

    def seconds(self) -> float:
        """Per step, of replays back to back."""
        for _ in range(3):
            self.replay()
        times = []
        for _ in range(3):
            self.rewind()
            torch.cuda.synchronize()
            times.append(timed(lambda: [self.replay() for _ in range(REPLAYS)]) / REPLAYS)
        return statistics.median(times)

    def kernels(self) -> list[tuple[str, int, float]]:
        self.rewind()
        return kernels_of(self.replay)


@torch.inference_mode()
def bytes_read(step: Step) -> int:
    """Return the bytes that one step must read."""
    engine, models = step.engine, step.engine.models
    parts = [models.target]
    if step.width > 1 and isinstance(models.drafter, DFlashDrafter):
        parts.append(models.drafter.model)
    touched = _experts_touched(step)
    total = 0
    for part in parts:
        skipped = set()
        for module in part.modules():
            if isinstance(module, Experts):
                share = touched[id(module)]
                tensors = [*module.parameters(), *module.buffers()]
                skipped |= {id(tensor) for tensor in tensors}
                total += int(sum(tensor.nbytes for tensor in tensors) * share)
        embedding = None if models.config.ties_embeddings else getattr(part, "embedding", None)
        if embedding is not None:
            skipped |= {id(tensor) for tensor in (*embedding.parameters(), *embedding.buffers())}
        own = [*part.parameters(), *(b for n, b in part.named_buffers() if "cos" not in n and "sin" not in n)]
        total += sum(tensor.nbytes for tensor in own if id(tensor) not in skipped)
    if len(parts) == 2:  # the drafter multiplies by the target's head once more
        head = models.target.head or models.target.embedding
        total += sum(tensor.nbytes for tensor in (*head.parameters(), *head.buffers()))
    return total + _state_bytes(engine, step, has_drafter=len(parts) == 2)


def _state_bytes(engine: Engine, step: Step, *, has_drafter: bool) -> int:
    """Keys and values of the context (within the window), and recurrent states, read once."""
    config, total = engine.models.config, 0
    specs = engine.models.cache_specs()[: None if has_drafter else config.num_layers]
    for spec in specs:
        window = getattr(spec, "window", None)
        tokens = step.context if window is None else min(step.context, window)
        total += step.num_rows * tokens * spec.bytes_per_token(2)
        if hasattr(spec, "bytes_per_row"):
            total += step.num_rows * spec.bytes_per_row(2, 0)
    return total


def _experts_touched(step: Step) -> dict[int, float]:
    """Return the share of each layer's experts that tokens of the block choose."""
    shares: dict[int, float] = {}

    def see(module: Experts, inputs: tuple[object, ...]) -> None:
        choice = inputs[1]
        assert isinstance(choice, ExpertChoice)
        shares[id(module)] = len(torch.unique(choice.ids)) / module.down.weight.shape[0]

    hooks = [
        part.register_forward_pre_hook(see)
        for part in step.engine.models.target.modules()
        if isinstance(part, Experts)
    ]
    if hooks:
        step.rewind()
        step.engine.decode(step.width)
        for hook in hooks:
            hook.remove()
    return shares


def time_step(
    pair: tuple[LoadedPair, Plan], *, num_rows: int, width: int, context: int, ceiling: float, tree: int = 0
) -> dict[str, object]:
    """Everything about one (rows, width), or about trees of so many tokens."""
    models, plan = pair
    step = Step(Engine(models, replace(plan, tree=tree)), num_rows, width, context, tree=tree)
    seconds, num_bytes = step.seconds(), bytes_read(step)
    kernels = step.kernels()
    busy = sum(item[2] for item in kernels)
    step.engine.drop_graphs()  # the next step's cache needs the memory
    return {
        "rows": num_rows,
        "width": width,
        "tree": tree,
        "context": context,
        "ms": seconds * 1e3,
        "bytes": num_bytes,
        "floor_ms": num_bytes / ceiling * 1e3,
        "share_of_ceiling": num_bytes / ceiling / seconds,
        "capture_s": step.capture_s,
        "num_kernels": sum(item[1] for item in kernels),
        "kernels_ms": busy * 1e3,
        "kernels": [{"name": n[:80], "launches": c, "ms": s * 1e3} for n, c, s in kernels[:24]],
    }


def begin_requests(engine: Engine, *, num_rows: int, context: int) -> None:
    """Requests that do not end, all of them decoding."""
    params = SamplingParams(
        temperature=1.0, top_p=0.95, stop=["a text", "that never comes"], max_tokens=100_000, ignore_eos=True
    )
    vocab_size = engine.models.config.vocab_size
    for number in range(num_rows):
        prompt = [(7919 * index + 31 * number) % vocab_size for index in range(context + 1)]
        engine.add(prompt, replace(params, seed=number))
    with mock.patch.object(Chunks, "is_due", True):  # nobody decodes until all prompts are read
        while engine.scheduler.waiting or not all(s.is_decoding for s in engine.scheduler.running):
            engine.step()


def time_chosen_widths(pair: tuple[LoadedPair, Plan], *, num_rows: int, context: int) -> dict[str, object]:
    """Live requests whose widths are chosen, as after a start; drafts are kept by their rates."""
    engine, plan = Engine(*pair), pair[1]
    if engine.models.device.type == "cuda":
        sizes, widths = row_sizes(plan.max_num_seqs), widths_for(plan.block)
        if engine.scheduler.means is not None:  # rows get widths of their own
            widths = sorted({1, plan.block})
        now = [(rows, width) for rows in (1, sizes[-1]) for width in (1, plan.width)]
        engine.capture(sizes, widths, now, uneven=uneven_places(sizes, plan.block, few_means))
        choose_widths(engine)
        # As after a while of serving: captures take their time then, and no more than a share of it.
        size = engine.graphs.size(num_rows, 1)
        while engine.graphs.capture_next(one for one in engine.graphs.places if one.rows == size.rows):
            pass
    else:
        choose_widths(engine)
    begin_requests(engine, num_rows=num_rows, context=context)
    for _ in range(SETTLING):
        engine.step()
    engine.wait()
    stats, begin = engine.stats, time.perf_counter()
    before = stats.num_emitted, stats.num_drafted, stats.num_blocks
    for _ in range(CHOSEN):
        engine.step()
    engine.wait()
    seconds = time.perf_counter() - begin
    if len(engine.scheduler.running) < num_rows:
        raise SystemExit("answers ended on the way: there is too little context behind --context.")
    after = stats.num_emitted, stats.num_drafted, stats.num_blocks
    num_tokens, num_drafted, num_blocks = (now - then for now, then in zip(after, before, strict=True))
    engine.drop_graphs()
    return {
        "rows": num_rows,
        "context": context,
        "tokens_per_s": num_tokens / seconds,
        "mean_width": 1 + num_drafted / num_blocks,
        "committed_per_step": num_tokens / num_blocks,
        "engine_ms": seconds / CHOSEN * 1e3,
        "first_width": engine.plan.width,
        "reason": engine.plan.reasons["width"],
    }


def time_engine(
    pair: tuple[LoadedPair, Plan], *, num_rows: int, width: int, context: int
) -> dict[str, object]:
    """Live requests through Engine.step against bare replays of the same graph from the same lengths."""
    engine = Engine(*pair)
    engine.capture([num_rows], [width])
    begin_requests(engine, num_rows=num_rows, context=context)
    for _ in range(5):
        engine.step()
    engine.wait()
    lengths = engine.rows.length.clone()
    before, begin = engine.stats.num_emitted, time.perf_counter()
    for _ in range(REPLAYS):
        engine.step()
    engine.wait()
    seconds = (time.perf_counter() - begin) / REPLAYS
    num_tokens = engine.stats.num_emitted - before
    graph = engine.graphs.find(num_rows, width)
    engine.rows.length.copy_(lengths)  # a step takes longer behind more context
    bare = timed(lambda: [graph.replay() for _ in range(REPLAYS)]) / REPLAYS
    engine.drop_graphs()
    return {
        "rows": num_rows,
        "width": width,
        "context": context,
        "engine_ms": seconds * 1e3,
        "bare_ms": bare * 1e3,
        "of_bare": bare / seconds,
        "host_gap": max(0.0, 1 - bare / seconds),
        "tokens_per_s": num_tokens / seconds / REPLAYS,
        "committed_per_step": num_tokens / REPLAYS / num_rows,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--width", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tree", type=int, nargs="+", default=[], help="tokens of trees of drafts, too")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--draft-quantization", default="none")
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=["auto"],
        help="of the target's keys and values; served requests have the last of several",
    )
    parser.add_argument(
        "--draft-kv-dtype", default="auto", help="of the drafter's, where the target's are not exact"
    )
    parser.add_argument("--committed", type=float, help="tokens committed per step, to say tokens per second")
    parser.add_argument("--engine", action="store_true", help="also serve requests through Engine.step")
    parser.add_argument(
        "--chosen-widths",
        action="store_true",
        help="also serve requests whose widths are chosen by the step",
    )
    parser.add_argument(
        "--prefill", type=int, nargs="+", metavar="TOKENS", help="time prompts of so many tokens, not steps"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: cuda)")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.chosen_widths and (args.committed is None or max(args.width) == 1):
        parser.error("--chosen-widths needs --committed and a --width above 1: by them drafts are kept.")
    return args


def main() -> None:
    args = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    if ":" in args.device:
        torch.cuda.set_device(args.device)  # "cuda" is the current one
    if args.prefill is not None:
        time_prompts(args)
        return
    ceiling = copy_ceiling()
    release()  # its 8 GiB
    has_drafter = max(args.width) > 1
    found: list[dict[str, object]] = []
    for kv_dtype in args.kv_dtype:
        models, plan = load(
            args.shape,
            has_drafter=has_drafter,
            max_num_seqs=max(args.rows),
            max_model_len=args.context + 1024,
            quantization=args.quantization,
            draft_quantization=args.draft_quantization,
            kv_dtype=kv_dtype,
            draft_kv_dtype="auto" if kv_dtype == "auto" else args.draft_kv_dtype,
        )
        found += [
            {
                "kv_dtype": kv_dtype,
                **freed(
                    time_step,
                    (models, plan),
                    num_rows=rows,
                    width=width,
                    context=args.context,
                    ceiling=ceiling,
                    tree=tree,
                ),
            }
            for rows in args.rows
            for width, tree in [
                *((width, 0) for width in args.width),
                *((plan.block, tree) for tree in args.tree if rows <= MAX_ROWS),
            ]
        ]
    if args.committed is not None and has_drafter:
        rates = acceptance_rates(f"mean:{args.committed}", width=plan.width, block=plan.block)
        models = replace(models, rates=rates)
    served, chosen = [], []
    for rows in args.rows:
        if args.engine:
            wide = max(args.width)
            served.append(freed(time_engine, (models, plan), num_rows=rows, width=wide, context=args.context))
        if args.chosen_widths:
            chosen.append(freed(time_chosen_widths, (models, plan), num_rows=rows, context=args.context))
    result = {
        "what": "random weights; steps by CUDA graph replay",
        "gpu": torch.cuda.get_device_name(),
        "ceiling_tb_s": ceiling / 1e12,
        "settings": vars(args),
        **record.context(),
        "steps": found,
        "engine": served,
        "chosen_widths": chosen,
    }
    record.save(args.json, result)
    _print(result, found, args.committed)
    _print_served(served, chosen)


def _print_served(served: list[dict[str, object]], chosen: list[dict[str, object]]) -> None:
    if served:
        names = ("ms", "bare ms", "host gap", "tok/s", "committed")
        keys = ("engine_ms", "bare_ms", "host_gap", "tokens_per_s", "committed_per_step")
        rows = [[f"{one['rows']} rows, width {one['width']}", *(one[key] for key in keys)] for one in served]
        print(record.table(["through Engine.step, temperature 1, top_p", *names], rows))
    if chosen:
        keys = ("tokens_per_s", "mean_width", "committed_per_step", "engine_ms")
        rows = [[f"{one['rows']} rows", *(one[key] for key in keys)] for one in chosen]
        print(record.table(["widths chosen step by step", "tok/s", "mean width", "committed", "ms"], rows))


def _print(result: dict[str, object], found: list[dict[str, object]], committed: float | None) -> None:
    print(f"{result['gpu']}, copy ceiling {result['ceiling_tb_s']:.2f} TB/s; RANDOM WEIGHTS, timing only")
    slowest = max(found, key=lambda step: step["ms"])
    print(
        record.table(
            ["kernel of the slowest step", "launches", "ms"],
            [[kernel["name"][:60], kernel["launches"], kernel["ms"]] for kernel in slowest["kernels"][:12]],
        )
    )
    plain = {(step["kv_dtype"], step["rows"]): step["ms"] for step in found if step["width"] == 1}
    rows = []
    for step in found:
        speed = (
            ""
            if committed is None or step["width"] == 1
            else f"{committed * step['rows'] / step['ms'] * 1e3:,.0f}"
        )
        ratio = plain.get((step["kv_dtype"], step["rows"]), float("nan")) / step["ms"]
        numbers = [step[key] for key in ("ms", "floor_ms", "share_of_ceiling")]
        counts = [step[key] for key in ("num_kernels", "capture_s")]
        drafts = f"trees of {step['tree']}" if step["tree"] else f"width {step['width']}"
        name = f"{step['rows']} rows, {drafts}, {step['kv_dtype']}"
        rows.append([name, *numbers, ratio, *counts, speed])
    # Step efficiency: the speedup over plain decoding per token committed; 1: draft and verify are free.
    header = ["step", "ms", "floor ms", "of ceiling", "efficiency", "kernels", "capture s", "tok/s"]
    print(record.table(header, rows))


if __name__ == "__main__":
    main()
