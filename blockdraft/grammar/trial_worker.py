"""The worker process that compiles clients' grammars for a trial. On Linux, it forks a child with limits.

The worker reads one request per line from standard input, and writes one answer per line to standard output.
It imports neither torch nor a model. `trial` starts it, and ends it if a grammar takes too long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from threading import Thread, stack_size
from typing import TYPE_CHECKING, TypedDict

from blockdraft.errors import RequestError
from blockdraft.grammar.compiling import TokenSource, WrittenGrammar, compile_text, read_tokens, write_grammar
from blockdraft.grammar.structured_output import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CPU_S = 2.0  # for one grammar; ordinary schemas take a hundredth of it
HAS_LIMITS = sys.platform == "linux"  # else a trial can only be ended with this process
MAX_WALL_S = 60.0 if HAS_LIMITS else 10.0  # a machine may be busy
MAX_BYTES = 512 << 20  # for one grammar
STACK_BYTES = 1 << 20  # a thread that compiles the grammar again has twice as much, or more
ASSUMED_BYTES = 4 << 20  # of a compiled grammar, if its memory is not measured
MAX_TOKENIZERS = 4
TOO_MUCH = (
    f"this structured output is too complex: to compile it takes more than {MAX_CPU_S:g} s of a core, "
    f"{MAX_BYTES >> 20} MB, or too deep a stack. "
    "Make it simpler: fewer patterns, alternatives, repeats and levels."
)


class TrialVerdict(TypedDict, total=False):
    """The result of a trial: either an error, or all other fields."""

    error: str
    text: str  # the grammar as llguidance reads it
    may_roll_back: bool
    num_bytes: int  # approximate memory of the compiled grammar


def judge(output: StructuredOutputs, tokens: TokenSource, read: LLTokenizer) -> TrialVerdict:
    """Compile a grammar. Return the error, or the grammar's text and if its matcher can roll back."""
    try:
        written = write_grammar(output, tokens)
        compile_text(read, written.text)
    except RequestError as error:
        return {"error": str(error)}
    return {"text": written.text, "may_roll_back": _may_roll_back(written, read)}


def _may_roll_back(written: WrittenGrammar, read: LLTokenizer) -> bool:
    """Say if llguidance can take back tokens of this grammar.

    It cannot (it reports so), or does it wrongly (1.9.1), if a rule ends by a count or a stop text, or if the
    grammar names tokens that are not special.
    """
    lark = written.lark
    if lark is None:
        return True
    if lark.has_ends or lark.has_other_ids:
        return False
    return all(map(read.is_special_token, lark.token_ids))


def main() -> None:
    """Answer requests until the input ends."""
    attempt = _try_in_child if HAS_LIMITS else _try_here
    known: dict[str, tuple[TokenSource, LLTokenizer]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "tokens" in asked:
            given = asked["tokens"]
            tokens = TokenSource(given["json"], given["size"], tuple(given["end_ids"]), given["names"])
            known[asked["key"]] = tokens, read_tokens(tokens)
            while len(known) > MAX_TOKENIZERS:
                del known[next(iter(known))]
        if asked["key"] not in known:
            answer: TrialVerdict | dict[str, bool] = {"is_unknown": True}
        else:
            answer = attempt(StructuredOutputs(**asked["output"]), *known[asked["key"]])
        sys.stdout.write(json.dumps({**answer, "number": asked["number"]}) + "\n")
        sys.stdout.flush()


def _try_here(output: StructuredOutputs, tokens: TokenSource, read: LLTokenizer) -> TrialVerdict:
    return {**judge(output, tokens, read), "num_bytes": ASSUMED_BYTES}


def _try_in_child(output: StructuredOutputs, tokens: TokenSource, read: LLTokenizer) -> TrialVerdict:
    """Judge a grammar in a child process, so that a crash or a limit does not end this process."""
    reading, writing = os.pipe()
    before = _statm()[1]
    child = os.fork()
    if child == 0:
        _limit()
        thread = Thread(target=_answer, args=(output, tokens, read, writing))
        stack_size(STACK_BYTES)
        thread.start()
        thread.join()
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answers:
        text = answers.read()
    _, _, used = os.wait4(child, 0)
    if not text:
        return {"error": TOO_MUCH}
    verdict: TrialVerdict = json.loads(text)
    return {**verdict, "num_bytes": max(0, used.ru_maxrss * 1024 - before)}


def _answer(output: StructuredOutputs, tokens: TokenSource, read: LLTokenizer, writing: int) -> None:
    answer = json.dumps(judge(output, tokens, read))
    with open(writing, "w", encoding="utf-8") as out:
        out.write(answer)


def _limit() -> None:
    """Limit this process's time and memory. A grammar that exceeds a limit ends the process."""
    import resource  # Windows has none

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_statm()[0] + MAX_BYTES, hard))


def _statm() -> tuple[int, int]:
    """Return the bytes of this process's address space and of its resident memory."""
    size, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(size) * page, int(resident) * page


if __name__ == "__main__":
    main()
