"""Commands as people copy them: what a shell and compose make of them is what was meant."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from blockdraft.launch.launch_request import Command
from blockdraft.launch.shell import compose, docker_run, is_secret, shell_line

JSON = '{"method":"dflash","model":"it\'s $HOME `here`"}'
ARGV = ("vllm", "serve", "a/b", "--port", "18000", "--speculative-config", JSON, "--enforce-eager")
ENV = {"VLLM_API_KEY": "very-secret", "PLAIN": "a b$c", "HF_TOKEN": "token"}


def command(**values):
    return Command(**{"engine": "vllm", "version": "0.33.0", "argv": ARGV, "env": ENV, "port": 18000,
                      "image": "vllm/vllm-openai:v0.33.0", **values})  # fmt: skip


def run(line, program, tmp_path, **env):
    """What a shell passes to a program: its arguments, and our variables."""
    tool = tmp_path / program
    tool.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        "names = 'VLLM_API_KEY', 'PLAIN', 'HF_TOKEN'\n"
        "print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))"
    )
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line], env={"PATH": path, "HOME": "/home/me", **env}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_shell_runs_what_was_meant(tmp_path):
    lines = shell_line(command(env={})).split(" \\\n  ")
    assert lines[:2] == ["vllm serve a/b", "--port 18000"]
    assert lines[-1] == "--enforce-eager"
    argv, env = run(shell_line(command()), "vllm", tmp_path, VLLM_API_KEY="from outside", HF_TOKEN="t")
    assert tuple(argv) == ARGV[1:]
    assert env == {"VLLM_API_KEY": "from outside", "PLAIN": "a b$c", "HF_TOKEN": "t"}


def test_docker_gets_the_same_command(tmp_path):
    line = docker_run(command(mounts=("/models/my model",)))
    argv, _ = run(line, "docker", tmp_path)
    image = argv.index("vllm/vllm-openai:v0.33.0")
    assert argv[image - 2 : image] == ["--entrypoint", "vllm"]
    assert tuple(argv[image + 1 :]) == ARGV[1:]
    assert "PLAIN=a b$c" in argv
    assert "/models/my model:/models/my model:ro" in argv
    home = next(one.removeprefix("HOME=") for one in argv if one.startswith("HOME="))
    assert f"/home/me/.cache/huggingface:{home}/.cache/huggingface" in argv
    assert "VLLM_API_KEY" in argv  # by name: docker takes the value from its own environment


def test_a_build_that_nobody_publishes_is_built_first(tmp_path):
    built = command(
        version="0.33.0+pr1.pr38484", source="0.33.0+pr1", image="blockdraft-vllm:0.33.0-pr1", build="spark"
    )
    build, folder, run_line = docker_run(built).split(" &&\n")
    argv, _ = run(build, "docker", tmp_path)
    assert argv[:5] == ["build", "-f", "container/Containerfile", "--target", "spark"]
    assert argv[5:] == ["--build-arg", "VLLM_VERSION=0.33.0+pr1", "-t", "blockdraft-vllm:0.33.0-pr1", "."]
    assert run(folder, "mkdir", tmp_path)[0] == ["-p", "/home/me/.cache/huggingface"]
    argv, _ = run(run_line, "docker", tmp_path)
    assert "blockdraft-vllm:0.33.0-pr1" in argv
    assert argv[argv.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    base = (Path(__file__).parents[2] / "container/Containerfile").read_text()
    hub = re.search(r"HF_HOME=(\S+)", base)[1]  # where our images keep what they download
    assert f"/home/me/.cache/huggingface:{hub}" in argv
    assert "blockdraft-vllm:/cache" in argv
    section = "build: {context: ., dockerfile: container/Containerfile, target: spark, args: "
    text = compose(built)
    assert section + '{VLLM_VERSION: "0.33.0+pr1"}}' in text
    assert f'- "${{HOME}}/.cache/huggingface:{hub}"' in text
    assert text.endswith("\nvolumes:\n  blockdraft-vllm: {}\n")


def test_compose_holds_the_same_command():
    text = compose(command(mounts=("/models/x",)))
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("command:") + 1
    listed = [json.loads(line[2:].replace("$$", "$")) for line in lines[start : start + len(ARGV) - 1]]
    assert tuple(listed) == ARGV[1:]
    assert "image: " + json.dumps("vllm/vllm-openai:v0.33.0") in lines
    assert 'PLAIN: "a b$$c"' in lines  # compose would look for a variable c
    assert 'VLLM_API_KEY: "${VLLM_API_KEY}"' in lines
    assert '- "/models/x:/models/x:ro"' in lines
    home = next(json.loads(line.removeprefix("HOME: ")) for line in lines if line.startswith("HOME: "))
    assert f'- "${{HOME}}/.triton:{home}/.triton"' in lines


@pytest.mark.parametrize("render", [shell_line, docker_run, compose])
def test_secrets_are_never_rendered(render):
    text = render(command())
    assert "very-secret" not in text
    assert "token" not in text.replace("HF_TOKEN", "")
    assert "VLLM_API_KEY" in text


def test_names_of_secrets():
    secrets = {"VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET", "my_password", "EXA_API_KEY"}
    harmless = {"VLLM_LOGGING_LEVEL", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"}
    assert {name for name in secrets | harmless if is_secret(name)} == secrets
