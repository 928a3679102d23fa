"""Fields that all APIs share: their types and limits, how a body is read, and errors that name a field.

Every body is one pydantic model, with a limit on everything that has a size. The models are also the schemas
of the OpenAPI document. A null field counts as left out; unknown fields are ignored, as clients expect.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.responses import Response

from blockdraft.errors import RequestError
from blockdraft.server.http.body import parse_object, shown_name

# Arbitrary limits; the body's size bounds everything once more.
MAX_MESSAGES = 4096
MAX_STOP_CHARS = 1024
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_CHARS = 1 << 14
MAX_INT = 2**31 - 1

IGNORED_HEADER = "x-blockdraft-ignored-fields"
MAX_SHOWN = 16  # names in one header; arbitrary, as the next one
MAX_LOGGED = 256  # different names that are logged
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

# Fields that would change the answer, with the values that change nothing.
Unsupported = Mapping[str, tuple[object, ...]]
_UNSUPPORTED: Unsupported = {
    **dict.fromkeys(("audio", "chat_template", "kv_transfer_params", "prompt_embeds"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions", "logits_processors"), ([],)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    "function_call": ("none",),
    "length_penalty": (1,),
    "modalities": (["text"],),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states"), (False,)),  # SGLang's router adds these
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),  # and these
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# Fields that do not change the answer: this server ignores them.
_HARMLESS = frozenset(
    {
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("priority", "store", "user"),
    }
)
_IN_JSON = {  # pydantic's texts that name classes and types of Python
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be an object"),
    "list_type": "Input should be an array",
}
# Variables of chat templates that the server sets itself.
_RESERVED_KWARGS = frozenset(
    {
        *("self", "messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"),
        *("tools", "add_special_tokens", "split_special_tokens"),
    }
)
_IGNORED = "ignored fields"  # an entry of a body's __dict__: pydantic's private attributes take longer
log = logging.getLogger(__name__)


class StrictFields(BaseModel):
    """An object in a body. Types are not converted, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)


BodyT = TypeVar("BodyT", bound="AnyBody")


class AnyBody(StrictFields):
    """A request's body; it may name the model."""

    UNSUPPORTED: ClassVar[Unsupported] = _UNSUPPORTED
    HARMLESS: ClassVar[frozenset[str]] = _HARMLESS

    model: str | None = None

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Return the names of fields that the API does not know, such as `temprature`; `parse` finds them."""
        found: tuple[str, ...] = self.__dict__.get(_IGNORED, ())
        return found

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""


# ---- types of fields

TOKEN_MARK = "x-token"  # in the schema of a token id, whose limit is the model's vocabulary
WIDTH_MARK = "x-width"  # in the schema of a block's width, whose limit is the engine's
TokenId = Annotated[int, Field(ge=0, le=MAX_INT, json_schema_extra={TOKEN_MARK: True})]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


def empty(kind: type[list[Any]] | type[dict[str, Any]], **limits: Any) -> Any:  # noqa: ANN401
    """Return a field that is empty by default. Pydantic would copy a default value, and this is faster."""
    return Field(default_factory=kind, json_schema_extra={"default": kind()}, **limits)


def needs(name: str, value: str, other: str) -> JsonDict:
    """Return the schema of an object in which `other` is required if the field `name` has this value."""
    then: JsonDict = {"required": [other], "properties": {other: {"not": {"type": "null"}}}}
    return {"if": {"required": [name], "properties": {name: {"const": value}}}, "then": then}


def whole(value: object) -> object:
    """Return 5 for 5.0, also in lists: JSON has one kind of number, and some clients write 5.0 for 5."""
    if isinstance(value, list) and any(isinstance(item, float | list) for item in value):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_fields(value: object) -> object:
    """Do `whole` to the fields of an object."""
    return {name: whole(item) for name, item in value.items()} if isinstance(value, dict) else value


def an_object(value: object) -> dict[str, object]:
    """Validate, for pydantic, a JSON object whose fields other code reads."""
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be an object")
    return value


def _template_kwargs(value: dict[str, object]) -> dict[str, object]:
    if len(json.dumps(value)) > MAX_TEMPLATE_KWARGS_CHARS:
        raise PydanticCustomError(
            "size", "more than {limit} characters", {"limit": MAX_TEMPLATE_KWARGS_CHARS}
        )
    if wrong := _RESERVED_KWARGS & value.keys():
        raise PydanticCustomError("name", "{names} cannot be set here", {"names": ", ".join(sorted(wrong))})
    return value


TemplateKwargs = Annotated[
    dict[str, object],
    Field(
        max_length=MAX_TEMPLATE_KWARGS,
        json_schema_extra={"propertyNames": {"not": {"enum": sorted(_RESERVED_KWARGS)}}},
    ),
    AfterValidator(_template_kwargs),
]


class Speculative(StrictFields):
    """Speculation for this request: `width` is the block's width (1: no speculation, null: the default)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    width: Annotated[int, Field(ge=1, le=1024, json_schema_extra={WIDTH_MARK: True})] | None = None
    detail: bool = False


def _as_speculative(value: object) -> object:
    """Return a boolean as fields: false turns speculation off, true takes the server's default."""
    if isinstance(value, bool):
        return {} if value else {"width": 1}
    return whole_fields(value)


SpeculativeField = Annotated[
    Speculative, BeforeValidator(_as_speculative, json_schema_input_type=bool | Speculative)
]

# ---- reading a body


_NEVER_FLOAT = (str, bool, int)


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """Read a request's body. Raises RequestError, which names the field at fault."""
    given = {
        name: value if type(value) in _NEVER_FLOAT else whole(value)
        for name, value in parse_object(body).items()
        if value is not None
    }
    if not given.keys().isdisjoint(kind.UNSUPPORTED):
        _check_supported(given, kind.UNSUPPORTED)
    asked = validate(kind, given)
    if others := given.keys() - _known_names(kind):
        asked.__dict__[_IGNORED] = tuple(shown_name(name) for name in given if name in others)
    return asked


def _check_supported(given: Mapping[str, object], unsupported: Unsupported) -> None:
    for name, neutral in unsupported.items():
        if name in given and not any(_is_same(given[name], one) for one in neutral):
            raise RequestError(f"'{name}' is not supported yet: leave it out.", name)


@functools.cache
def _known_names(kind: type[AnyBody]) -> frozenset[str]:
    return frozenset({*kind.model_fields, *kind.UNSUPPORTED, *kind.HARMLESS})


def _is_same(value: object, other: object) -> bool:
    """Return whether two values are equal in JSON, in which false is not 0."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def validate(kind: type[BodyT], given: Mapping[str, object]) -> BodyT:
    """Return a request of this kind, made from the fields. Raises RequestError."""
    try:
        asked = kind.model_validate(given)
    except ValidationError as error:
        first = _likeliest(error.errors(include_url=False, include_input=False))
        where = ".".join(shown_name(str(part)) for part in _path(given, first))
        text = _IN_JSON.get(first["type"], first["msg"])
        text = text.replace("Dictionary", "Object").replace("List", "Array")
        raise RequestError(f"'{where}': {text}.", shown_name(str(first["loc"][0]))) from None
    asked.check()
    return asked


def _path(given: object, error: ErrorDetails) -> Iterator[str | int]:
    """Yield the path of an error in the body, without the type names that pydantic adds."""
    value = given
    for number, part in enumerate(error["loc"]):
        is_missing = error["type"] == "missing" and number == len(error["loc"]) - 1
        if is_missing or (isinstance(value, Mapping) and part in value):
            value = value.get(part) if isinstance(value, Mapping) else None
            yield part
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            yield part


def _likeliest(errors: list[ErrorDetails]) -> ErrorDetails:
    """Return the error that lies deepest in the first wrong field: its type is the likeliest one meant."""
    same = (one for one in errors if one["loc"][:1] == errors[0]["loc"][:1])
    return max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


# ---- errors


class _OfFields(ContextDecorator, ABC):
    """Changes which field a RequestError names. It costs less than a context manager made of a generator."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError):
            raise self._changed(error) from None

    @abstractmethod
    def _changed(self, error: RequestError) -> RequestError: ...


class FieldAtFault(_OfFields):
    """Adds this field to a RequestError that names none. Also works as a decorator."""

    def __init__(self, field: str) -> None:
        self._field = field

    def _changed(self, error: RequestError) -> RequestError:
        return RequestError(str(error), error.field or self._field, error.code)


class Renamed(_OfFields):
    """Changes errors about a field of a chat request to name the original field that it was made from."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def _changed(self, error: RequestError) -> RequestError:
        name = self._names.get(error.field or "")
        if name is None:
            return error
        text = str(error).replace(f"'{error.field}", f"'{name}")
        return RequestError(text, name, error.code)


class IgnoredFields:
    """Reports ignored fields, so that typos are noticed: in a header, and once per name in the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def tell(self, response: Response, asked: AnyBody) -> Response:
        """Return the response, with the header if the request had ignored fields."""
        if asked.ignored_fields:
            names = [_UNSAFE.sub("?", name) for name in asked.ignored_fields[:MAX_SHOWN]]
            response.headers[IGNORED_HEADER] = ", ".join(names)
            for name in names:
                if name not in self._logged and len(self._logged) < MAX_LOGGED:
                    self._logged.add(name)
                    log.warning("ignored the unknown field '%s' of a request", name)
        return response
