"""llama.cpp's side of `benchmarks.cpu`, run by the interpreter of an environment with llama-cpp-python.

Only the standard library, numpy and llama_cpp are there, so nothing of ours is imported. It drives
llama.cpp's C functions, and chooses tokens by numpy's argmax, which is cheaper than its samplers.

    llama_worker.py serve                           orders as lines of JSON on stdin, a line back for each
    llama_worker.py first FILE TEXT THREADS         the first token of an answer to TEXT
    llama_worker.py memory FILE THREADS [DRAFTER]   resident memory after an answer

Drafting does as common/speculative.cpp, which the Python package comes without. The functions that it needs
beyond the binding's, for the inputs of the target's layers, are exported by the library under their C++
names; where a version has others, the answer to "load" says so and there is no drafting.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from pathlib import Path

CORES = len(os.sched_getaffinity(0))  # before OpenMP binds this thread to one of them

import llama_cpp as c  # noqa: E402
import numpy as np  # noqa: E402

SET_LAYER_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_LAYER_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
LAYERS, NUM_LAYERS = (
    f"_Z{28 + len(end)}llama_model_target_layer_ids{end}PK11llama_model" for end in ("", "_n")
)
DECODE = 1  # LLAMA_PROCESS_TYPE_DECODE
CONTEXT_TOKENS = 2048


@c.llama_log_callback
def _say_nothing(level: int, text: bytes, data: object) -> None:
    pass


class Model:
    def __init__(self, path: str) -> None:
        self.pointer = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        assert self.pointer, f"{path} cannot be loaded"
        self.vocab = c.llama_model_get_vocab(self.pointer)
        self.vocab_size = c.llama_vocab_n_tokens(self.vocab)
        self.width = c.llama_model_n_embd(self.pointer)

    def tokens_of(self, text: str) -> list[int]:
        data, room = text.encode(), len(text.encode()) + 8
        found = (c.llama_token * room)()
        count = c.llama_tokenize(self.vocab, data, len(data), found, room, False, True)
        return list(found[:count])

    def text_of(self, token: int) -> str:
        room = ctypes.create_string_buffer(64)
        size = c.llama_token_to_piece(self.vocab, token, room, 64, 0, True)
        return room.raw[:size].decode(errors="replace")


class Context:
    """A cache of `rows` sequences and what is computed with it."""

    def __init__(
        self, model: Model, threads: int, *, rows: int = 1, ubatch: int = 512, target: object = None
    ) -> None:
        params = c.llama_context_default_params()
        params.n_ctx = CONTEXT_TOKENS if rows == 1 else rows * CONTEXT_TOKENS // 2
        params.n_batch, params.n_ubatch, params.n_seq_max = max(2048, ubatch), ubatch, rows
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if target is not None:
            params.ctx_other = target
        self.model, self.pointer = model, c.llama_init_from_model(model.pointer, params)
        assert self.pointer, "no context"
        self.memory = c.llama_get_memory(self.pointer)
        self.batch = c.llama_batch_init(params.n_batch, 0, 1)

    def clear(self) -> None:
        c.llama_memory_clear(self.memory, False)

    def cut(self, length: int) -> None:
        """Forget what sequence 0 holds from position `length` on."""
        assert c.llama_memory_seq_rm(self.memory, 0, length, -1)

    def forward(self, tokens: list[int], start: int, row: int = 0, num_logits: int = 1) -> np.ndarray:
        """Return the likeliest next token after each of the last `num_logits` tokens of one sequence."""
        places = [(start + i, row) for i in range(len(tokens))]
        return self.forward_at(tokens, places, num_logits)

    def forward_at(self, tokens: list[int], places: list[tuple[int, int]], num_logits: int) -> np.ndarray:
        """Return the likeliest next tokens for tokens at given (position, sequence)."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i, (token, (position, row)) in enumerate(zip(tokens, places)):  # noqa: B905 (older Pythons)
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = i >= count - num_logits
        assert c.llama_decode(self.pointer, batch) == 0, "llama_decode failed"
        logits = c.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(logits, (num_logits, self.model.vocab_size)).argmax(1)


class Pair:
    """A target and a DFlash drafter that reads the inputs of some of its layers."""

    def __init__(self, target: Model, drafter: Model, threads: int) -> None:
        self.target = Context(target, threads)
        self.draft = Context(drafter, threads, target=self.target.pointer)
        self.mask = c.llama_vocab_mask(drafter.vocab)
        count = hidden_function(NUM_LAYERS, ctypes.c_uint32, ctypes.c_void_p)(drafter.pointer)
        layers = hidden_function(LAYERS, ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p)(drafter.pointer)
        self.layers = layers[:count]
        floats = ctypes.POINTER(ctypes.c_float)
        self.read = hidden_function(GET_LAYER_INPUT, floats, ctypes.c_void_p, ctypes.c_uint32)
        want = hidden_function(SET_LAYER_INPUT, None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)
        for layer in self.layers:
            want(self.target.pointer, layer, True)
        is_causal = meta(drafter, "dflash.attention.causal") == "true"
        c.llama_set_causal_attn(self.draft.pointer, is_causal)
        self.batch = c.llama_batch_ext_init(self.draft.pointer)

    def inject(self, count: int, start: int) -> None:
        """Put the first `count` tokens that the target has just read into the drafter's cache."""
        shape = (count, self.target.model.width)
        parts = [np.ctypeslib.as_array(self.read(self.target.pointer, i), shape) for i in self.layers]
        features = np.ascontiguousarray(np.concatenate(parts, 1), np.float32)
        most, size = 512, features.shape[1]
        for begin in range(0, count, most):
            c.llama_batch_ext_clear(self.batch)
            for i in range(begin, min(begin + most, count)):
                data = features[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                place = c.llama_batch_ext_add_embd(self.batch, 0, c.llama_embd(data, 1, size))
                assert place >= 0
                c.llama_batch_ext_set_pos(self.batch, place, ctypes.byref(c.llama_pos(start + i)))
                c.llama_batch_ext_set_output_logits(self.batch, place, False)
            assert c.llama_process(self.draft.pointer, DECODE, self.batch) == 0, "no features injected"

    def answer(self, ids: list[int], max_tokens: int, stops: list[int], num_drafts: int) -> dict[str, object]:
        self.target.clear()
        self.draft.clear()
        tokens = [int(self.target.forward(ids, 0)[0])]
        self.inject(len(ids), 0)
        position, num_steps, begun_s = len(ids), 0, time.perf_counter()
        while len(tokens) < max_tokens and tokens[-1] not in stops:
            block = [tokens[-1]] + [self.mask] * num_drafts
            drafts = self.draft.forward(block, position, num_logits=num_drafts + 1)[1:].tolist()
            self.draft.cut(position)
            found = self.target.forward([tokens[-1], *drafts], position, num_logits=num_drafts + 1).tolist()
            accepted = next((i for i in range(num_drafts) if drafts[i] != found[i]), num_drafts)
            self.target.cut(position + accepted + 1)
            self.inject(accepted + 1, position)
            position += accepted + 1
            num_steps += 1
            for token in found[: accepted + 1]:
                tokens.append(token)
                if token in stops or len(tokens) == max_tokens:
                    break
        return timed(tokens, begun_s, num_steps)


def timed(tokens: list[int], begun_s: float, steps: int) -> dict[str, object]:
    """An answer as `cpu_ours.Answer` has it; its first token came with the prompt."""
    seconds = time.perf_counter() - begun_s
    return {"tokens": tokens, "seconds": seconds, "num_timed": len(tokens) - 1, "steps": steps}


def meta(model: Model, key: str) -> str:
    room = ctypes.create_string_buffer(256)
    size = c.llama_model_meta_val_str(model.pointer, key.encode(), room, 256)
    assert size >= 0, f"the file has no {key}"
    return room.value.decode()


def hidden_function(name: str, result: object, *arguments: object) -> object:
    """A function of the library that llama_cpp does not declare. AttributeError where there is none."""
    function = ctypes.CDLL(c.llama_cpp._lib._name)[name]
    function.argtypes, function.restype = arguments, result
    return function


class Worker:
    """The loaded models, and their contexts by kind."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.contexts: dict[tuple[str, int, int], Context] = {}
        self.pairs: dict[str, Pair] = {}
        self.threads = 1

    def load(self, files: dict[str, str], threads: int) -> dict[str, object]:
        self.threads = threads
        self.models = {name: Model(path) for name, path in files.items()}
        why = ""
        try:
            for name in (GET_LAYER_INPUT, SET_LAYER_INPUT, LAYERS, NUM_LAYERS):
                hidden_function(name, None)
        except AttributeError as error:
            why = f"its library exports no such function: {error}"
        info = c.llama_print_system_info().decode()
        return {"version": c.__version__, "system": info, "no_drafts": why, "cores": CORES}

    def context(self, model: str, rows: int = 1, ubatch: int = 512) -> Context:
        key = (model, rows, ubatch)
        if key not in self.contexts:
            self.contexts[key] = Context(self.models[model], self.threads, rows=rows, ubatch=ubatch)
        self.contexts[key].clear()
        return self.contexts[key]

    def decode(self, model: str, prompts: list[list[int]], tokens: int) -> dict[str, object]:
        """Every row goes on by `tokens` after its first, all rows in one batch per step."""
        context, rows = self.context(model, len(prompts)), range(len(prompts))
        answers = [[int(context.forward(ids, 0, row)[0])] for row, ids in enumerate(prompts)]
        begun_s = time.perf_counter()
        for step in range(tokens):
            places = [(len(prompts[row]) + step, row) for row in rows]
            found = context.forward_at([answers[row][-1] for row in rows], places, len(prompts))
            for row in rows:
                answers[row].append(int(found[row]))
        return {"seconds": time.perf_counter() - begun_s, "answers": answers}

    def prefill(self, model: str, ids: list[int], ubatch: int) -> dict[str, object]:
        context = self.context(model, 1, ubatch)
        begun_s = time.perf_counter()
        context.forward(ids, 0)
        return {"seconds": time.perf_counter() - begun_s}

    def answer(self, model: str, ids: list[int], max_tokens: int, stops: list[int]) -> dict[str, object]:
        """One answer until a stop; the seconds are those after its first token."""
        context = self.context(model)
        tokens = [int(context.forward(ids, 0)[0])]
        begun_s = time.perf_counter()
        while len(tokens) < max_tokens and tokens[-1] not in stops:
            tokens.append(int(context.forward(tokens[-1:], len(ids) + len(tokens) - 1)[0]))
        return timed(tokens, begun_s, len(tokens) - 1)

    def draft_answer(
        self, model: str, ids: list[int], max_tokens: int, stops: list[int], num_drafts: int
    ) -> dict[str, object]:
        if model not in self.pairs:
            self.pairs[model] = Pair(self.models[model], self.models["dflash"], self.threads)
        return self.pairs[model].answer(ids, max_tokens, stops, num_drafts)


def serve() -> None:
    worker = Worker()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(worker, order.pop("do"))(**order)), flush=True)


def first(path: str, text: str, threads: int) -> None:
    model = Model(path)
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    token = Context(model, threads).forward(model.tokens_of(chat), 0)[0]
    print(model.text_of(int(token)), flush=True)


def memory(path: str, threads: int, *drafter: str) -> None:
    """After what `benchmarks.cpu` asks of our engine for the same figure."""
    worker = Worker()
    worker.load(dict(zip(("model", "dflash"), (path, *drafter))), threads)  # noqa: B905
    ids = list(range(100, 612))
    if drafter:
        worker.draft_answer("model", ids, 32, [], 3)
    else:
        worker.answer("model", ids, 32, [])
    status = Path("/proc/self/status").read_text()
    found = {k: int(re.search(k + r":\s+(\d+)", status)[1]) / 1024 for k in ("VmRSS", "VmHWM")}
    print(json.dumps(found), flush=True)


def main() -> None:
    c.llama_log_set(_say_nothing, ctypes.c_void_p(0))
    c.llama_backend_init()
    what, *words = sys.argv[1:]
    if what == "serve":
        serve()
    elif what == "first":
        first(words[0], words[1], int(words[2]))
    else:
        memory(words[0], int(words[1]), *words[2:])


if __name__ == "__main__":
    main()
