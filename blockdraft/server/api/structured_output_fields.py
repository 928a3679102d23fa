"""Fields that ask for a form of the answer: OpenAI's, vLLM's and llama.cpp's ways to say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from blockdraft.errors import RequestError
from blockdraft.grammar.form import MAX_CHOICES, StructuredOutputs
from blockdraft.grammar.limits import MAX_FORM_CHARS
from blockdraft.server.api.fields import StrictFields
from blockdraft.server.api.json_schemas import Schema, SchemaOrText

ANY_WHITESPACE = r"[ \n\r\t]{1,32}"  # without a bound, a small model may write blanks for ever

Grammar = Annotated[str, Field(min_length=1, max_length=MAX_FORM_CHARS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(StrictFields):
    """OpenAI's way to send a schema. If strict, keywords that are not known are refused; else not heeded."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictFields):
    """The form of the answer, as OpenAI asks for it. `schema` is llama.cpp's way, beside json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    def form(self, whitespace: str | None) -> StructuredOutputs | None:
        """The form that is asked for, with a regex of the white space in it."""
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
    """The form of the answer, as vLLM asks for it: one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    whitespace_pattern: Grammar | None = None  # of JSON: a regex of what may stand between its parts
    disable_any_whitespace: bool | None = None  # false: the model chooses the white space of JSON

    @property
    def forms(self) -> list[StructuredOutputs]:
        found = []
        whitespace = self.whitespace_pattern
        if whitespace is None and self.disable_any_whitespace is False:
            whitespace = ANY_WHITESPACE
        if self.json_ is not None:
            found.append(StructuredOutputs(json=self.json_, whitespace_pattern=whitespace))
        if self.json_object:
            found.append(StructuredOutputs(json_object=True, whitespace_pattern=whitespace))
        if self.regex is not None:
            found.append(StructuredOutputs(regex=self.regex))
        if self.choice is not None:
            found.append(StructuredOutputs(choice=self.choice))
        if self.grammar is not None:
            found.append(StructuredOutputs(grammar=self.grammar))
        return found


class FormFields(StrictFields):
    """All of these fields. Only one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    grammar: Grammar | None = None  # llama.cpp's name
    guided_json: SchemaOrText | None = None  # these five are vLLM's old names
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Grammar | None = None

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that is asked for. Raises RequestError if there are two."""
        forms = self._forms
        if len(forms) > 1:
            names = " and ".join(dict.fromkeys(name for name, _ in forms))
            raise RequestError(f"{names} ask for {len(forms)} forms: an answer can have one.", forms[0][0])
        return forms[0][1] if forms else None

    @property
    def form_field(self) -> str:
        """The field that asks for the form."""
        return next((name for name, _ in self._forms), "structured_outputs")

    @property
    def _forms(self) -> list[tuple[str, StructuredOutputs]]:
        """All that is asked for, and by which field."""
        found = [("structured_outputs", one) for one in self._structured]
        whitespace = self.guided_whitespace_pattern
        if self.response_format is not None:
            with _of("response_format"):
                form = self.response_format.form(whitespace)
            found += [] if form is None else [("response_format", form)]
        for field, name, value in (
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("grammar", "grammar", self.grammar),
        ):
            if value is not None:
                spacing = whitespace if name == "json" else None
                with _of(field):
                    found.append((field, _form(name, value, spacing)))
        return found

    @property
    def _structured(self) -> list[StructuredOutputs]:
        if self.structured_outputs is None:
            return []
        forms = self.structured_outputs.forms
        if not forms:
            names = "json, json_object, regex, choice or grammar"
            raise RequestError(f"'structured_outputs' holds none of {names}.", "structured_outputs")
        return forms


@contextmanager
def _of(field: str) -> Iterator[None]:
    """Errors of a form name the field that asks for it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), field, error.code) from None


def _form(name: str, value: object, whitespace: str | None) -> StructuredOutputs:
    fields: dict[str, Any] = {name: value, "whitespace_pattern": whitespace}
    return StructuredOutputs(**fields)
