"""Translates GBNF, llama.cpp's grammar format, to Lark in one pass. Every error names its line.

Each piece of GBNF has a counterpart in Lark: only names, characters and repeats are written differently. Line
ends mean nothing: a rule ends where the next rule begins, at a name followed by `::=`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from blockdraft.errors import RequestError

MAX_GROUPS = 24  # nested; llguidance takes 30 levels of Lark
MAX_REPEATS = 1 << 20  # arbitrary

# Texts and sets also match without their closing sign, so that a missing one is reported once, at its start.
_PIECES = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<defines>::=)
      | (?P<name>[A-Za-z0-9_-]+)
      | (?P<text>"(?:[^"\\\n]|\\.)*"?)
      | (?P<set>\[(?:[^\]\\\n]|\\.)*\]?)
      | (?P<repeat>[*+?]|\{[0-9,\s]*\})
      | (?P<mark>[|().])
      | (?P<other>.)""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++\s*+::=", re.MULTILINE)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '"\\[]-^/'}}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))", re.DOTALL)
_TIMES = re.compile(r"\{\s*([0-9]{1,9})\s*(,)?\s*([0-9]{1,9})?\s*\}")


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Rule:
    name: str
    line: int
    pieces: list[str] = field(default_factory=list)  # Lark text without the names of other rules
    names: dict[int, str] = field(default_factory=dict)  # GBNF names, by their place in `pieces`
    lines: dict[str, int] = field(default_factory=dict)  # the first line of each name


def is_gbnf(text: str) -> bool:
    """Say if a line begins like a GBNF rule. In Lark, `::=` occurs only in strings and comments."""
    return _RULE.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """Translate a GBNF grammar to Lark. Raise RequestError for an invalid one."""
    rules = _rules(list(_pieces(text)))
    for rule in rules.values():
        for name, line in rule.lines.items():
            if name not in rules:
                raise _mistake(line, f"the rule {_shown(name)} is not defined: add '{_cut(name)} ::= …'")
    if "root" not in rules:
        raise _mistake(1, "the rule 'root', with which an answer begins, is missing: add 'root ::= …'")
    written = _lark_names(rules, _terminals(rules))
    lines = []
    for rule in rules.values():
        for place, name in rule.names.items():
            rule.pieces[place] = written[name] + rule.pieces[place]
        lines.append(f"{written[rule.name]}: {' '.join(filter(None, rule.pieces))}")
    return "\n".join(lines)


def _mistake(line: int, what: str) -> RequestError:
    return RequestError(f"the GBNF grammar cannot be read: line {line}: {what}.", "structured_outputs")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"


def _shown(text: str) -> str:
    return f"'{_cut(text)}'"


def _pieces(text: str) -> Iterator[_Piece]:
    line = 1
    for match in _PIECES.finditer(text):
        kind, found = str(match.lastgroup), match.group()
        if kind == "other":
            raise _mistake(line, f"{_shown(found)} means nothing here")
        if kind in ("text", "set") and not _is_closed(found):
            what = "a text without its closing '\"'" if kind == "text" else "a set without its closing ']'"
            raise _mistake(line, f"{_shown(found)} is {what}")
        if kind != "space":
            yield _Piece(kind, found, line)
        line += found.count("\n")


def _is_closed(found: str) -> bool:
    """Say if a text or set ends with its closing sign, not escaped by a backslash."""
    inside = found[1:-1]
    num_slashes = len(inside) - len(inside.rstrip("\\"))
    return len(found) > 1 and found[-1] in '"]' and num_slashes % 2 == 0


def _rules(pieces: list[_Piece]) -> dict[str, _Rule]:
    begins = [place - 1 for place, piece in enumerate(pieces) if piece.kind == "defines"]
    if not begins or begins[0] != 0:
        line = pieces[0].line if pieces else 1
        raise _mistake(line, "a grammar begins with a rule, such as 'root ::= …'")
    rules: dict[str, _Rule] = {}
    for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True):
        name = pieces[begin]
        if name.kind != "name":
            raise _mistake(name.line, f"{_shown(name.text)} stands in front of '::=', where a name belongs")
        if name.text in rules:
            raise _mistake(name.line, f"the rule {_shown(name.text)} is defined twice")
        rules[name.text] = _Body(_Rule(name.text, name.line)).read(pieces[begin + 2 : end])
    return rules


class _Body:
    """Reads the part of a rule after its `::=`."""

    def __init__(self, rule: _Rule) -> None:
        self._rule = rule
        self._groups: list[tuple[int, int]] = []  # the start and line of each open group
        self._item: int | None = None  # the start of the last item, which a repeat applies to
        self._is_repeated = False

    def read(self, pieces: list[_Piece]) -> _Rule:
        for piece in pieces:
            if piece.kind == "repeat":
                self._repeat(piece)
            elif piece.text == "(":
                self._open(piece.line)
            elif piece.text == ")":
                self._close(piece.line)
            elif piece.text == "|":
                self._end_sequence()
                self._rule.pieces.append("|")
            else:
                self._add(piece)
        self._end_sequence()
        if self._groups:
            raise _mistake(self._groups[-1][1], "a '(' without its ')'")
        return self._rule

    def _begin_item(self) -> None:
        self._item, self._is_repeated = len(self._rule.pieces), False
        self._rule.pieces.append("")  # room for a bracket

    def _add(self, piece: _Piece) -> None:
        self._begin_item()
        if piece.kind == "name":
            self._rule.names[len(self._rule.pieces)] = piece.text
            self._rule.lines.setdefault(piece.text, piece.line)
            self._rule.pieces.append("")
        elif piece.kind == "text":
            text = _ESCAPE.sub(lambda found: _character(found, piece), piece.text[1:-1])
            self._rule.pieces.append(json.dumps(text, ensure_ascii=False))
        else:
            self._rule.pieces.append("/(?s:.)/" if piece.kind == "mark" else _regex_of_set(piece))

    def _open(self, line: int) -> None:
        if len(self._groups) >= MAX_GROUPS:
            raise _mistake(line, f"it nests too deep: more than {MAX_GROUPS} groups; give some a rule each")
        self._begin_item()
        assert self._item is not None
        self._groups.append((self._item, line))
        self._rule.pieces.append("(")
        self._item = None

    def _close(self, line: int) -> None:
        if not self._groups:
            raise _mistake(line, "a ')' without its '('")
        self._end_sequence()
        self._rule.pieces.append(")")
        self._item, self._is_repeated = self._groups.pop()[0], False

    def _end_sequence(self) -> None:
        """End a sequence. Write an empty sequence as an empty text."""
        if not self._rule.pieces or self._rule.pieces[-1] in ("(", "|"):
            self._rule.pieces.append('""')
        self._item = None

    def _repeat(self, piece: _Piece) -> None:
        if self._item is None:
            raise _mistake(piece.line, f"{_shown(piece.text)} repeats nothing: put it behind an item")
        if self._is_repeated:  # Lark repeats a repeat only in brackets
            self._rule.pieces[self._item] += "("
            self._rule.pieces.append(")")
        self._is_repeated = True
        times = piece.text if len(piece.text) == 1 else _times(piece)
        if times == "{0,0}":  # Lark has no such repeat
            self._forget_item()
        else:
            self._rule.pieces[-1] += times

    def _forget_item(self) -> None:
        """Replace the last item by an empty text."""
        assert self._item is not None
        self._rule.pieces[self._item :] = ['""']
        kept = {place: name for place, name in self._rule.names.items() if place < self._item}
        self._rule.names = kept


def _times(piece: _Piece) -> str:
    found = _TIMES.fullmatch(piece.text)
    if found is None:
        raise _mistake(piece.line, f"{_shown(piece.text)} is not {{n}}, {{n,}} or {{n,m}}")
    least, comma, most = found.groups()
    low = int(least)
    high = int(most) if most is not None else None if comma else low
    if max(low, high or 0) > MAX_REPEATS:
        raise _mistake(piece.line, f"{_shown(piece.text)} is more than {MAX_REPEATS} times")
    if high is not None and high < low:
        raise _mistake(piece.line, f"{_shown(piece.text)} has a maximum below its minimum")
    return f"{{{low},{'' if high is None else high}}}"


def _character(found: re.Match[str], piece: _Piece) -> str:
    """Return the character that an escape stands for."""
    code = next((part for part in found.groups()[:3] if part is not None), None)
    if code is None and (letter := found.group(4)) in _ESCAPES:
        return _ESCAPES[letter]
    value = -1 if code is None else int(code, 16)
    if not 0 <= value <= 0x10FFFF or 0xD800 <= value <= 0xDFFF:
        raise _mistake(piece.line, f"{_shown(found.group())} is not an escape of a character")
    return chr(value)


def _regex_of_set(piece: _Piece) -> str:
    """Translate a set such as [^a-z]. Only an unescaped `-` between two characters makes a range."""
    inside = piece.text[1:-1]
    is_negated = inside.startswith("^")
    parts: list[str] = []
    at = int(is_negated)
    while at < len(inside):
        found = _ESCAPE.match(inside, at)
        character = inside[at] if found is None else _character(found, piece)
        is_range = found is None and character == "-" and parts and at + 1 < len(inside)
        parts.append("-" if is_range else f"\\u{{{ord(character):X}}}")
        at = at + 1 if found is None else found.end()
    if not parts:
        raise _mistake(piece.line, f"{_shown(piece.text)} is an empty set of characters")
    return f"/[{'^' * is_negated}{''.join(parts)}]/"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the rules made of characters only, directly or through other such rules: Lark's terminals."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    missing = {name: len(rule.lines) for name, rule in rules.items()}
    for name, rule in rules.items():
        for other in rule.lines:
            users[other].append(name)
    found: set[str] = set()
    waiting = [name for name, count in missing.items() if count == 0]
    while waiting:
        name = waiting.pop()
        if name == "root":
            continue
        found.add(name)
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                waiting.append(user)
    return found


def _lark_names(rules: dict[str, _Rule], terminals: set[str]) -> dict[str, str]:
    """Return Lark's names: lower case for rules, upper case for terminals."""
    names, taken = {"root": "start"}, {"start"}
    for number, name in enumerate(rules):
        if name != "root":
            plain = "rule_" + re.sub("[^a-z0-9]", "_", name[:64].lower())
            plain = f"{plain}_{number}" if plain in taken else plain
            taken.add(plain)
            names[name] = plain.upper() if name in terminals else plain
    return names
