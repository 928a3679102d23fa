"""The container's entrypoint: plan, fetch, then become the server.

Run by container/entrypoint as `python -m blockdraft.cli.container [flags of blockdraft serve]`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from blockdraft.cli.flags import flags_of, given_settings
from blockdraft.cli.main import EXIT_ERROR, parse
from blockdraft.cli.masking import masked
from blockdraft.errors import BlockdraftError, SettingsError
from blockdraft.settings.container import (
    OTHER_BACKENDS,
    TUNED,
    TUNED_BACKEND,
    Wanted,
    base_name,
    check_model,
    child_environment,
    hub_id,
    quantization_of,
    read_container,
    without_settings,
)
from blockdraft.settings.merge import MergedSettings, flag_of, merge_settings
from blockdraft.settings.settings import DRAFT_WORDS, Settings, whole_environment

REVISIONS = ("--revision", "--code-revision")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code where it did not come to a server."""
    words = sys.argv[1:] if words is None else words
    environment = whole_environment()
    try:
        _start(read_container(environment), words, environment)
    except BlockdraftError as error:
        print("blockdraft: error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_ERROR


def _start(wanted: Wanted, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    program = shutil.which("blockdraft")
    if program is None:
        raise SettingsError("`blockdraft` is not on PATH: this is not the container it was made for.")
    argv, resolved, notes = serve_words(wanted, words)
    settings = resolved.settings
    for name, variable in (("model", "MODEL_PATH"), ("draft", "DFLASH_DRAFTER")):
        value = getattr(settings, name)
        if value is not None and value not in DRAFT_WORDS:
            source = resolved.sources[name]
            check_model(value, variable=variable if source.startswith("--") else f"{name} of {source}")
            _check_pin(value, settings.engine)
    for note in (*wanted.notes, *resolved.notes, *notes):
        _say(note)
    child = child_environment(environment, wanted)
    if settings.model == "default":  # a file of ours, without which there is nothing to plan
        _run([program, "fetch"], child)
    tuned = _tuned(program, resolved, child)
    if tuned:
        settings = replace(settings, **tuned)
        _say(
            f"nobody said otherwise: {', '.join(f'{flag_of(name)} {value}' for name, value in tuned.items())}"
        )
        argv += [f"{flag_of(name)}={value}" for name, value in tuned.items()]
    _run([program, "plan", *flags_of(settings)], child)
    more, child = _fetch(settings, child)
    argv += more
    if tuned and resolved.sources["attention_backend"] == "default" and _takes_tuned_backend(settings.model):
        argv.append(f"{flag_of('attention_backend')}={TUNED_BACKEND}")
    _say(f"starting: {shlex.join(['blockdraft', *masked(argv)])}")
    # The server takes this process over, and with it the signals of the container's engine.
    os.execve(program, [program, *argv], child)


def _run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ends with its exit code where it fails."""
    done = subprocess.run(words, env=without_settings(environment), check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def _tuned(program: str, resolved: MergedSettings, child: Mapping[str, str]) -> dict[str, Any]:
    """Of vLLM with a drafter: what nobody set, as far as the model's positions and the memory reach."""
    settings = resolved.settings
    is_meant = settings.engine == "vllm" and settings.model != "default" and resolved.recipe is None
    if not is_meant or settings.draft in (None, "none"):
        return {}
    tuned: dict[str, Any] = {
        name: value for name, value in TUNED.items() if resolved.sources[name] == "default"
    }
    longest = tuned.pop("max_model_len", None)
    for found in (tuned, dict[str, Any]()):  # without larger steps, where those leave no room
        words = [program, "plan", "--json", *flags_of(replace(settings, **found))]
        done = subprocess.run(words, env=without_settings(child), check=False, capture_output=True, text=True)
        if done.returncode == 0:
            planned = int(json.loads(done.stdout)["capacity"]["max_model_len"])
            return found | ({} if longest is None else {"max_model_len": min(longest, planned)})
    return {}  # the plan itself will say what is wrong


def _takes_tuned_backend(model: str) -> bool:
    """Not where the model's kind is made for another one; its files are there by now."""
    from blockdraft.checkpoints.fetch import hub_folder

    found = hub_id(model)
    folder = Path(model) if found is None else hub_folder(found[0], revision=found[1], is_whole=False)
    kind = str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    return not kind.startswith(OTHER_BACKENDS)


def _check_pin(source: str, engine: str) -> None:
    found = hub_id(source)
    if engine != "native" and found is not None and found[1] is not None:
        raise SettingsError(
            f"'{source}' is pinned in our words, which {engine} does not know: leave out "
            f"@{found[1]}, and put --revision {found[1]} into EXTRA_ARGS."
        )


def serve_words(wanted: Wanted, words: Sequence[str]) -> tuple[list[str], MergedSettings, list[str]]:
    """The command line of the server, its settings, and what was left out of it."""
    for flag in (word.partition("=")[0] for word in (*wanted.extra_args, *words)):
        if flag in ("--host", "--port"):
            raise SettingsError(f"{flag}: set PORT instead, which the health check asks too.")
    argv = ["serve", "--host=0.0.0.0", f"--port={wanted.port}"]
    settings, notes = dict(wanted.settings), []
    engine = _engine([*argv, *words])
    quantization, engine_words = quantization_of(wanted, engine)
    if quantization is not None:
        settings["quantization"] = quantization
    if engine == "native":
        settings |= wanted.turboquant
        extra = list(wanted.extra_args)
        if settings.pop("attention_backend", None) is not None:
            notes.append("ATTENTION_BACKEND: left out, the native engine has one of its own")
    else:
        if wanted.turboquant:
            raise SettingsError(
                "ENABLE_TURBOQUANT: our own engine compresses keys and values, "
                f"{engine} does not with a drafter (its turboquant_* repeat text, vllm#53180). "
                "Leave it out and set KV_CACHE_DTYPE=fp8, or leave out BLOCKDRAFT_ENGINE."
            )
        passed_on = [*wanted.extra_args, *engine_words]
        extra = [f"--engine-args={shlex.join(passed_on)}"] if passed_on else []
    flags = [f"{flag_of(name)}={text}" for name, text in settings.items()]
    argv += [*flags, *extra, *words]
    args = parse(argv)
    resolved = merge_settings(given_settings(args))
    if resolved.sources["model"] == "default":
        raise SettingsError(
            "MODEL_PATH is not set: give a hub id (-e MODEL_PATH=org/name), a mounted folder, or 'default' "
            "for a small model to try things out."
        )
    if args.served_model_name is None:
        argv.append(f"--served-model-name={wanted.served_name or base_name(resolved.settings.model)}")
    return argv, resolved, notes


def _engine(argv: Sequence[str]) -> str:
    """Which engine it will be, as a flag, the environment or a recipe says."""
    given = given_settings(parse(argv))
    # Not the others yet: whether they suit an engine is judged once it is known.
    return merge_settings(
        {name: given[name] for name in ("engine", "recipe") if name in given}
    ).settings.engine


def _fetch(settings: Settings, child: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Download what is on the hub; flags and environment by which exactly that is served."""
    from blockdraft.checkpoints.fetch import hub_folder

    is_native = settings.engine == "native"
    if not is_native and any(word.partition("=")[0] in REVISIONS for word in settings.engine_args):
        _say(f"{settings.engine} fetches the revision of EXTRA_ARGS by itself")
        return [], child
    flags = []
    for name in ("model", "draft"):
        source = getattr(settings, name)
        found = hub_id(source) if source not in (None, "default", *DRAFT_WORDS) else None
        if found is None:
            continue
        repo, revision = found
        _say(f"fetching {source}")
        commit = hub_folder(repo, revision=revision, is_whole=not is_native).name
        _say(f"{repo} is {repo}@{commit}")
        flags += [f"{flag_of(name)}={repo}@{commit}"] if is_native else []
    # Another engine takes a hub id alone; offline, that is what has just been fetched.
    is_cached = not is_native and hub_id(settings.model) is not None
    return flags, child | ({"HF_HUB_OFFLINE": "1"} if is_cached else {})


def _say(text: str) -> None:
    print(f"blockdraft: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
