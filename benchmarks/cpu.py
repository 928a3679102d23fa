"""The engine on a CPU, beside what it must beat: llama.cpp, a lean PyTorch forward, transformers' generate.

    python -m benchmarks.cpu [--llama-python PYTHON] [--quantization int8] [--json FILE]

The same model for all, the same threads, bound to cores, greedy, in rounds that take turns, best of the
rounds; only one engine computes at a time. Nothing else may run meanwhile: the load before the start is
recorded. The parts, of which `--parts` names some:

    plain    one stream: a context of 512 tokens, then `--tokens` more. Ours without a drafter, as
             `--quantization` says and in float32, which must write the same tokens as the lean forward and
             as transformers
    streams  the same by eight streams together; llama.cpp takes all eight in one batch per step
    prefill  a prompt of 1,000 tokens, to its first token; llama.cpp in pieces of 512, and all at once
    drafts   answers to the prompts that ship with `blockdraft bench`, with the drafter that ships and
             `--width auto`; llama.cpp plain, and with the same drafter and several numbers of drafts a step
    forward  what one forward of k tokens costs us, and the lean forward
    start    fresh processes: to the first character of an answer, and a server until it is ready
    memory   resident, of fresh processes after an answer

llama.cpp runs in a process of `--llama-python`, an interpreter that has llama-cpp-python; without it, its
rows are left out. It reads the file that ships (Q4_1) and, made of it, Q8_0 and Q4_0 (`llama_files.py`). Q8_0
keeps what the weights say. Q4_0 is faster, but rounds weights anew that were rounded to 4 bits before: it is
another model, and few of its answers are float32's. llama.cpp has a DFlash of its own and reads our drafter;
llama-cpp-python declares no drafting, so `llama_worker.py` does it as llama.cpp's server does.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402

from benchmarks import cpu_ours  # noqa: E402
from benchmarks.cpu_ours import Arm, answers_of, cells, figures  # noqa: E402
from benchmarks.cpu_pytorch import forward_costs, hf_model, lean, transformers_generate  # noqa: E402
from benchmarks.llama import Llama  # noqa: E402
from benchmarks.llama_files import FORMATS  # noqa: E402
from benchmarks.record import context, save, table  # noqa: E402
from blockdraft.bench.workloads import load  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.settings.settings import QUANTIZATIONS  # noqa: E402

PROMPT_TOKENS = 1000
UBATCHES = (512, PROMPT_TOKENS)  # llama.cpp's default, and the whole prompt at once
NUM_ROWS = 8
FLOAT32 = "blockdraft float32"
Speeds = dict[str, list[float]]


@dataclass
class Bench:
    """Options, what was found so far, and engines that are made when a part first wants them."""

    options: argparse.Namespace
    result: dict[str, object] = field(default_factory=context)

    @cached_property
    def ours(self) -> dict[str, Engine]:
        """Without drafters: as asked for, and in float32."""
        asked = {f"blockdraft {self.options.quantization}": self.options.quantization, FLOAT32: "none"}
        if self.options.quantization == "none":
            del asked["blockdraft none"]
        engines = {name: cpu_ours.engine_of(value, "none") for name, value in asked.items()}
        self.result["quantization"] = {name: one.plan.quantization for name, one in engines.items()}
        return engines

    @cached_property
    def exact(self) -> Engine:
        return self.ours[FLOAT32]

    @cached_property
    def with_drafts(self) -> Engine:
        return cpu_ours.engine_of(self.options.quantization, "auto")

    @cached_property
    def llama(self) -> Llama | None:
        if self.options.llama_python is None:
            return None
        vocab_size = self.exact.models.config.vocab_size
        llama = Llama(self.options.llama_python, torch.get_num_threads(), vocab_size)
        self.result["llama"] = {"version": llama.version, "system": llama.system}
        return llama

    def turns(self, runs: dict[str, Callable[[], float]]) -> Speeds:
        """Return the results of each run by round; the runs take turns within a round."""
        found: Speeds = {name: [] for name in runs}
        for _ in range(self.options.rounds):
            for name, run in runs.items():
                found[name].append(run())
        return found


def plain(bench: Bench) -> None:
    answers: dict[str, list[int]] = {}
    num_tokens, target = bench.options.tokens, bench.exact.models.target
    hf, vocab_size = hf_model(target), target.config.vocab_size

    def run(name: str, measure: Callable[[], tuple[float, list]]) -> float:
        speed, found = measure()
        answers[name] = found[0] if isinstance(found[0], list) else found
        return speed

    measures: dict[str, Callable[[], tuple[float, list]]] = {
        name: partial(cpu_ours.decode, engine, 1, num_tokens) for name, engine in bench.ours.items()
    }
    measures["lean"] = partial(lean, target, num_tokens)
    measures["transformers"] = partial(transformers_generate, hf, vocab_size, num_tokens)
    if bench.llama is not None:
        for name in FORMATS:
            measures[f"llama.cpp {name}"] = partial(bench.llama.decode, name, 1, num_tokens)
    speeds = bench.turns({name: partial(run, name, measure) for name, measure in measures.items()})
    same = {name: answers[FLOAT32] == answers[name] for name in ("lean", "transformers")}
    bench.result |= {"tokens_per_s": speeds, "same_tokens_as": same}
    rows = [[name, max(values)] for name, values in speeds.items()]
    print(table([f"one stream, context {cpu_ours.CONTEXT}", "tok/s"], rows))
    print(f"float32 writes the same tokens as: {same}\n", flush=True)


def streams(bench: Bench) -> None:
    runs: dict[str, Callable[[], float]] = {
        name: lambda engine=engine: cpu_ours.decode(engine, NUM_ROWS, bench.options.tokens)[0]
        for name, engine in bench.ours.items()
    }
    if (llama := bench.llama) is not None:
        for name in FORMATS:
            run = partial(llama.decode, name, NUM_ROWS, bench.options.tokens)
            runs[f"llama.cpp {name}"] = lambda run=run: run()[0]
    bench.result["streams_tokens_per_s"] = speeds = bench.turns(runs)
    rows = [[name, max(values)] for name, values in speeds.items()]
    print(table([f"{NUM_ROWS} streams together", "tok/s"], rows) + "\n", flush=True)


def prefill(bench: Bench) -> None:
    runs: dict[str, Callable[[], float]] = {
        name: partial(cpu_ours.prefill_s, engine, PROMPT_TOKENS) for name, engine in bench.ours.items()
    }
    if bench.llama is not None:
        for name in FORMATS:
            for size in UBATCHES:
                key = f"llama.cpp {name}, {size} at once"
                runs[key] = partial(bench.llama.prefill_s, name, PROMPT_TOKENS, size)
    bench.result["prefill_s"] = times = bench.turns(runs)
    rows = [[name, min(values), PROMPT_TOKENS / min(values)] for name, values in times.items()]
    print(table([f"prompt of {PROMPT_TOKENS:,} tokens", "s", "tok/s"], rows) + "\n", flush=True)


def drafts(bench: Bench) -> None:
    options, engine, llama = bench.options, bench.with_drafts, bench.llama
    tokenizer, most = engine.models.tokenizer, options.max_tokens
    plain_name = next(iter(bench.ours))
    arms = {"blockdraft with drafts": Arm(lambda ids: cpu_ours.answer(engine, ids, most), plain_name)}
    for name, without in bench.ours.items():
        arms[name] = Arm(lambda ids, without=without: cpu_ours.answer(without, ids, most), name)
    if llama is not None:
        stops = sorted(tokenizer.eos_ids)
        for name, count in itertools.product(FORMATS[:2], (0, *options.llama_drafts)):
            if count and llama.no_drafts:
                continue
            arms[f"llama.cpp {name}" + (f", {count} drafts" if count else "")] = Arm(
                partial(llama.answer, name, count, most, stops), f"llama.cpp {name}"
            )
        if llama.no_drafts:
            print(f"llama.cpp without drafts: {llama.no_drafts}")
    found = {}
    for name in options.workloads:
        asked = load(name, limit=options.num_prompts).prompts
        questions = [tokenizer.encode_chat(prompt.messages()) for prompt in asked]
        found[name] = figures(arms, answers_of(arms, questions, options.answer_rounds), FLOAT32)
    bench.result["answers"] = found
    header = ["answers, tok/s (tokens per step)", *found, "as plain", "as float32"]
    print(table(header, [cells(found, arm) for arm in arms]) + "\n", flush=True)


def forward(bench: Bench) -> None:
    costs = forward_costs(bench.ours, bench.exact.models.target, bench.options.rounds)
    bench.result["forward_ms"] = costs
    names = [name for name in costs[0] if name != "tokens"]
    rows: list[list[object]] = []
    for cost in costs:
        cells = [f"{cost[name]:.1f} ({cost[name] / costs[0][name]:.2f})" for name in names]
        rows.append([f"{cost['tokens']:.0f} tokens", *cells])
    print(table(["forward of, ms (x one)", *names], rows) + "\n", flush=True)


def start(bench: Bench) -> None:
    quantization = bench.options.quantization
    runs: dict[str, Callable[[], float]] = {
        "blockdraft, first character": partial(cpu_ours.first_token_s, quantization),
        "blockdraft, server ready": partial(cpu_ours.ready_s, quantization),
    }
    if bench.llama is not None:
        for name in FORMATS:
            runs[f"llama.cpp {name}, first character"] = partial(bench.llama.first_token_s, name)
    bench.result["start_s"] = times = bench.turns(runs)
    rows = [[name, min(values)] for name, values in times.items()]
    print(table(["from the start of the process", "s"], rows) + "\n", flush=True)


def memory(bench: Bench) -> None:
    quantization = bench.options.quantization
    found = {"blockdraft with drafts": cpu_ours.memory(quantization, "auto")}
    for name in bench.ours:
        found[name] = cpu_ours.memory("none" if name == FLOAT32 else quantization, "none")
    if bench.llama is not None:
        for name in FORMATS:
            found[f"llama.cpp {name}"] = bench.llama.memory(name)
        if not bench.llama.no_drafts:
            found["llama.cpp Q8_0 with drafts"] = bench.llama.memory("Q8_0", with_drafter=True)
    bench.result["memory_mb"] = found
    header = ["VmRSS", "VmHWM", "weights", "cache", "other"]
    rows = [
        [name, *(f"{one[key]:.0f}" if key in one else "" for key in header)] for name, one in found.items()
    ]
    print(table(["resident after an answer, MB", *header], rows) + "\n", flush=True)


PARTS: dict[str, Callable[[Bench], None]] = {
    one.__name__: one for one in (plain, streams, prefill, drafts, forward, start, memory)
}


def main() -> None:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=words, default=list(PARTS), help="of them, with commas (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto", help="of target and drafter")
    parser.add_argument("--llama-python", metavar="PATH", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--workloads", type=words, default=["code", "prose", "qa"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each workload (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--answer-rounds", type=int, default=2)
    parser.add_argument(
        "--llama-drafts", type=numbers, default=[2, 3, 5, 7], help="a step (default: 2,3,5,7)"
    )
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    bench = Bench(options)
    for name in options.parts:
        PARTS[name](bench)
        save(options.json, bench.result)
    if options.llama_python is None:
        print("llama.cpp was left out: --llama-python names an interpreter that has llama-cpp-python.")
    elif "llama" in vars(bench) and bench.llama is not None:
        bench.llama.close()


if __name__ == "__main__":
    main()
