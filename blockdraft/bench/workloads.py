"""Loads the prompts: built-in classes, public data sets, random words, or a user's own file.

Equal names, limits and seeds give equal prompts in every run.
"""

from __future__ import annotations

import difflib
import random
import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import blockdraft
from blockdraft.bench.datasets import DATASETS, load_dataset
from blockdraft.bench.filler import filler
from blockdraft.bench.prompt_files import SUFFIXES, num_assistant_messages, prompts_of, read
from blockdraft.bench.records import Prompt, Workload
from blockdraft.errors import BenchError

CLASSES = ("code", "reasoning", "dialogue", "prose", "qa", "json", "long_code", "summarise")
APART = ("program", "page")  # built in, but not in "all": an answer takes thousands of tokens
ALL = "all"
RANDOM = "random"
NAMES = (*CLASSES, *APART, *DATASETS, RANDOM, ALL)

_SPELLINGS = {"math_500": "math500", "human_eval": "humaneval", "summarize": "summarise"}
_RANDOM_WORDS = 256  # words of a prompt, unless `random:N` sets N; arbitrary
_RANDOM_PROMPTS = 12  # as many as a built-in class has
_NOISE = string.ascii_letters + string.digits
_DEPTH_HEADING = "Background notes (not needed for the task):"


def load(
    name_or_path: str,
    *,
    limit: int | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    is_offline: bool = False,
) -> Workload:
    """Return the prompts of one workload. A limit keeps at most that many, spread evenly over all."""
    name = _spelled(name_or_path)
    if name == ALL:
        raise BenchError(
            f"'{ALL}' names several workloads, but one was expected: use one of {', '.join(CLASSES)}."
        )
    if name == RANDOM or name.startswith(RANDOM + ":"):
        return _random_workload(name, num_prompts=limit or _RANDOM_PROMPTS, seed=seed)
    if name in (*CLASSES, *APART):
        workload = _built_in(name)
    elif name in DATASETS:
        workload = load_dataset(name, data_dir=data_dir, is_offline=is_offline)
    elif _is_path(name_or_path):
        workload = _own(Path(name_or_path))
    else:
        raise BenchError(_unknown(name_or_path, name))
    return replace(workload, prompts=_spread(workload.prompts, limit, seed))


def load_all(
    names: Sequence[str] = (ALL,),
    *,
    limit: int | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    is_offline: bool = False,
) -> tuple[Workload, ...]:
    """Return one workload per name, in order. "all" means all built-in classes. The limit is per workload."""
    each: dict[str, None] = {}  # a set that keeps its order
    for name in names:
        each.update(dict.fromkeys(CLASSES if _spelled(name) == ALL else (name,)))
    workloads = [
        load(name, limit=limit, seed=seed, data_dir=data_dir, is_offline=is_offline) for name in each
    ]
    for later, workload in enumerate(workloads):
        if any(workload.name == earlier.name for earlier in workloads[:later]):
            raise BenchError(f"two workloads are called '{workload.name}': rename one file.")
    return tuple(workloads)


def with_turns(workload: Workload, max_turns: int | None) -> Workload:
    """Return the workload with conversations cut after `max_turns` user turns."""
    prompts = tuple(replace(prompt, turns=prompt.turns[:max_turns]) for prompt in workload.prompts)
    return replace(workload, prompts=prompts)


def salted(prompt: Prompt, salt: str) -> Prompt:
    """Put a unique line before the prompt, so that no cache has its prefix. Call this after `deepened`."""
    line = f"[run {salt}]\n"
    if prompt.system is not None:
        return replace(prompt, system=line + prompt.system)
    return replace(prompt, turns=(line + prompt.turns[0], *prompt.turns[1:]))


def deepened(prompt: Prompt, *, num_tokens: int, tokens_per_word: float, seed: int = 0) -> Prompt:
    """Put notes of about `num_tokens` before the prompt. The notes differ from prompt to prompt."""
    num_words = round(num_tokens / tokens_per_word) - len(_DEPTH_HEADING.split())
    if num_words < 1:
        return prompt
    notes = filler(num_words, seed=f"{seed}/{prompt.id}")
    first = f"{_DEPTH_HEADING}\n\n{notes}\n\n{prompt.turns[0]}"
    return replace(prompt, turns=(first, *prompt.turns[1:]))


def _spelled(name: str) -> str:
    """Return a name in our spelling: `MT-Bench` becomes mt_bench."""
    name = name.lower().replace("-", "_")
    return _SPELLINGS.get(name, name)


def _built_in(name: str) -> Workload:
    rows = read(Path(__file__).parent / "prompts" / f"{name}.jsonl").rows
    prompts = prompts_of(rows, name=name, category=name)
    return Workload(name, prompts, source=f"built in, blockdraft {blockdraft.__version__}")


def _own(path: Path) -> Workload:
    file = read(path)
    name = path.name.split(".")[0] or path.name
    prompts = prompts_of(file.rows, name=name, category=name)
    left_out = num_assistant_messages(file.rows)
    note = f" ({left_out} assistant messages left out: the model writes its own)" if left_out else ""
    return Workload(name, prompts, source=f"{path.name}, sha256 {file.digest}{note}")


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.suffix in SUFFIXES or len(path.parts) > 1 or path.is_file()


def _unknown(given: str, name: str) -> str:
    close = difflib.get_close_matches(name, NAMES, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(NAMES)}, or a JSONL file."
    return f"unknown workload '{given}': {hint}"


def _spread(prompts: tuple[Prompt, ...], limit: int | None, seed: int) -> tuple[Prompt, ...]:
    """Draw one prompt from each of `limit` stretches of equal length, in the file's order."""
    if limit is None or limit >= len(prompts):
        return prompts
    draw = random.Random(f"sample/{seed}")
    edges = [i * len(prompts) // limit for i in range(limit + 1)]
    return tuple(prompts[draw.randrange(start, end)] for start, end in pairwise(edges))


def _random_workload(name: str, *, num_prompts: int, seed: int) -> Workload:
    """Return prompts of random words, which no drafter can predict."""
    given = name.removeprefix(RANDOM).removeprefix(":")
    if given and not (given.isascii() and given.isdigit() and int(given)):
        raise BenchError(f"'{given}' is not a number of words: write '{RANDOM}:N', such as '{RANDOM}:512'.")
    num_words, prompts = int(given or _RANDOM_WORDS), []
    for number in range(num_prompts):
        draw = random.Random(f"noise/{seed}/{number}")
        words = ("".join(draw.choices(_NOISE, k=draw.randint(2, 9))) for _ in range(num_words))
        prompts.append(Prompt(id=f"random-{number + 1}", category=RANDOM, turns=(" ".join(words),)))
    return Workload(name, tuple(prompts), source=f"random, seed {seed}, {num_words} words", is_raw=True)
