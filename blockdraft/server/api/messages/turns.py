"""Turns of a conversation as Anthropic's clients send them, blocks and all, as messages of a chat."""

from __future__ import annotations

from blockdraft.server.api.translation import Conversation
from blockdraft.server.http.body import Nested, all_of
from blockdraft.server.http.replies import json_of

# Claude Code writes who pays in front of its instructions: no model needs it, and no two prompts would share
# a prefix where it differs.
_BILLING = "x-anthropic-billing-header:"
_ONLY_TEXT = "only text, tool_use, tool_result and thinking"


def system_text(system: str | list[dict[str, object]] | None) -> str | None:
    if system is None or isinstance(system, str):
        return system
    texts = [_plain_text(block) for block in all_of(system, "system")]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def conversation_of(messages: list[dict[str, object]]) -> Conversation:
    """All turns. What blocks say about caching is ignored: the server caches prefixes by itself."""
    conversation = Conversation()
    for turn in all_of(messages, "messages"):
        role = turn.text("role")
        if role == "user":
            _add_user(conversation, _blocks(turn))
        elif role == "assistant":
            _add_assistant(conversation, _blocks(turn))
        elif role == "system":
            _add_system(conversation, _joined(_blocks(turn)))
        else:
            raise turn.unknown("role", "user, assistant or system")
    return conversation


def _add_system(conversation: Conversation, text: str) -> None:
    """Many templates accept a system message in the first place only: later ones become reminders."""
    if conversation.messages:
        conversation.add_user(f"<system-reminder>\n{text}\n</system-reminder>")
    else:
        conversation.say("system", text)


def _blocks(turn: Nested) -> list[Nested]:
    if "content" not in turn and turn.get("role") == "assistant":
        return []
    content = turn.text_or_all("content")
    if isinstance(content, str):
        return [Nested({"type": "text", "text": content}, f"{turn.where}.content")]
    return content


def _add_user(conversation: Conversation, blocks: list[Nested]) -> None:
    """Add the results of tools first, as they answer the turn before."""
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if not conversation.has_called(block.name("tool_use_id")):
                raise block.wrong("tool_use_id", "no earlier turn has made this call")
            conversation.result(block.name("tool_use_id"), _result_text(block))
        else:
            rest.append(block)
    if rest or not blocks:
        conversation.add_user(_joined(rest))


def _result_text(block: Nested) -> str:
    content = block.text_or_all("content") if "content" in block else ""
    return content if isinstance(content, str) else _joined(content)


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
