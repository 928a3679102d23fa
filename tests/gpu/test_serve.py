"""`blockdraft serve` with the shipped pair on this card, as its user starts it: to ready, with the drafter.

A test of the engine can be well while the command does not start. The card must be free: `pytest -n 0`.
"""

import json
import os
import urllib.request
from contextlib import closing, contextmanager

import pytest

from benchmarks.rehearsal.children import Children
from benchmarks.rehearsal.client import MAX_TOKENS, QUESTION
from benchmarks.rehearsal.serving import complaints, end, get_json, start
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.settings.settings import cache_dir
from blockdraft.settings.shipped import shipped_drafter

pytestmark = pytest.mark.skipif(
    not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
)


@contextmanager
def serving(folder, device, *flags):
    """A server that is ready; at the end it must end by itself."""
    with closing(Children()) as children:
        words = ("default", "--device", device, *flags)
        server = start(children, *words, env=dict(os.environ), log=folder / "serve.log")
        yield server
        assert end(children, server) == 0


def chat(url):
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": MAX_TOKENS}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def check_serving(folder, *flags, drafter="smollm2-135m-instruct/dflash2"):
    """`drafter` is the end of its folder: on a card `auto` is the head."""
    with serving(folder, "cuda", *flags) as server:
        assert complaints(server) == []
        assert (server.engine["device"].partition(":")[0], server.engine["dtype"]) == ("cuda", "bfloat16")
        assert server.engine["draft"].endswith(drafter)
        assert server.engine["width"] > 1
        first = chat(server.url)
        assert "n % 2 == 0" in first
        assert chat(server.url) == first
        assert get_json(f"{server.url}/health") == {"status": "ok"}
        assert get_json(f"{server.url}/ready")["state"] == "ready"
        assert get_json(f"{server.url}/v1/models")["data"][0]["id"] == "default"
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            assert "blockdraft:ready" in response.read().decode()


def test_the_shipped_pair_is_served_in_bfloat16(tmp_path):
    check_serving(tmp_path)


def test_the_shipped_drafter_is_served_without_its_head(tmp_path):
    drafter = str(shipped_drafter("default"))
    check_serving(tmp_path, "--draft", drafter, drafter=drafter)


def test_the_shipped_pair_is_served_with_the_drafter_in_fp8(tmp_path):
    """The target cannot be: its file is a quantised GGUF, and `--quantization fp8` refuses those."""
    check_serving(tmp_path, "--draft-quantization", "fp8")
