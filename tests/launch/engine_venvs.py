"""Virtual environments with the real engines' argument parsers, for the tests that want the real thing.

vLLM's is the newest release that we know, of which there may be no build for a CPU: the Python files of its
wheel, the small packages that its parser imports, and this environment's torch, transformers and pydantic, in
whatever version. SGLang's is made without a GPU and without the kernels that only run on one.
$BLOCKDRAFT_TEST_VLLM_PARSER and $BLOCKDRAFT_TEST_SGLANG are "1" for an environment in our cache folder (0.2
and 2 GB, minutes), which is kept, or the Python of one that exists. Without them these tests are skipped.
"""

import os
import subprocess
import sysconfig
import zipfile

from packaging.requirements import Requirement

from blockdraft.launch.engine_versions import NEWEST
from tests.bench.vllm_venv import python_of, requirements

VARIABLE = "BLOCKDRAFT_TEST_SGLANG"
VLLM_VARIABLE = "BLOCKDRAFT_TEST_VLLM_PARSER"
VERSION = "0.5.23"
# What SGLang's parser imports; torch of another version than its own, since any will do for that.
NEEDED = (
    "torch==2.13.0", "transformers==5.19.0", "triton==3.9.0", "apache-tvm-ffi==0.1.11", "aiohttp",
    "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "gguf", "interegular", "IPython", "msgspec",
    "numpy", "nvidia-ml-py", "openai-harmony==0.0.4", "openai==2.8.0", "orjson", "packaging",
    "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64", "pydantic",
    "python-multipart", "pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "tqdm",
    "uvicorn", "uvloop", "watchfiles", "xxhash",
)  # fmt: skip
# What vLLM's parser imports and this environment may lack, in the versions that its wheel asks for.
VLLM_NEEDED = {
    "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle", "fastapi", "msgspec", "oss-harmony",
    "partial-json-parser", "pillow", "py-cpuinfo", "pybase64", "pyzmq", "xgrammar",
}  # fmt: skip


def wants_vllm_parser():
    return os.environ.get(VLLM_VARIABLE, "") not in ("", "0")


def vllm_parser_python():
    """The Python of an environment in which vLLM's parser is imported; made first where there is none."""
    return python_of(os.environ[VLLM_VARIABLE], f"vllm-parser-{NEWEST['vllm']}", _install_vllm)


def wants_sglang():
    return os.environ.get(VARIABLE, "") not in ("", "0")


def sglang_python():
    """The Python of an environment in which SGLang's parser is imported; made first where there is none."""
    return python_of(os.environ[VARIABLE], f"sglang-parser-{VERSION}", _install)


def _install(python):
    _pip(python, "install", *NEEDED)
    _pip(python, "install", "--no-deps", f"sglang=={VERSION}")


def _install_vllm(python):
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    any_machine = ("--only-binary=:all:", "--platform", "manylinux_2_28_x86_64")  # Python files are the same
    _pip(python, "download", "--no-deps", *any_machine, "-d", site, f"vllm=={NEWEST['vllm']}")
    wheel = next(site.glob("vllm-*.whl"))
    found = [text for text in requirements(wheel) if Requirement(text).name.lower() in VLLM_NEEDED]
    assert len(found) == len(VLLM_NEEDED), found
    _pip(python, "install", "--no-deps", *found)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))]
        archive.extractall(site, names)
    wheel.unlink()
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _pip(python, *arguments):
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)
