"""Checks a start of another engine before anything is started or downloaded."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from blockdraft.checkpoints.read_draft_config import draft_block, read_draft_config
from blockdraft.errors import CapacityError, FetchError, ModelError, SettingsError
from blockdraft.launch import Command, translate
from blockdraft.launch.engine_versions import TITLES, read_version
from blockdraft.launch.installed import Installed
from blockdraft.launch.issues import Issue, check_settings, refuse
from blockdraft.launch.launch_request import HOST, Combination, LaunchRequest
from blockdraft.launch.supervisor import Launch
from blockdraft.machine.cards import card_named
from blockdraft.machine.machine import Machine, free_port, read_machine
from blockdraft.planner.draft_title import kind_title
from blockdraft.planner.external import fit_external
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.pair import Case, check_stored, open_pair
from blockdraft.planner.resolver import asked_otherwise, with_drafter
from blockdraft.planner.stored import Stored, open_stored
from blockdraft.settings.model_source import find_source
from blockdraft.settings.recipe import check_recipe_card, load_recipe, recipe_cards
from blockdraft.settings.settings import Settings

SPARK_WHEELS = "gb10-wheels"  # of issues.toml
BUILT_FIRST = (
    "published images of vLLM lack fp8 and NVFP4 kernels for capability 12.1 (GB10): one that has them is "
    "built first, from source. Nobody has built it on a DGX Spark yet: please report"
)


@dataclass(frozen=True, slots=True)
class CheckedLaunch:
    """An engine that may be started: its settings with the facts and findings about them."""

    settings: Settings
    name: str  # the model's name for clients
    machine: Machine | None  # None if unknown
    target: Mapping[str, object] | None  # config.json
    draft: Mapping[str, object] | None
    findings: tuple[Issue, ...]  # no issue with severity "refuse"
    warnings: tuple[str, ...] = ()

    def command(self, *, port: int, api_key: str | None, host: str = HOST) -> Command:
        return translate(
            LaunchRequest(
                settings=self.settings,
                served_name=self.name,
                port=port,
                host=host,
                api_key=api_key,
                machine=self.machine,
                target=self.target,
                draft=self.draft,
            )
        )

    def in_image(self) -> CheckedLaunch:
        """Return the launch in a container; its image is built if published ones lack the card's kernels."""
        findings = tuple(finding for finding in self.findings if finding.id != SPARK_WHEELS)
        version = read_version(self.settings.engine, self.settings.engine_version)
        if findings == self.findings or version.is_nightly:  # of a nightly there is no tag to build
            return self
        settings = asked_otherwise(self.settings, engine_version=version.with_spark_kernels())
        return replace(self, settings=settings, findings=findings, warnings=(*self.warnings, BUILT_FIRST))

    def launch(self, installed: Installed, *, start_timeout_s: float) -> Launch:
        """Return the launch on this machine. A random API key excludes other users of the machine."""
        settings = self.settings
        command = self.command(port=free_port(), api_key=secrets.token_urlsafe(32))
        return Launch(
            command=command,
            argv=tuple(installed.argv(command.argv)),
            name=self.name,
            has_drafter=self.draft is not None,
            api_key=command.env.get("VLLM_API_KEY"),
            start_timeout_s=start_timeout_s,
            head_address=settings.head_address if settings.node_rank > 0 else None,
        )

    def facts(self) -> dict[str, object]:
        """Return the facts that the live page shows in addition to the engine's own."""
        settings = self.settings
        draft: dict[str, object] = {"draft": None, "draft_kind": None, "width": 1}
        if self.draft is not None:
            width = draft_block(self.draft) if settings.width == "auto" else settings.width
            draft = {"draft": settings.draft, "draft_kind": _kind_title(self.draft), "width": width}
        return {
            "target": settings.model,
            **draft,
            "dtype": settings.dtype,
            "quantization": settings.quantization,
            "is_dummy": settings.load_format == "dummy",
            "synthetic_acceptance": settings.synthetic_acceptance,
            "can_switch": False,  # speculation cannot be switched off per request
            "notices": [],
        }


def _kind_title(draft: Mapping[str, object]) -> str | None:
    """Return the drafter's kind; None if we do not know it (the engine may know it)."""
    try:
        return kind_title(read_draft_config(draft, name="the drafter"))
    except ModelError:
        return None


def check_launch(settings: Settings, name: str) -> CheckedLaunch:
    """Check a start on this machine. Raise an error if models, the pair, GPUs or an issue forbid it."""
    settings, machine = _placed(with_drafter(settings)), read_machine()
    other_card = check_recipe_card(settings.recipe, settings.model, settings.device, machine)
    file = settings.chat_template
    if file is not None and not os.path.isfile(file):  # an engine would read the name as a template
        raise SettingsError(f"--chat-template {file} is no file: check the path.")
    target, draft = (_opened(settings, source) for source in _sources(settings))
    _check_num_gpus(settings, machine)
    checked = _checked(settings, name, machine, target, draft)
    return replace(checked, warnings=(*other_card, *_room(settings, machine)))


def as_installed(settings: Settings, installed: Installed) -> tuple[Settings, tuple[str, ...]]:
    """Return settings for the installed version, and warnings. Keep a patched build of that release."""
    asked, found = settings.engine_version, installed.version
    if found is None or (asked is not None and not _is_another(settings.engine, asked, found)):
        return settings, ()
    warning = (
        f"{TITLES[installed.engine]} {found} is installed, not {asked}: its flags are written for {found}"
    )
    return asked_otherwise(settings, engine_version=found), () if asked is None else (warning,)


def _is_another(engine: str, asked: str, found: str) -> bool:
    try:
        release = read_version(engine, found).release
    except SettingsError:  # a build with an unreadable version
        return False
    return read_version(engine, asked).release != release


def check_to_print(settings: Settings, name: str, card: str | None) -> CheckedLaunch:
    """Check a command that is only printed, maybe for another machine. Only warn if the hub is down."""
    settings = _placed(with_drafter(settings))
    machine, assumed = _machine_to_print(settings, card)
    warnings = list(check_recipe_card(settings.recipe, settings.model, settings.device, machine))
    models: list[Stored | None] = []
    unread: list[str | None] = []
    for source in _sources(settings):
        try:
            models.append(_opened(settings, source))
        except FetchError:
            models.append(None)
            unread.append(source)
    target, draft = models
    warnings += [
        f"the hub cannot be reached: config.json of {source} was not read, and what it says not checked"
        for source in unread
    ]
    if settings.chat_template is not None and not os.path.isfile(settings.chat_template):
        warnings.append(f"--chat-template {settings.chat_template} is no file here: the command names it so")
    warnings += assumed
    if machine is not None and not unread:
        try:
            warnings += _room(settings, machine)
        except CapacityError as error:
            warnings.append(str(error))
    return replace(_checked(settings, name, machine, target, draft), warnings=tuple(warnings))


def _checked(
    settings: Settings, name: str, machine: Machine | None, target: Stored | None, draft: Stored | None
) -> CheckedLaunch:
    if target is not None and draft is not None:
        check_stored(target, draft)
    configs = (None if target is None else target.full_config, None if draft is None else draft.full_config)
    asked = Combination(settings=settings, machine=machine, target=configs[0], draft=configs[1])
    findings = check_settings(asked)
    refuse(findings)
    return CheckedLaunch(settings, name, machine, *configs, tuple(findings))


def _machine_to_print(settings: Settings, card: str | None) -> tuple[Machine | None, tuple[str, ...]]:
    """Return a machine and assumptions: with the named card, else this one, else the recipe's first card."""
    if card is not None:
        return machine_of(card_named(card)), ()
    machine = read_machine()
    if machine.gpus or settings.device == "cpu":
        return machine, ()
    cards = [] if settings.recipe is None else recipe_cards(load_recipe(settings.recipe))
    what = f"the recipe's {cards[0].title}; --card names another" if cards else "a GPU that --card can name"
    warning = f"there is no GPU here: the command is for {what}"
    return machine_of(cards[0]) if cards else None, (warning,)


def _placed(settings: Settings) -> Settings:
    """Return settings with absolute paths: an engine or a container has another directory and no ~."""
    tests = {"model": os.path.isdir, "draft": os.path.isdir, "chat_template": os.path.isfile}
    paths = {name: os.path.expanduser(getattr(settings, name) or "") for name in tests}
    changes = {name: os.path.abspath(path) for name, path in paths.items() if tests[name](path)}
    return asked_otherwise(settings, **changes)


def _sources(settings: Settings) -> tuple[str | None, str | None]:
    """Return the models that have a config.json; `translate` refuses our default model and GGUF files."""
    is_readable = settings.model != "default" and not settings.model.lower().endswith(".gguf")
    has_drafter = settings.draft not in (None, "none", "auto") and settings.width != 1
    return settings.model if is_readable else None, settings.draft if has_drafter else None


def _opened(settings: Settings, source: str | None) -> Stored | None:
    if source is None:
        return None
    found = find_source(source, "drafter" if source == settings.draft else "model")
    if found.revision is not None:
        raise SettingsError(
            f"'{source}' is pinned in our words, which {settings.engine} does not know: leave out "
            f"@{found.revision}, and add --engine-args='--revision {found.revision}'."
        )
    return open_stored(source, needs_weights=False)


def _check_num_gpus(settings: Settings, machine: Machine) -> None:
    needed = -(-settings.tensor_parallel * settings.pipeline_parallel // settings.num_nodes)
    if machine.gpus and needed > len(machine.gpus):
        raise SettingsError(
            f"tensor_parallel {settings.tensor_parallel} x pipeline_parallel {settings.pipeline_parallel} on "
            f"{settings.num_nodes} machine(s) takes {needed} GPUs of each, but this one has "
            f"{len(machine.gpus)}: lower them, or add machines (--num-nodes)."
        )


def _room(settings: Settings, machine: Machine) -> tuple[str, ...]:
    """Raise CapacityError if the weights do not fit; return a warning if the estimated total does not."""
    if not machine.gpu_bytes or settings.device == "cpu":
        return ()
    try:
        fit = fit_external(Case(settings, machine, open_pair(settings)))
    except (ModelError, FetchError):  # the engine may read a checkpoint that we cannot read
        return ()
    if fit.weight_bytes > fit.budget:
        raise CapacityError(
            f"the weights take {fit.weight_bytes / 1e9:.1f} GB of {fit.device}, and the budget is "
            f"{fit.budget / 1e9:.1f} GB ({fit.budget_how}): `blockdraft plan` with the same flags says what "
            "would fit."
        )
    warning = f"by the plan it does not fit: {fit.problem} `blockdraft plan` says what would."
    return () if fit.problem is None else (warning,)
