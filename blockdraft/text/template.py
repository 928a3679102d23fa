"""Runs a checkpoint's chat template, an untrusted program, in jinja's sandbox and with limits on its work."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from blockdraft.errors import ModelError, RequestError

# Arbitrary limits of one rendering, far above the needs of a conversation that fits a model.
_MAX_STEPS = 1_000_000  # loop items, calls and operators; one more per _CHARS_PER_STEP
_CHARS_PER_STEP = 4096
_STEPS_PER_CALL = 4  # a call of a macro takes about 6 µs
_MAX_CHARS = 1 << 24  # of one intermediate string, and of the prompt
_MAX_NUMBER = 100_000  # range() lengths, widths, repeat counts: jinja's own MAX_RANGE
_MAX_PRODUCT = 1 << 30  # characters that one replace() can make of its arguments
_MAX_BITS = 4096  # of an integer
_PYTHON_NAME = re.compile(r"'(\w+) object'|'None'")  # how jinja's errors name a value
_JSON_NAMES = {
    None: "null",
    "NoneType": "null",
    "bool": "a boolean",
    "dict": "an object",
    "float": "a number",
    "int": "a number",
    "list": "an array",
    "str": "a string",
}
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
_SIZED = (str, list, tuple)
_WORK = " work"  # not an identifier: no template can name it


def compile_template(source: str) -> jinja2.Template:
    """Return the compiled template; raise ModelError if it does not parse."""
    try:
        return _Environment().from_string(source)
    except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as e:
        line = f"line {e.lineno}: " if isinstance(e, jinja2.TemplateSyntaxError) else ""
        raise ModelError(
            f"the model's chat template does not parse ({line}{e}): "
            "fix the template in its checkpoint, or use plain prompts."
        ) from e


def run_template(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    work = _Work()
    try:
        # As Template.generate makes it, without its lookups of globals in a chain of dictionaries.
        values = {**template.environment.globals, **variables, _WORK: work}
        context = jinja2.runtime.new_context(
            template.environment, template.name, template.blocks, values, shared=True
        )
        pieces = []
        for piece in template.root_render_func(context):
            work.add_output(piece)
            pieces.append(piece)
        return "".join(pieces)
    except _Refused as e:
        raise RequestError(f"the chat template refused the messages: {e}") from None
    except _OverBudget as e:
        raise RequestError(
            f"the chat template ran too long on these messages ({e}): shorten the conversation; "
            "if a short one fails too, the template is at fault."
        ) from None
    except jinja2.exceptions.SecurityError as e:
        raise ModelError(
            f"the model's chat template does something forbidden ({e}): "
            "do not trust this checkpoint's template; use plain prompts."
        ) from e
    except (
        *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
        *(AttributeError, RuntimeError, MemoryError),
    ) as e:
        raise RequestError(
            f"the chat template failed on these messages{_why(e)}: check the roles, their order and the "
            "template's own arguments."
        ) from e


def _why(error: Exception) -> str:
    """Return jinja's message in JSON's words if a value is undefined; "" for others: they mention Python."""
    if not isinstance(error, jinja2.UndefinedError):
        return ""
    return f" ({_PYTHON_NAME.sub(lambda found: _JSON_NAMES.get(found[1], 'a value'), str(error))})"


class _Refused(jinja2.TemplateError):
    """The template called raise_exception; the message is for the user."""


class _OverBudget(jinja2.TemplateError):
    """The template exceeded its limit of steps or of text."""


class _Work:
    """Counts the steps and characters of one rendering; raises _OverBudget above the limits."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_chars = 0

    def add_steps(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise _OverBudget(f"more than {_MAX_STEPS} steps")

    def add_result(self, value: object) -> None:
        size = len(value) if isinstance(value, _SIZED) else 0
        if size > _MAX_CHARS:
            raise _OverBudget(f"a text of more than {_MAX_CHARS} characters")
        self._num_steps += 1 + size // _CHARS_PER_STEP
        if self._num_steps > _MAX_STEPS:
            self.add_steps(0)

    def add_output(self, piece: str) -> None:
        self._num_steps += 1
        self._num_chars += len(piece)
        if self._num_steps > _MAX_STEPS:
            self.add_steps(0)
        if self._num_chars > _MAX_CHARS:
            raise _OverBudget(f"a prompt of more than {_MAX_CHARS} characters")


def _work_of(context: jinja2.runtime.Context) -> _Work:
    work = context.parent[_WORK]
    assert isinstance(work, _Work)
    return work


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with limits on work and text.

    The sandbox keeps a template from Python's internals and from changing its inputs. It has no loader, so a
    template reads no file. This class counts loop items, calls, operators, and the size of the results of
    calls, operators and `~`. It refuses long ranges, widths and repeat counts, and big integers. Jinja has no
    hook to limit time, compiling, one string method on long text, or the work inside one filter (`sort`,
    `map`, `join` of a list that repeats one long text); a chain of filters is limited only by its output. To
    serve untrusted templates, run them in a process that can be killed.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        self.filters |= {name: _guard(self.filters[name]) for name in _GROWING}
        self.filters |= {"tojson": _to_json, "a loop": _count_items, "a concat": _concat}
        del self.globals["lipsum"]
        self.globals |= {
            "range": _short_range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counted().visit(tree)
        tree.set_environment(self)
        return tree

    def getattr(self, obj: object, attribute: str) -> object:
        if type(obj) is jinja2.runtime.LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(
        __self,  # mangled names as in jinja, so that a template may pass any keyword
        __context: jinja2.runtime.Context,
        __obj: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        # str.format arrives wrapped by the sandbox; a method of a builtin knows its receiver.
        method = getattr(__obj, "__wrapped__", __obj)
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            is_format = method is not __obj
            check = _check_format if is_format else _check_arguments
            check(receiver, *args, *kwargs.values())
        result: object = super().call(__context, __obj, *args, **kwargs)
        work = _work_of(__context)
        work.add_steps(_STEPS_PER_CALL)
        work.add_result(result)
        return result

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: object, right: object
    ) -> object:
        if operator == "+" and type(left) is type(right) is str:  # nearly always
            text: str = left + right
            _work_of(context).add_result(text)
            return text
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, *(right if isinstance(right, tuple) else (right,)))
        result: object = super().call_binop(context, operator, left, right)
        _work_of(context).add_result(result)
        return result


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}, which marks text to train on; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Counted(jinja2.visitor.NodeTransformer):
    """Wraps loops and `~` in filters that count, as jinja's sandbox has no hook for them."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "a loop")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), "a concat")


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _count_items(context: jinja2.runtime.Context, items: Iterable[object]) -> Iterable[object]:
    work = _work_of(context)
    if isinstance(items, Sized):
        work.add_steps(len(items))
        return items
    return _counting(items, work)


def _counting(items: Iterable[object], work: _Work) -> Iterator[object]:
    for item in items:
        work.add_steps(1)
        yield item


@jinja2.pass_context
def _concat(context: jinja2.runtime.Context, values: list[object]) -> str:
    result = "".join(map(str, values))
    _work_of(context).add_result(result)
    return result


class _Namespace(jinja2.utils.Namespace):
    """namespace() without names that begin with an underscore, which could replace Python's attributes."""

    def __init__(*args: object, **kwargs: object) -> None:  # as in jinja, so that a name may be "self"
        self, *rest = args
        assert isinstance(self, _Namespace)
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace with the name {name!r}")


# Filters whose arguments decide how much text they make.
_GROWING = ("batch", "center", "format", "indent", "replace", "slice", "wordwrap")
_PASSED_BY_JINJA = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _guard(function: Callable[..., object]) -> Callable[..., object]:
    """Return the filter `function` with a check that refuses arguments for too much text."""
    check = _check_format if function.__name__ == "do_format" else _check_arguments

    @functools.wraps(function)  # keeps the attributes that jinja's pass_environment and others set
    def guarded(*args: object, **kwargs: object) -> object:
        values = [value for value in args if not isinstance(value, _PASSED_BY_JINJA)]
        receiver = values[0] if values and isinstance(values[0], str) else ""
        check(receiver, *values[1:], *kwargs.values())
        return function(*args, **kwargs)

    return guarded


def _check_arguments(receiver: str, *args: object) -> None:
    longest = max((len(value) for value in args if isinstance(value, str)), default=0)
    if len(receiver) * longest > _MAX_PRODUCT:
        raise _OverBudget(f"one call on {len(receiver)} and {longest} characters")
    for value in args:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise jinja2.exceptions.SecurityError(f"a call with a number over {_MAX_NUMBER}")


def _check_format(spec: str, *args: object) -> None:
    if re.search(r"\d{6,}", spec):
        raise jinja2.exceptions.SecurityError(f"a format with a number over {_MAX_NUMBER}")
    # A width may also come from an argument: "%*d", "{:{}}".
    if "*" in spec or re.search(r":[^{}]*\{", spec):
        _check_arguments("", *args)


def _check_product(operator: str, left: object, right: object) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            num_items = len(one) * other
            if num_items > (_MAX_CHARS if isinstance(one, str) else _MAX_NUMBER):
                raise jinja2.exceptions.SecurityError(f"a repetition to {num_items} items")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else (left * right).bit_length()
        if bits > _MAX_BITS:
            raise jinja2.exceptions.SecurityError(f"an integer of more than {_MAX_BITS} bits")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_arguments("", indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _short_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _MAX_NUMBER:
        raise jinja2.exceptions.SecurityError(f"a range of {len(numbers)} numbers")
    return numbers


def _make_dict(*args: Mapping[str, object], **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)


def _refuse(message: object = "") -> None:
    raise _Refused(str(message))


def _strftime_now(spec: str) -> str:
    return datetime.now().strftime(spec)
