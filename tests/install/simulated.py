"""Runs blockdraft commands as on another system: python -m tests.install.simulated SYSTEM COMMAND...

What the system lacks is taken away after the libraries are imported, which have their own ways there:
modules, attributes, and files such as those of /proc. Commands are texts; "import" imports all of ours.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import importlib
import importlib.abc
import io
import mmap
import multiprocessing.popen_fork
import os
import pkgutil
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class System:
    platform: str
    machine: str
    modules: tuple[str, ...]  # that it lacks
    attributes: dict[object, tuple[str, ...]]


_LINUX_ONLY = {os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "preadv")}
_NO_WINDOWS = {
    os: (
        *_LINUX_ONLY[os],
        *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgid", "getloadavg", "nice"),
        *("killpg", "setsid", "setpgid", "sysconf", "statvfs", "mkfifo", "uname", "wait", "wait3", "wait4"),
        *("WIFEXITED", "WEXITSTATUS", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"),
        *("fchmod", "fchown", "chown", "pread", "pwrite", "posix_fadvise", "posix_spawn"),
    ),
    signal: (
        *("SIGKILL", "SIGHUP", "SIGCHLD", "SIGQUIT", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGSTOP"),
        *("setitimer", "alarm", "pause", "pthread_kill", "sigwait", "siginterrupt"),
    ),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "PROT_READ"),
    socket: ("SO_REUSEPORT", "send_fds", "recv_fds"),
}
_NO_UNIX = ("fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "syslog", "crypt", "uvloop", "triton")
SYSTEMS = {
    "macos": System("darwin", "arm64", ("triton",), _LINUX_ONLY),
    "windows": System("win32", "AMD64", _NO_UNIX, _NO_WINDOWS),
}
LIBRARIES = (
    *(
        "asyncio",
        "concurrent.futures",
        "ctypes",
        "email",
        "http.client",
        "logging.handlers",
        "multiprocessing",
    ),
    *("multiprocessing.popen_spawn_posix", "multiprocessing.resource_tracker", "multiprocessing.synchronize"),
    *(
        "selectors",
        "shutil",
        "ssl",
        "subprocess",
        "tempfile",
        "urllib.request",
        "zipfile",
        "runpy",
        "webbrowser",
    ),
    *("aiohttp", "filelock", "gguf", "jinja2", "llguidance", "numpy"),
    *("packaging.version", "prometheus_client", "pydantic", "pynvml", "rich.live", "rich.progress"),
    *("starlette.applications", "tokenizers"),
    *("uvicorn", "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "uvicorn.loops.auto"),
)
COMPUTING = ("torch", "torch.utils.cpp_extension", "safetensors.torch", "llvmlite.binding", "huggingface_hub")
COMPUTES_NOTHING = ("--", "plan", "settings", "fetch")
FOLDERS = ("/proc/", "/sys/", "/dev/nvidia", "/dev/shm", "/dev/kfd", "/dev/dxg")


class Missing(importlib.abc.MetaPathFinder):
    """Hide a module from every import."""

    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named '{name}' (simulated)", name=name)
        return None  # noqa: RET501  # the finders after us are asked


def hide(system):
    # Python's own libraries go on as here.
    multiprocessing.popen_fork.signal = subprocess.signal = SimpleNamespace(**vars(signal))
    disk = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: disk  # it makes another call there
    for name in [name for name in sys.modules if name.partition(".")[0] in system.modules]:
        del sys.modules[name]
    sys.meta_path.insert(0, Missing(system.modules))
    for module, names in system.attributes.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    _hide_files()
    if system.platform == "win32":
        asyncio.ProactorEventLoop = asyncio.SelectorEventLoop
        ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(GetPhysicallyInstalledSystemMemory=_memory))
    sys.platform = system.platform
    platform.machine = lambda: system.machine
    platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}[system.platform]


def _memory(kilobytes):
    kilobytes._obj.value = 16 << 20  # 16 GiB


def _hide_files():
    def refuse(path):
        if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory (simulated)", os.fspath(path))

    def hidden(real):
        def function(path, *args, **kwargs):
            refuse(path)
            return real(path, *args, **kwargs)

        return function

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        setattr(os, name, hidden(getattr(os, name)))
    io.open = builtins.open = hidden(open)


def modules_of_ours():
    import blockdraft

    names = [module.name for module in pkgutil.walk_packages(blockdraft.__path__, "blockdraft.")]
    # Triton's kernels are for cards; these two are scripts of a process of their own.
    left_out = ("blockdraft.kernels.triton", "blockdraft.__main__", "blockdraft.launch.reaper")
    return [name for name in names if not name.startswith(left_out)]


def run(command):
    if command == "import":
        for module in modules_of_ours():
            importlib.import_module(module)
        return 0
    from blockdraft.cli.main import main as run_command

    try:
        return run_command(shlex.split(command))
    except SystemExit as end:  # argparse's way after --help
        return end.code


def main(name, *commands):
    sysconfig.get_config_vars()
    needs_all = not all(command.startswith(COMPUTES_NOTHING) for command in commands)
    for library in (*LIBRARIES, *(COMPUTING if needs_all else ())):
        importlib.import_module(library)
    hide(SYSTEMS[name])
    # Windows has an encoding of its own for files; Python says where it would be taken (-X).
    warnings.filterwarnings("error", category=EncodingWarning, module=r"blockdraft\.")
    return max(run(command) or 0 for command in commands)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
