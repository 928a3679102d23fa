"""What the APIs beside chat completions stand on: a body in, a conversation answered, in any API's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from blockdraft.errors import RequestError
from blockdraft.server.api.answers import ChatAnswer
from blockdraft.server.api.chat.schemas import AnswerObject
from blockdraft.server.api.chat.streaming import Writer
from blockdraft.server.api.fields import AnyBody, ChatRequest

Ask = Callable[[], ChatRequest]  # takes long where the body is long
MakeWriter = Callable[[ChatAnswer], Writer]
BodyT = TypeVar("BodyT", bound=AnyBody)


class ChatHost(Protocol):
    """The server, as an API that is a translation sees it."""

    name: str

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body, checked; the model it names is ours."""

    async def converse(self, request: Request, ask: Ask, head: AnswerObject, writer: MakeWriter) -> Response:
        """The answer, written by what `writer` makes of it. `ask` runs beside the event loop if need be."""

    async def num_prompt_tokens(self, request: Request, ask: Ask) -> int: ...
    def tell(self, response: Response, asked: AnyBody) -> Response:
        """The response, with the names of fields that were ignored."""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields of a chat request name the fields that they were made of."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.field or "")
        if name is None:
            raise
        text = str(error).replace(f"'{error.field}", f"'{name}")
        raise RequestError(text, name, error.code) from None
