"""llama.cpp as `benchmarks.cpu` measures it: a process of another interpreter, which takes our orders.

Its environment has llama-cpp-python (tried with 0.3.36) and no need of anything of ours. What it runs is
`llama_worker.py`; the files are those of `llama_files.py`. It computes only while we wait for it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.cpu_ours import QUESTION, Answer, all_cores, first_character_s, prompt, prompts
from benchmarks.llama_files import DRAFTER, llama_files

WORKER = Path(__file__).with_name("llama_worker.py")


class Llama:
    """The worker with all files loaded; fresh workers are started where needed."""

    def __init__(self, python: str, threads: int, vocab_size: int) -> None:
        self.files, self.threads, self.vocab_size = llama_files(), threads, vocab_size
        # -I: the folder of the script, with names such as http.py, is not searched for modules.
        self.command = [python, "-I", str(WORKER)]
        with all_cores():
            self.process = subprocess.Popen(
                [*self.command, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        names = {name: str(path) for name, path in self.files.items()}
        found = self._ask("load", files=names, threads=threads)
        assert found["cores"] >= threads, f"llama.cpp may use {found['cores']} cores for {threads} threads"
        self.version, self.no_drafts = f"llama-cpp-python {found['version']}", str(found["no_drafts"])
        self.system = str(found["system"])

    def close(self) -> None:
        self.process.communicate()

    def _ask(self, what: str, **words: object) -> dict[str, object]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp's process has ended at '{what}'; its own words are above.")
        found: dict[str, object] = json.loads(line)
        return found

    def decode(self, name: str, num_rows: int, num_tokens: int) -> tuple[float, list[list[int]]]:
        """Decode tok/s over all rows, first tokens excluded, and the tokens of each row."""
        given = prompts(self.vocab_size, num_rows)
        found = self._ask("decode", model=name, prompts=given, tokens=num_tokens)
        return num_rows * num_tokens / found["seconds"], found["answers"]

    def prefill_s(self, name: str, length: int, ubatch: int) -> float:
        ids = prompt(self.vocab_size, length)
        return self._ask("prefill", model=name, ids=ids, ubatch=ubatch)["seconds"]

    def answer(self, name: str, drafts: int, max_tokens: int, stops: list[int], ids: list[int]) -> Answer:
        """One greedy answer, plain, or with so many drafts of our drafter a step."""
        words = {"model": name, "ids": ids, "max_tokens": max_tokens, "stops": stops}
        if drafts:
            return Answer(**self._ask("draft_answer", **words, num_drafts=drafts))
        return Answer(**self._ask("answer", **words))

    def first_token_s(self, name: str) -> float:
        """Seconds from starting a process to the first character of its answer."""
        return first_character_s([*self.command, "first", str(self.files[name]), QUESTION, str(self.threads)])

    def memory(self, name: str, *, with_drafter: bool = False) -> dict[str, float]:
        """Resident megabytes after an answer in a fresh process."""
        words = ["memory", str(self.files[name]), str(self.threads)]
        words += [str(self.files[DRAFTER])] if with_drafter else []
        with all_cores():
            done = subprocess.run([*self.command, *words], capture_output=True, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
