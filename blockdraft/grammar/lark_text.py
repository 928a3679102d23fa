"""Finds the named tokens of a Lark grammar (llguidance's dialect), outside of comments, strings, regexes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_RUN_CHARS

# As llguidance's lexer reads Lark. Strings and regexes also match without their closing sign, so that the
# time is linear in the text.
_PARTS = re.compile(
    r"""(?:\#|//)[^\n]*
      | "(?:[^"\\\n]|\\.)*"?
      | /(?:[^/\\]|\\.)*/?
      | (?P<token><[^<>\s]+>)
      | \b(?P<end>max_tokens|stop)\s*=""",
    re.VERBOSE | re.DOTALL,
)
_IDS = re.compile(r"<\[([0-9]{1,9}(?:,[0-9]{1,9})*)\]>")


@dataclass(frozen=True, slots=True)
class LarkFacts:
    """A grammar with its tokens as ids, and the facts that decide if its matcher can take back tokens."""

    text: str
    token_ids: frozenset[int]  # tokens that the grammar names
    has_ends: bool  # a rule ends by a count of tokens or by a stop text
    has_other_ids: bool  # the grammar has ranges of tokens, or all tokens but some


def quoted(text: str) -> str:
    """Return literal text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_lark(text: str, token_id: Callable[[str], int | None], vocab_size: int) -> LarkFacts:
    """Read a grammar. `token_id` finds a token by its name. Raise RequestError for an unknown token."""
    ids: set[int] = set()
    has_ends = has_other_ids = False

    def numbered(found: re.Match[str]) -> str:
        nonlocal has_ends, has_other_ids
        has_ends = has_ends or found.group("end") is not None
        name = found.group("token")
        if name is None:
            text = found.group()
            if text[0] in '"/' and len(text) > MAX_RUN_CHARS and not text.startswith("//"):
                raise _refused(f"a text of more than {MAX_RUN_CHARS} characters: shorten it.")
            return text
        if not name.startswith("<["):
            ids.add(number := _named(name, token_id))
            return f"<[{number}]>"
        if (listed := _IDS.fullmatch(name)) is None:
            has_other_ids = True
        else:
            ids.update(map(int, listed.group(1).split(",")))
        return name

    written = _PARTS.sub(numbered, text)
    if ids and max(ids) >= vocab_size:
        raise _refused(f"<[{max(ids)}]>: this model's tokens are 0 to {vocab_size - 1}.")
    return LarkFacts(written, frozenset(ids), has_ends, has_other_ids)


def _named(name: str, token_id: Callable[[str], int | None]) -> int:
    number = token_id(name)
    if number is None:
        raise _refused(f"{name[:64]}, which is not a token of this model: put text in quotes.")
    return number


def _refused(why: str) -> RequestError:
    return RequestError(f"the grammar holds {why}", "structured_outputs")
