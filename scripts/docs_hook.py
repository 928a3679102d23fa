"""A hook of mkdocs: pages that read well in the repository read the same on the site."""

import posixpath
import re
from types import SimpleNamespace

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)[^)\s]*\)")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: SimpleNamespace, **_: object) -> str:
    return with_blank_lines(without_links_outside(markdown, page.file.src_uri))


def without_links_outside(markdown: str, path: str) -> str:
    """Links to files outside docs/ become text, since the site does not have them; tests/docs checks them."""

    def text_or_link(found: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        return found[1] if there.startswith("../") else found[0]

    return LINK.sub(text_or_link, markdown)


def with_blank_lines(markdown: str) -> str:
    """Python's Markdown wants a blank line before a list, a table, a heading and a code block."""
    lines: list[str] = []
    before = ""
    for line in markdown.splitlines():
        kind = _kind(line, before)
        if "" not in (before, kind) and kind != before and before != "code":
            lines.append("")
        lines.append(line)
        before = kind
    return "\n".join(lines)


def _kind(line: str, before: str) -> str:
    if line.startswith("```"):
        return "end of code" if before == "code" else "code"
    if before == "code":
        return "code"
    if not line.strip():
        return ""
    if line.startswith("#"):
        return "heading"
    if line.startswith("|"):
        return "table"
    return "list" if LIST_ITEM.match(line) or before == "list" else "text"
