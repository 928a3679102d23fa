"""The cost of the host: the engine's Python thread per row and step, with no model behind it.

    OMP_NUM_THREADS=1 python -m benchmarks.host [--rows 1 16 64 256] [--json FILE]

The scheduler, the commit, the text, the counters and the delivery to the event loop are the real ones; the
step itself is a table of tokens of an English text. All rows have the same prompt and were admitted at once,
so each finds its pages remembered by another. Then what the event loop does with each delta, up to the event
that goes to the socket: another thread's work, but under the same interpreter lock. Times are this thread's
processor time, in microseconds, the mean over all steps, best of `--rounds`, for each of the two threads: a
full garbage collection (110 ms here) falls into some rounds only.
"""

import argparse
import asyncio
import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdraft.settings.settings import Settings, pin_threads

pin_threads()

import torch  # noqa: E402

from benchmarks.record import context, save, table  # noqa: E402
from blockdraft.checkpoints.opening import open_checkpoint  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.engine.loop import EngineLoop, _Live  # noqa: E402
from blockdraft.engine.request import Delta, SamplingParams  # noqa: E402
from blockdraft.engine.scheduler import Batch, Outcome  # noqa: E402
from blockdraft.engine.streams import EventLoopOutlet, Stream  # noqa: E402
from blockdraft.planner.plan import Plan  # noqa: E402
from blockdraft.server.api.chat.answers import ChatAnswer  # noqa: E402
from blockdraft.server.api.chat.fields import ChatRequest  # noqa: E402
from blockdraft.server.api.streaming import respond  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.step.verify import Verdict  # noqa: E402
from blockdraft.text.tokenizer import Tokenizer  # noqa: E402

WIDTH = 16
PAGE_SIZE = 16
WARM_STEPS = 4
NUM_TURNS = 6  # of the event loop, in which every reader has written what a step brought it
PARTS = ("schedule", "launch", "read", "commit", "count", "deliver")  # of the engine's thread
MAX_ROW_US, MAX_TOKEN_US = 5.0, 0.5
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TEXT = """The host decides who runs next, reads what the device has said, and writes it out. A row is the
home of one sequence; a step brings each row a few tokens more. "Nothing is rolled back," it says:
What was accepted is kept, and the rest (some 3 of 16 positions) is overwritten by the next step.\n"""


class FakeEngine(Engine):
    """Its prefill computes nothing, and its decode reads tokens from a text."""

    def __init__(self, models: LoadedPair, plan: Plan, text_ids: list[int], num_tokens: int) -> None:
        super().__init__(models, plan)
        self._text = torch.tensor(text_ids)
        self._num_tokens = num_tokens
        self._at = 0

    def _prefill(self, batch: Batch) -> Outcome:
        return Outcome()

    def decode(self, width: int, num_logprobs: int | None = None) -> Verdict:
        num_rows = len(self.rows.active)
        at = torch.arange(num_rows)[:, None] * 7 + torch.arange(width) + self._at
        self._at += self._num_tokens
        counts = torch.full((num_rows,), self._num_tokens)
        return Verdict(self._text[at % len(self._text)], counts, None)


class Clock:
    """Processor time of this thread by part, in seconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            began_s = time.thread_time()
            result = function(*args, **kwargs)
            self.spent[part] += time.thread_time() - began_s
            return result

        return call


def make_models(
    tokenizer: Tokenizer, *, num_rows: int, context: int, num_steps: int
) -> tuple[LoadedPair, Plan]:
    """Weights that are never run, the tokenizer of the default model, and pages for every row."""
    max_model_len = context + WIDTH * (num_steps + WARM_STEPS + 4)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        settings = Settings(
            model=folder, draft="none", device="cpu", dtype="float32", load_format="dummy", max_model_len=2048
        )
        models, plan = load_models(settings, lambda line: None)
    plan = replace(
        plan,
        width=WIDTH,
        block=WIDTH,
        max_model_len=max_model_len,
        max_positions=max_model_len + 2 * WIDTH,
        max_num_seqs=num_rows,
        max_queue=num_rows,
        page_size=PAGE_SIZE,
        num_pages=num_rows * -(-(max_model_len + 2 * WIDTH) // PAGE_SIZE),
        max_prefill_tokens=1 << 30,
        prefix_cache=True,
    )
    return replace(models, tokenizer=tokenizer), plan


async def read_all(answer: ChatAnswer, stream: Stream, heard: list[int]) -> None:
    response: Any = await respond(answer, [stream], is_stream=True)
    async for _ in response.events:
        heard[0] += 1


async def measure(tokenizer: Tokenizer, *, num_rows: int, context: int, num_tokens: int) -> dict[str, float]:
    """Microseconds per row and step of each part, and of the event loop per delta."""
    num_steps = max(40, 4096 // num_rows)
    text_ids = tokenizer.encode(TEXT * 4)
    models, plan = make_models(tokenizer, num_rows=num_rows, context=context, num_steps=num_steps)
    engine = FakeEngine(models, plan, text_ids, num_tokens)
    loop = EngineLoop(lambda startup: engine).wait()  # its thread sleeps: this one steps the engine
    prompt_ids = (text_ids * (context // len(text_ids) + 1))[:context]
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "stream": True})
    heard, readers, outlet = [0], [], EventLoopOutlet(asyncio.get_running_loop())
    for _ in range(num_rows):
        request_id = engine.add(prompt_ids, SamplingParams(ignore_eos=True))
        stream = Stream(request_id, outlet, lambda request_id: None)
        loop._live[request_id] = _Live(stream, 1)
        answer = ChatAnswer(
            asked,
            head={"id": f"chatcmpl-{request_id}", "created": 1_700_000_000, "model": "default"},
            tokenizer=tokenizer,
            prompt_ids=prompt_ids,
            tags=None,
        )
        readers.append(asyncio.ensure_future(read_all(answer, stream, heard)))

    clock = Clock()
    deliver = clock.timed("deliver", loop._deliver)

    async def step() -> list[Delta]:
        deltas = engine.step()
        deliver(deltas)
        began_s = time.thread_time()
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        clock.spent["event loop"] += time.thread_time() - began_s
        return deltas

    while not await step():
        pass
    for _ in range(WARM_STEPS):
        await step()
    clock.spent.clear()
    heard[0] = 0
    for owner, name, part in (
        (engine.scheduler, "schedule", "schedule"),
        (engine, "_launch", "launch"),
        (engine.scheduler, "commit", "commit"),
        (engine.stats, "count", "count"),
        (engine, "decode", "decode"),
        (engine, "step", "step"),
    ):
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    for _ in range(num_steps):
        assert len(await step()) == num_rows
    assert heard[0] > 0.9 * num_steps * num_rows, "some readers have not had their turn"
    for reader in readers:
        reader.cancel()
    loop.close()
    spent = {part: 1e6 * seconds / (num_steps * num_rows) for part, seconds in clock.spent.items()}
    decode, whole = spent.pop("decode"), spent.pop("step")
    spent["launch"] -= decode  # the part that is not real
    spent["read"] = whole - decode - sum(spent[part] for part in ("schedule", "launch", "commit", "count"))
    return spent | {"engine": whole - decode + spent["deliver"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 4000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = context() | {"width": WIDTH, "page_size": PAGE_SIZE, "unit": "us per row and step"}
    tokenizer = Tokenizer(open_checkpoint("default").tokenizer_parts())
    found, rows = [], []
    for length in options.contexts:
        for num_tokens in options.tokens:
            for num_rows in options.rows:
                one = functools.partial(
                    measure, tokenizer, num_rows=num_rows, context=length, num_tokens=num_tokens
                )
                rounds = [asyncio.run(one()) for _ in range(options.rounds)]
                best = min(rounds, key=lambda spent: spent["engine"])
                best = {**best, "event loop": min(spent["event loop"] for spent in rounds)}
                found.append({"context": length, "tokens": num_tokens, "rows": num_rows, **best})
                name = f"context {length}, {num_tokens} tokens, {num_rows} rows"
                aim = MAX_ROW_US + MAX_TOKEN_US * num_tokens
                rows.append([name, *(best[part] for part in PARTS), best["engine"], aim, best["event loop"]])
    print(table(["us per row and step", *PARTS, "engine's thread", "aim", "event loop"], rows))
    save(options.json, result | {"results": found})


if __name__ == "__main__":
    main()
