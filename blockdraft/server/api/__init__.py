"""The APIs: they turn requests into calls of the engine, and its answers into JSON and events.

A request: `fields.parse` checks the body once. The Responses and the Messages API translate theirs to a
`ChatRequest` (`translation.Conversation`); `chat.prepare` turns that into prompt tokens and sampling
parameters.

A token on its way back: the engine's `Delta` -> `choices.AnswerChoice.push` -> `AnswerPiece`, with
separate thoughts, text and tool calls -> a writer's dictionary (`chat.answers`; the other
two APIs have writers based on `translation.PartsWriter`) -> JSON. `streaming` takes the deltas and sends the
result, whole or as events.

The modules of this folder serve all APIs; each API has its own modules in a folder.
"""
