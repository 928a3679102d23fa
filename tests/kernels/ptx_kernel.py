"""Runs the PTX of a compiled kernel on a CPU: blocks in turn, the threads of a block in step.

It knows the instructions of `kernels.triton.kv_mma` and `kv_wide`. Products of tensor cores add the 16
products of a step to the sum in float64, then round: an order of steps, or a set of products in a step, that
differs between two kernels shows in the bits. Asynchronous products read shared memory when they begin or
when they are waited for (`is_late`), so what is overwritten between is found; whether warps wait for one
another is not.
"""

import re

import numpy as np
import torch

_WIDTH = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}


class Memory:
    """Tensors at made-up addresses; an access outside of them is an error."""

    def __init__(self):
        self.bases, self.data = [], []

    def place(self, tensor):
        """Return the address of a tensor's bytes."""
        address = 1 << 24
        if self.bases:
            address = self.bases[-1] + (((len(self.data[-1]) >> 20) + 2) << 20)
        self.bases.append(address)
        self.data.append(tensor.view(-1).view(torch.uint8).numpy())
        return address

    def find(self, addresses, size):
        at = np.searchsorted(self.bases, addresses, side="right") - 1
        assert len(addresses) == 0 or at.min() == at.max() >= 0, "memory that is ours"
        if not len(addresses):
            return None, addresses
        offset = addresses - self.bases[at[0]]
        assert int(offset.max()) + size <= len(self.data[at[0]]), "memory that is ours"
        assert not (offset % size).any(), "aligned"
        return self.data[at[0]], offset


class Kernel:
    """A kernel's PTX, taken apart once."""

    def __init__(self, text, num_warps, shared_bytes, is_late=False):
        self.threads, self.shared_bytes, self.is_late = 32 * num_warps, shared_bytes, is_late
        body = text[text.index("{\n", text.index(".entry")) :]
        self.parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)", text[: text.index(body)])
        self.lines, self.labels = [], {}
        self._parse(re.sub(r"//.*|^\s*\.(loc|pragma).*", "", body, flags=re.MULTILINE))

    def _parse(self, body):
        scopes, number = [], 0
        for statement in re.findall(r"\s*(\$\w+:|[{}]|\w[^;]*;|[.@%][^;]*;)", body):
            statement = " ".join(statement.split())
            if statement in ("{", "}"):
                number += statement == "{"
                scopes.append((number, set())) if statement == "{" else scopes.pop()
            elif statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.lines)
            elif statement.startswith(".reg"):
                if len(scopes) > 1:
                    scopes[-1][1].update(re.findall(r"\w+", statement)[2:])
            elif not statement.startswith((".", "//")):
                found = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)(?: (.*))?;", statement)
                assert found, statement
                operands = [self._named(one, scopes) for one in _split(found[4] or "")]
                guard = (found[1] == "!", self._named(found[2], scopes)) if found[2] else None
                self.lines.append((guard, found[3], operands))

    @staticmethod
    def _named(text, scopes):
        """Return an operand with the names of inline assembly's registers made different by scope."""

        def name_of(match):
            number = next((number for number, names in reversed(scopes) if match[0] in names), None)
            return match[0] if number is None else f"{match[0]}@{number}"

        return re.sub(r"(?<![\w%.$])[a-z]\w*", name_of, text)

    def run(self, memory, grid, arguments):
        assert len(arguments) <= len(self.parameters)
        for z, y, x in np.ndindex(*reversed(grid)):
            _Block(self, memory, grid, (x, y, z), arguments).run()


def _split(text):
    return [one.strip() for one in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", text) if one.strip()]


class _Block:
    def __init__(self, kernel, memory, grid, place, arguments):
        self.kernel, self.memory = kernel, memory
        lane = np.arange(kernel.threads, dtype=np.uint32)
        self.lane, self.all = lane, np.ones(kernel.threads, bool)
        self.registers = {"%tid.x": lane}
        for axis, size, at in zip("xyz", grid, place, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full_like(lane, at)
            self.registers[f"%nctaid.{axis}"] = np.full_like(lane, size)
        self.shared = np.random.default_rng(0).integers(0, 256, kernel.shared_bytes, dtype=np.uint8)
        self.values = {
            name: np.full(kernel.threads, value)
            for name, value in zip(kernel.parameters, arguments, strict=False)
        }
        self.begun, self.waiting = [], []

    def run(self):
        at = steps = 0
        while True:
            guard, name, operands = self.kernel.lines[at]
            at, steps = at + 1, steps + 1
            assert steps < 5_000_000, "the kernel ends"
            mask = self.all
            if guard:
                mask = self.registers[guard[1]].astype(bool) ^ guard[0]
                if not mask.any():
                    continue
            base = name.split(".", 1)[0]
            if base == "bra":
                assert mask.all(), "all threads go on together"
                at = self.kernel.labels[operands[0]]
            elif base == "ret":
                return
            elif base in ("bar", "fence", "griddepcontrol"):
                pass
            else:
                getattr(self, f"_{base}", self._compute)(name, operands, mask)

    # ---- registers

    def read(self, text, kind):
        """Return an operand's bits, or its value as a number of `kind`, such as "s32" or "f32"."""
        value = self.registers.get(text)
        if value is None:
            assert not re.match(r"%[a-z]+\d", text), f"{text} was written"
            if text == "global_smem":
                value = 0
            elif text.startswith("0f"):
                value = int(text[2:], 16)
            else:
                value = int(text, 0)
        size = kind[1:].removesuffix("x2")
        if kind == "pred":
            return np.broadcast_to(np.asarray(value, bool), self.lane.shape)
        if not isinstance(value, np.ndarray):
            value = np.full(self.lane.shape, value & (1 << int(size)) - 1, dtype=_WIDTH[size])
        if kind == "bf16x2" or kind == "f16x2":
            return value.astype(np.uint32)
        value = value.astype(_WIDTH[size])
        if kind[0] == "s":
            return value.view(value.dtype.name[1:])
        if kind[0] == "f":
            return value.view({"16": np.float16, "32": np.float32, "64": np.float64}[size])
        return value

    def write(self, name, value, mask):
        if value.dtype != bool:
            value = np.ascontiguousarray(value)
            value = value.view(_WIDTH[str(8 * value.dtype.itemsize)])
        if name == "_":
            return
        if mask is not self.all and not mask.all():
            before = self.registers.get(name, np.zeros_like(value))
            value = np.where(mask, value, before.astype(value.dtype))
        self.registers[name] = value

    # ---- arithmetic

    def _compute(self, name, operands, mask):
        parts = name.split(".")
        kind = "pred" if parts[-1] == "pred" else parts[-1]
        if kind == "bf16x2":
            value = self._paired(parts[0], [self.read(one, "b32") for one in operands[1:]])
        else:
            ins = [self.read(one, kind) for one in operands[1:]]
            with np.errstate(all="ignore"):
                value = _RUN[parts[0]](parts, *ins)
        self.write(operands[0], value, mask)

    def _paired(self, base, ins):
        out = []
        for shift in (0, 16):
            x = [((one >> shift & 0xFFFF) << 16).view(np.float32).astype(np.float64) for one in ins]
            out.append(_bfloat16(_PAIRED[base](*x)))
        return out[0] | out[1] << 16

    def _mov(self, name, operands, mask):
        kind = name.split(".")[-1]
        target, source = operands
        if target.startswith("{"):  # one word to two
            low, high = _split(target[1:-1])
            half = int(kind[1:]) // 2
            value = self.read(source, kind)
            self.write(low, (value & ((1 << half) - 1)).astype(_WIDTH[str(half)]), mask)
            self.write(high, (value >> half).astype(_WIDTH[str(half)]), mask)
        elif source.startswith("{"):
            half = int(kind[1:]) // 2
            low, high = (self.read(one, f"b{half}").astype(_WIDTH[kind[1:]]) for one in _split(source[1:-1]))
            self.write(target, low | high << half, mask)
        else:
            self.write(target, self.read(source, "pred" if kind == "pred" else kind), mask)

    def _setp(self, name, operands, mask):
        _, test, kind = name.split(".")
        a, b = (self.read(one, kind) for one in operands[1:])
        tests = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        self.write(operands[0], tests[test], mask)

    def _selp(self, name, operands, mask):
        kind = name.split(".")[-1]
        a, b = (self.read(one, kind) for one in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], "pred"), a, b), mask)

    def _cvt(self, name, operands, mask):
        parts = name.split(".")
        if parts[-2] == "bf16x2":
            high, low = (_bfloat16(self.read(one, "f32").astype(np.float64)) for one in operands[1:])
            value = low | high << 16
        else:
            x = self.read(operands[1], parts[-1])
            if parts[-2] == "bf16":
                value = _bfloat16(x.astype(np.float64)).astype(np.uint16)
            else:
                x = np.trunc(x) if parts[1] == "rzi" else x
                kinds = {"s": "int", "u": "uint", "f": "float"}
                value = x.astype(kinds[parts[-2][0]] + parts[-2][1:])
        self.write(operands[0], value, mask)

    def _shfl(self, name, operands, mask):
        by, value = self.read(operands[2], "b32"), self.read(operands[1], "b32")
        source = self.lane ^ by if ".bfly" in name else self.lane // 32 * 32 + by % 32
        assert ".bfly" in name or ".idx" in name
        self.write(operands[0].split("|")[0], value[source], mask)

    def _redux(self, name, operands, mask):
        assert ".add." in name
        value = self.read(operands[1], "u32").reshape(-1, 32).sum(1, dtype=np.uint32)
        self.write(operands[0], value.repeat(32), mask)

    def _movmatrix(self, name, operands, mask):
        rows = self.read(operands[1], "b32").reshape(-1, 8, 4)
        pairs = np.stack((rows & 0xFFFF, rows >> 16), -1).reshape(-1, 8, 8).transpose(0, 2, 1)
        pairs = np.ascontiguousarray(pairs).reshape(-1, 8, 4, 2)
        self.write(operands[0], (pairs[..., 0] | pairs[..., 1] << 16).reshape(-1), mask)

    # ---- memory

    def _ld(self, name, operands, mask):
        parts = name.split(".")
        targets = _split(operands[0][1:-1]) if operands[0].startswith("{") else [operands[0]]
        size = int(parts[-1][1:]) // 8
        if parts[1] == "param":
            whole = re.match(r"\[(\w+)", operands[1])[1]
            self.write(targets[0], self.values[whole].astype(_pick(self.values[whole], size)), mask)
            return
        places = self._places(operands[1], size * len(targets), mask)
        data, offset = self._found(parts, places[mask], size * len(targets))
        for i, target in enumerate(targets):
            value = np.zeros(len(self.lane), _WIDTH[str(8 * size)])
            if data is not None:
                value[mask] = _taken(data, offset + i * size, size)
            self.write(target, value, mask)

    def _st(self, name, operands, mask):
        parts = name.split(".")
        sources = _split(operands[1][1:-1]) if operands[1].startswith("{") else [operands[1]]
        size = int(parts[-1][1:]) // 8
        places = self._places(operands[0], size * len(sources), mask)
        data, offset = self._found(parts, places[mask], size * len(sources))
        for i, source in enumerate(sources):
            value = self.read(source, f"b{8 * size}")[mask]
            at = offset[:, None].astype(np.int64) + i * size + np.arange(size)
            data[at] = np.ascontiguousarray(value).view(np.uint8).reshape(-1, size)

    def _places(self, text, size, mask):
        name, _, offset = text.strip("[]").replace(" ", "").partition("+")
        place = self.read(name, "b64").astype(np.int64)
        return place + int(offset or 0)

    def _found(self, parts, places, size):
        if parts[1] == "shared":
            assert len(places) == 0 or int(places.max()) + size <= len(self.shared), "memory that is ours"
            assert not (places % size).any(), "aligned"
            return self.shared, places
        return self.memory.find(places, size)

    def _ldmatrix(self, name, operands, mask):
        targets = _split(operands[0][1:-1])
        places = self._places(operands[1], 16, mask).reshape(-1, 32)
        for i, target in enumerate(targets):
            rows = self.shared[places[:, 8 * i : 8 * i + 8, None] + np.arange(16)]  # warp, row, byte
            words = np.ascontiguousarray(rows).view(np.uint32)  # warp, row, pair
            if ".trans" in name:
                both = words.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
                words = np.ascontiguousarray(both).view(np.uint32)
            self.write(target, words.reshape(-1), mask)

    def _stmatrix(self, name, operands, mask):
        sources = _split(operands[1][1:-1])
        places = self._places(operands[0], 16, mask).reshape(-1, 32)
        assert not (places % 16).any()
        assert int(places.max()) + 16 <= len(self.shared)
        for i, source in enumerate(sources):
            words = np.ascontiguousarray(self.read(source, "b32").reshape(-1, 8, 4))
            if ".trans" in name:
                both = words.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
                words = np.ascontiguousarray(both).view(np.uint32)
            rows = words.view(np.uint8).reshape(-1, 8, 16)
            self.shared[places[:, 8 * i : 8 * i + 8, None] + np.arange(16)] = rows

    # ---- products

    def _mma(self, name, operands, mask):
        assert "m16n8k16" in name
        sums, a, b, added = (_split(one[1:-1]) for one in operands)
        left = self._fragment(a, 16)
        right = np.zeros((len(left), 8, 16))
        warp, g, t = self.lane // 32, self.lane % 32 // 4, self.lane % 4
        for i, one in enumerate(b):
            for odd, value in enumerate(_halves(self.read(one, "b32"))):
                right[warp, g, 2 * t + odd + 8 * i] = value
        product = left @ right.transpose(0, 2, 1)
        for i, (target, one) in enumerate(zip(sums, added, strict=True)):
            value = product[warp, g + i // 2 * 8, 2 * t + i % 2] + self.read(one, "f32")
            self.write(target, value.astype(np.float32), mask)

    def _fragment(self, names, rows):
        out = np.zeros((self.kernel.threads // 32, rows, 16))
        warp, g, t = self.lane // 32, self.lane % 32 // 4, self.lane % 4
        for i, one in enumerate(names):
            for odd, value in enumerate(_halves(self.read(one, "b32"))):
                out[warp, g + i % 2 * 8, 2 * t + odd + i // 2 * 8] = value
        return out

    def _wgmma(self, name, operands, mask):
        step = name.split(".")[1]
        if step == "commit_group":
            self.waiting.append(self.begun)
            self.begun = []
        elif step == "wait_group":
            while len(self.waiting) > int(operands[0]):
                for one in self.waiting.pop(0):
                    one()
        elif step == "mma_async":
            size = re.search(r"m64n(\d+)k16", name)
            assert operands[-1] == "0", "keys' or values' rows are along the products"
            is_added = operands[3]
            is_added = bool(int(is_added)) if is_added.isdigit() else bool(self.registers[is_added].all())

            def multiply(operands=operands, size=int(size[1]), is_added=is_added):
                self._multiply(operands, size, is_added)

            self.begun.append(multiply) if self.kernel.is_late else multiply()

    def _multiply(self, operands, size, is_added):
        sums = _split(operands[0][1:-1])
        if operands[1].startswith("{"):
            left = self._fragment(_split(operands[1][1:-1]), 16)
        else:
            left = self._described(operands[1], 64).reshape(-1, 16, 16)
        product = left @ self._described(operands[2], size).T
        warp, g, t = self.lane // 32, self.lane % 32 // 4, self.lane % 4
        for i, target in enumerate(sums):
            value = product[warp, g + i // 2 % 2 * 8, 8 * (i // 4) + 2 * t + i % 2]
            value = value + (self.read(target, "f32") if is_added else 0)
            self.write(target, value.astype(np.float32), self.all)

    def _described(self, name, rows):
        """Return the matrix [rows, 16] of a descriptor of shared memory, in swizzles of 128 bytes."""
        word = int(self.registers[name][0])
        assert (self.registers[name] == word).all()
        assert word >> 62 == 1, "128 bytes"
        row, column = np.arange(rows)[:, None], np.arange(16)[None]
        place = (word & 0x3FFF) * 16 + row // 8 * (word >> 32 & 0x3FFF) * 16 + row % 8 * 128 + column * 2
        place = place ^ (place >> 7 & 7) << 4
        bits = self.shared[place] | self.shared[place + 1].astype(np.uint32) << 8
        return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def _taken(data, offset, size):
    at = offset[:, None].astype(np.int64) + np.arange(size)
    return np.ascontiguousarray(data[at]).view(_WIDTH[str(8 * size)]).reshape(-1)


def _pick(values, size):
    return np.float32 if values.dtype.kind == "f" else _WIDTH[str(8 * size)]


def _halves(words):
    return [((words >> shift & 0xFFFF) << 16).view(np.float32) for shift in (0, 16)]


def _bfloat16(x):
    """Return the bits of float64 numbers, rounded to bfloat16, ties to even."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    single = x.to(torch.float32)  # exact for sums of few bfloat16 numbers, but for ties broken twice
    return single.to(torch.bfloat16).view(torch.int16).numpy().astype(np.uint32) & 0xFFFF


def _product(parts, a, b):
    is_longer = "wide" in parts or "hi" in parts
    kind = {"s": np.int64, "u": np.uint64}[parts[-1][0]] if is_longer else a.dtype
    product = a.astype(kind) * b.astype(kind)
    return (product >> 32).astype(a.dtype) if "hi" in parts else product


def _lop3(parts, a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _prmt(parts, a, b, selector):
    pool = np.stack([one >> 8 * i & 0xFF for one in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = np.take_along_axis(pool, (pick & 7)[None].astype(np.int64), 0)[0]
        out |= np.where(pick & 8, 255 * (byte >> 7), byte).astype(np.uint32) << 8 * i
    return out


def _fma(parts, a, b, c):
    exact = a.astype(np.float64) * b.astype(np.float64)  # 48 bits
    total = exact + c.astype(np.float64)
    return total.astype(np.float32)


def _exp2(parts, x):
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _shift(parts, x, by, left):
    by = by.astype(np.uint32)
    bits = 8 * x.dtype.itemsize
    safe = np.minimum(by, bits - 1).astype(x.dtype)
    if left:
        return np.where(by >= bits, 0, x << safe).astype(x.dtype)
    return np.where((by >= bits) & (x.dtype.kind == "u"), 0, x >> safe).astype(x.dtype)


def _bfe(parts, x, at, count):
    moved = x >> at
    out = moved & ((1 << int(count[0])) - 1)
    if parts[-1][0] == "s":
        sign = 1 << int(count[0]) - 1
        out = (out ^ sign) - sign
    return out.astype(x.dtype)


_PAIRED = {
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "fma": lambda a, b, c: a * b + c,
}
_RUN = {
    "add": lambda parts, a, b: a + b,
    "sub": lambda parts, a, b: a - b,
    "mul": _product,
    "mad": lambda parts, a, b, c: _product(parts, a, b) + c,
    "fma": _fma,
    "div": lambda parts, a, b: (a / b if a.dtype.kind == "f" else np.trunc(a / b)).astype(a.dtype),
    "rem": lambda parts, a, b: np.fmod(a, b),
    "min": lambda parts, a, b: np.minimum(a, b) if a.dtype.kind != "f" else np.fmin(a, b),
    "max": lambda parts, a, b: np.maximum(a, b) if a.dtype.kind != "f" else np.fmax(a, b),
    "popc": lambda parts, a: np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=np.uint32),
    "neg": lambda parts, a: -a,
    "and": lambda parts, a, b: a & b,
    "or": lambda parts, a, b: a | b,
    "xor": lambda parts, a, b: a ^ b,
    "not": lambda parts, a: ~a,
    "lop3": _lop3,
    "prmt": _prmt,
    "ex2": _exp2,
    "bfe": _bfe,
    "shl": lambda parts, x, by: _shift(parts, x, by, True),
    "shr": lambda parts, x, by: _shift(parts, x, by, False),
}
