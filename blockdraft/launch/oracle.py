"""The compatibility oracle: combinations that an engine accepts, or dies of late, although they are bad.

known_bad.toml lists them: what must be so for an entry to hold, what then happens, the way out, and the
thread where it was found. A condition on something that is not known (no card, no config.json) does not hold:
the oracle never guesses, and so never refuses what may be good.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Literal

from blockdraft.checkpoints.draft_config import draft_block
from blockdraft.errors import SettingsError
from blockdraft.launch.order import Raw
from blockdraft.launch.versions import NEWEST, Version, read_version
from blockdraft.machine.machine import Machine, told_share
from blockdraft.settings.settings import Settings
from blockdraft.settings.shipped import with_drafter

FILE = Path(__file__).with_name("known_bad.toml")

Severity = Literal["refuse", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry of known_bad.toml that holds here."""

    id: str
    severity: Severity
    symptom: str
    way_out: str
    thread: str  # address
    upstream_since: str | None = None  # the first release that needs no patch

    def __str__(self) -> str:
        return f"{self.symptom} {self.way_out} ({self.thread})"


@dataclass(frozen=True, slots=True)
class Combination:
    """What is asked of an engine, and what is known of its models and its machine."""

    settings: Settings
    version: Version
    machine: Machine | None = None
    target: Raw | None = None  # config.json
    draft: Raw | None = None

    @property
    def speculates(self) -> bool:
        return self.settings.draft not in (None, "none") and self.settings.width != 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding, and the conditions under which it is made: all of them."""

    finding: Finding
    engine: str
    conditions: Mapping[str, object]
    fixed_by: tuple[int, ...] = ()  # pull requests: a build that carries one is spared

    def holds(self, combination: Combination) -> bool:
        version = combination.version
        if self.engine != version.engine or version.carried & set(self.fixed_by):
            return False
        return all(CONDITIONS[name](combination, wanted) for name, wanted in self.conditions.items())


def check_settings(
    settings: Settings,
    *,
    machine: Machine | None = None,
    target: Raw | None = None,
    draft: Raw | None = None,
) -> list[Finding]:
    """What is known against this combination, the worst first; nothing for our own engine."""
    if settings.engine == "native":
        return []
    version = read_version(settings.engine, settings.engine_version)
    return check(Combination(with_drafter(settings), version, machine, target, draft))


def check(combination: Combination) -> list[Finding]:
    version = combination.version
    found = [_softened(entry.finding, version) for entry in entries() if entry.holds(combination)]
    order: tuple[Severity, ...] = ("refuse", "warn", "note")
    return sorted(_newer(version) + found, key=lambda finding: order.index(finding.severity))


def refuse(findings: Iterable[Finding]) -> None:
    """Raises SettingsError, naming the thread, where one of them may not be started."""
    bad = [finding for finding in findings if finding.severity == "refuse"]
    if bad:
        raise SettingsError("\n".join(str(finding) for finding in bad))


@cache
def entries() -> tuple[Entry, ...]:
    """known_bad.toml, read once."""
    return read_entries(FILE.read_text(encoding="utf-8"))


def read_entries(text: str) -> tuple[Entry, ...]:
    return tuple(_entry(dict(table)) for table in tomllib.loads(text)["bad"])


def _entry(table: dict[str, object]) -> Entry:
    """The file is ours: a mistake in it is a bug."""
    about = {name: table.pop(name) for name in ("id", "severity", "symptom", "way_out", "thread")}
    upstream = table.pop("upstream_since", None)
    if upstream is not None:
        assert "versions" not in table, f"{about['id']}: upstream_since is the end of its versions"
        table["versions"] = f"<{upstream}"
    finding = Finding(**about, upstream_since=upstream)  # type: ignore[arg-type]
    engine, fixed_by = table.pop("engine"), table.pop("fixed_by", [])
    unknown = table.keys() - CONDITIONS.keys()
    assert not unknown, f"{finding.id}: unknown conditions {unknown}"
    assert isinstance(engine, str)
    assert isinstance(fixed_by, list)
    return Entry(finding, engine, table, tuple(fixed_by))


def _softened(finding: Finding, version: Version) -> Finding:
    """A nightly build of the minor release before the repair may have it already: then it only warns."""
    if finding.severity != "refuse" or finding.upstream_since is None or not version.is_nightly:
        return finding
    major, minor, _ = version.release
    is_next = read_version(version.engine, finding.upstream_since).within(f"<={major}.{minor + 1}.99")
    return replace(finding, severity="warn") if is_next else finding


def _newer(version: Version) -> list[Finding]:
    if not version.within(f">{NEWEST[version.engine]}"):
        return []
    return [
        Finding(
            id="unknown-version",
            severity="note",
            symptom=f"{version} is newer than {NEWEST[version.engine]}, the newest we know.",
            way_out="Flags are written for that one; if it does not start, say --engine-version.",
            thread="docs/scale-out.md",
        )
    ]


# ---- conditions: each is asked with what known_bad.toml says


def _gpu_capability(found: Combination) -> str | None:
    if found.machine is None or not found.machine.gpus:
        return None
    return "{}.{}".format(*found.machine.gpus[0].capability)


def _matches(value: str | None, patterns: object) -> bool:
    assert isinstance(patterns, list)
    return value is not None and any(fnmatch(value.lower(), pattern.lower()) for pattern in patterns)


def _model_type(config: Raw | None) -> str | None:
    """The text part's, where the model also sees or hears."""
    if config is None:
        return None
    inner = config.get("text_config")
    found = (inner if isinstance(inner, Mapping) else config).get("model_type", config.get("model_type"))
    return found.removesuffix("_text") if isinstance(found, str) else None


def _target(found: Combination, wanted: object) -> bool:
    """By the type in config.json, or by name where that is not known; `only` is asked of the name as well."""
    assert isinstance(wanted, dict)
    if found.target is not None and "types" in wanted:
        is_family = _matches(_model_type(found.target), wanted["types"])
    else:
        is_family = _matches(found.settings.model, wanted["names"])
    return is_family and ("only" not in wanted or _matches(found.settings.model, wanted["only"]))


def _draft_layout(found: Combination) -> str | None:
    if found.draft is not None:
        return "speculators" if "speculators_model_type" in found.draft else "z-lab"
    name = (found.settings.draft or "").lower()
    return "speculators" if "speculator." in name else "z-lab" if name.startswith("z-lab/") else None


def _draft_kind(found: Combination) -> str | None:
    if found.draft is None:
        return next(
            (kind for kind in ("dflash2", "dspark") if kind in (found.settings.draft or "").lower()), None
        )
    kind = found.draft.get("speculators_model_type")
    if isinstance(kind, str):
        return kind
    names = found.draft.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return {"DFlash2DraftModel": "dflash2", "LiLiCorrDraftModel": "lilicorr"}.get(first, "dflash")


def _draft_has_windows(found: Combination) -> bool:
    if found.draft is None:
        return False
    inner = found.draft.get("transformer_layer_config")
    types = (inner if isinstance(inner, Mapping) else found.draft).get("layer_types")
    return isinstance(types, list) and "sliding_attention" in types


def _is_quantised(config: Raw | None) -> bool:
    return config is not None and isinstance(config.get("quantization_config"), Mapping)


def _quant_method(config: Raw | None) -> str | None:
    """How the target's weights are packed, in the checkpoint's own word."""
    section = None if config is None else config.get("quantization_config")
    if not isinstance(section, Mapping):
        return None
    method = section.get("quant_algo") or section.get("format") or section.get("quant_method")
    return method if isinstance(method, str) else None


def _weights(found: Combination, wanted: object) -> bool:
    if found.settings.quantization not in ("auto", "keep"):
        return _matches(found.settings.quantization, wanted)
    if found.target is not None:
        return _matches(_quant_method(found.target), wanted)
    assert isinstance(wanted, list)
    return _matches(found.settings.model, [f"*{pattern.strip('*')}*" for pattern in wanted])


def _draft_context(found: Combination) -> bool:
    """Whether more context is asked than the drafter's positions reach."""
    reach = None if found.draft is None else found.draft.get("max_position_embeddings")
    asked = found.settings.max_context
    return isinstance(reach, int) and asked != "auto" and asked > reach


def _width_past_block(found: Combination) -> bool:
    width = found.settings.width
    return found.draft is not None and width != "auto" and width > draft_block(found.draft)


def _width_below_block(found: Combination) -> bool:
    width = found.settings.width
    return found.draft is not None and width != "auto" and width < draft_block(found.draft)


def _is_cpu(found: Combination) -> bool:
    if found.settings.device == "auto":
        return found.machine is not None and not found.machine.gpus
    return found.settings.device == "cpu"


def _more(value: int | str, than: object) -> bool:
    assert isinstance(than, int)
    return isinstance(value, int) and value > than


def _env(found: Combination, wanted: object) -> bool:
    given = [f"{name}={value}" for name, value in found.settings.engine_env]
    return any(_matches(item, wanted) for item in given)


def _args(found: Combination, wanted: object) -> bool:
    text = " ".join(found.settings.engine_args).replace("=", " ")
    return _matches(text, wanted)


def _backend(found: Combination, wanted: object) -> bool:
    return _matches(found.settings.attention_backend, wanted)


def _draft_backend(found: Combination, wanted: object) -> bool:
    return _matches(found.settings.draft_attention_backend, wanted)


def _is_unified(found: Combination) -> bool:
    return found.machine is not None and found.machine.is_unified


CONDITIONS: Mapping[str, Callable[[Combination, object], bool]] = {
    "versions": lambda found, wanted: found.version.within(str(wanted)),
    "capability": lambda found, wanted: _matches(_gpu_capability(found), wanted),
    "unified": lambda found, wanted: _is_unified(found) is wanted,
    "cpu": lambda found, wanted: _is_cpu(found) is wanted,
    "kernel": lambda found, wanted: _matches(found.machine.kernel if found.machine else None, wanted),
    "target": _target,
    "weights": _weights,
    "speculates": lambda found, wanted: found.speculates is wanted,
    "draft_layout": lambda found, wanted: _draft_layout(found) == wanted,
    "draft_kind": lambda found, wanted: _matches(_draft_kind(found), wanted),
    "draft_quantised": lambda found, wanted: _is_quantised(found.draft) is wanted,
    "draft_windows": lambda found, wanted: _draft_has_windows(found) is wanted,
    "context_past_draft": lambda found, wanted: _draft_context(found) is wanted,
    "width_past_block": lambda found, wanted: _width_past_block(found) is wanted,
    "width_below_block": lambda found, wanted: _width_below_block(found) is wanted,
    "kv_dtype": lambda found, wanted: _matches(found.settings.kv_dtype, wanted),
    "attention_backend": _backend,
    "draft_attention_backend": _draft_backend,
    "prefix_cache": lambda found, wanted: found.settings.prefix_cache is wanted,
    "graphs": lambda found, wanted: found.settings.graphs is wanted,
    "rows_above": lambda found, wanted: _more(found.settings.max_rows, wanted),
    "context_above": lambda found, wanted: _more(found.settings.max_context, wanted),
    "chunk_above": lambda found, wanted: _more(found.settings.chunk, wanted),
    "nodes_above": lambda found, wanted: _more(found.settings.num_nodes, wanted),
    "pipeline_above": lambda found, wanted: _more(found.settings.pipeline_parallel, wanted),
    "memory_above": lambda found, wanted: told_share(found.settings, found.machine) > float(str(wanted)),
    "env": _env,
    "env_unset": lambda found, wanted: not _env(found, wanted),
    "args_unset": lambda found, wanted: not _args(found, wanted),
}
