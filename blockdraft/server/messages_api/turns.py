"""Turns of a conversation as Anthropic's clients send them, blocks and all, as messages of a chat."""

from __future__ import annotations

from blockdraft.server.conversation import Conversation
from blockdraft.server.nested import Nested, all_of
from blockdraft.server.responses import json_of

_ONLY_TEXT = "only text, tool_use, tool_result and thinking"


def system_text(system: str | list[dict[str, object]] | None) -> str | None:
    if system is None or isinstance(system, str):
        return system
    return "\n\n".join(_plain_text(block) for block in all_of(system, "system"))


def conversation_of(messages: list[dict[str, object]]) -> Conversation:
    """All turns. What a block says about caching is ours to know anyway."""
    conversation = Conversation()
    for turn in all_of(messages, "messages"):
        role = turn.text("role")
        if role == "user":
            _add_user(conversation, _blocks(turn))
        elif role == "assistant":
            _add_assistant(conversation, _blocks(turn))
        elif role == "system":
            conversation.say("system", _joined(_blocks(turn)))
        else:
            raise turn.unknown("role", "user, assistant or system")
    return conversation


def _blocks(turn: Nested) -> list[Nested]:
    content = turn.get("content")
    if isinstance(content, str):
        return [Nested({"type": "text", "text": content}, f"{turn.where}.content")]
    return turn.all("content")


def _add_user(conversation: Conversation, blocks: list[Nested]) -> None:
    """The results of tools first: they answer the turn before."""
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            conversation.result(block.name("tool_use_id"), _result_text(block))
        else:
            rest.append(block)
    if rest or not blocks:
        conversation.say("user", _joined(rest))


def _result_text(block: Nested) -> str:
    content = block.get("content")
    return _joined(block.all("content")) if isinstance(content, list) else block.text("content", default="")


def _add_assistant(conversation: Conversation, blocks: list[Nested]) -> None:
    texts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block.text("text"))
            continue
        if texts:
            conversation.answer("".join(texts))
            texts = []
        if kind == "thinking":
            conversation.think(block.text("thinking"))
        elif kind == "tool_use":
            conversation.call(block.name("id"), block.name("name"), json_of(block.object("input")))
        elif kind != "redacted_thinking":  # nothing that a model could read
            raise block.unknown("type", _ONLY_TEXT)
    if texts or not blocks:
        conversation.answer("".join(texts))


def _joined(blocks: list[Nested]) -> str:
    return "\n".join(_plain_text(block) for block in blocks)


def _plain_text(block: Nested) -> str:
    if block.get("type") != "text":
        raise block.unknown("type", _ONLY_TEXT)
    return block.text("text")
