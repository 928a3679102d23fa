"""The cost of the host: the engine's Python thread per row and step, with no model behind it.

    OMP_NUM_THREADS=1 python -m benchmarks.host [--rows 1 16 64 256] [--own-widths] [--json FILE]

The scheduler, the commit, the text, the counters and the message to the HTTP server's process (`deliver`) are
the real ones; the step itself is a table of tokens of an English text. The width controller chooses among all
widths, of which only the widest is ready. All rows have the same prompt and were admitted at once, so each
finds its pages remembered by another. Then what the server's event loop does with
each delta, up to the event that goes to the socket; it reads the message on another thread, which is not
counted. Times are this thread's processor time, in microseconds, the mean over all steps, best of `--rounds`,
for each of the two: a full garbage collection (110 ms here) falls into some rounds only.
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
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from blockdraft.settings.settings import Settings, pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.record import context, save, table  # noqa: E402
from blockdraft.checkpoints.opening import open_checkpoint  # noqa: E402
from blockdraft.engine.engine import Engine  # noqa: E402
from blockdraft.engine.loaded_pair import LoadedPair  # noqa: E402
from blockdraft.engine.loop import EngineLoop  # noqa: E402
from blockdraft.engine.request import Delta, Deltas, SamplingParams  # noqa: E402
from blockdraft.engine.streams import EventLoopOutlet, Stream  # noqa: E402
from blockdraft.planner.plan import Plan  # noqa: E402
from blockdraft.server.api.chat.answers import ChatAnswer  # noqa: E402
from blockdraft.server.api.chat.fields import ChatRequest  # noqa: E402
from blockdraft.server.api.chat.prepare import find_dialect, prepare_chat  # noqa: E402
from blockdraft.server.api.fields import parse  # noqa: E402
from blockdraft.server.api.schemas import AnswerObject  # noqa: E402
from blockdraft.server.api.streaming import EventSource  # noqa: E402
from blockdraft.server.engine_link.engine_worker import _Server  # noqa: E402
from blockdraft.server.engine_link.outbox import Inbox  # noqa: E402
from blockdraft.start.loading import load_models  # noqa: E402
from blockdraft.step.step_sizes import few_means  # noqa: E402
from blockdraft.step.verify import Verdict  # noqa: E402
from blockdraft.text.tokenizer import Tokenizer  # noqa: E402

WIDTH = 16
PAGE_SIZE = 16
WARM_STEPS = 4
NUM_TURNS = 6  # of the event loop, in which every reader has written what a step brought it
PARTS = ("schedule", "width", "launch", "read", "commit", "count", "deliver")  # of the engine's thread
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

    def __init__(
        self,
        models: LoadedPair,
        plan: Plan,
        text_ids: list[int],
        num_tokens: int,
        *,
        is_uneven: bool = False,
    ) -> None:
        super().__init__(models, plan)
        self._text = torch.tensor(text_ids)
        self._num_tokens = num_tokens
        self._at = 0
        self.scheduler.is_ready = lambda rows, width, tokens: width == WIDTH and tokens > rows
        if is_uneven:  # as on a GPU
            self.scheduler.means = few_means
            self.scheduler.follow(plan)

    def prefill(self, *tensors: object) -> Tensor:
        return torch.empty(0)

    def decode(self, width: int, num_tokens: int | None = None, num_logprobs: int | None = None) -> Verdict:
        num_rows = len(self.rows.active)
        at = torch.arange(num_rows)[:, None] * 7 + torch.arange(width) + self._at
        self._at += self._num_tokens
        counts = torch.full((num_rows,), self._num_tokens).minimum(self.rows.limits)
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
        step_costs={(rows, width): 1e-3 for rows in (1, num_rows) for width in (1, WIDTH)},
        draft_chances=(0.7,) * (WIDTH - 1),
    )
    return replace(models, tokenizer=tokenizer), plan


async def read_all(answer: ChatAnswer, stream: Stream, heard: list[int]) -> None:
    events = EventSource(answer, [stream])
    while True:
        await events.next_text()
        heard[0] += 1


class Served:
    """An engine whose requests are all admitted, with a reader for each stream on this event loop."""

    def __init__(self, engine: FakeEngine, prompt_ids: list[int]) -> None:
        tokenizer = engine.models.tokenizer
        ours, theirs = Pipe()
        self._inbox, server = Inbox(ours), _Server(theirs)
        self._outlet = EventLoopOutlet(asyncio.get_running_loop())
        self._streams: dict[str, Stream] = {}
        self.engine = engine
        self.loop = EngineLoop(lambda startup: engine, server).wait()  # its thread sleeps: this one steps
        self.clock = Clock()
        self.heard = [0]
        self.readers = []
        asked = parse(ChatRequest, b'{"messages": [{"role": "user", "content": "?"}], "stream": true}')
        prepared = prepare_chat(asked, find_dialect(tokenizer), {})
        for _ in range(engine.plan.max_num_seqs):
            request_id = engine.add(prompt_ids, SamplingParams(ignore_eos=True))
            stream = self._streams[request_id] = Stream(request_id, self._outlet, lambda request_id: None)
            self.loop._live[request_id] = 1
            head = AnswerObject(id=request_id, created=0, model="default", system_fingerprint=None)
            answer = ChatAnswer(prepared, head=head)
            self.readers.append(asyncio.ensure_future(read_all(answer, stream, self.heard)))
        self._deliver = self.clock.timed("deliver", self.loop._deliver)

    async def step(self) -> Deltas:
        deltas = self.engine.step()
        self._deliver(deltas)
        if deltas:
            self._outlet.send([(self._streams[one[0]], Delta(*one)) for one in self._inbox.recv()[1]])
        began_s = time.thread_time()
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        self.clock.spent["event loop"] += time.thread_time() - began_s
        return deltas

    def time_parts(self) -> None:
        engine, controller = self.engine, self.engine.scheduler._width_controller
        for owner, name, part in (
            (controller, "next_widths", "next width"),
            (controller, "observe", "observed width"),
            (engine.scheduler, "schedule", "schedule"),
            (engine, "_launch", "launch"),
            (engine.scheduler, "commit", "commit"),
            (engine.stats, "count", "count"),
            (engine, "decode", "decode"),
            (engine, "step", "step"),
        ):
            setattr(owner, name, self.clock.timed(part, getattr(owner, name)))

    def close(self) -> None:
        for reader in self.readers:
            reader.cancel()
        self.loop.close()


async def measure(
    tokenizer: Tokenizer, *, num_rows: int, context: int, num_tokens: int, is_uneven: bool
) -> dict[str, float]:
    """Microseconds per row and step of each part, and of the event loop per delta."""
    num_steps = max(40, 4096 // num_rows)
    text_ids = tokenizer.encode(TEXT * 4)
    models, plan = make_models(tokenizer, num_rows=num_rows, context=context, num_steps=num_steps)
    prompt_ids = (text_ids * (context // len(text_ids) + 1))[:context]
    served = Served(FakeEngine(models, plan, text_ids, num_tokens, is_uneven=is_uneven), prompt_ids)
    while not await served.step():
        pass
    for _ in range(WARM_STEPS):
        await served.step()
    served.clock.spent.clear()
    served.heard[0] = 0
    served.time_parts()
    for _ in range(num_steps):
        assert len(await served.step()) == num_rows
    assert served.heard[0] > 0.9 * num_steps * num_rows, "some readers have not had their turn"
    served.close()
    spent = {part: 1e6 * seconds / (num_steps * num_rows) for part, seconds in served.clock.spent.items()}
    decode, whole = spent.pop("decode"), spent.pop("step")
    spent["schedule"] -= spent["next width"]
    spent["commit"] -= spent["observed width"]
    spent["width"] = spent.pop("next width") + spent.pop("observed width")
    spent["launch"] -= decode  # the part that is not real
    spent["read"] = whole - decode - sum(spent[part] for part in PARTS if part not in ("read", "deliver"))
    return spent | {"engine": whole - decode + spent["deliver"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 4000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--own-widths", action="store_true", help="each row has one, as on a GPU")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = context() | {"width": WIDTH, "page_size": PAGE_SIZE, "unit": "us per row and step"}
    tokenizer = Tokenizer(open_checkpoint("default").tokenizer_parts())
    found, rows = [], []
    for length in options.contexts:
        for num_tokens in options.tokens:
            for num_rows in options.rows:
                one = functools.partial(
                    measure,
                    tokenizer,
                    num_rows=num_rows,
                    context=length,
                    num_tokens=num_tokens,
                    is_uneven=options.own_widths,
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
