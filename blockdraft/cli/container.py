"""The container's entrypoint: plan, download, then become the server.

container/entrypoint runs `python -m blockdraft.cli.container [flags of blockdraft serve]`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from blockdraft.cli.flags import flags_of, given_settings, masked
from blockdraft.cli.main import EXIT_ERROR, parse
from blockdraft.errors import BlockdraftError, SettingsError
from blockdraft.launch import container
from blockdraft.planner.resolver import asked_otherwise
from blockdraft.settings.merge import MergedSettings, flag_of, merge_settings
from blockdraft.settings.settings import DRAFT_WORDS, whole_environment

REVISIONS = ("--revision", "--code-revision")


def main(words: Sequence[str] | None = None) -> int:
    """Replace this process by the server. Return an exit code only on failure."""
    words = sys.argv[1:] if words is None else words
    environment = whole_environment()
    try:
        _start(container.read_container(environment), words, environment)
    except BlockdraftError as error:
        print("blockdraft: error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_ERROR


def _start(wanted: container.Wanted, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    program = shutil.which("blockdraft")
    if program is None:
        raise SettingsError("`blockdraft` is not on PATH: run this in the container it was made for.")
    argv, resolved, notes = serve_words(wanted, words)
    settings = resolved.settings
    for name, own in (("model", "MODEL_PATH"), ("draft", "DFLASH_DRAFTER")):
        value = getattr(settings, name)
        if value is not None and value not in DRAFT_WORDS:
            source = resolved.sources[name]
            variable = own if source.startswith("--") else f"{name} of {source}"
            container.check_model(value, variable=variable)
            _, revision = container.hub_id(value) or ("", None)
            if settings.engine != "native" and revision is not None:
                way_out = f"Leave out @{revision} and put --revision {revision} into EXTRA_ARGS"
                raise SettingsError(f"'{value}': {settings.engine} takes no NAME@REVISION. {way_out}.")
    for note in (*wanted.notes, *resolved.notes, *notes):
        _say(note)
    child = container.child_environment(environment, wanted)
    if settings.model == "default":  # the plan needs this file
        _run([program, "fetch"], child)
    tuned = _tuned(program, resolved, child)
    if tuned:
        settings = asked_otherwise(settings, **tuned)
        _say(f"defaults for vLLM: {', '.join(f'{flag_of(name)} {value}' for name, value in tuned.items())}")
        argv += [f"{flag_of(name)}={value}" for name, value in tuned.items()]
    _run([program, "plan", *flags_of(settings)], child)
    sources = {"model": settings.model, "draft": settings.draft}
    more, child = _fetch(sources, settings.engine, settings.engine_args, child)
    argv += more
    if tuned and resolved.sources["attention_backend"] == "default" and _takes_tuned_backend(settings.model):
        argv.append(f"{flag_of('attention_backend')}={container.TUNED_BACKEND}")
    _say(f"starting: {shlex.join(['blockdraft', *masked(argv)])}")
    # The server replaces this process, so that it gets the container's signals.
    os.execve(program, [program, *argv], child)


def _run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command. If it fails, exit with its code."""
    done = subprocess.run(words, env=container.without_settings(environment), check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def _tuned(program: str, resolved: MergedSettings, child: Mapping[str, str]) -> dict[str, Any]:
    """Return tuned values of settings that are not set, for vLLM with a drafter, if memory allows them."""
    settings = resolved.settings
    is_meant = settings.engine == "vllm" and settings.model != "default" and resolved.recipe is None
    if not is_meant or settings.draft in (None, "none"):
        return {}
    unset = {name for name, source in resolved.sources.items() if source == "default"}
    tuned: dict[str, Any] = {name: value for name, value in container.TUNED.items() if name in unset}
    longest = tuned.pop("max_model_len", None)
    for found in (tuned, dict[str, Any]()):  # second try: without larger steps, which need memory
        words = [program, "plan", "--json", *flags_of(asked_otherwise(settings, **found))]
        environment = container.without_settings(child)
        done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            planned = int(json.loads(done.stdout)["capacity"]["max_model_len"])
            return found | ({} if longest is None else {"max_model_len": min(longest, planned)})
    return {}  # the plan will report the error


def _takes_tuned_backend(model: str) -> bool:
    """Return whether the model works with the tuned attention backend. Its config.json must be present."""
    from blockdraft.checkpoints.fetch import hub_folder

    found = container.hub_id(model)
    folder = Path(model) if found is None else hub_folder(found[0], revision=found[1], is_whole=False)
    kind = str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    return not kind.startswith(container.OTHER_BACKENDS)


def serve_words(
    wanted: container.Wanted, words: Sequence[str]
) -> tuple[list[str], MergedSettings, list[str]]:
    """Return the server's command line, its settings, and notes on variables that are ignored."""
    for flag in (word.partition("=")[0] for word in (*wanted.extra_args, *words)):
        if flag in ("--host", "--port"):
            raise SettingsError(f"{flag} is fixed in the container: set PORT instead.")
    argv = ["serve", "--host=0.0.0.0", f"--port={wanted.port}"]
    settings, notes = dict(wanted.settings), []
    engine = _engine([*argv, *words])
    quantization, engine_words = container.quantization_of(wanted, engine)
    if quantization is not None:
        settings["quantization"] = quantization
    if engine == "native":
        settings |= wanted.turboquant
        extra = list(wanted.extra_args)
        if settings.pop("attention_backend", None) is not None:
            notes.append("ATTENTION_BACKEND is ignored: the native engine has its own")
    else:
        if wanted.turboquant:
            why = f"does not work with {engine} and a drafter (its turboquant_* repeat text, vllm#53180)"
            way_out = "set KV_CACHE_DTYPE=fp8 instead, or leave out BLOCKDRAFT_ENGINE"
            raise SettingsError(f"ENABLE_TURBOQUANT {why}: {way_out}.")
        passed_on = [*wanted.extra_args, *engine_words]
        extra = [f"--engine-args={shlex.join(passed_on)}"] if passed_on else []
    flags = [f"{flag_of(name)}={text}" for name, text in settings.items()]
    argv += [*flags, *extra, *words]
    args = parse(argv)
    resolved = merge_settings(given_settings(args))
    if resolved.sources["model"] == "default":
        raise SettingsError(
            "MODEL_PATH is not set: give a hub id (-e MODEL_PATH=org/name), a mounted folder, or 'default' "
            "(a small model for a first try)."
        )
    if args.served_model_name is None:
        name = wanted.served_name or container.base_name(resolved.settings.model)
        argv.append(f"--served-model-name={name}")
    return argv, resolved, notes


def _engine(argv: Sequence[str]) -> str:
    """Return the engine that flags, environment or recipe select."""
    given = given_settings(parse(argv))
    known: dict[str, object] = {name: given[name] for name in ("engine", "recipe") if name in given}
    return merge_settings(known).settings.engine  # other settings are checked when the engine is known


def _fetch(
    sources: Mapping[str, str | None], engine: str, engine_args: Sequence[str], child: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Download models from the hub. Return flags and an environment that serve exactly these files."""
    from blockdraft.checkpoints.fetch import hub_folder

    is_native = engine == "native"
    if not is_native and any(word.partition("=")[0] in REVISIONS for word in engine_args):
        _say(f"{engine} itself downloads the revision of EXTRA_ARGS")
        return [], child
    flags = []
    for name, source in sources.items():
        found = container.hub_id(source) if source not in (None, "default", *DRAFT_WORDS) else None
        if found is None:
            continue
        repo, revision = found
        _say(f"fetching {source}")
        commit = hub_folder(repo, revision=revision, is_whole=not is_native).name
        _say(f"{repo} is {repo}@{commit}")
        flags += [f"{flag_of(name)}={repo}@{commit}"] if is_native else []
    # Other engines take a hub id without revision. Offline, they use the files that were just fetched.
    is_cached = not is_native and container.hub_id(str(sources["model"])) is not None
    return flags, child | ({"HF_HUB_OFFLINE": "1"} if is_cached else {})


def _say(text: str) -> None:
    print(f"blockdraft: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
