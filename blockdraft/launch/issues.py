"""Known issues: bad combinations that an engine accepts, or rejects only late.

issues.toml lists their conditions, symptom, way out, and source thread. A condition on an unknown fact (no
card, no config.json) is false, so nothing is refused by a guess.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Literal, get_args

from blockdraft.checkpoints.model_folder import ModelFolder
from blockdraft.checkpoints.read_draft_config import draft_block
from blockdraft.errors import SettingsError
from blockdraft.launch.engine_versions import NEWEST, EngineVersion, read_version
from blockdraft.launch.launch_request import Combination, Raw

FILE = Path(__file__).with_name("issues.toml")

PULLS = {
    "vllm": "https://github.com/vllm-project/vllm/pull/",
    "sglang": "https://github.com/sgl-project/sglang/pull/",
}

PAGE = "docs/scale-out.md"
Severity = Literal["refuse", "warn", "note"]  # from worst to mildest


@dataclass(frozen=True, slots=True)
class Issue:
    """A known issue of a combination."""

    id: str
    severity: Severity
    symptom: str
    way_out: str
    thread: str  # address
    upstream_since: str | None = None  # the first release with the repair

    def __str__(self) -> str:
        return f"{self.symptom} {self.way_out} ({self.thread})"


@dataclass(frozen=True, slots=True)
class IssueEntry:
    """An issue and its conditions. A combination has the issue if all conditions hold."""

    issue: Issue
    engine: str
    conditions: Mapping[str, object]
    fixed_by: tuple[int, ...] = ()  # pull requests; a build with one of them does not have the issue

    def holds(self, combination: Combination) -> bool:
        version = combination.version
        if self.engine != version.engine or version.carried & set(self.fixed_by):
            return False
        return all(_holds(combination, name, wanted) for name, wanted in self.conditions.items())


def check_settings(asked: Combination) -> list[Issue]:
    """Return the issues of a combination, worst first; empty for our own engine."""
    if asked.settings.engine == "native":
        return []
    version = asked.version
    found = [_softened(entry.issue, version) for entry in entries() if entry.holds(asked)]
    found += _newer(version) + _unknown_pulls(version) + _head_alone(asked)
    if asked.trusts_code:
        symptom = "Python code of the checkpoint or the drafter will run with your rights."
        way_out = "Leave out --trust-remote-code, unless the model needs it and you have read that code."
        found.append(Issue("trust-remote-code", "warn", symptom, way_out, PAGE))
    return sorted(found, key=lambda issue: get_args(Severity).index(issue.severity))


def refuse(issues: Iterable[Issue]) -> None:
    """Raise SettingsError, with the source thread, if an issue forbids the start."""
    bad = [issue for issue in issues if issue.severity == "refuse"]
    if bad:
        raise SettingsError("\n".join(map(str, bad)))


@cache
def entries() -> tuple[IssueEntry, ...]:
    return read_entries(FILE.read_text(encoding="utf-8"))


def read_entries(text: str) -> tuple[IssueEntry, ...]:
    return tuple(_entry(**table) for table in tomllib.loads(text)["issue"])


def _entry(
    *, engine: str, fixed_by: Iterable[int] = (), upstream_since: str | None = None, **table: object
) -> IssueEntry:
    """Read one entry of issues.toml. A mistake in the file is a bug of ours."""
    about = {name: table.pop(name) for name in ("id", "severity", "symptom", "way_out", "thread")}
    if upstream_since is not None:
        assert "versions" not in table, f"{about['id']}: upstream_since is the end of its versions"
        table["versions"] = f"<{upstream_since}"
    unknown = table.keys() - CONDITIONS
    assert not unknown, f"{about['id']}: unknown conditions {unknown}"
    issue = Issue(**about, upstream_since=upstream_since)  # type: ignore[arg-type]
    return IssueEntry(issue, engine, table, tuple(fixed_by))


def _softened(issue: Issue, version: EngineVersion) -> Issue:
    """Lower a refusal to a warning for a nightly build that may already have the repair."""
    if issue.severity != "refuse" or issue.upstream_since is None or not version.is_nightly:
        return issue
    major, minor, _ = version.release
    is_next = read_version(version.engine, issue.upstream_since).release[:2] <= (major, minor + 1)
    return replace(issue, severity="warn") if is_next else issue


def _newer(version: EngineVersion) -> list[Issue]:
    newest = NEWEST[version.engine]
    symptom = f"{version} is newer than {newest}, the newest we know."
    way_out = "Flags are written for that one; if it does not start, give --engine-version."
    is_newer = version.within(f">{newest}")
    return [Issue("unknown-version", "note", symptom, way_out, PAGE)] if is_newer else []


def _head_alone(asked: Combination) -> list[Issue]:
    """Refuse a drafter's folder whose body is in the folder above: an engine may leave its weights unset."""
    folder = Path(os.path.expanduser(asked.drafter or "")).resolve()
    has_files = asked.drafter is not None and asked.settings.load_format != "dummy"
    if not has_files or not (folder / "config.json").is_file():
        return []
    symptom = (
        f"{folder} is a drafter's head, whose body is in the folder above it. {asked.version} looks for "
    )
    symptom += "weights in the folder itself."
    way_out = f"Use the whole drafter, --draft {folder.parent}, or our own engine, without --engine."
    is_head = ModelFolder(folder, name=str(folder)).has_body_above
    return [Issue("head-without-body", "refuse", symptom, way_out, PAGE)] if is_head else []


def _unknown_pulls(version: EngineVersion) -> list[Issue]:
    """Return a warning for each pull request in a build's name that fixes no known issue."""
    known = {number for entry in entries() for number in entry.fixed_by}
    threads = [re.search(r"/pull/(\d+)$", entry.issue.thread) for entry in entries()]
    known |= {int(found[1]) for found in threads if found}
    said = f"{version} is said to carry pull request"
    way_out = "Check the number; those that matter are in docs/engine-builds.md."
    return [
        Issue(
            "unknown-pull-request",
            "warn",
            f"{said} {number}, but no known issue is repaired by it.",
            way_out,
            f"{PULLS[version.engine]}{number}",
        )
        for number in sorted(version.carried - known)
    ]


# ---- facts about a combination; None if unknown


def _model_type(config: Raw) -> object:
    inner = config.get("text_config")
    found = (inner if isinstance(inner, Mapping) else config).get("model_type", config.get("model_type"))
    return found.removesuffix("_text") if isinstance(found, str) else None


def _draft_layout(found: Combination) -> str | None:
    if found.draft is not None:
        return "speculators" if "speculators_model_type" in found.draft else "z-lab"
    name = (found.settings.draft or "").lower()
    return "speculators" if "speculator." in name else "z-lab" if name.startswith("z-lab/") else None


def _draft_has_windows(found: Combination) -> bool:
    config = found.draft or {}
    inner = config.get("transformer_layer_config")
    types = (inner if isinstance(inner, Mapping) else config).get("layer_types")
    return isinstance(types, list) and "sliding_attention" in types


def _quantization(config: Raw | None) -> Raw | None:
    section = None if config is None else config.get("quantization_config")
    return section if isinstance(section, Mapping) else None


def _is_context_past_draft(found: Combination) -> bool:
    """Return whether the context is longer than the drafter's positions reach."""
    reach = None if found.draft is None else found.draft.get("max_position_embeddings")
    asked = found.settings.max_model_len
    return isinstance(reach, int) and asked != "auto" and asked > reach


def _width_beyond_block(found: Combination) -> int:
    """Return the requested width minus the drafter's block; 0 if one is unknown."""
    width = found.settings.width
    return 0 if found.draft is None or width == "auto" else width - draft_block(found.draft)


def _is_step_below_rows(found: Combination) -> bool:
    """Return whether a step holds fewer tokens than the blocks of all requests; False if one is unknown."""
    settings = found.settings
    rows, width, step = settings.max_num_seqs, settings.width, settings.max_prefill_tokens
    if width == "auto":
        width = 0 if found.draft is None else draft_block(found.draft)
    return rows != "auto" and step != "auto" and rows * width > step


def _has_flash_attention(found: Combination) -> bool:
    """Return whether FlashAttention is set for the target or the drafter."""
    names = (found.settings.attention_backend, found.settings.draft_attention_backend)
    return any(name is not None and name.lower() in ("flash", "flash_attn") for name in names)


_SETTINGS = ("kv_dtype", "attention_backend", "draft_attention_backend", "prefix_cache", "graphs")
FACTS: Mapping[str, Callable[[Combination], object]] = {
    "capability": lambda found: found.capability and "{}.{}".format(*found.capability),
    "unified": lambda found: found.machine is not None and found.machine.is_unified,
    "cpu": lambda found: found.is_cpu,
    "kernel": lambda found: found.machine and found.machine.kernel,
    "speculates": lambda found: found.drafter is not None,
    "draft_layout": _draft_layout,
    "draft_kind": lambda found: found.draft_kind,
    "draft_quantised": lambda found: _quantization(found.draft) is not None,
    "draft_windows": _draft_has_windows,
    "context_past_draft": _is_context_past_draft,
    # A block plus one is published (RedHatAI's Gemma 4 with 8): vLLM does not count the anchor.
    "width_past_block": lambda found: _width_beyond_block(found) > 1,
    "draft_rows_past_step": _is_step_below_rows,
    "width_below_block": lambda found: _width_beyond_block(found) < 0,
    **{name: attrgetter(f"settings.{name}") for name in _SETTINGS},
    "flash_attention": _has_flash_attention,
    "rows_above": lambda found: found.settings.max_num_seqs,
    "context_above": lambda found: found.settings.max_model_len,
    "chunk_above": lambda found: found.settings.max_prefill_tokens,
    "nodes_above": lambda found: found.settings.num_nodes,
    "pipeline_above": lambda found: found.settings.pipeline_parallel,
    "memory_above": lambda found: found.memory_share,
    "env": lambda found: tuple(f"{name}={value}" for name, value in found.settings.engine_env),
    "args": lambda found: " ".join(found.settings.engine_args).replace("=", " "),
}


# ---- conditions


def _holds(found: Combination, name: str, wanted: object) -> bool:
    """Check one condition; `env_unset` holds if the variable is not set."""
    if name in RULES:
        return RULES[name](found, wanted)
    fact = name.removesuffix("_unset")
    return _meets(FACTS[fact](found), wanted) == (fact == name)


def _meets(value: object, wanted: object) -> bool:
    """Return whether a fact meets a condition: match a pattern, exceed a number, or equal anything else."""
    if isinstance(wanted, list):
        return _matches(value, wanted)
    if isinstance(wanted, bool | str):
        return value == wanted
    assert isinstance(wanted, int | float)
    return isinstance(value, int | float) and value > wanted


def _matches(value: object, patterns: list[str]) -> bool:
    texts = value if isinstance(value, tuple) else (value,)
    known = [text.lower() for text in texts if isinstance(text, str)]
    return any(fnmatch(text, pattern.lower()) for text in known for pattern in patterns)


def _is_target(found: Combination, wanted: object) -> bool:
    """Match the type in config.json, or the model's name if it is unknown; `only` must match the name too."""
    assert isinstance(wanted, dict)
    if found.target is not None and "types" in wanted:
        is_family = _matches(_model_type(found.target), wanted["types"])
    else:
        is_family = _matches(found.settings.model, wanted["names"])
    return is_family and ("only" not in wanted or _matches(found.settings.model, wanted["only"]))


def _has_weights(found: Combination, wanted: object) -> bool:
    """Match the format of the weights: from the settings, else config.json, else the model's name."""
    assert isinstance(wanted, list)
    if found.settings.quantization not in ("auto", "keep"):
        return _matches(found.settings.quantization, wanted)
    if found.target is not None:
        section = _quantization(found.target) or {}
        names = (section.get(key) for key in ("quant_algo", "format", "quant_method"))
        return _matches(next(filter(None, names), None), wanted)
    return _matches(found.settings.model, [f"*{pattern.strip('*')}*" for pattern in wanted])


RULES: Mapping[str, Callable[[Combination, object], bool]] = {
    "versions": lambda found, wanted: found.version.within(str(wanted)),
    "target": _is_target,
    "weights": _has_weights,
}
CONDITIONS = {*RULES, *FACTS, *(f"{name}_unset" for name in ("env", "args"))}
