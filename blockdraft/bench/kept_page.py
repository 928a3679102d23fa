"""Keeps the page of HTML that a model was asked for, so that a person can look at what was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from blockdraft.bench.records import Group

_FENCED = re.compile(r"^```html[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_BARE = re.compile(r"(?:<!doctype html|<html\b).*?(?:</html\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_END = re.compile(r"</html\s*>\s*\Z", re.IGNORECASE)


def page_in(text: str) -> str | None:
    """Return the page of HTML in an answer, fenced or not; None if there is none."""
    fenced, bare = _FENCED.search(text), _BARE.search(text)
    return fenced[1] if fenced else bare[0] if bare else None


def keep_page(groups: Sequence[Group], path: Path) -> str:
    """Write the first answer's page to `path`. Return a line that says so, or why there is none."""
    texts = [answer.text for group in groups for answer in group.answers if answer.is_ok]
    page = next(filter(None, map(page_in, texts)), None)
    if page is None:
        return "no page was kept: no answer has one."
    path.write_text(page, encoding="utf-8")
    is_whole = _END.search(page) is not None
    return f"written: {path}{'' if is_whole else ', which is cut: give more --max-tokens'}"
