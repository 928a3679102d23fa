"""Kernels of a card are compiled by several processes, without a card, and found by whoever runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

# A driver that names an H200. Kernels are skipped, compiled by two workers, then asked for as by a start.
SCRIPT = """
import json, sys, torch
from pathlib import Path
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver())
from blockdraft.kernels.triton.cache_keys import settle_cache_keys
from blockdraft.kernels.triton.compile_pool import CompilePool, collecting
from blockdraft.kernels.triton import pointwise as rows
from blockdraft.kernels.triton.pointwise import rms_norm

settle_cache_keys()

def files():
    return sorted(str(path) for path in Path(knobs.cache.dir).rglob("*.cubin"))

def call():
    for dtype in (torch.bfloat16, torch.float32):
        for count in (1, 3, 3):
            rms_norm(torch.ones(count, 64, dtype=dtype), torch.ones(64, dtype=dtype), 1e-6)

pool = CompilePool(2)
with collecting(pool):
    call()
    is_zero = not torch.empty(1000).any() and not torch.empty_like(torch.ones(1000)).any()
    nowhere, table = torch.full((4,), 10**9), torch.ones(8)
    table[nowhere] = table[nowhere] + table.gather(0, nowhere) + table.index_select(0, nowhere)
skipped = files()
pool.ask("blockdraft.kernels.triton.pointwise", "nonsense", "{}", GPUTarget("cuda", 90, 32))
told = []
pool.wait(lambda *what: told.append(what))
pool.close()
compiled = files()
run = JITFunction.run
JITFunction.run = lambda self, *args, **others: run(self, *args, **{**others, 'warmup': True})
call()  # compiles what it does not find, and launches nothing
kinds = {type(kernel).__name__ for kernel in rows._rms_norm.device_caches[0][0].values()}
print(json.dumps([is_zero, skipped, compiled, files(), sorted(kinds), told, pool.errors]))
"""


KEYS = """
import json
from blockdraft.kernels.triton import sampling
from blockdraft.kernels.triton.cache_keys import own_functions, settle_cache_keys
if {settles}:
    settle_cache_keys()
functions = list(own_functions())
for function in {order}(functions):
    function.cache_key
print(json.dumps([function.cache_key for function in functions]))
"""


def run(script, folder):
    """Run a script that compiles instead of interpreting; return its last line as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_keys_do_not_depend_on_which_kernel_runs_first(tmp_path):
    orders = ("list", "reversed")
    loose = [run(KEYS.format(order=order, settles=False), tmp_path) for order in orders]
    assert loose[0] != loose[1], "Triton has mended it: settle_cache_keys can go"
    settled = [run(KEYS.format(order=order, settles=True), tmp_path) for order in orders]
    assert settled[0] == settled[1]


def test_a_word_that_names_a_type_stays_a_word():
    from blockdraft.kernels.triton.compile_workers import _constant

    assert _constant("int8") == "int8"


def test_a_worker_answers_whatever_a_kernel_raises(monkeypatch):
    from blockdraft.kernels.triton import compile_workers

    monkeypatch.setattr(compile_workers, "compile_kernel", lambda *_: {}["a key"])
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    answer = compile_workers._answer(
        json.dumps({"module": "m", "name": "one", "specialization": "", "target": target})
    )
    assert json.loads(answer) == {"name": "one", "error": "KeyError: 'a key'"}


@pytest.mark.slow
def test_whoever_runs_a_kernel_finds_it_compiled(tmp_path):
    is_zero, skipped, compiled, after, kinds, told, errors = run(SCRIPT, tmp_path)
    assert skipped == [], "nothing is compiled while collecting"
    assert is_zero, "memory and indices are zero while collecting"
    assert len(compiled) >= 2
    assert after == compiled
    assert kinds == ["CompiledKernel"], "what stood for the kernels is gone"
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1)), "each is told of once"
    assert {total for _, total, _ in told} == {len(told)}
    assert len(told) == len(compiled) + 1
    (error,) = errors
    assert error.startswith("nonsense: KeyError")


def test_a_pool_whose_workers_end_at_once_waits_for_nobody(monkeypatch):
    from blockdraft.kernels.triton import compile_pool

    monkeypatch.setattr(compile_pool, "WORKERS", (sys.executable, "-c", "pass"))
    pool = compile_pool.CompilePool(2)
    for number in range(4):
        pool.ask("module", "kernel", str(number), SimpleNamespace())
    pool.wait()
    pool.close()
    assert pool.num_done == 0


def test_what_a_compiler_prints_is_no_answer(monkeypatch):
    from blockdraft.kernels.triton import compile_pool

    answer = json.dumps({"name": "one", "error": None})
    script = f"input(); print('a warning'); print({answer!r})"
    monkeypatch.setattr(compile_pool, "WORKERS", (sys.executable, "-c", script))
    pool, told = compile_pool.CompilePool(1), []
    pool.ask("module", "one", "{}", SimpleNamespace())
    pool.wait(lambda *what: told.append(what))
    pool.close()
    assert told == [(1, 1, "one")]


@pytest.mark.slow
def test_workers_end_with_the_start_that_has_begun_them():
    """Their input ends with it, however it ends."""
    command = [sys.executable, "-m", "blockdraft.kernels.triton.compile_workers", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(
            json.dumps({"module": "x", "name": "y", "specialization": "{}", "target": {}}) + "\n"
        )
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["name"] == "y"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3
        process.stdin.close()
        assert process.wait(60) == 0
    assert not any(Path("/proc", child).exists() for child in children)
