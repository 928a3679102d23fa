"""Without a card Triton's kernels run in its interpreter: Triton must know before anyone imports it.

And what starts keep for the next one (`widths`, `verified`, `kernels`) stays with this run of the suite: the
user's cache folder lends its downloads alone. The workers of a run share compiled kernels, which their names
tell apart by source, LLVM and processor.
"""

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import torch

from blockdraft.settings.settings import cache_dir
from tests.interpreter import speed_up
from tests.not_run import (  # noqa: F401  # hooks: what a run leaves out is said at its end
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell's background jobs ignore Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _own_cache():
    folder = Path(tempfile.mkdtemp(prefix="blockdraft-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    users, own = cache_dir(), {"widths", "verified", "kernels", "compiled"}
    if "PYTEST_XDIST_WORKER" in os.environ:
        own.remove("kernels")
    for path in users.iterdir() if users.is_dir() else ():
        if path.name not in own:
            (folder / path.name).symlink_to(path)
    os.environ.setdefault("BLOCKDRAFT_TEST_CACHE", str(users))  # where environments of other engines are kept
    (folder / "kernels").mkdir(exist_ok=True)
    os.environ["BLOCKDRAFT_CACHE"] = str(folder)


_own_cache()


def pytest_collection_finish(session):
    """All tests and what they import stay: a collection by an engine that starts need not scan them."""
    gc.collect()
    gc.freeze()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        speed_up()
