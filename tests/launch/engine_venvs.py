"""Virtual environments with the real engines' argument parsers, for the tests that want the real thing.

vLLM's comes from tests/bench/vllm_venv.py ($BLOCKDRAFT_TEST_VLLM). SGLang's is made here, without a GPU and
without the kernels that only run on one: $BLOCKDRAFT_TEST_SGLANG is "1" for one in our cache folder (2 GB,
minutes), which is kept, or the Python of one that exists. Without the variable these tests are skipped.
"""

import os
import subprocess

from tests.bench.vllm_venv import python_of

VARIABLE = "BLOCKDRAFT_TEST_SGLANG"
VERSION = "0.5.23"
# What its argument parser imports; torch of another version than its own, since any will do for that.
NEEDED = (
    "torch==2.13.0", "transformers==5.19.0", "triton==3.9.0", "apache-tvm-ffi==0.1.11", "aiohttp",
    "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "gguf", "interegular", "IPython", "msgspec",
    "numpy", "nvidia-ml-py", "openai-harmony==0.0.4", "openai==2.8.0", "orjson", "packaging",
    "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64", "pydantic",
    "python-multipart", "pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "tqdm",
    "uvicorn", "uvloop", "watchfiles", "xxhash",
)  # fmt: skip


def wants_sglang():
    return os.environ.get(VARIABLE, "") not in ("", "0")


def sglang_python():
    """The Python of an environment in which SGLang's parser is imported; made first where there is none."""
    return python_of(os.environ[VARIABLE], f"sglang-parser-{VERSION}", _install)


def _install(python):
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, *NEEDED], check=True)
    subprocess.run([*pip, "--no-deps", f"sglang=={VERSION}"], check=True)
