"""Text to token ids and back, and chat messages to a prompt.

A chat template is a program that comes with a checkpoint nobody has vetted, and a conversation
comes from anyone on the network. The template runs in jinja's sandbox with a budget of steps and of
text (`_Environment` says what it covers); the messages are rebuilt from plain JSON values first.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
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
from blockdraft.models.checkpoint import TokenizerParts

REPLACEMENT = "\ufffd"  # what stands for bytes that are not UTF-8

# Arbitrary limits of one rendering, far past what a conversation that fits a model needs.
_MAX_STEPS = 1_000_000  # loop items, calls and operators; one more per _CHARS_PER_STEP
_CHARS_PER_STEP = 4096
_STEPS_PER_CALL = 4  # a call of a macro takes about 6 µs
_MAX_CHARS = 1 << 24  # of one intermediate string, and of the prompt
_MAX_NUMBER = 100_000  # range() lengths, widths, repeat counts: jinja's own MAX_RANGE
_MAX_PRODUCT = 1 << 30  # characters one replace() can make out of its arguments
_MAX_BITS = 4096  # of an integer

_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
_CONTINUE_TAG = "\ue000continue here\ue000"
_WORK = " work"  # not an identifier: no template can name it


class Tokenizer:
    """One checkpoint's tokenizer and chat template. Safe to share between threads.

    Takes over `parts.tokenizer`: truncation and padding stored in it are switched off.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._tokenizer = parts.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._chat_template = parts.chat_template
        names = {"bos_token": parts.bos_token, "eos_token": parts.eos_token}
        self._token_names = {name: token for name, token in names.items() if token is not None}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = parts.eos_ids or self._ids_of(parts.eos_token)
        # Entries, added tokens included; a model's embedding is often padded past it.
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._byte_ids = self._find_byte_ids()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens spelled out in `text` become their ids. RequestError if not Unicode."""
        _check_unicode(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary have none.

        As `tokenizers` does it, but for one case: in a run of byte tokens (`<0xE2>`) that is not
        valid UTF-8, only the bytes at fault become U+FFFD, as in SentencePiece, and not the whole
        run. A later byte can then never take back a character that was already streamed.
        """
        try:
            if self._byte_ids.keys().isdisjoint(ids):
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return self._decode_with_bytes(ids, skip_special_tokens)
        except OverflowError:
            raise RequestError(
                f"a token id is outside the vocabulary (0 to {self.vocab_size - 1}): "
                "send ids of this model's tokenizer."
            ) from None

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at this id at all."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return bool(self._tokenizer.id_to_token(token_id))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: object,
    ) -> str:
        """The prompt the chat template makes of `messages`.

        With `continue_final_message` the prompt ends inside the last message, so that the model
        goes on writing it; this takes the place of the generation prompt. RequestError: the
        messages, or the template on these messages, are at fault. ModelError: the template is.
        """
        chat = [_check_message(message) for message in messages]
        if not chat:
            raise RequestError("the conversation is empty: send at least one message.")
        if wrong := _RESERVED & template_kwargs.keys():
            raise RequestError(f"the chat template sets {sorted(wrong)} itself: leave it out.")
        if continue_final_message:
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}{_CONTINUE_TAG} "}
        variables = {
            "tools": None,
            "documents": None,
            **{name: _plain(value) for name, value in template_kwargs.items()},
            **self._token_names,
            "messages": chat,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run_template(self._template, variables)
        if continue_final_message:
            text = _cut_at_tag(text)
        _check_unicode(text)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: object,
    ) -> list[int]:
        """`render`, as ids. The template writes its own special tokens, so none are added."""
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use generate or /v1/completions with a plain "
                "prompt, or serve a model that has one (its name often ends in -Instruct or -it)."
            )
        try:
            return _Environment().from_string(self._chat_template)
        except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as e:
            line = f"line {e.lineno}: " if isinstance(e, jinja2.TemplateSyntaxError) else ""
            raise ModelError(
                f"the model's chat template does not parse ({line}{e}): "
                "fix the template in its checkpoint, or use plain prompts."
            ) from e

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return () if token_id is None else (token_id,)

    def _find_byte_ids(self) -> dict[int, int]:
        """id → byte, for tokenizers that spell unknown characters as <0xNN> tokens."""
        decoder = self._tokenizer.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return {}
        ids = {self._tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    def _decode_with_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        shown = [i for i in ids if self.shows(i, skip_special_tokens)]
        tokens = [self._tokenizer.id_to_token(i) or "" for i in shown]
        for at in _broken_bytes([self._byte_ids.get(i) for i in shown]):
            tokens[at] = REPLACEMENT
        return str(self._tokenizer.decoder.decode(tokens))


def _broken_bytes(values: Sequence[int | None]) -> Iterator[int]:
    """Where a byte is no part of a whole UTF-8 character; None stands for any other token."""
    at = 0
    while at < len(values):
        lead = values[at]
        size = 1 if lead is None or lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        is_whole = lead is None or _is_utf8(values[at : at + size])
        if not is_whole:
            yield at
        at += size if is_whole else 1


def _is_utf8(values: Sequence[int | None]) -> bool:
    """A character with a byte missing is not; that is why None can simply be left out."""
    try:
        bytes(byte for byte in values if byte is not None).decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the text is not valid Unicode (unpaired surrogate U+{ord(text[e.start]):04X} at "
            f"character {e.start}): send whole characters; in JSON an emoji is two \\u escapes."
        ) from None


def _check_message(message: object) -> dict[str, object]:
    """A copy of one message with its text as one string; keys such as tool_calls are kept."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"a message is {type(message).__name__}, not an object: send "
            '{"role": "user", "content": "..."}.'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"a message has the role {role!r}: use 'system', 'user' or 'assistant'.")
    plain = {str(key): _plain(value) for key, value in message.items()}
    return {**plain, "content": _text_of(plain.get("content"), bool(plain.get("tool_calls")))}


def _text_of(content: object, may_be_empty: bool) -> str:
    """Text parts are joined by a newline, as in vLLM. Only tool calls may come without text."""
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list):
        raise RequestError(
            f"a message's content is {type(content).__name__}: send a string, or a list of "
            '{"type": "text", "text": "..."} parts.'
        )
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise RequestError(f"a message has a part of type {kind!r}: this engine is text only.")
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"a text part holds {type(text).__name__}: its 'text' must be a string.")
    return text


def _plain(value: object) -> object:
    """A copy made of JSON types only: the sandbox does not know other objects' methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError(f"a {type(value).__name__} was sent to the chat template: send JSON values only.")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG)
    if at < 0:
        raise RequestError(
            "the chat template leaves out the end of the final message, so it cannot be continued: "
            "set continue_final_message to false."
        )
    # A template that strips its messages has eaten the space behind the tag.
    end = at + len(_CONTINUE_TAG)
    return text[:at] if text[end : end + 1] == " " else text[:at].rstrip()


def _run_template(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    work = _Work()
    try:
        pieces = []
        for piece in template.generate({**variables, _WORK: work}):
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
            f"the model's chat template does what a template may not do ({e}): "
            "do not trust this checkpoint's template; use plain prompts."
        ) from e
    except (
        *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
        *(AttributeError, RuntimeError, MemoryError),
    ) as e:
        raise RequestError(
            f"the chat template failed on these messages ({type(e).__name__}: {e}): "
            "check the roles, their order and the template's own arguments."
        ) from e


class _Refused(jinja2.TemplateError):
    """The template called raise_exception: its message is for the user."""


class _OverBudget(jinja2.TemplateError):
    """The template used up its steps or its text."""


class _Work:
    """What one rendering has used of its budget."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_chars = 0

    def add_steps(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise _OverBudget(f"more than {_MAX_STEPS} steps")

    def add_result(self, value: object) -> None:
        size = len(value) if isinstance(value, str | list | tuple) else 0
        if size > _MAX_CHARS:
            raise _OverBudget(f"a text of more than {_MAX_CHARS} characters")
        self.add_steps(1 + size // _CHARS_PER_STEP)

    def add_output(self, piece: str) -> None:
        self.add_steps(1)
        self._num_chars += len(piece)
        if self._num_chars > _MAX_CHARS:
            raise _OverBudget(f"a prompt of more than {_MAX_CHARS} characters")


def _work_of(context: jinja2.runtime.Context) -> _Work:
    work = context.parent[_WORK]
    assert isinstance(work, _Work)
    return work


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, on a budget.

    The sandbox keeps a template from Python's internals and from changing its inputs; there is no
    loader, so it reads no file. Counted: loop items, calls, operators, and the size of what calls,
    operators and `~` return. Refused: long ranges, widths and repeat counts, big integers.
    Not bounded, because jinja has no hook for it: work inside one filter (`sort`, `map`, `join` of
    a list that repeats one long text; a chain of filters is limited only through its output), the
    time of one string method on long text, compiling, and wall-clock time as such. Who serves
    templates from strangers has to run them in a process that can be killed.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
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

    def call(
        __self,  # mangled as in jinja: a template may pass keywords of any name
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
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, *(right if isinstance(right, tuple) else (right,)))
        result: object = super().call_binop(context, operator, left, right)
        _work_of(context).add_result(result)
        return result


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what to train on; here it prints its body and no more."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Counted(jinja2.visitor.NodeTransformer):
    """Sends loops and `~` through filters that count: jinja's sandbox has no hook for these two."""

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
    """namespace() without underscore names: these could stand in for Python's own attributes."""

    def __init__(*args: object, **kwargs: object) -> None:  # as in jinja: "self" is free
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


# Filters whose arguments say how much text to make.
_GROWING = ("batch", "center", "format", "indent", "replace", "slice", "wordwrap")
_PASSED_BY_JINJA = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _guard(function: Callable[..., object]) -> Callable[..., object]:
    """The filter `function`, refusing arguments that ask for text out of all proportion."""
    check = _check_format if function.__name__ == "do_format" else _check_arguments

    @functools.wraps(function)  # keeps the marks of jinja's pass_environment and the like
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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
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
