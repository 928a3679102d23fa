"""The wheel is complete and starts without the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import blockdraft, sys
from blockdraft import LLM, SamplingParams
assert not blockdraft.__file__.startswith(sys.argv[1]), blockdraft.__file__
answers = LLM().chat([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0, max_tokens=4))
print(len(answers[0].token_ids))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from files in git, in a separate folder because setuptools leaves build/ behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.Popen(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    unpacking = subprocess.Popen(["tar", "-x"], cwd=source, stdin=packed.stdout)
    packed.stdin.write(files)
    packed.stdin.close()
    assert unpacking.wait() == 0
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(pip, check=True, timeout=300)
    return next(out.iterdir())


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "blockdraft"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    missing = set(tracked.stdout.split()) - set(zipfile.ZipFile(wheel).namelist())
    assert missing == set()


@pytest.mark.slow
def test_installed_elsewhere_it_starts_and_answers(wheel, tmp_path):
    """A clean environment with borrowed dependencies: their download is not tested."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", wheel]
    subprocess.run(pip, check=True, timeout=120)
    borrowed = _dependencies_without_ours(tmp_path / "borrowed")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(borrowed)
    places = {"cwd": tmp_path, "env": environment, "text": True, "capture_output": True, "timeout": 300}
    help_text = subprocess.run([tmp_path / "venv/bin/blockdraft", "--help"], check=True, **places).stdout
    assert "serve" in help_text
    answered = subprocess.run([python, "-c", CODE, str(ROOT)], **places)
    assert answered.stdout == "4\n", answered.stderr
    recipes = subprocess.run([tmp_path / "venv/bin/blockdraft", "recipes"], check=True, **places)
    assert "gemma-4-31b" in recipes.stdout


def _dependencies_without_ours(folder):
    """Link to everything that is installed here except the checkout."""
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "blockdraft" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder
