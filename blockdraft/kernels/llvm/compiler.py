"""Compiles a kernel, written as a Python function, to LLVM assembly.

    @kernel
    def double(num_rows: Int, size: Int, x: Reals, *, real: Type) -> None:
        for row in taken(num_rows):              # one thread takes each row
            for i in range(0, size, 4):          # a loop at run time
                for j in unrolled(4):            # unrolled four times
                    x[row * size + i + j] = x[row * size + i + j] * 2.0

Positional parameters are the fields of a job; keyword-only parameters are compile-time constants. Statements
may be assignments, `for`, `while`, `if`, `return` at the end, and calls; loops and branches that depend only
on constants run at compile time. Expressions are Python expressions over `language.Value`. A call runs the
Python function at compile time; a function with run-time loops or branches must be marked `inlined`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

from blockdraft.kernels.llvm.language import (
    Assembly,
    Pointer,
    Type,
    Value,
    Variable,
    f16,
    f32,
    i8,
    i32,
    i64,
    select,
)

F = TypeVar("F", bound=Callable[..., Any])
_POINTERS = {"Bytes": i8, "Words": i32, "Longs": i64, "Floats": f32, "Halves": f16}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.Pow: operator.pow, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip

# What `language` raises, and Python for expressions of constants; helpers' other errors pass as they are.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Written:
    """A function that is compiled from its source text."""

    function: FunctionType

    @functools.cached_property
    def tree(self) -> ast.FunctionDef:
        module = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        assert isinstance(module.body[0], ast.FunctionDef)
        return module.body[0]

    def __call__(self, *args: Any, **known: Any) -> Any:
        raise TypeError(f"'{self.function.__name__}' is part of a kernel: only kernels call it")


def kernel(function: F) -> Written:
    """Mark a function as a kernel, which `jit.Jit` compiles."""
    assert isinstance(function, FunctionType)
    names = function.__annotations__.values()
    assert all(isinstance(one, str) for one in names), "its file needs `from __future__ import annotations`"
    return Written(function)


inlined = kernel  # a part of kernels with run-time loops or branches


def taken(count: Any) -> Iterator[Any]:
    """Distribute the numbers from 0 to `count` - 1 among the threads that run the kernel."""
    raise TypeError("`taken` can only be used in a kernel")


def unrolled(*bounds: int) -> Iterator[int]:
    """Return a `range` to unroll: the kernel contains the loop's body once per number."""
    return iter(range(*bounds))


def assembly(kernel: Written, **known: Any) -> str:
    """Return an LLVM module with `worker(ptr job)`, which every thread runs on the same job.

    All fields of a job have 8 bytes. The first is the counter from which threads take work.
    """
    wanted = {one.arg for one in kernel.tree.args.kwonlyargs}
    if wanted != set(known):
        raise TypeError(f"'{kernel.function.__name__}' is compiled for {sorted(wanted)}, not {sorted(known)}")
    text = Assembly()
    scope: dict[str, Any] = dict(known)
    for index, argument in enumerate(kernel.tree.args.args, start=1):
        assert isinstance(argument.annotation, ast.Name), f"{argument.arg} has no type"
        scope[argument.arg] = _field(text, index, argument.annotation.id, known)
    body = _Body(text, kernel, scope)
    body.run(kernel.tree.body)
    lines = [
        *sorted(text.declared), "define void @worker(ptr %job) {", "entry:", *text.entry, *text.body,
        "  ret void", "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def field_types(kernel: Written) -> list[str]:
    """Return the type names of a kernel's fields, in order, without parsing its source."""
    code, types = kernel.function.__code__, kernel.function.__annotations__
    return [types[name] for name in code.co_varnames[: code.co_argcount]]


def _field(text: Assembly, index: int, kind: str, known: Mapping[str, Any]) -> Value:
    at = Pointer(text, "%job", i64) + index
    if kind == "Int":
        return at[0]
    if kind == "Real":
        return at.of(Type("double"))[0].to(known["real"])
    element = known["real"] if kind == "Reals" else _POINTERS[kind]
    return at.pointer(0, element)


class _Body:
    """Compiles one function; holds its names and their values."""

    def __init__(self, text: Assembly, written: Written, scope: dict[str, Any]) -> None:
        self._text, self._written, self._scope = text, written, scope
        self._result: Any = None
        self._has_returned = False
        self._outside: dict[str, Any] | None = None  # inside a run-time loop or branch: the scope before it
        self._offered: dict[str, Variable] = {}  # inside an 'else': the variables of the other branch

    def run(self, statements: list[ast.stmt]) -> Any:
        for statement in statements:
            if self._has_returned:
                break
            try:
                getattr(self, f"_{type(statement).__name__.lower()}", self._unknown)(statement)
            except _Refused:
                raise
            except _MISTAKES as error:
                code, text = self._written.function.__code__, ast.unparse(statement).splitlines()[0][:80]
                line = code.co_firstlineno + statement.lineno - 1
                raise _Refused(f"{code.co_name}, line {line}: {text}: {error}") from error
        return self._result

    def _unknown(self, node: ast.AST) -> None:
        raise TypeError(f"a kernel has no '{type(node).__name__}'")

    # Statements

    def _pass(self, statement: ast.Pass) -> None:
        """Do nothing."""

    def _expr(self, statement: ast.Expr) -> None:
        if not isinstance(statement.value, ast.Constant):  # a docstring
            self._eval(statement.value)

    def _assert(self, statement: ast.Assert) -> None:
        assert self._eval(statement.test), ast.unparse(statement.test)

    def _assign(self, statement: ast.Assign) -> None:
        value = self._eval(statement.value)
        for target in statement.targets:
            self._bind(target, value)

    def _augassign(self, statement: ast.AugAssign) -> None:
        target = ast.parse(ast.unparse(statement.target), mode="eval").body
        value = self._join(statement.op, self._eval(target), self._eval(statement.value))
        self._bind(statement.target, value)

    def _return(self, statement: ast.Return) -> None:
        if self._outside is not None:
            raise TypeError("a run-time loop or branch has no return: return after it")
        self._has_returned = True
        self._result = None if statement.value is None else self._eval(statement.value)

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, value, strict=True):
                self._bind(one, part)
        elif isinstance(target, ast.Subscript):
            self._eval(target.value)[self._eval(target.slice)] = value
        else:
            assert isinstance(target, ast.Name)
            self._set(target.id, value)

    def _bind_anew(self, target: ast.expr, value: Any) -> None:
        """Bind the names of `target` to the constant `value`; forget their old values."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._scope.pop(node.id, None)
                (self._outside or {}).pop(node.id, None)
        self._bind(target, value)

    def _set(self, name: str, value: Any) -> None:
        old = self._scope.get(name, self._offered.get(name))
        if isinstance(old, Variable) and isinstance(value, int | float):
            value = Value(self._text, old.type.literal(value), old.type)
        self._check_same(name, value)
        if isinstance(value, Value):
            element = value.element if isinstance(value, Pointer) else None
            if not isinstance(old, Variable) or (old.type, old.element) != (value.type, element):
                old = Variable(self._text, value.type, element)
            self._scope[name] = old
            old.set(value)
        else:
            self._scope[name] = value

    def _check_same(self, name: str, value: Any) -> None:
        """Raise TypeError if a run-time loop or branch changes an outer name's type or an outer constant."""
        if self._outside is None or name not in self._outside:
            return
        outer = self._outside[name]
        if isinstance(outer, Variable):
            kind = (value.type, getattr(value, "element", None)) if isinstance(value, Value) else None
            if kind != (outer.type, outer.element):
                raise TypeError(f"'{name}' is {outer.type} and becomes another type here: use another name")
        elif (value is not outer and isinstance(value, Value | list | tuple)) or value != outer:
            raise TypeError(f"'{name}' is the constant {outer!r} and changes here: begin with a Value")

    def _in_region(self, act: Callable[[], Any]) -> dict[str, Any]:
        """Write code that may be skipped or repeated at run time; return its local names."""
        before, self._outside = self._outside, {**(self._outside or {}), **self._scope}
        act()
        own = {name: self._scope.pop(name) for name in list(self._scope) if name not in self._outside}
        self._outside = before
        return own

    def _for(self, statement: ast.For) -> None:
        call = statement.iter
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if name not in ("range", "taken"):
            for item in self._eval(statement.iter):
                self._bind_anew(statement.target, item)
                self.run(statement.body)
            self.run(statement.orelse)
            return
        assert isinstance(call, ast.Call)
        assert isinstance(statement.target, ast.Name)
        bounds = [self._eval(one) for one in call.args]
        first, end, step = {1: [0, *bounds, 1], 2: [*bounds, 1], 3: bounds}[len(bounds)]
        if not isinstance(step, Value) and step < 1:
            raise TypeError(f"a range counts up, not by {step}: count up and subtract")
        self._begin_loop(statement)
        if name == "taken":

            def take() -> Value:
                item = self._text.value("atomicrmw add ptr %job, i64 1 monotonic", i64)
                self._set(statement.target.id, item)  # type: ignore[attr-defined]
                is_left: Value = item < end
                return is_left

            self._loop(take, lambda: self.run(statement.body))
            return
        counter = Variable(self._text, i64, None)
        counter.set(self._whole(first))

        def begin() -> Value:
            is_left: Value = counter.get() < end
            return is_left

        def body() -> None:
            self._set(statement.target.id, counter.get())  # type: ignore[attr-defined]
            self.run(statement.body)
            counter.set(counter.get() + step)

        self._loop(begin, body)

    def _while(self, statement: ast.While) -> None:
        self._begin_loop(statement)
        self._loop(lambda: self._eval(statement.test), lambda: self.run(statement.body))

    def _begin_loop(self, statement: ast.For | ast.While) -> None:
        if statement.orelse:
            raise TypeError("a run-time loop has no 'else'")
        self._make_variable(statement)

    def _loop(self, begin: Callable[[], Value], body: Callable[[], None]) -> None:
        head, inside, after = (self._text.name(prefix) for prefix in ("head", "body", "after"))
        self._jump(head)
        self._text.label(head)
        condition = begin()
        if not isinstance(condition, Value):
            raise TypeError("the condition of a loop is constant: the loop would never begin, or never end")
        self._text.line(f"br i1 {condition.name}, label %{inside}, label %{after}")
        self._text.label(inside)
        self._in_region(body)
        self._jump(head)
        self._text.label(after)

    def _if(self, statement: ast.If) -> None:
        condition = self._eval(statement.test)
        if not isinstance(condition, Value):
            self.run(statement.body if condition else statement.orelse)
            return
        self._make_variable(statement)
        then, other, after = (self._text.name(prefix) for prefix in ("then", "else", "after"))
        self._text.line(f"br i1 {condition.name}, label %{then}, label %{other}")
        first: dict[str, Variable] = {}
        outside = set(self._scope)

        def branches() -> None:
            self._text.label(then)
            self.run(statement.body)
            self._jump(after)
            first.update((name, one) for name, one in self._scope.items() if isinstance(one, Variable))
            offered, self._offered = self._offered, first
            self._scope = {name: one for name, one in self._scope.items() if name in outside}
            self._text.label(other)
            self.run(statement.orelse)
            self._jump(after)
            self._offered = offered
            self._text.label(after)

        own = self._in_region(branches)
        stored = {
            node.id for part in statement.orelse for node in ast.walk(part)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }  # fmt: skip
        # A name that both branches assigned exists after them.
        self._scope.update((name, own[name]) for name in stored & own.keys() if own[name] is first.get(name))

    def _jump(self, label: str) -> None:
        self._text.line(f"br label %{label}")

    def _make_variable(self, statement: ast.stmt) -> None:
        """Turn constant integers into variables if a run-time loop or branch changes them."""
        for node in ast.walk(statement):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AugAssign) else targets
            stored = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            for name in (one.id for one in stored if isinstance(one.ctx, ast.Store)):
                old = self._scope.get(name)
                if isinstance(old, int) and not isinstance(old, bool):
                    self._set(name, self._whole(old))

    def _whole(self, value: Any) -> Value:
        return value if isinstance(value, Value) else Value(self._text, str(value), i64)

    # Expressions

    def _eval(self, node: ast.expr) -> Any:
        return getattr(self, f"_eval_{type(node).__name__.lower()}", self._unknown)(node)

    def _join(self, sign: ast.AST, one: Any, two: Any) -> Any:
        if type(sign) not in _BINARY:
            self._unknown(sign)
        return _BINARY[type(sign)](one, two)

    def _eval_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _eval_name(self, node: ast.Name) -> Any:
        if node.id in self._scope:
            found = self._scope[node.id]
            return found.get() if isinstance(found, Variable) else found
        names = self._written.function.__globals__
        if node.id not in names and not hasattr(builtins, node.id):
            raise TypeError(f"there is no '{node.id}' here: assign it before loops and in both branches")
        return names[node.id] if node.id in names else getattr(builtins, node.id)

    def _eval_attribute(self, node: ast.Attribute) -> Any:
        return getattr(self._eval(node.value), node.attr)

    def _eval_subscript(self, node: ast.Subscript) -> Any:
        return self._eval(node.value)[self._eval(node.slice)]

    def _eval_tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._eval(one) for one in node.elts)

    def _eval_list(self, node: ast.List) -> Any:
        return [self._eval(one) for one in node.elts]

    def _eval_unaryop(self, node: ast.UnaryOp) -> Any:
        return _UNARY[type(node.op)](self._eval(node.operand))

    def _eval_binop(self, node: ast.BinOp) -> Any:
        return self._join(node.op, self._eval(node.left), self._eval(node.right))

    def _eval_compare(self, node: ast.Compare) -> Any:
        assert len(node.ops) == 1, "comparisons are not chained"
        return self._join(node.ops[0], self._eval(node.left), self._eval(node.comparators[0]))

    def _eval_boolop(self, node: ast.BoolOp) -> Any:
        """Evaluate `and` and `or` of constants as Python does; at run time, compute both sides."""
        is_or = isinstance(node.op, ast.Or)
        result = self._eval(node.values[0])
        for one in node.values[1:]:
            if not isinstance(result, Value):
                result = result if bool(result) == is_or else self._eval(one)
                continue
            two = self._eval(one)
            if isinstance(two, Value):
                result = result | two if is_or else result & two
            elif bool(two) == is_or:
                result = two
        return result

    def _eval_ifexp(self, node: ast.IfExp) -> Any:
        """Evaluate a constant condition as Python does; at run time, compute both sides."""
        condition = self._eval(node.test)
        if not isinstance(condition, Value):
            return self._eval(node.body if condition else node.orelse)
        return select(condition, self._eval(node.body), self._eval(node.orelse))

    def _eval_listcomp(self, node: ast.ListComp) -> list[Any]:
        assert len(node.generators) == 1, "one loop in a list"
        found, outer = [], dict(self._scope)
        for item in self._eval(node.generators[0].iter):
            self._bind_anew(node.generators[0].target, item)
            if all(self._eval(test) for test in node.generators[0].ifs):
                found.append(self._eval(node.elt))
        self._scope = outer
        return found

    def _eval_call(self, node: ast.Call) -> Any:
        function = self._eval(node.func)
        args = [
            value
            for one in node.args
            for value in (self._eval(one.value) if isinstance(one, ast.Starred) else [self._eval(one)])
        ]
        named = {one.arg: self._eval(one.value) for one in node.keywords if one.arg is not None}
        if not isinstance(function, Written):
            return function(*args, **named)
        scope = inspect.signature(function.function).bind(*args, **named)
        scope.apply_defaults()
        inner: dict[str, Any] = {}
        body = _Body(self._text, function, inner)
        for name, value in scope.arguments.items():
            body._set(name, value)
        return body.run(function.tree.body)


class _Refused(TypeError):
    """A kernel cannot be compiled; the message has the line."""
