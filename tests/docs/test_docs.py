"""Links, paths, generated pages and quoted numbers of the documentation are right."""

import ast
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

from scripts import docs_hook
from scripts.make_docs import DOCS, PAGES

ROOT = DOCS.parent
README = ROOT / "README.md"
# What describes the tree as it is; the log and the changelog describe what it was.
CURRENT = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_LINKS = [*CURRENT, ROOT / "CHANGELOG.md", ROOT / "benchmarks/log.md"]
REFERENCE = {"bench-schema.md", "cli.md", "models.md", "settings.md"}  # tables, to look something up in
MAX_LINES = 110  # two screens
MAX_PICTURE_BYTES = 300_000
ROOMS = [path.name for path in (ROOT / "blockdraft").iterdir() if path.is_dir() and path.name.isidentifier()]
FOLDERS = ("blockdraft", "tests", "benchmarks", "docs", "scripts", "container", "deploy", *ROOMS)


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name):
    if name == "cli.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other Python versions; the page is made by 3.11")
    assert (DOCS / name).read_text() == PAGES[name](), "run python -m scripts.make_docs"


# ---- links and paths


def prose(text):
    """The text without code blocks, where # is no heading and brackets are no link."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text):
    """The anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=named)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page.read_text())):
        if link.startswith("http"):
            continue
        there = page.parent / link if link else page
        assert there.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{page.name} links to #{anchor} of {there.name}"


def paths(text):
    """Paths in this repository that a page names: `step/decode.py`, `tests/lossless/`, `docs/*.md`."""
    pattern = rf"(?<![\w./~-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]"
    return set(re.findall(pattern, text))


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_paths_that_a_page_names_exist(page):
    for path in paths(re.sub(r"https?://\S+", "", page.read_text())):
        is_there = any(any(folder.glob(path.rstrip("/"))) for folder in (ROOT, ROOT / "blockdraft"))
        assert is_there, f"{page.name} names {path}"


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_modules_that_a_page_runs_exist(page):
    for name in re.findall(r"-m ((?:benchmarks|scripts|tests)[\w.]*\w)", page.read_text()):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} runs {name}"


def test_pages_that_the_code_names_exist():
    for file in (
        *(ROOT / "blockdraft").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        ROOT / "Makefile",
    ):
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{file.relative_to(ROOT)} names {page}"


def test_paths_and_anchors_are_found():
    text = "see `step/decode.py`, `blockdraft/step/no.py` and `tests/lossless/`; not run/drafter"
    assert paths(text) == {"step/decode.py", "blockdraft/step/no.py", "tests/lossless/"}
    assert anchors("# Of `--width auto`\n```\n# not this\n```\n## What it's for") == {
        "of---width-auto",
        "what-its-for",
    }


# ---- the pages as a whole


def test_the_index_names_every_page():
    links = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert pages <= links


@pytest.mark.parametrize(
    "page", sorted({*DOCS.rglob("*.md")} - {DOCS / name for name in REFERENCE}), ids=named
)
def test_a_page_is_shorter_than_two_screens(page):
    assert len(page.read_text().splitlines()) <= MAX_LINES


def test_the_readme_is_a_front_door():
    assert len(README.read_text().splitlines()) <= 90


def test_the_picture_of_the_page_is_small():
    assert (DOCS / "page.png").stat().st_size < MAX_PICTURE_BYTES


# ---- the README


def test_a_page_shows_the_step_as_it_is():
    source = (ROOT / "blockdraft/step/decode.py").read_text()
    step = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    first, last = step.body[1].lineno, step.body[-1].lineno  # between the docstring and the return
    lines = textwrap.dedent("\n".join(source.splitlines()[first - 1 : last - 1]))
    assert f"```python\n{lines}\n```" in (DOCS / "how-it-works.md").read_text()


def recorded(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def test_the_readmes_speeds_are_the_recorded_ones():
    text = README.read_text()
    runs = recorded("drafter-head-h200.json")["one_stream"]["head"]
    for name in ("humaneval", "mt"):
        found = min((run[name] for run in runs), key=lambda one: one["speed_up"])
        speeds = f"{found['plain_tok_s']:,.0f} | {found['draft_tok_s']:,.0f} | **{found['speed_up']:.2f}x**"
        assert f"| {speeds} | {found['tokens_per_step']:.2f} |" in text
    parts = [part for part in recorded("cpu-drafter.json").values() if isinstance(part, dict)]
    cells = {
        (cell["key"]["workload"], cell["arm"]): cell
        for part in reversed(parts[:2])  # by each request's drafts; the others are at a fixed width
        for cell in part["cells"]
    }
    for name in ("code", "prose", "qa"):
        plain, drafted = cells[name, "plain"], cells[name, "speculative"]
        before, after = plain["tokens_per_s"]["value"], drafted["tokens_per_s"]["value"]
        per_step = drafted["speculation"]["committed_per_step"]["value"]
        assert f"| {before:.1f} | {after:.1f} | **{after / before:.2f}x** | {per_step:.2f} |" in text


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in CURRENT:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets, page.name


def test_the_package_pyproject_and_the_changelog_name_one_version():
    import blockdraft

    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found[1] == blockdraft.__version__
    assert newest[1] in (blockdraft.__version__, "Unreleased")


def test_the_readmes_python_names_exist():
    import blockdraft

    text = Path(ROOT / "README.md").read_text()
    for names in re.findall(r"^from blockdraft import (.+)$", text, re.M):
        for name in names.split(", "):
            assert hasattr(blockdraft, name)


# ---- the site


def test_the_site_names_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    in_navigation = re.findall(r"([\w/-]+\.md)$", text[text.index("\nnav:") :], re.M)
    assert sorted(in_navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_links_out_of_the_sites_folder_become_text():
    text = "[a](../benchmarks/log.md) [b](../../CONTRIBUTING.md#x) [c](../width.md) [d](0001-x.md#y) [e](https://x)"
    shown = docs_hook.without_links_outside(text, "decisions/0002-y.md")
    assert shown == "[a](../benchmarks/log.md) b [c](../width.md) [d](0001-x.md#y) [e](https://x)"
    assert docs_hook.without_links_outside(text, "start.md").startswith("a b c [d]")


def test_lists_and_tables_have_the_blank_line_that_the_site_needs():
    text = "It holds:\n- one\n  more\n- two\n## Next\n| a |\n|---|\n```\n- no list\n```\nend"
    blocks = docs_hook.with_blank_lines(text).split("\n\n")
    assert blocks == [
        "It holds:",
        "- one\n  more\n- two",
        "## Next",
        "| a |\n|---|",
        "```\n- no list\n```",
        "end",
    ]
