"""The public data sets DFlash is measured on: where their files are, and the words put around their rows.

A file is looked for in the folder of `--data`, then on the hub. Rows may have our own layout ("messages",
"turns": taken as they are) or that of the original release, to which the wording of the DFlash paper is
added (z-lab/dflash, benchmark.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from blockdraft.bench.prompt_files import AS_IT_IS, TEXT, PromptFile, Wrapper, prompts_of, read
from blockdraft.bench.records import Workload
from blockdraft.errors import BenchError
from blockdraft.jsonl import Row

_MATH = TEXT + "\nPlease reason step by step, and put your final answer within \\boxed{}."
_HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    f"```python\n{TEXT}\n```"
)
_MT_BENCH_CLASSES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
_MBPP_TEST_IDS = range(11, 511)  # the test split; the original file holds all splits
_PACKINGS = ("", ".gz", ".xz")


@dataclass(frozen=True, slots=True)
class Dataset:
    """One public data set.

    `files` are paths below the data folder, without .gz or .xz, in the order they are tried; one of
    `shared_files`, whose names several sets use, counts only where its rows are this set's.
    """

    title: str
    category: str
    files: tuple[str, ...]
    hub: tuple[str, str] | None  # repository and file
    home: str  # where a person finds the file
    wrapper: Wrapper = AS_IT_IS
    shared_files: tuple[str, ...] = ()
    is_own: Callable[[tuple[Row, ...]], bool] = lambda rows: False
    is_wanted: Callable[[Row], bool] = lambda row: True
    group: Callable[[str], str] = lambda category: category


def _has(field: str) -> Callable[[tuple[Row, ...]], bool]:
    return lambda rows: field in rows[0].fields


def _is_mt_bench(rows: tuple[Row, ...]) -> bool:
    return all(row.fields.get("category") in _MT_BENCH_CLASSES for row in rows)


def _is_spec_bench(rows: tuple[Row, ...]) -> bool:
    return not _is_mt_bench(rows) and "turns" in rows[0].fields


def _is_mbpp_test(row: Row) -> bool:
    task = row.fields.get("task_id")
    return not isinstance(task, int) or task in _MBPP_TEST_IDS


def _spec_bench_group(category: str) -> str:
    """Spec-Bench reports its eight MT-Bench classes as one of six tasks."""
    return "mt_bench" if category in _MT_BENCH_CLASSES else category


DATASETS: dict[str, Dataset] = {
    "gsm8k": Dataset(
        title="GSM8K",
        category="math",
        files=("gsm8k_test.jsonl", "gsm8k.jsonl", "gsm8k/test.jsonl", "grade_school_math/data/test.jsonl"),
        shared_files=("test.jsonl",),
        is_own=_has("question"),
        hub=("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        home="github.com/openai/grade-school-math, grade_school_math/data/test.jsonl",
        wrapper=Wrapper(("question",), _MATH),
    ),
    "math500": Dataset(
        title="MATH-500",
        category="math",
        files=("math500.jsonl", "math500_test.jsonl", "math500/test.jsonl", "MATH-500/test.jsonl"),
        shared_files=("test.jsonl",),
        is_own=_has("problem"),
        hub=("HuggingFaceH4/MATH-500", "test.jsonl"),
        home="huggingface.co/datasets/HuggingFaceH4/MATH-500, test.jsonl",
        wrapper=Wrapper(("problem",), _MATH),
    ),
    "humaneval": Dataset(
        title="HumanEval",
        category="code",
        files=(
            "humaneval.jsonl",
            "HumanEval.jsonl",
            "data/HumanEval.jsonl",
            "human-eval/data/HumanEval.jsonl",
        ),
        hub=("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
        home="github.com/openai/human-eval, data/HumanEval.jsonl.gz",
        wrapper=Wrapper(("prompt",), _HUMANEVAL),
    ),
    "mbpp": Dataset(
        title="MBPP (sanitized, test)",
        category="code",
        files=(
            "mbpp_sanitized_test.jsonl",
            "sanitized-mbpp.json",
            "mbpp/sanitized-mbpp.json",
            "mbpp.jsonl",
            "mbpp/mbpp.jsonl",
        ),
        hub=("google-research-datasets/mbpp", "sanitized/test-00000-of-00001.parquet"),
        home="github.com/google-research/google-research, mbpp/sanitized-mbpp.json",
        wrapper=Wrapper(("prompt", "text")),
        is_wanted=_is_mbpp_test,
    ),
    "mt_bench": Dataset(
        title="MT-Bench",
        category="mt_bench",
        files=("mt_bench.jsonl", "mt_bench/question.jsonl"),
        shared_files=("question.jsonl",),
        is_own=_is_mt_bench,
        hub=("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
        home="github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench/question.jsonl",
        wrapper=Wrapper(("prompt",)),
    ),
    "spec_bench": Dataset(
        title="Spec-Bench",
        category="spec_bench",
        files=("spec_bench.jsonl", "spec_bench/question.jsonl", "data/spec_bench/question.jsonl"),
        shared_files=("question.jsonl",),
        is_own=_is_spec_bench,
        hub=None,
        home="github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
        group=_spec_bench_group,
    ),
}


def load_dataset(name: str, *, data_dir: Path | None, is_offline: bool) -> Workload:
    """All prompts of a data set, from the folder where its file is there, else from the hub."""
    dataset = DATASETS[name]
    file = _local_file(dataset, data_dir)
    source = "" if file is None else file.path.name
    if file is None:
        file = read(_hub_file(name, dataset, data_dir=data_dir, is_offline=is_offline))
        source = f"hub {' '.join(dataset.hub or ())}"
    rows = tuple(filter(dataset.is_wanted, file.rows))
    if not rows:
        raise BenchError(f"{file.path} holds no row of the test split of {dataset.title}.")
    prompts = prompts_of(rows, name=name, category=dataset.category, wrapper=dataset.wrapper)
    grouped = tuple(replace(prompt, category=dataset.group(prompt.category)) for prompt in prompts)
    return Workload(name, grouped, f"{source}, sha256 {file.digest}")


def _local_file(dataset: Dataset, data_dir: Path | None) -> PromptFile | None:
    if data_dir is None:
        return None
    if not data_dir.is_dir():
        raise BenchError(
            f"the data folder {data_dir} is not a folder: give one that holds the data sets' files."
        )
    for files, is_shared in ((dataset.files, False), (dataset.shared_files, True)):
        for folder, name, packing in product((data_dir, data_dir / "eval"), files, _PACKINGS):
            path = folder / (name + packing)
            if path.is_file() and (not is_shared or dataset.is_own(read(path).rows)):
                return read(path)
    return None


def _hub_file(name: str, dataset: Dataset, *, data_dir: Path | None, is_offline: bool) -> Path:
    absent = f"{dataset.title} ('{name}') is not here"
    where = "a folder, given with --data," if data_dir is None else str(data_dir)
    advice = f"put {dataset.home} into {where} as {dataset.files[0]}"
    if dataset.hub is None:
        raise BenchError(f"{absent}, and the hub has no copy: {advice}.")
    if is_offline:
        raise BenchError(f"{absent}, and downloads are off: {advice}.")
    if dataset.hub[1].endswith(".parquet") and not _can_read_parquet():
        raise BenchError(
            f"{absent}, and the hub has it as Parquet, read by pyarrow: 'pip install pyarrow', or {advice}."
        )
    import huggingface_hub

    from blockdraft.checkpoints.hub import HUB_ERRORS

    try:
        return Path(huggingface_hub.hf_hub_download(*dataset.hub, repo_type="dataset"))
    except HUB_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BenchError(
            f"{absent}, and {' '.join(dataset.hub)} did not come from the hub ({reason}): {advice}."
        ) from error


def _can_read_parquet() -> bool:
    return find_spec("pyarrow") is not None
