"""Writes a command for users to copy: shell line, `docker run` or compose file. Secrets are not shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from blockdraft.errors import SettingsError
from blockdraft.launch.engine_versions import TITLES
from blockdraft.launch.launch_request import Command

# The container's home for any user. Downloads and compiled kernels in it outlive the container.
HOME = "/cache"
HUB = ".cache/huggingface"
CACHES = (HUB, ".cache/vllm", ".cache/flashinfer", ".triton")
VOLUME = "blockdraft-vllm"  # caches of images that container/Containerfile builds
CONTAINERFILE = "container/Containerfile"
BREAK = " \\\n  "
SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")  # endings of variables with secrets


def is_secret(name: str) -> bool:
    """Return whether a variable's value may never be printed or passed as an argument."""
    return name.upper().endswith(SECRETS)


def shell_line(command: Command) -> str:
    """Return the environment and the command as a shell line, one flag per line."""
    variables = [
        f'{name}="${{{name}}}"' if is_secret(name) else f"{name}={shlex.quote(value)}"
        for name, value in sorted(command.env.items())
    ]
    return BREAK.join([*variables, *_lines(command.argv)])


def docker_run(command: Command) -> str:
    """Return `docker run` of the command, with the card, this machine's network and the caches."""
    image = _image(command)
    options = ["docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1:-1"]
    options += [] if command.build is None else ['--user "$(id -u):$(id -g)"']
    options += [f'-v "{volume}"' for volume in _caches(command, home="$HOME")]
    options += [f"-v {shlex.quote(volume)}" for volume in _folders(command)]
    # For `-e NAME` without a value, Docker takes the value from its own environment.
    options += [
        f"-e {name}" if is_secret(name) else f"-e {shlex.quote(f'{name}={value}')}"
        for name, value in _inside(command)
    ]
    head, *rest = command.argv
    run = BREAK.join([*options, f"--entrypoint {head} {image}", *_lines(rest)])
    if command.build is None:
        return run
    build = [f"docker build -f {CONTAINERFILE} --target {command.build}"]
    build += [f"--build-arg VLLM_VERSION={command.source}", f"-t {image} ."]
    folder = f'mkdir -p "$HOME/{HUB}"'  # docker would make it, for root alone
    return f"# in a checkout of blockdraft\n{BREAK.join(build)} &&\n{folder} &&\n{run}"


def compose(command: Command) -> str:
    """Return a compose file with one service. Every value is JSON, which is also YAML."""
    image = _image(command)
    head, *rest = command.argv
    arguments = f"args: {{VLLM_VERSION: {json.dumps(command.source)}}}"
    build = f"{{context: ., dockerfile: {CONTAINERFILE}, target: {command.build}, {arguments}}}"
    lines = [
        *([] if command.build is None else [f"# in a checkout of blockdraft; user 1000 writes to ~/{HUB}"]),
        "services:",
        f"  {command.engine}:",
        f"    image: {json.dumps(image)}",
        *([] if command.build is None else [f"    build: {build}"]),
        f"    entrypoint: [{_literal(head)}]",
        "    command:",
        *(f"      - {_literal(argument)}" for argument in rest),
        "    network_mode: host",
        "    ipc: host",
        "    ulimits: {memlock: -1}",
        "    volumes:",
        *(f"      - {json.dumps(volume)}" for volume in _caches(command, home="${HOME}")),
        *(f"      - {_literal(volume)}" for volume in _folders(command)),
        "    environment:",
        *(f"      {name}: {_value(name, value)}" for name, value in _inside(command)),
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]",
        *([] if command.build is None else ["volumes:", f"  {VOLUME}: {{}}"]),
    ]
    return "\n".join(lines) + "\n"


def _image(command: Command) -> str:
    if command.image is None:
        kind = "" if "+pr" in command.version else " for a CPU"
        name = f"{TITLES[command.engine]} {command.version}{kind}"
        raise SettingsError(f"we know no image of {name}: use --dry-run shell.")
    return command.image


def _lines(argv: Iterable[str]) -> list[str]:
    """Return quoted lines: one for the words before the first flag, then one per flag with its value."""
    lines: list[list[str]] = [[]]
    for argument in argv:
        if argument.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return [" ".join(line) for line in lines]


def _inside(command: Command) -> list[tuple[str, str]]:
    return sorted({"HOME": HOME, **command.env}.items())


def _caches(command: Command, *, home: str) -> list[str]:
    if command.build is not None:
        return [f"{VOLUME}:{HOME}", f"{home}/{HUB}:{HOME}/huggingface"]
    return [f"{home}/{name}:{HOME}/{name}" for name in CACHES]


def _folders(command: Command) -> list[str]:
    return [f"{folder}:{folder}:ro" for folder in command.mounts]


def _literal(text: str) -> str:
    """Return a text as JSON with `$` escaped, so that compose does not expand variables."""
    return json.dumps(text).replace("$", "$$")


def _value(name: str, value: str) -> str:
    return json.dumps(f"${{{name}}}") if is_secret(name) else _literal(value)
