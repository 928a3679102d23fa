"""The language of CPU kernels: numbers and vectors, pointers, and the operations on them.

A kernel is a Python function over these types (`compiler.py` lists the supported statements). Operators work
as in C without fast-math: each rounds once, and none is reordered or contracted, so the source decides the
bits. A Python number takes the type of the other operand; a scalar is spread to the lanes of a vector.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# The types of arguments in a kernel's signature; the compiler reads these names.
Int: TypeAlias = Any  # a 64-bit integer
Real: TypeAlias = Any  # a number of the kernel's `real` type
Reals: TypeAlias = Any  # a pointer to Real
Floats: TypeAlias = Any  # a pointer to float32
Halves: TypeAlias = Any  # a pointer to float16, which must be converted for arithmetic
Bytes: TypeAlias = Any  # a pointer to int8
Words: TypeAlias = Any  # a pointer to int32
Longs: TypeAlias = Any  # a pointer to int64


@dataclass(frozen=True, slots=True)
class Type:
    """An LLVM type: a vector with `lanes` numbers of type `name`, or a scalar if `lanes` is 0."""

    name: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.name}>" if self.lanes else self.name

    @property
    def is_float(self) -> bool:
        return self.name in ("half", "float", "double")

    @property
    def bits(self) -> int:
        return {"half": 16, "float": 32, "double": 64, "ptr": 64}.get(self.name) or int(self.name[1:])

    @property
    def suffix(self) -> str:
        """The suffix of intrinsics for this type."""
        one = f"f{self.bits}" if self.is_float else f"i{self.bits}"
        return f"v{self.lanes}{one}" if self.lanes else one

    def wide(self, lanes: int) -> Type:
        return Type(self.name, lanes)

    def literal(self, number: float) -> str:
        """Return a constant in LLVM's syntax, where a float is the hexadecimal bits of an equal double."""
        if self.is_float:
            exact = struct.unpack("f", struct.pack("f", number))[0] if self.bits == 32 else float(number)
            one = f"0x{struct.unpack('Q', struct.pack('d', exact))[0]:016X}"
        else:
            if number != int(number):
                raise TypeError(f"{number} is no {self.name}: convert the other operand by `to`")
            one = {0: "false", 1: "true"}[int(number)] if self.bits == 1 else str(int(number))
        return "<" + ", ".join([f"{self.name} {one}"] * self.lanes) + ">" if self.lanes else one


f16, f32, f64, i1, i8, i16, i32, i64 = (
    Type(name) for name in ("half", "float", "double", "i1", "i8", "i16", "i32", "i64")
)  # fmt: skip
_POINTER = Type("ptr")


class Assembly:
    """The LLVM assembly of one module."""

    def __init__(self) -> None:
        self.entry: list[str] = []  # declarations of variables, which LLVM turns into registers
        self.body: list[str] = []
        self.declared: set[str] = set()
        self._names = itertools.count()

    def name(self, prefix: str = "%v") -> str:
        return f"{prefix}{next(self._names)}"

    def line(self, text: str) -> None:
        self.body.append(f"  {text}")

    def value(self, text: str, type: Type) -> Value:
        """Add the instruction `text` and return its result."""
        name = self.name()
        self.line(f"{name} = {text}")
        return Value(self, name, type)

    def label(self, name: str) -> None:
        self.body.append(f"{name}:")

    def call(self, function: str, result: Type | None, *arguments: Value) -> Value:
        """Call an intrinsic or an external function; return its result (without one, the first argument)."""
        kinds = ", ".join(str(one.type) for one in arguments)
        self.declared.add(f"declare {result or 'void'} @{function}({kinds})")
        given = ", ".join(f"{one.type} {one.name}" for one in arguments)
        if result is None:
            self.line(f"call void @{function}({given})")
            return arguments[0]
        return self.value(f"call {result} @{function}({given})", result)


def _operator(whole: str, real: str = "", *, is_swapped: bool = False) -> Callable[[Value, Operand], Value]:
    """Return a method that applies LLVM's instruction `whole` to integers and `real` to floats."""

    def operate(self: Value, other: Operand) -> Value:
        one, two = matched(other, self) if is_swapped else matched(self, other)
        name = real if one.type.is_float else whole
        assert name, f"{one.type} has no such operator"
        return one.text.value(f"{name} {one.type} {one.name}, {two.name}", one.type)

    return operate


def _comparison(name: str) -> Callable[[Value, Operand], Value]:
    """Return a method that compares values; integers are signed."""

    def compare(self: Value, other: Operand) -> Value:
        one, two = matched(self, other)
        signed = "s" if name not in ("eq", "ne") else ""
        kind = f"fcmp {'u' if name == 'ne' else 'o'}{name}" if one.type.is_float else f"icmp {signed}{name}"
        return one.text.value(f"{kind} {one.type} {one.name}, {two.name}", Type("i1", one.type.lanes))

    return compare


class Value:
    """A number or a vector at run time."""

    def __init__(self, text: Assembly, name: str, type: Type) -> None:
        self.text, self.name, self.type = text, name, type

    def constant(self, number: float, type: Type | None = None) -> Value:
        type = type or self.type
        return Value(self.text, type.literal(number), type)

    def to(self, type: Type) -> Value:
        """Convert as C does; a float must be integral to become an integer."""
        old, new = self.type, type.wide(self.type.lanes)
        if old == new:
            return self
        if old.is_float and new.is_float:
            name = "fptrunc" if new.bits < old.bits else "fpext"
        elif old.is_float or new.is_float:
            name = "fptosi" if old.is_float else "sitofp"
        elif old.bits == 1:
            name = "zext"
        else:
            name = "trunc" if new.bits < old.bits else "sext"
        return self.text.value(f"{name} {old} {self.name} to {new}", new)

    def widened(self, type: Type) -> Value:
        """Zero-extend an integer to `type`."""
        new = type.wide(self.type.lanes)
        return self.text.value(f"zext {self.type} {self.name} to {new}", new)

    def bits_as(self, type: Type) -> Value:
        """Reinterpret the bits as another type of the same size."""
        return self.text.value(f"bitcast {self.type} {self.name} to {type}", type)

    def spread(self, lanes: int) -> Value:
        """Return a vector of `lanes` lanes with this number in each."""
        wide = self.type.wide(lanes)
        one = self.text.value(f"insertelement {wide} poison, {self.type} {self.name}, i32 0", wide)
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.text.value(f"shufflevector {wide} {one.name}, {wide} poison, {zeros}", wide)

    def zeros(self, type: Type) -> Value:
        """Return 0 of `type`, in the kernel of this value; the value does not matter."""
        return Value(self.text, "zeroinitializer" if type.lanes else type.literal(0), type)

    def constants(self, type: Type, numbers: Sequence[float]) -> Value:
        """Return a constant vector in the kernel of this value; the value does not matter."""
        lanes = ", ".join(f"{type} {type.literal(number)}" for number in numbers)
        return Value(self.text, f"<{lanes}>", type.wide(len(numbers)))

    def scratch(self, type: Type, count: int | Value) -> Pointer:
        """Allocate numbers on the stack until the kernel ends; a run-time count must not be in a loop."""
        name = self.text.name("%m")
        if isinstance(count, Value):
            self.text.line(f"{name} = alloca {type}, i64 {count.name}, align 64")
        else:
            self.text.entry.append(f"  {name} = alloca [{count} x {type}], align 64")
        return Pointer(self.text, name, type)

    def halved(self, join: Callable[[Value, Value], Value] | None = None) -> Value:
        """Join all lanes to a number, by default by addition: the lower half with the upper, repeatedly."""
        x = self
        while (lanes := x.type.lanes) > 1:
            lower, upper = x.lanes(range(lanes // 2)), x.lanes(range(lanes // 2, lanes))
            x = lower + upper if join is None else join(lower, upper)
        return x[0]

    def __getitem__(self, lane: int) -> Value:
        return self.text.value(f"extractelement {self.type} {self.name}, i32 {lane}", self.type.wide(0))

    def lanes(self, indices: Iterable[int], other: Value | None = None) -> Value:
        """Select lanes by index from this vector, or from this vector followed by `other`."""
        indices = list(indices)
        second = f"{self.type} {other.name if other is not None else 'poison'}"
        mask = f"<{len(indices)} x i32> <{', '.join(f'i32 {index}' for index in indices)}>"
        wide = self.type.wide(len(indices))
        return self.text.value(f"shufflevector {self.type} {self.name}, {second}, {mask}", wide)

    __add__, __radd__ = _operator("add", "fadd"), _operator("add", "fadd", is_swapped=True)
    __sub__, __rsub__ = _operator("sub", "fsub"), _operator("sub", "fsub", is_swapped=True)
    __mul__, __rmul__ = _operator("mul", "fmul"), _operator("mul", "fmul", is_swapped=True)
    __truediv__, __rtruediv__ = _operator("", "fdiv"), _operator("", "fdiv", is_swapped=True)
    __floordiv__, __mod__ = _operator("udiv"), _operator("urem")  # unsigned: operands must not be negative
    __and__, __or__, __xor__ = _operator("and"), _operator("or"), _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")  # logical: zeros are shifted in
    above = _operator("ashr")  # arithmetic: the sign is shifted in
    __lt__, __le__, __gt__, __ge__ = (_comparison(name) for name in ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = _comparison("eq"), _comparison("ne")  # type: ignore[assignment]

    def __abs__(self) -> Value:
        return _intrinsic("fabs", self)

    def __round__(self) -> Value:
        """Round to the nearest integer, ties to even."""
        return _intrinsic("roundeven", self)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.text.value(f"fneg {self.type} {self.name}", self.type)
        return 0 - self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a value that the kernel computes is not known while it is compiled")

    def __index__(self) -> int:
        return bool(self)


Operand: TypeAlias = Value | float


class Pointer(Value):
    """The address of numbers of type `element`; p[i] is number i, p + i its address."""

    def __init__(self, text: Assembly, name: str, element: Type) -> None:
        super().__init__(text, name, _POINTER)
        self.element = element

    def _at(self, index: Operand) -> str:
        if not isinstance(index, Value):
            index = self.constant(index, i64)
        name = self.text.name()
        self.text.line(f"{name} = getelementptr {self.element}, ptr {self.name}, i64 {index.name}")
        return name

    def __add__(self, other: Operand) -> Pointer:
        return Pointer(self.text, self._at(other), self.element)

    def __getitem__(self, index: Operand) -> Value:
        return load(self + index)

    def __setitem__(self, index: Operand, value: Operand) -> None:
        store(self + index, value)

    def of(self, element: Type) -> Pointer:
        """Return the address as a pointer to numbers of another type."""
        return Pointer(self.text, self.name, element)

    @property
    def is_given(self) -> Value:
        return self.text.value(f"icmp ne ptr {self.name}, null", i1)

    def pointer(self, index: Operand, element: Type = i64) -> Pointer:
        """Load the address at `index`, as a pointer to numbers of type `element`."""
        found = self.text.value(f"load ptr, ptr {self._at(index)}", _POINTER)
        return Pointer(self.text, found.name, element)


class Variable:
    """A name in a kernel whose value changes at run time."""

    def __init__(self, text: Assembly, type: Type, element: Type | None) -> None:
        self._text, self.type, self.element = text, type, element
        self._name = text.name("%m")
        text.entry.append(f"  {self._name} = alloca {type}")

    def get(self) -> Value:
        found = self._text.value(f"load {self.type}, ptr {self._name}", self.type)
        return found if self.element is None else Pointer(self._text, found.name, self.element)

    def set(self, value: Value) -> None:
        self._text.line(f"store {self.type} {value.name}, ptr {self._name}")


class Registers:
    """A table of variables in registers: sums[row, token] += …; indices are compile-time constants."""

    def __init__(self, shape: Sequence[int], first: Value) -> None:
        indices = itertools.product(*map(range, shape))
        self._variables = {index: Variable(first.text, first.type, None) for index in indices}
        self._first = first
        for variable in self._variables.values():
            variable.set(first)

    def __getitem__(self, index: int | tuple[int, ...]) -> Value:
        return self._at(index).get()

    def __setitem__(self, index: int | tuple[int, ...], value: Value) -> None:
        if value.type != self._first.type:
            raise TypeError(f"{value.type} goes to registers of {self._first.type}")
        self._at(index).set(value)

    def _at(self, index: int | tuple[int, ...]) -> Variable:
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(one, Value) for one in index):
            raise TypeError("the index of a register has to be known at compile time")
        if index not in self._variables:
            raise IndexError(f"there is no register {index}")
        return self._variables[index]


def matched(one: Operand, two: Operand) -> tuple[Value, Value]:
    """Return both operands as values of one type: spread scalars, convert Python numbers."""
    if not isinstance(one, Value):
        assert isinstance(two, Value)
        return two.constant(one), two
    if not isinstance(two, Value):
        return one, one.constant(two)
    if one.type.lanes and not two.type.lanes:
        two = two.spread(one.type.lanes)
    elif two.type.lanes and not one.type.lanes:
        one = one.spread(two.type.lanes)
    assert one.type == two.type, f"{one.type} meets {two.type}"
    return one, two


def load(at: Pointer, lanes: int = 0) -> Value:
    """Load the number at an address, or a vector with `lanes` numbers."""
    type = at.element.wide(lanes)
    return at.text.value(f"load {type}, ptr {at.name}, align {max(1, at.element.bits // 8)}", type)


def store(at: Pointer, value: Operand) -> None:
    if not isinstance(value, Value):
        value = at.constant(value, at.element)
    assert value.type.wide(0) == at.element, f"{value.type} goes to {at.element}"
    at.text.line(f"store {value.type} {value.name}, ptr {at.name}, align {max(1, at.element.bits // 8)}")


def pieces(size: Int, lanes: int) -> list[tuple[Int, Int, int]]:
    """Return (begin, end, step) of two loops over `size` numbers: whole vectors, then the other numbers."""
    whole = size - size % lanes
    return [(0, whole, lanes), (whole, size, 1)]


def prefetch(at: Pointer, *, level: int) -> None:
    """Prefetch the cache line at an address, to the L1 (level 3) or the L2 (level 2)."""
    at.text.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    at.text.line(f"call void @llvm.prefetch.p0(ptr {at.name}, i32 0, i32 {level}, i32 1)")


def select(condition: Value, one: Operand, two: Operand) -> Value:
    one, two = matched(one, two)
    lanes = one.type.lanes
    if lanes and not condition.type.lanes:
        condition = condition.spread(lanes)
    return one.text.value(
        f"select {condition.type} {condition.name}, {one.type} {one.name}, {two.type} {two.name}", one.type
    )


def _intrinsic(name: str, *operands: Operand) -> Value:
    first = max((one for one in operands if isinstance(one, Value)), key=lambda one: one.type.lanes)
    values = [matched(first, one)[1] for one in operands]
    return first.text.call(f"llvm.{name}.{first.type.suffix}", first.type, *values)


def fma(one: Operand, two: Operand, plus: Operand) -> Value:
    """Return one * two + plus, rounded once."""
    return _intrinsic("fma", one, two, plus)


def sqrt(x: Value) -> Value:
    return _intrinsic("sqrt", x)


def largest(one: Operand, two: Operand) -> Value:
    """Return the larger operand; if one is NaN, return the other."""
    one, two = matched(one, two)
    return _intrinsic("maxnum" if one.type.is_float else "smax", one, two)


def smallest(one: Operand, two: Operand) -> Value:
    """Return the smaller operand; if one is NaN, return the other."""
    one, two = matched(one, two)
    return _intrinsic("minnum" if one.type.is_float else "smin", one, two)


_LN2 = {32: (0.693359375, -2.12194440e-4), 64: (6.93145751953125e-1, 1.42860682030941723212e-6)}
# Coefficients from the largest degree to x**2. float32: Cephes' expf; float64: Taylor's to x**13.
_EXP = {
    32: (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.50000001201),
    64: tuple(1.0 / math.factorial(n) for n in range(13, 1, -1)),
}


def exp(x: Value) -> Value:
    """Return e**x for x below 80, by the same operations in every lane.

    x = n ln 2 + r, e**x = 2**n * (1 + r + r**2 * polynomial(r)). Results below the smallest normal number are
    0; NaN stays NaN. The error is at most 2 units of the last place.
    """
    bits, (bias, mantissa) = x.type.bits, {32: (127, 23), 64: (1023, 52)}[x.type.bits]
    round_up = 1.5 * 2.0**mantissa  # adding it leaves round(x) in the low bits
    high, low = _LN2[bits]
    shifted = fma(x, 1.4426950408889634, round_up)
    n = shifted - round_up
    r = fma(n, -low, fma(n, -high, x))
    polynomial = r.constant(_EXP[bits][0])
    for coefficient in _EXP[bits][1:]:
        polynomial = fma(polynomial, r, coefficient)
    near_one = fma(polynomial, r * r, r) + 1.0
    whole = Type(f"i{bits}", x.type.lanes)
    power = (shifted.bits_as(whole) + bias << mantissa).bits_as(x.type)
    return select(x < (-87.3 if bits == 32 else -708.3), 0.0, near_one * power)


# Cephes' logf, largest degree first.
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def log(x: Value) -> Value:
    """Return the natural logarithm of positive normal float32, by the same operations in every lane.

    x = 2**n * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2). The error is at most 2 units of the last place.
    """
    whole = Type("i32", x.type.lanes)
    bits = x.bits_as(whole) - 0x3F3504F3  # sqrt(1/2)
    n = (bits.above(23)).to(f32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).bits_as(x.type) - 1.0
    square = f * f
    polynomial = f.constant(_LOG[0])
    for coefficient in _LOG[1:]:
        polynomial = fma(polynomial, f, coefficient)
    small = fma(polynomial * f, square, n * _LN2[32][1]) - 0.5 * square
    return fma(n, _LN2[32][0], f + small)


def sigmoid(x: Value) -> Value:
    """Return 1 / (1 + exp(-x)), computed by exp(-|x|), which cannot overflow."""
    small = exp(-abs(x))
    return select(x >= 0.0, 1.0, small) / (small + 1.0)


def invoke(function: Pointer, *arguments: Value) -> None:
    """Call the function at an address; ignore its result."""
    given = ", ".join(f"{one.type} {one.name}" for one in arguments)
    function.text.line(f"call void {function.name}({given})")


# Sequentially consistent atomics, for memory that threads share.


def load_shared(at: Pointer) -> Value:
    return at.text.value(f"load atomic i64, ptr {at.name} seq_cst, align 8", i64)


def store_shared(at: Pointer, value: Operand) -> None:
    if not isinstance(value, Value):
        value = at.constant(value, i64)
    at.text.line(f"store atomic i64 {value.name}, ptr {at.name} seq_cst, align 8")


def add_shared(at: Pointer, number: int) -> Value:
    """Add `number` to the shared integer at an address; return its old value."""
    return at.text.value(f"atomicrmw add ptr {at.name}, i64 {number} seq_cst", i64)


def replace_shared(at: Pointer, old: Operand, new: Operand) -> Value:
    """Replace the shared integer `old` at an address by `new`; return 0 if another integer is there."""
    old, new = (one if isinstance(one, Value) else at.constant(one, i64) for one in (old, new))
    operands = f"i64 {old.name}, i64 {new.name}"
    pair = at.text.name()
    at.text.line(f"{pair} = cmpxchg ptr {at.name}, {operands} seq_cst seq_cst, align 8")
    return at.text.value(f"extractvalue {{ i64, i1 }} {pair}, 1", i1)


def pause(like: Value, hint: str) -> None:
    """Tell the processor that this thread is polling; `hint` is the intrinsic and its argument."""
    name, _, argument = hint.partition(" ")
    like.text.declared.add(f"declare void @{name}({'i32' if argument else ''})")
    like.text.line(f"call void @{name}({f'i32 {argument}' if argument else ''})")
