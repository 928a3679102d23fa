"""How much memory loading a target takes: run as a script in a process of its own.

Prints two numbers, both in bytes: how far the peak of resident memory rose over what the imports and the
configuration took, and what the weights take once loaded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn

from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.kernels.kernels import kernels_for
from blockdraft.machine.machine import read_machine
from blockdraft.planner.plan import Weights
from blockdraft.planner.resolver import resolve
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_target


def main(model: str, dtype: str, quantization: str) -> None:
    checkpoint = open_checkpoint(model)
    config = read_model_config(checkpoint.config, name=checkpoint.name)
    settings = Settings(model=model, device="cpu", dtype=dtype, quantization=quantization, max_model_len=64)
    plan = resolve(settings, read_machine(), config, None, weights=Weights(0))
    kernels_for(getattr(torch, dtype), torch.device("cpu"))  # imports and compiles what is not there yet
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    target = load_target(checkpoint, config, None, plan, torch.device("cpu"))
    peak = status_bytes("VmHWM") - before
    sys.stdout.write(json.dumps({"peak_bytes": peak, "weight_bytes": resident_bytes(target)}))


def status_bytes(field: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])


def resident_bytes(model: nn.Module) -> int:
    """The memory behind all parameters and buffers but the rope tables, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not re.match(r"rotar(y|ies)\.", name)
    }
    return sum(storages.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
