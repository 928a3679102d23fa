"""A lint of the Containerfile: its grammar, and the mistakes that builds of images are known for."""

import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from blockdraft.launch import container

ROOT = Path(__file__).parents[2]
FILE = ROOT / "container" / "Containerfile"
TARGETS = {"cpu", "cuda", "vllm", "spark", "sglang"}


@dataclass
class Stage:
    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of its line

    def all(self, instruction):
        return [rest for name, rest in self.lines if name == instruction]


def instructions(text):
    """Comments and continued lines resolved, as the builder does."""
    joined, rest = [], ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            assert not rest or line.strip(), "an empty line inside an instruction"
            continue
        rest += line.strip()
        if rest.endswith("\\"):
            rest = rest[:-1].rstrip() + " "
            continue
        name, _, value = rest.partition(" ")
        joined.append((name, value.strip()))
        rest = ""
    assert not rest, "the last instruction goes on past the end"
    return joined


def read_stages(text):
    arguments, stages = [], []
    for name, rest in instructions(text):
        if name == "FROM":
            base, word, stage = rest.split()
            assert word == "AS"
            stages.append(Stage(stage, base))
        elif stages:
            stages[-1].lines.append((name, rest))
        else:
            assert name == "ARG", "only ARG may come before the first FROM"
            arguments.append(rest)
    return arguments, stages


ARGUMENTS, STAGES = read_stages(FILE.read_text())
BY_NAME = {stage.name: stage for stage in STAGES}
EVERY = [(stage.name, name, rest) for stage in STAGES for name, rest in stage.lines]


def chain(name):
    """The stage and those it is built on, itself first."""
    while name in BY_NAME:
        yield BY_NAME[name]
        name = BY_NAME[name].base


def test_stages_have_their_own_names_and_targets_are_there():
    assert len(BY_NAME) == len(STAGES)
    assert set(BY_NAME) >= TARGETS
    assert STAGES[-1].name == "cuda", "what a build without --target makes"
    seen = set()
    for stage in STAGES:
        assert stage.base in seen or stage.base.startswith("docker.io/"), (
            f"{stage.name} is built on {stage.base}"
        )
        seen.add(stage.name)


def test_images_of_others_have_a_full_name_and_a_fixed_tag():
    for stage in STAGES:
        if stage.base not in BY_NAME:
            tag = stage.base.rpartition(":")[2]
            assert "/" not in tag
            assert tag not in ("", "latest")


def test_arguments_are_declared_before_they_are_used():
    for stage in STAGES:
        known = {"PATH"} | {
            text.partition("=")[0] for text in ARGUMENTS if text and stage.base not in BY_NAME
        }
        assert set(re.findall(r"\$\{(\w+)\}", stage.base)) <= known
        known = {"PATH"}
        for name, rest in stage.lines:
            if name == "ARG":
                known.add(rest.partition("=")[0])
            if name in ("RUN", "ENV"):
                assert set(re.findall(r"\$\{(\w+)\}", rest)) <= known, rest


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (FILE.parent / "Containerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    for _, name, rest in EVERY:
        if name == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source.partition('/')[0]}" in ignored, source


def test_all_that_the_wheel_is_made_of_is_copied():
    copied = {word for rest in BY_NAME["wheel"].all("COPY") for word in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"], "blockdraft"} <= copied


@pytest.mark.parametrize(
    ("stage", "command"), [(stage, rest) for stage, name, rest in EVERY if name == "RUN"]
)
def test_commands_are_shell_and_leave_nothing_behind(stage, command):
    words = re.sub(r"^(--mount=\S+ )+", "", command)
    assert subprocess.run(["sh", "-n", "-c", words], capture_output=True).returncode == 0, command
    assert "sudo" not in words
    assert "curl" not in words, "what is downloaded is pinned by a package manager"
    if "apt-get" in words:
        assert re.search(r"apt-get update && apt-get install --yes --no-install-recommends ", words)
        assert words.endswith("rm -rf /var/lib/apt/lists/*")
    for install in re.findall(r"pip (?:install|wheel) [^&]*", words):
        assert "--no-cache-dir" in install, install
    for mount in re.findall(r"--mount=(\S+)", command):
        options = dict(part.split("=") for part in mount.split(","))
        assert options["type"] == "bind"
        assert options["from"] in BY_NAME


def test_pip_installs_versions_that_are_fixed():
    for _, name, rest in EVERY:
        if name == "RUN" and "pip install" in rest:
            assert re.search(r"==\$\{\w+_VERSION\}|\^torch==|--constraint ", rest), rest
        if name == "RUN" and "install-vllm" in rest:
            assert '"${VLLM_VERSION}"' in rest
    assert (ROOT / "constraints.txt").read_text().count("\ntorch==") == 1


def test_nothing_in_it_is_for_one_kind_of_machine():
    assert not re.search(r"x86_64|amd64|arm64|--platform", "\n".join(rest for _, _, rest in EVERY))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_starts_as_one_user_with_our_entrypoint_and_health_check(target):
    stages = list(chain(target))
    assert BY_NAME[target].lines[-1] == ("USER", "1000:1000"), "nothing runs as root, and USER is last"
    entrypoints = [rest for stage in stages for rest in stage.all("ENTRYPOINT")]
    checks = [rest for stage in stages for rest in stage.all("HEALTHCHECK")]
    assert entrypoints == ['["blockdraft-entrypoint"]'], "one, in the form that passes signals on"
    assert len(checks) == 1
    assert checks[0].endswith('CMD ["blockdraft-healthcheck"]')
    copied = [rest for stage in stages for rest in stage.all("COPY")]
    for script in ("entrypoint", "healthcheck"):
        assert f"container/{script} /usr/local/bin/blockdraft-{script}" in copied
        assert (FILE.parent / script).stat().st_mode & 0o111, "COPY keeps the mode"
    assert str(container.PORT) in [rest for stage in stages for rest in stage.all("EXPOSE")]


def test_there_is_one_set_of_defaults_and_no_secret():
    """A default of a container variable here would be a second opinion: settings/settings.py has them all."""
    for _, name, rest in EVERY:
        if name in ("ENV", "ARG"):
            for word in shlex.split(rest):
                variable = word.partition("=")[0]
                assert variable not in container.VARIABLES
                assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", variable)


def test_what_is_downloaded_or_compiled_goes_to_the_volume():
    values = dict(word.split("=", 1) for rest in BY_NAME["base"].all("ENV") for word in shlex.split(rest))
    assert BY_NAME["base"].all("VOLUME") == ['["/cache"]']
    for name in ("HOME", "HF_HOME", "BLOCKDRAFT_CACHE", "TRITON_CACHE_DIR"):
        assert Path(values[name]).is_relative_to("/cache")


def test_engines_are_of_the_versions_we_know_best():
    versions = pytest.importorskip("blockdraft.launch.engine_versions")
    for engine, version in versions.NEWEST.items():
        assert f"{engine.upper()}_VERSION={version}" in BY_NAME[engine].all("ARG")


# ---- the page


def test_the_page_has_every_variable_once():
    page = (ROOT / "docs" / "container.md").read_text()
    rows = re.findall(r"^\| `(\w+)`", page, re.M)
    assert sorted(rows) == sorted({*container.VARIABLES})


def test_the_pages_targets_exist():
    page = (ROOT / "docs" / "container.md").read_text()
    assert set(re.findall(r"--target (\w+)", page)) <= TARGETS
