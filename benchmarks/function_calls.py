"""Whether a model that must call a tool does: `python -m benchmarks.function_calls URL --data FILE`.

The Berkeley leaderboard's questions (bfcl_json_tools), asked over /v1/chat/completions with
`tool_choice: "required"`. Of the calls that ended by themselves all must name a function that was offered and
have arguments that match its schema (`jsonschema`): else the grammar or the reader has a bug. Whether it is
the right call is the model's affair.
"""

import argparse
import asyncio
import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

from benchmarks import record

TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "any": None,
    "list": "array",
    "int": "integer",
}
FUNCTIONS, QUESTION = "Functions:\n", "\n\nQuestion: "


def schema_of(given: Any) -> Any:  # noqa: ANN401
    """A schema in Python's words, as the questions have it, in JSON schema's."""
    if isinstance(given, list):
        return [schema_of(one) for one in given]
    if not isinstance(given, dict):
        return given
    found = {}
    for key, value in given.items():
        if key == "type" and isinstance(value, str):
            value = TYPES.get(value.lower(), value.lower())
            if value is None:
                continue
        elif key == "properties" and isinstance(value, dict):
            value = {name: schema_of(one) for name, one in value.items()}
        elif key in ("items", "anyOf", "oneOf", "additionalProperties"):
            value = schema_of(value)
        elif key not in ("required", "enum", "description", "minItems", "maxItems", "minimum", "maximum"):
            continue
        found[key] = value
    return found


def question_of(line: str) -> tuple[list[dict[str, Any]], str]:
    """Return the tools and the question of one line."""
    content = json.loads(line)["messages"][-1]["content"]
    functions, _, question = content.partition(FUNCTIONS)[2].partition(QUESTION)
    return [tool_of(one) for one in json.loads(functions)], question


def tool_of(given: dict[str, Any]) -> dict[str, Any]:
    schema = schema_of(given["parameters"])
    is_closed = set(schema.get("required", ())) <= schema["properties"].keys()  # one of them is not
    function = {
        "name": given["name"].replace(".", "_"),
        "description": given.get("description", ""),
        "parameters": {**schema, "additionalProperties": not is_closed},
    }
    return {"type": "function", "function": function}


async def ask(session: aiohttp.ClientSession, url: str, line: str, max_tokens: int) -> tuple[str, str]:
    """Ask one question; return the outcome, and why it is bad."""
    tools, question = question_of(line)
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": tools,
        "tool_choice": "required",
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return f"refused ({response.status})", answer["error"]["message"][:160]
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "length":
        return "cut at the limit of tokens", ""
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] != "tool_calls" or not calls:
        return "no call", str(choice)[:300]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            jsonschema.validate(json.loads(arguments), schemas[name])
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            return "bad call", f"{name}: {arguments[:200]} ({str(error)[:100]})"
    return "whole call", ""


async def run(args: argparse.Namespace) -> dict[str, Any]:
    opened = gzip.open if args.data.endswith(".gz") else open
    with opened(args.data, "rt") as file:
        lines = [line for line in file if FUNCTIONS in line.replace("\\n", "\n")][: args.num_prompts]
    gate, found, reasons = asyncio.Semaphore(args.concurrency), Counter[str](), list[str]()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(line: str) -> None:
            async with gate:
                outcome, why = await ask(session, args.url, line, args.max_tokens)
            found[outcome] += 1
            if why:
                reasons.append(f"{outcome}: {why}")

        begin = time.perf_counter()
        await asyncio.gather(*map(one, lines))
    return {"found": dict(found), "seconds": time.perf_counter() - begin, "reasons": reasons[:20]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--data", required=True, help="bfcl_json_tools.jsonl, or .gz")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {
        "settings": vars(args) | {"data": Path(args.data).name},
        **record.context(),
        **asyncio.run(run(args)),
    }
    for line in result["reasons"]:
        print(line)
    print(
        record.table(
            ["what came of it", "answers"], [[name, count] for name, count in result["found"].items()]
        )
    )
    print(f"{result['seconds']:.1f} s")
    record.save(args.json, result)
    if any(name.startswith(("bad", "no", "refused")) for name in result["found"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
