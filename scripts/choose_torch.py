"""Choose PyTorch's build for `make`: prints cpu or cuda, and on stderr what will be downloaded.

`python scripts/choose_torch.py INDEX [cpu|cuda]`, where INDEX is PyTorch's own. Without a word: on Linux
CUDA's build where an NVIDIA card is, else the CPU's, which only that index has; where it does not answer,
PyPI's, which brings CUDA along.
"""

import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 5
SIZES = {"cpu": "about 0.3 GB", "cuda": "about 3 GB, most of it for NVIDIA cards"}
BEGIN = "Installing into .venv, which takes some minutes, once. To download: "


def has_card() -> bool:
    """Whether NVIDIA's driver is there: in WSL there is only its tool."""
    paths = ("/proc/driver/nvidia", "/dev/nvidiactl")
    return shutil.which("nvidia-smi") is not None or any(Path(path).exists() for path in paths)


def why_no_index(index: str) -> str | None:
    """Why the index cannot be used; None: it answers."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=TIMEOUT_S):
            return None
    except (OSError, urllib.error.URLError) as error:
        return str(getattr(error, "reason", error))


def choose(index: str, asked: str) -> tuple[str, str]:
    """The build, and what to say of it; a SystemExit where the one that was asked for cannot be had."""
    if asked not in ("", "cpu", "cuda"):
        sys.exit(f"TORCH={asked} is unknown: TORCH=cpu or TORCH=cuda, or nothing: by whether there is a card")
    if sys.platform != "linux":
        if asked == "cuda":
            sys.exit("TORCH=cuda: PyTorch has no build for CUDA on this system that pip can install")
        return "cpu", "about 0.2 GB."
    if asked == "cuda" or (not asked and has_card()):
        return "cuda", f"{SIZES['cuda']}."
    reason = why_no_index(index)
    if reason is None:
        return "cpu", f"{SIZES['cpu']}: no NVIDIA card was found ('make serve TORCH=cuda' takes its build)."
    if asked:
        sys.exit(f"TORCH=cpu: {index} does not answer ({reason}); without TORCH=cpu it is PyPI's, with CUDA")
    return "cuda", (
        f"{SIZES['cuda']}. There is none here, but only PyTorch's index has a build without "
        f"CUDA (0.3 GB), and it does not answer ({reason})."
    )


if __name__ == "__main__":
    build, said = choose(sys.argv[1], "".join(sys.argv[2:]))
    if not Path(".venv/installed").exists():
        print(BEGIN + said, file=sys.stderr)
    print(build)
