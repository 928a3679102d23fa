"""The APIs: fields of requests become questions to the engine, and its answers become JSON and events.

A request: `fields.parse` checks the body once. The Responses and the Messages API translate theirs to a
`ChatRequest` (`translation.Conversation`); `chat.prepare` makes of it prompt tokens and sampling parameters.

A token on its way back: the engine's `Delta` -> `choices.AnswerChoice.push` -> `AnswerPiece`, in which
thoughts, text and tool calls are apart -> a writer's dictionary (`chat.answers`, or by way of
`translation.PartsWriter` the writers of the other two) -> JSON. `streaming` takes the deltas and sends the
result, whole or as events.

The modules of this folder serve all APIs; what belongs to one of them is in its own folder.
"""
