"""Finds the files of public data sets (datasets.toml) and makes a prompt of each row.

A file is searched in the folder of `--data`, then on the hub. Rows in our own layout ("messages", "turns")
are used unchanged. Rows in the layout of the original release get the words in datasets.toml added.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from blockdraft.bench.prompt_files import TEXT, TEXT_FIELDS, PromptFile, prompts_of, read
from blockdraft.bench.records import Workload
from blockdraft.errors import BenchError
from blockdraft.jsonl import Row

_MT_BENCH_CLASSES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_PACKINGS = ("", ".gz", ".xz")


@dataclass(frozen=True, slots=True)
class Dataset:
    """One public data set. datasets.toml explains the fields."""

    name: str
    title: str
    category: str
    files: Sequence[str]
    home: str
    hub: Sequence[str] | None = None
    fields: Sequence[str] = TEXT_FIELDS
    template: str = TEXT
    shared_files: Sequence[str] = ()
    own_field: str | None = None
    test_ids: Sequence[int] | None = None

    def is_own(self, rows: tuple[Row, ...]) -> bool:
        """Return whether rows belong to this data set: several data sets share a file name."""
        if self.own_field is not None:
            return self.own_field in rows[0].fields
        is_mt_bench = all(row.fields.get("category") in _MT_BENCH_CLASSES for row in rows)
        return is_mt_bench if self.name == "mt_bench" else not is_mt_bench and "turns" in rows[0].fields

    def is_wanted(self, row: Row) -> bool:
        task = row.fields.get("task_id")
        return (
            self.test_ids is None or not isinstance(task, int) or self.test_ids[0] <= task <= self.test_ids[1]
        )

    def group(self, category: str) -> str:
        """Return the group of a category: Spec-Bench counts its eight MT-Bench classes as one task."""
        return "mt_bench" if self.name == "spec_bench" and category in _MT_BENCH_CLASSES else category


_TABLE = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
DATASETS = {name: Dataset(name, **facts) for name, facts in _TABLE.items()}


def load_dataset(name: str, *, data_dir: Path | None, is_offline: bool) -> Workload:
    """Return all prompts of a data set, from the folder if it has the file, else from the hub."""
    dataset = DATASETS[name]
    file = _local_file(dataset, data_dir)
    source = "" if file is None else file.path.name
    if file is None:
        file = read(_hub_file(dataset, data_dir=data_dir, is_offline=is_offline))
        source = f"hub {' '.join(dataset.hub or ())}"
    rows = tuple(filter(dataset.is_wanted, file.rows))
    if not rows:
        raise BenchError(f"{file.path} has no row of the test split of {dataset.title}: give the whole file.")
    prompts = prompts_of(
        rows, name=name, category=dataset.category, fields=dataset.fields, template=dataset.template
    )
    grouped = tuple(replace(prompt, category=dataset.group(prompt.category)) for prompt in prompts)
    return Workload(name, grouped, f"{source}, sha256 {file.digest}")


def _local_file(dataset: Dataset, data_dir: Path | None) -> PromptFile | None:
    if data_dir is None:
        return None
    if not data_dir.is_dir():
        raise BenchError(
            f"--data {data_dir} is not a folder: give the folder that has the files of the data sets."
        )
    for files, is_shared in ((dataset.files, False), (dataset.shared_files, True)):
        for folder, name, packing in product((data_dir, data_dir / "eval"), files, _PACKINGS):
            path = folder / (name + packing)
            if path.is_file() and (not is_shared or dataset.is_own(read(path).rows)):
                return read(path)
    return None


def _hub_file(dataset: Dataset, *, data_dir: Path | None, is_offline: bool) -> Path:
    absent = f"{dataset.title} ('{dataset.name}') is not here"
    where = "a folder, given with --data," if data_dir is None else str(data_dir)
    advice = f"put {dataset.home} into {where} as {dataset.files[0]}"
    if dataset.hub is None:
        raise BenchError(f"{absent}, and the hub has no copy: {advice}.")
    if is_offline:
        raise BenchError(f"{absent}, and downloads are off: {advice}.")
    if dataset.hub[1].endswith(".parquet") and not _can_read_parquet():
        raise BenchError(
            f"{absent}, and the hub's copy is a Parquet file: 'pip install pyarrow' to read it, or {advice}."
        )
    import huggingface_hub

    from blockdraft.checkpoints.hub import HUB_ERRORS

    try:
        return Path(huggingface_hub.hf_hub_download(*dataset.hub, repo_type="dataset"))
    except HUB_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BenchError(
            f"{absent}, and {' '.join(dataset.hub)} could not be downloaded ({reason}): {advice}."
        ) from error


def _can_read_parquet() -> bool:
    return find_spec("pyarrow") is not None
