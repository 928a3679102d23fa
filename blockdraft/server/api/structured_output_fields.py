"""Fields that ask for structured output: OpenAI's, vLLM's and llama.cpp's names for it."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_GRAMMAR_CHARS
from blockdraft.grammar.structured_output import MAX_CHOICES, StructuredOutputs
from blockdraft.server.api.fields import Renamed, StrictFields
from blockdraft.server.api.json_schemas import Schema, SchemaOrText

ANY_WHITESPACE = r"[ \n\r\t]{1,32}"  # without a limit, small models may write blanks forever

Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(StrictFields):
    """A schema as OpenAI sends it. Unknown keywords are refused if strict, else ignored."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictFields):
    """OpenAI's field for structured output. llama.cpp sends `schema` with the type json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    def structured_output(self, whitespace: str | None) -> StructuredOutputs | None:
        """Return the structured output; None for text. `whitespace` is a regex of the white space in JSON."""
        if self.type == "text":
            return None
        schema, is_strict = self.schema_, False
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError(
                    "'response_format' of type json_schema needs 'json_schema'.", "response_format"
                )
            schema, is_strict = self.json_schema.schema_, bool(self.json_schema.strict)
        if schema is None:
            return StructuredOutputs(json_object=True, whitespace_pattern=whitespace)
        return StructuredOutputs(json=schema, is_lenient=not is_strict, whitespace_pattern=whitespace)


class StructuredFields(StrictFields):
    """vLLM's fields for structured output; one of them may be set."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    whitespace_pattern: Grammar | None = None  # a regex of the white space in JSON
    disable_any_whitespace: bool | None = None  # false: the model chooses the white space of JSON

    @property
    def structured_outputs(self) -> list[StructuredOutputs]:
        """Return all structured outputs that are requested."""
        whitespace = self.whitespace_pattern
        if whitespace is None and self.disable_any_whitespace is False:
            whitespace = ANY_WHITESPACE
        given: dict[str, object] = {"json": self.json_, "json_object": self.json_object or None}
        given |= {"regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return [_output(name, value, whitespace) for name, value in given.items() if value is not None]


def _output(name: str, value: object, whitespace: str | None) -> StructuredOutputs:
    """Return one structured output; `whitespace` applies only to JSON."""
    given: dict[str, Any] = {name: value}
    if name in ("json", "json_object"):
        given["whitespace_pattern"] = whitespace
    return StructuredOutputs(**given)


class StructuredOutputFields(StrictFields):
    """All fields for structured output. Only one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    grammar: Grammar | None = None  # llama.cpp's name
    guided_json: SchemaOrText | None = None  # these five are vLLM's old names
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Grammar | None = None

    @property
    def structured_output(self) -> StructuredOutputs | None:
        """Return the requested structured output, or None. Raises RequestError if there are several."""
        return self._structured_output if self.model_fields_set & _OUTPUT_FIELDS else None

    @cached_property
    def _structured_output(self) -> StructuredOutputs | None:
        found = self._all
        if len(found) > 1:
            names = " and ".join(dict.fromkeys(name for name, _ in found))
            raise RequestError(
                f"{names} ask for {len(found)} structured outputs: an answer can have one.", found[0][0]
            )
        return found[0][1] if found else None

    @property
    def output_field(self) -> str:
        """Return the name of the field that requests structured output."""
        return next((name for name, _ in self._all), "structured_outputs")

    @property
    def _all(self) -> list[tuple[str, StructuredOutputs]]:
        """Return the requested structured outputs, each with the name of its field."""
        found: list[tuple[str, StructuredOutputs]] = []
        if self.structured_outputs is not None:
            found += [("structured_outputs", one) for one in self.structured_outputs.structured_outputs]
            if not found:
                names = "json, json_object, regex, choice or grammar"
                raise RequestError(f"'structured_outputs' is empty: set {names}.", "structured_outputs")
        whitespace = self.guided_whitespace_pattern
        if self.response_format is not None:
            with Renamed({"structured_outputs": "response_format"}):
                one = self.response_format.structured_output(whitespace)
            found += [] if one is None else [("response_format", one)]
        for field, name, value in (
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("grammar", "grammar", self.grammar),
        ):
            if value is not None:
                with Renamed({"structured_outputs": field}):
                    found.append((field, _output(name, value, whitespace)))
        return found


_OUTPUT_FIELDS = frozenset(StructuredOutputFields.model_fields)
