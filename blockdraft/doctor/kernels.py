"""Findings from the probe: torch, the kernel path of each operation, and comparisons with references."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from blockdraft.doctor.finding import Area, Finding
from blockdraft.doctor.probe_runner import Failure, KernelPath, Probe, ShapeCheck, Torch
from blockdraft.doctor.shapes import SHAPE_NAMES
from blockdraft.machine.machine import Machine
from blockdraft.machine.remedies import INSTALL, NO_COMPILER, NO_HEADERS, why_unseen

REPORT = "please report this line with the output of `blockdraft doctor --json`"
GIB = 1 << 30
HIDDEN_SHARE = 0.75  # of the available memory: CUDA reports more if the page cache is small
# The first key that occurs in a failure's lower-case text decides.
ADVICE = (
    ("outofresources", f"a tile is too large for this card: --engine vllm may be faster; {REPORT}"),
    (
        "ptxas",
        "use a newer Triton, or point TRITON_PTXAS_BLACKWELL_PATH (before Triton 3.6, and on older cards: "
        "TRITON_PTXAS_PATH) to the ptxas of a CUDA that knows this card",
    ),
    ("no kernel image", f"this PyTorch has no code for this card: install one that has, {INSTALL}"),
    ("gcc", NO_HEADERS),
    ("failed to find c compiler", NO_COMPILER),
    ("out of memory", "free the card's memory (nvidia-smi shows who holds it) and run this again"),
    ("sigill", "a library was compiled for a newer CPU: install a build for this one"),
    ("did not end", f"the process hung: look at dmesg for Xid errors, reboot, and {REPORT}"),
)


def torch_findings(machine: Machine, probe: Probe) -> Iterator[Finding]:
    for failure in probe.failures:
        if failure.what not in SHAPE_NAMES:
            yield _failed(failure)
    torch = probe.torch
    if torch is None:
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else "ROCm" if torch.hip else "no GPU"
    threads = f"{torch.num_threads} thread{'s' if torch.num_threads != 1 else ''}"
    yield Finding("libraries", "torch", "ok", f"{torch.version}, built for {build}; {threads}")
    if machine.gpus and not torch.has_gpu:
        unseen = why_unseen(machine, torch.version, torch.cuda)
        assert unseen is not None
        yield Finding("libraries", "torch and the GPU", "problem", unseen.says, advice=unseen.advice)
    if torch.has_gpu and not _has_code(torch):
        assert torch.capability is not None
        major, minor = torch.capability
        compiled_for = f"this PyTorch was compiled for {', '.join(torch.architectures)}"
        says = f"{torch.gpu} has capability {major}.{minor}, but {compiled_for}"
        advice = f"install a PyTorch that was compiled for it: {INSTALL}"
        yield Finding("libraries", "torch's kernels", "problem", says, advice)
    yield from _page_cache(machine, torch)
    if not probe.is_product_right:
        says = f"a product of 64 x 64 ones is wrong on {probe.device}"
        yield Finding("kernels", "a product", "problem", says, REPORT)


def _page_cache(machine: Machine, torch: Torch) -> Iterator[Finding]:
    """Warn if the page cache takes much unified memory: CUDA counts this memory as used."""
    gpu = machine.gpus[0] if machine.gpus else None
    if gpu is None or not gpu.is_unified or torch.free_bytes is None:
        return
    if torch.free_bytes < HIDDEN_SHARE * gpu.free_bytes:
        says = (
            f"CUDA reports {torch.free_bytes / GIB:.1f} GiB free, the kernel {gpu.free_bytes / GIB:.1f}: the "
            "page cache counts as used, and an engine may refuse to start"
        )
        advice, thread = "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches", "vllm-project/vllm#48140"
        yield Finding("machine", "page cache", "warning", says, advice, thread)


def _has_code(torch: Torch) -> bool:
    """Return whether PyTorch has code for the card: for its major capability, or PTX for an earlier one."""
    if torch.capability is None or not torch.architectures:
        return True
    major, minor = torch.capability
    for name in torch.architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        of_major, of_minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and of_major == major and of_minor <= minor:
            return True
        if kind == "compute" and (of_major, of_minor) <= (major, minor):
            return True
    return False


# ---- kernels


def kernel_findings(probe: Probe) -> Iterator[Finding]:
    yield from (_path(path) for path in probe.paths)
    for shape, group in groupby(probe.checks, key=lambda check: check.shape):
        yield from _checked(shape, list(group))
    for failure in probe.failures:
        if failure.what in SHAPE_NAMES:
            yield _failed(failure)


def _path(path: KernelPath) -> Finding:
    if path.taken is not None:
        return Finding("kernels", path.operation, "ok", path.taken)
    why = path.why_not or "not taken"
    if "pip install" in why:
        command = why[why.index("pip install") :].rstrip(")")  # the command is in brackets
        return Finding("kernels", path.operation, "warning", f"PyTorch's own, slower: {why}", advice=command)
    if why.startswith("does not compile"):
        says = f"{why}: the slower reference is used"
        return Finding("kernels", path.operation, "warning", says, advice=_advice(why) or REPORT)
    return Finding("kernels", path.operation, "ok", f"not used: {why}")


def _checked(shape: str, checks: list[ShapeCheck]) -> Iterator[Finding]:
    wrong = [check for check in checks if not check.is_passed]
    for check in wrong:
        off = "not a number" if check.error is None else f"off by {check.error:.1e}"
        says = f"{off} at {check.where}, where {check.tolerance:.0e} is rounding: answers would be wrong"
        advice = f"do not serve on this device; {REPORT}"
        yield Finding("kernels", f"{shape}: {check.operation}", "problem", says, advice)
    if not wrong:
        closest = max(checks, key=lambda check: (check.error or 0.0) / max(check.tolerance, 1e-300))
        num = sum(check.num_comparisons for check in checks)
        off = f"{closest.operation} ({closest.error:.0e} of {closest.tolerance:.0e})"
        says = f"{len(checks)} operations right in {num} comparisons; closest to its tolerance is {off}"
        yield Finding("kernels", shape, "ok", says)


def _advice(how: str) -> str | None:
    return next((advice for text, advice in ADVICE if text in how.lower()), None)


def _failed(failure: Failure) -> Finding:
    advice = _advice(failure.how)
    if advice is None:
        is_torch = failure.what == "torch"
        advice = f"torch cannot be imported: install it again, {INSTALL}" if is_torch else REPORT
    area: Area = "libraries" if failure.what == "torch" else "kernels"
    return Finding(area, failure.what, "problem", f"failed: {failure.how}", advice=advice)
