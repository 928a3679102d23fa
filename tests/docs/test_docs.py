"""Documentation that can be checked is checked."""

import re
import sys
from pathlib import Path

import pytest

from scripts.make_docs import DOCS, PAGES

ROOT = DOCS.parent
PAGES_WITH_LINKS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name):
    if name == "cli.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other Python versions; the page is made by 3.11")
    assert (DOCS / name).read_text() == PAGES[name](), "run python -m scripts.make_docs"


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_make_target_of_the_readme_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text())) <= set(targets)


def test_the_version_is_one():
    import blockdraft

    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found[1] == blockdraft.__version__


def test_the_readmes_python_names_exist():
    import blockdraft

    text = Path(ROOT / "README.md").read_text()
    for names in re.findall(r"^from blockdraft import (.+)$", text, re.M):
        for name in names.split(", "):
            assert hasattr(blockdraft, name)
