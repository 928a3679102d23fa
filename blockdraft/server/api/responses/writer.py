"""Writes the answers of /v1/responses: turns parts of an answer into OpenAI's items, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from blockdraft.engine.request import Delta
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.responses import schemas
from blockdraft.server.api.responses.fields import ResponsesRequest, namespaces_of
from blockdraft.server.api.responses.items import sealed
from blockdraft.server.api.schemas import AnswerObject
from blockdraft.server.api.translation import AnswerPart, PartsWriter
from blockdraft.server.http.replies import named_event

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}

Keep = Callable[[schemas.Response], None]


class ResponseWriter(PartsWriter):
    """One response, made of the deltas of a chat answer. `keep` receives it when it is complete."""

    def __init__(self, asked: ResponsesRequest, head: AnswerObject, keep: Keep, chat: ChatAnswer) -> None:
        super().__init__(head, chat)
        self._asked = asked
        self._keep = keep
        self._namespaces = namespaces_of(asked.tools)
        self._num_events = 0

    def whole(self) -> schemas.Response:
        is_cut = self._last.finish_reason == "length"
        answer = self._response("incomplete" if is_cut else "completed")
        self._keep(answer)
        return answer

    def end(self) -> str:
        answer = self.whole()
        if answer["status"] == "incomplete":
            return self._state("response.incomplete", answer)
        return self._state("response.completed", answer)

    def failed(self, message: str) -> str:
        answer = self._response("failed")
        answer["error"] = {"code": "server_error", "message": message}
        return self._state("response.failed", answer)

    def _push(self, delta: Delta) -> None:
        super()._push(delta)
        if self._last.finish_reason is not None and not self._parts:  # an answer must have at least one part
            self._open("text")
            self._close(is_whole=True)

    # ---- the whole

    def _response(self, status: schemas.ResponseStatus) -> schemas.Response:
        asked = self._asked
        is_over = status in ("completed", "incomplete")
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._head["model"],
            "output": [] if status == "in_progress" else [self._item(part) for part in self._parts],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
            "service_tier": "default",
            "store": asked.store,
            "temperature": asked.temperature,
            "text": {"format": asked.text.known_format, "verbosity": asked.text.verbosity or "medium"},
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }

    def _usage(self) -> schemas.ResponseUsage:
        usage = self._chat.usage()
        details = usage["prompt_tokens_details"]
        num_cached = 0 if details is None else details["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, part: AnswerPart, status: schemas.ItemStatus | None = None) -> schemas.Item:
        """Return the item of a part; with status "in_progress" the item is still empty."""
        status = status or ("completed" if part.is_whole else "incomplete")
        is_new, item_id = status == "in_progress", _item_id(part)
        if part.kind == "text":
            content = [] if is_new else [output_text(part.text)]
            return {
                "id": item_id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        if part.kind == "call":
            arguments = "" if is_new else part.text
            return {**call_item(part.call_id, part.name, arguments, status, self._namespaces), "id": item_id}
        thoughts: schemas.ReasoningItem = {
            "id": item_id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [] if is_new else [{"type": "reasoning_text", "text": part.text}],
        }
        if self._asked.seals_thoughts and not is_new:
            thoughts["encrypted_content"] = sealed(part.text)
        return thoughts

    # ---- events

    def _begin(self) -> str:
        answer = self._response("in_progress")
        return self._state("response.created", answer) + self._state("response.in_progress", answer)

    def _state(self, name: str, answer: schemas.Response) -> str:
        return self._numbered({"type": name, "response": answer})

    def _opened(self, part: AnswerPart) -> str:
        return "".join(map(self._numbered, opened_events(part, self._item(part, "in_progress"))))

    def _added(self, part: AnswerPart, text: str) -> str:
        return self._numbered(added_event(part, _item_id(part), text))

    def _closed(self, part: AnswerPart) -> str:
        return "".join(map(self._numbered, closed_events(part, self._item(part))))

    def _numbered(self, data: dict[str, object]) -> str:
        """Return an event as text, with the next number."""
        number = self._num_events
        self._num_events += 1
        return named_event(str(data["type"]), {**data, "sequence_number": number})


def _item_id(part: AnswerPart) -> str:
    return f"{_PREFIXES[part.kind]}_{part.id}"


def _place(part: AnswerPart, item_id: str) -> dict[str, object]:
    """Return the fields that say where an event belongs; a call has no content parts."""
    place: dict[str, object] = {"item_id": item_id, "output_index": part.index}
    return place if part.kind == "call" else place | {"content_index": 0}


def opened_events(part: AnswerPart, item: schemas.Item) -> Iterator[dict[str, object]]:
    """Yield the events of a part that begins; `item` is still empty."""
    yield {"type": "response.output_item.added", "output_index": part.index, "item": item}
    if part.kind != "call":
        begun = _content(part, "")
        yield {"type": "response.content_part.added", **_place(part, item["id"]), "part": begun}


def added_event(part: AnswerPart, item_id: str, text: str) -> dict[str, object]:
    event = {"type": f"{_EVENTS[part.kind]}.delta", **_place(part, item_id), "delta": text}
    return event | {"logprobs": []} if part.kind == "text" else event


def closed_events(part: AnswerPart, item: schemas.Item) -> Iterator[dict[str, object]]:
    """Yield the events of a part that has ended; `item` is complete."""
    done = {"type": f"{_EVENTS[part.kind]}.done", **_place(part, item["id"])}
    if item["type"] == "function_call":
        yield {**done, "name": item["name"], "arguments": part.text}
    else:
        yield {**done, "text": part.text, **({"logprobs": []} if part.kind == "text" else {})}
        whole = _content(part, part.text)
        yield {"type": "response.content_part.done", **_place(part, item["id"]), "part": whole}
    yield {"type": "response.output_item.done", "output_index": part.index, "item": item}


def _content(part: AnswerPart, text: str) -> schemas.OutputText | schemas.ReasoningText:
    return output_text(text) if part.kind == "text" else {"type": "reasoning_text", "text": text}


def call_item(
    call_id: str,
    name: str,
    arguments: str,
    status: schemas.ItemStatus,
    namespaces: Mapping[str, tuple[str, str]],
) -> schemas.FunctionCallItem:
    """Return the item of a call, without its id; `name` is the full name, as the model knows it."""
    namespace, own_name = namespaces.get(name, ("", name))
    call: schemas.FunctionCallItem = {
        "id": "",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": own_name,
        "arguments": arguments,
    }
    if namespace:
        call["namespace"] = namespace
    return call


def output_text(text: str) -> schemas.OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
