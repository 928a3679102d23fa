"""Runs the PTX of `kernels.triton.packed_loop` on a CPU: four warps in turns, with copies that end late."""

import re

import numpy as np
import torch

from tests.kernels import ptx

_THREADS = 128


class Machine:
    """Registers of 128 threads, global memory at made-up addresses, and shared memory that begins as noise.

    Asynchronous copies end when they are waited for, or at once (`is_early`). So memory that is read
    or overwritten too early gives other sums.
    """

    def __init__(self, text, *, is_early):
        self.lines = [line for line in text.splitlines() if line]
        self.is_early = is_early
        self.registers, self.memory, self.shared = {}, {}, np.zeros(0, np.uint8)
        self.copies = [[]]

    def place(self, tensor):
        """Return the address of a tensor's bytes."""
        address = 1 << 20 if not self.memory else max(self.memory) + (1 << 24)
        self.memory[address] = tensor.contiguous().view(torch.uint8).flatten().numpy()
        return address

    def run(self, outputs, inputs):
        for i, value in enumerate(inputs):
            self.registers[f"${outputs + i}"] = torch.full((_THREADS,), value, dtype=torch.int64)
        self.scopes, labels, at, steps = [], {}, 0, 0
        while at < len(self.lines):
            line, steps = self.lines[at], steps + 1
            assert steps < 1_000_000, "the loop ends"
            if line.endswith(":"):
                labels[line[:-1]] = at
            elif line in "{}":
                self.scopes.append({}) if line == "{" else self.scopes.pop()
            elif line.startswith(".shared"):
                size = int(re.search(r"\[(\d+)\]", line)[1])
                self.shared = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
                self.registers["ring"] = torch.zeros(_THREADS, dtype=torch.int64)
            elif line.startswith(".reg"):
                for name, count in re.findall(r"(\w+)(?:<(\d+)>)?[,;]", line.split(None, 2)[2]):
                    for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                        self.scopes[-1][one] = f"{one}@{len(self.scopes)}"
            else:
                at = self._step(line, at, labels)
            at += 1
        return [self.registers[f"${i}"] for i in range(outputs)]

    def _name(self, name):
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _read(self, name):
        if re.fullmatch(r"-?\d\w*", name):
            value = 0 if name.startswith("0f") else int(name, 0)
            return torch.tensor(value)
        return torch.arange(_THREADS) if name == "%tid.x" else self.registers[self._name(name)]

    def _write(self, name, value, mask):
        name = self._name(name)
        before = self.registers.get(name, torch.zeros(_THREADS, dtype=torch.int64))
        self.registers[name] = torch.where(mask, value.to(torch.int64), before)

    def _step(self, line, at, labels):
        found = re.fullmatch(r"(?:@(\w+) )?([\w.:]+)(?: (.*))?;", line)
        assert found, line
        mask = torch.ones(_THREADS, dtype=torch.bool)
        if found[1]:
            mask = self._read(found[1]).bool()
        name, text = found[2], found[3] or ""
        if not bool(mask.any()):
            return at
        if name == "bra":
            assert bool(mask.all()) == bool(mask.any()), "all threads go on together"
            return labels[text] if bool(mask[0]) else at
        if name.startswith("mma"):
            self._multiply(text)
        elif name.startswith("ldmatrix"):
            self._load_matrices(text)
        elif name.startswith("cp.async.bulk.prefetch"):
            self._fetch(text, mask)
        elif name.startswith("cp.async"):
            self._copy(name, text, mask)
        elif name.startswith(("ld.shared", "ld.global")):
            self._load(name, text, mask)
        elif not name.startswith(("bar", "fence", "griddepcontrol")):
            self._compute(name, re.findall(r"\{.*?\}|[%$\w.-]+", text), mask)
        return at

    def _compute(self, name, operands, mask):
        if name == "mov.b64" and operands[1].startswith("{"):
            low, high = (self._read(one) for one in operands[1].strip("{}").split(", "))
            self._write(operands[0], high << 32 | low, mask)
        elif name == "mov.b32" and operands[0].startswith("{"):
            value = self._read(operands[1])
            for i, one in enumerate(operands[0].strip("{}").split(", ")):
                self._write(one, value >> (16 * i) & 0xFFFF, mask)
        else:
            kind = re.sub(r"\.(lo|wide)|\.[usbf]\d\d$|\.pred$", "", name)
            run = ptx._RUN.get(name) or _RUN[kind]
            is_wide = "wide" in name or name.endswith("64") or kind.startswith("setp")
            value = run(*map(self._read, operands[1:]))
            self._write(operands[0], value if is_wide else value & ptx.ALL, mask)

    # ---- memory

    def _bytes(self, address, count):
        start = max((base for base in self.memory if base <= address), default=None)
        assert start is not None, "memory that is ours"
        assert address + count <= start + len(self.memory[start]), "memory that is ours"
        return self.memory[start][address - start : address - start + count]

    def _place(self, text):
        name, _, offset = text.strip("[]").partition("+")
        return (self._read(name) + int(offset or 0)) & 0xFFFFFFFFFFFF

    def _load(self, name, text, mask):
        targets, place = re.fullmatch(r"(.*), (\[.*\])", text).groups()
        targets = targets.strip("{}").split(", ")
        size, values = 4 * len(targets), np.zeros((_THREADS, len(targets)), np.uint32)
        for i, at in enumerate(self._place(place).tolist()):
            assert at % size == 0, "aligned"
            row = self.shared[at : at + size] if "shared" in name else self._bytes(at, size)
            values[i] = row.view(np.uint32)
        for j, target in enumerate(targets):
            self._write(target, torch.from_numpy(values[:, j].astype(np.int64)), mask)

    def _copy(self, name, text, mask):
        if name == "cp.async.commit_group":
            self.copies.append([])
        elif name == "cp.async.wait_group":
            while len(self.copies) - 1 > int(text):
                self._finish(self.copies.pop(0))
        else:
            to, source, *sizes = re.findall(r"\[.*?\]|\w+", text)
            count = self._read(sizes[1]) if len(sizes) > 1 else torch.full((_THREADS,), 16)
            copies = torch.stack((self._place(to), self._place(source), count))
            group = copies[:, mask].T.tolist()
            if self.is_early:
                self._finish(group)
            else:
                self.copies[-1] += group

    def _fetch(self, text, mask):
        place, size = text.split(", ")
        fetched = torch.stack((self._place(place), self._read(size).expand(_THREADS)))
        for address, count in fetched[:, mask].T.tolist():
            self._bytes(address, count)

    def _finish(self, group):
        for to, source, count in group:
            assert to % 16 == source % 16 == 0, "aligned"
            assert to + 16 <= len(self.shared), "memory that is ours"
            self.shared[to : to + 16] = self._bytes(source, 16) if count else 0

    # ---- products: a warp's rows are 32 of the first dimension

    def _load_matrices(self, text):
        targets, place = re.fullmatch(r"\{(.*)\}, (\[.*\])", text).groups()
        places = self._place(place).view(-1, 4, 8)
        assert not (places & 15).any(), "aligned"
        at = places[..., None] + torch.arange(16)
        rows = torch.from_numpy(self.shared[at.numpy()]).view(torch.int32)  # warp, matrix, row, pair
        for i, target in enumerate(targets.split(", ")):
            found = rows[:, i].reshape(_THREADS).to(torch.int64) & ptx.ALL
            self._write(target, found, torch.ones(_THREADS, dtype=torch.bool))

    def _multiply(self, text):
        sums, a, b, added = ([self._name(name) for name in group.split(", ")] for group in _groups(text))
        assert sums == added
        noise = torch.full((_THREADS,), 0x3F8140C0)  # registers that were never written
        left = torch.zeros(_THREADS // 32, 16, 16, dtype=torch.float64)
        right = torch.zeros(_THREADS // 32, 8, 16, dtype=torch.float64)
        warp, g, t = _LANES
        for odd in range(2):
            for i, name in enumerate(a):
                half = self.registers.get(name, noise) >> (16 * odd) & 0xFFFF
                left[warp, g + i % 2 * 8, 2 * t + odd + i // 2 * 8] = ptx._bf16(half)
            for i, name in enumerate(b):
                right[warp, g, 2 * t + odd + 8 * i] = ptx._bf16(self.registers[name] >> (16 * odd) & 0xFFFF)
        product = left @ right.transpose(1, 2)
        for i, name in enumerate(sums):
            value = product[warp, g + i // 2 * 8, 2 * t + i % 2] + ptx._f32(self.registers[name]).double()
            self.registers[name] = ptx._f32_bits(value.float()) & ptx.ALL


def _groups(text):
    return re.findall(r"\{(.*?)\}", text)


_LANES = (torch.arange(_THREADS) // 32, torch.arange(_THREADS) % 32 // 4, torch.arange(_THREADS) % 4)
_RUN = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": torch.minimum,
    "selp": lambda a, b, p: torch.where(p.bool(), a, b),
    "setp.lt": lambda a, b: a < b,
    "setp.gt": lambda a, b: a > b,
    "setp.ge": lambda a, b: a >= b,
    "setp.eq": lambda a, b: a == b,
}
