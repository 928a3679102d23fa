"""Choose PyTorch's build for `make`: prints cpu or cuda, and on stderr what will be downloaded.

`python scripts/choose_torch.py INDEX [cpu|cuda]`, where INDEX is PyTorch's own. Without cpu or cuda: on Linux
the CUDA build if there is an NVIDIA card, else the CPU build, which only that index has. PyPI's build, which
includes CUDA, if the index does not answer.
"""

import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 5
SIZES = {"cpu": "about 0.3 GB", "cuda": "about 3 GB, most of it for NVIDIA cards"}
BEGIN = "Installing into .venv takes a few minutes, once. To download: "


def has_card() -> bool:
    """Return whether NVIDIA's driver is there. In WSL only nvidia-smi shows it."""
    paths = ("/proc/driver/nvidia", "/dev/nvidiactl")
    return shutil.which("nvidia-smi") is not None or any(Path(path).exists() for path in paths)


def why_no_index(index: str) -> str | None:
    """The reason why the index cannot be used, or None."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=TIMEOUT_S):
            return None
    except (OSError, urllib.error.URLError) as error:
        return str(getattr(error, "reason", error))


def choose(index: str, asked: str) -> tuple[str, str]:
    """The build and a message about its size. Exits if the build that was asked for does not exist here."""
    if asked not in ("", "cpu", "cuda"):
        sys.exit(
            f"TORCH={asked} is unknown: use TORCH=cpu or TORCH=cuda, or leave it out to choose by the machine"
        )
    if sys.platform != "linux":
        if asked == "cuda":
            sys.exit("TORCH=cuda: pip has no CUDA build of PyTorch for this system")
        return "cpu", "about 0.2 GB."
    if asked == "cuda" or (not asked and has_card()):
        return "cuda", f"{SIZES['cuda']}."
    reason = why_no_index(index)
    if reason is None:
        return (
            "cpu",
            f"{SIZES['cpu']}: no NVIDIA card was found (TORCH=cuda takes the CUDA build).",
        )
    if asked:
        sys.exit(f"TORCH=cpu: {index} does not answer ({reason}). Leave out TORCH=cpu for PyPI's CUDA build")
    return "cuda", (
        f"{SIZES['cuda']}. No card was found, but PyTorch's index, which alone has the smaller CPU "
        f"build (0.3 GB), does not answer ({reason})."
    )


if __name__ == "__main__":
    build, said = choose(sys.argv[1], "".join(sys.argv[2:]))
    if not Path(".venv/installed").exists():
        print(BEGIN + said, file=sys.stderr)
    print(build)
