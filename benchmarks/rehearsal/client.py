"""Uses the server through the `openai` package, and checks the replies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.rehearsal.sheet import Failure

if TYPE_CHECKING:
    from openai import OpenAI

# Its greedy answer has no close call: each token is likelier than the next best by a nat and more. On a card
# a prompt that is found in the prefix cache is computed by other kernels than one that is not, and rounding
# decides close calls (docs/lossless.md).
QUESTION = "Write a Python function is_even(n)."
MAX_TOKENS = 24
LONG_PROMPT = 320  # tokens: from here on some are read compressed, where keys are (docs/kv-cache.md)
LONG_TOKENS = 48
TIMEOUT_S = 120.0


def connect(url: str) -> OpenAI:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise Failure(f"openai cannot be imported ({error}): run 'pip install openai'") from None
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


def check(client: OpenAI, expected: str | None) -> str:
    """Every way to ask, and the greedy answer. `expected`: what it must be; None: nobody knows."""
    from openai import OpenAIError

    try:
        return _check(client, expected)
    except OpenAIError as error:
        raise Failure(f"{type(error).__name__}: {error}") from None


def _check(client: OpenAI, expected: str | None) -> str:
    text = _text(client)
    if not text.strip():
        raise Failure("the chat's answer is empty")
    if expected is not None and text != expected:
        raise Failure(f"the server's greedy answer {text!r} is not that of `generate`, {expected!r}")
    if (again := _text(client)) != text:
        raise Failure(f"the same greedy request gave {text!r}, then {again!r}")
    _check_stream(client, text)
    _check_seed(client)
    _check_stop(client, text)
    _check_logprobs(client, text)
    _check_form(client)
    _check_tool(client)
    return text


def _ask(client: OpenAI, **fields: object):  # noqa: ANN202 - one of the client's many types
    asked = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    return client.chat.completions.create(**{**asked, **fields})


def _text(client: OpenAI, **fields: object) -> str:
    return _ask(client, **fields).choices[0].message.content or ""


def _check_stream(client: OpenAI, text: str) -> None:
    chunks = _ask(client, stream=True)
    joined = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    if joined != text:
        raise Failure(f"the streamed pieces make {joined!r}, unstreamed it is {text!r}")


def _check_seed(client: OpenAI) -> None:
    first, second = (_text(client, temperature=1, seed=7) for _ in range(2))
    if first != second:
        raise Failure(f"seed 7 at temperature 1 gave {first!r}, then {second!r}")


def _check_stop(client: OpenAI, text: str) -> None:
    word = text.split()[-1]
    found, expected = _text(client, stop=[word]), text.partition(word)[0]
    if found.strip() != expected.strip():
        raise Failure(f"with the stop string {word!r} the answer is {found!r}, not {expected!r}")


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def _check_form(client: OpenAI) -> None:
    """JSON of a schema, and the same with drafts and without."""
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    found = [
        _text(client, response_format=wanted, max_tokens=80, extra_body={"speculative": is_drafted})
        for is_drafted in (True, False)
    ]
    if found[0] != found[1]:
        raise Failure(f"of a form, with drafts {found[0]!r}, without {found[1]!r}")
    if set(_loaded(found[0])) != {"city", "is_capital"}:
        raise Failure(f"the answer {found[0]!r} has not the form it was asked for")


def check_drafts(client: OpenAI, text: str) -> str:
    """Check that the greedy answer after a long `text` is equal with and without drafts."""
    from openai import OpenAIError

    messages = [{"role": "user", "content": f"{text}\n\nWhat is this text about? Say it in a few sentences."}]
    try:
        drafted, plain = (
            _ask(client, messages=messages, max_tokens=LONG_TOKENS, extra_body={"speculative": is_drafted})
            for is_drafted in (True, False)
        )
    except OpenAIError as error:
        raise Failure(f"{type(error).__name__}: {error}") from None
    if drafted.usage.prompt_tokens < LONG_PROMPT:
        raise Failure(f"the long prompt has {drafted.usage.prompt_tokens} tokens: none is read compressed")
    said = [one.choices[0].message.content or "" for one in (drafted, plain)]
    if said[0] != said[1]:
        raise Failure(f"behind a long prompt, with drafts {said[0]!r}, without {said[1]!r}")
    if not said[0].strip():
        raise Failure("the answer behind a long prompt is empty")
    return said[0]


def _check_tool(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
    choice = _ask(client, tools=[tool], tool_choice="required", max_tokens=80).choices[0]
    calls = choice.message.tool_calls or []
    if choice.finish_reason != "tool_calls" or [call.function.name for call in calls] != ["look_up"]:
        raise Failure(f"a tool that must be called was not: {choice}")
    if set(_loaded(calls[0].function.arguments)) != {"city", "is_capital"}:
        raise Failure(f"the arguments {calls[0].function.arguments!r} have not their form")


def _loaded(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        raise Failure(f"{text!r} is not JSON") from None
    return found if isinstance(found, dict) else {}


def _check_logprobs(client: OpenAI, text: str) -> None:
    entries = _ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    joined = "".join(entry.token for entry in entries)
    if not joined.startswith(text):
        raise Failure(f"the tokens of the log-probabilities make {joined!r}, the text is {text!r}")
    for entry in entries:
        # Greedy: the token is the likeliest of those that are listed.
        if len(entry.top_logprobs) != 2 or entry.logprob > 0 or entry.token != entry.top_logprobs[0].token:
            raise Failure(f"the log-probabilities of {entry.token!r} are wrong: {entry}")
