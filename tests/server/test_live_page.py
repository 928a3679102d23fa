"""The page's files: what is served, under which rules, and that nothing comes from elsewhere."""

import re
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette

from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.page import live_page as page
from tests.server.fake import serve

ROOT = Path(page.__file__).parents[3]
MODULES = [
    *("app.js", "chat.js", "code.js", "conversation.js", "dom.js", "draft.js", "live.js", "markdown.js"),
    "math.js",
    *("menu.js", "net.js", "settings.js", "store.js"),
]
OWN = ["index.html", "style.css", "icon.svg", "theme.js", *MODULES]
LIBRARIES = ["marked.esm.js", "highlight.min.js", "temml.esm.js"]  # of modules of ours
VENDORED = [
    *("uplot/LICENSE", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"),
    *("marked-LICENSE", "highlight-LICENSE", "temml-LICENSE", *LIBRARIES),
]


@pytest.fixture(scope="module")
def client():
    with serve(Starlette(routes=page.routes())) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def html():
    return (page.FOLDER / "index.html").read_text()


def read(name):
    return (page.FOLDER / name).read_text()


def test_these_are_the_files():
    assert sorted(page.read_files()) == sorted(OWN + VENDORED)


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/index.html", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/app.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/page/uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
        ("/page/uplot/LICENSE", "text/plain; charset=utf-8"),
        ("/page/marked.esm.js", "text/javascript; charset=utf-8"),
        ("/page/marked-LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_a_file_is_sent_whole_with_its_type(client, path, content_type):
    answer = client.get(path)
    name = path.removeprefix("/page/").lstrip("/") or "index.html"
    assert answer.status_code == 200
    assert answer.headers["content-type"] == content_type
    assert answer.content == (page.FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../page.py",
        "/page/%2e%2e/page.py",
        "/page/uplot/..%2f..%2fpage.py",
        "/page//etc/passwd",
        "/page/uplot",
        "/page/app.js/",
    ],
)
def test_nothing_else_is_sent(client, path):
    assert client.get(path).status_code == 404


def test_head_and_get_only(client):
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert client.post("/").status_code == 405
    assert client.delete("/page/app.js").status_code == 405


def test_a_browser_asks_again_and_gets_nothing_new(client):
    first = client.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for value in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = client.get("/page/app.js", headers={"if-none-match": value})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
        assert "content-security-policy" in again.headers
    assert client.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get("/page/live.js").headers["etag"] != etag


def test_the_policy_allows_our_own_files_only(client):
    policy = client.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["frame-ancestors"] == "'none'"
    assert rules["base-uri"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in policy


def test_the_html_obeys_the_policy(html):
    assert not re.findall(r"<script(?![^>]*\bsrc=)", html), "inline script"
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html), "inline style or handler"


def test_every_reference_of_the_html_exists_and_is_relative(client, html):
    """Relative, so that the page also works behind a proxy that adds a prefix."""
    references = re.findall(r'(?:src|href)="([^"#][^"]*)"', html)
    assert len(references) == 7
    for reference in references:
        assert not reference.startswith("/")
        assert client.get("/" + reference).status_code == 200, reference


def test_every_import_exists_and_every_module_is_used():
    imported = set()
    for name in MODULES:
        found = re.findall(r'(?:from |import\()"\./([\w.]+)"', read(name))
        assert found or "import" not in read(name), name
        imported.update(found)
    assert imported == {*MODULES, *LIBRARIES} - {"app.js"}
    assert "import" not in read("theme.js")  # no module: it runs before the first paint


def test_every_id_of_the_scripts_is_in_the_html_and_appears_once(html):
    ids = re.findall(r'\bid="([\w-]+)"', html)
    assert len(ids) == len(set(ids))
    asked = {name for module in MODULES for name in re.findall(r'\$\("([\w-]+)"\)', read(module))}
    assert len(asked) > 30
    assert asked <= set(ids)
    named = re.findall(r'(?:for|aria-controls|aria-describedby|aria-labelledby)="([\w-]+)"', html)
    assert named
    assert set(named) <= set(ids)


@pytest.mark.parametrize("name", OWN)
def test_no_address_of_another_machine(name):
    hosts = {urlsplit(address).netloc for address in re.findall(r"https?://[^\s\"'<)]+", read(name))}
    assert hosts <= {"www.w3.org"}, "only SVG's name space, which nobody fetches"
    assert not re.search(r"""["'(]//\w""", read(name))
    assert "@import" not in read(name)


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".js")])
def test_text_never_becomes_markup(name):
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", read(name)
    )


@pytest.mark.parametrize(
    ("library", "says", "licence", "holder"),
    [
        ("marked.esm.js", "marked v18.2.0", "marked-LICENSE", "MarkedJS"),
        ("temml.esm.js", "Temml v0.13.5", "temml-LICENSE", "Ron Kok"),
        ("highlight.min.js", "Highlight.js v11.12.0", "highlight-LICENSE", "Redistribution and use"),
        ("uplot/uPlot.iife.min.js", "uPlot (v1.6.32)", "uplot/LICENSE", "Leon Sorokin"),
    ],
)
def test_a_library_is_shipped_with_its_licence(library, says, licence, holder):
    assert says in read(library)[:200]
    assert holder in read(licence)
    assert not re.search(r"\beval\(|new Function", read(library))


def test_every_setting_can_be_asked_of_the_server():
    """A name that the server does not know would be ignored, and nobody would see it."""
    numbers = re.search(r"const NUMBERS = \[(.*?)\n\];", read("settings.js"), re.S)[1]
    names = re.findall(r'\["[\w-]+", "(\w+)", ', numbers)
    assert len(names) == 8
    assert {*names, "stop", "tools", "seed"} <= ChatRequest.model_fields.keys()


def test_a_field_of_the_page_refuses_what_the_server_would(html):
    """The page names the field; the server's answer names a field of its JSON."""
    numbers = [*re.findall(r'\["([\w-]+)", "(\w+)", ', read("settings.js")), ("seed", "seed")]
    asked = {"messages": [{"role": "user", "content": "a"}]}
    assert len(numbers) == 9
    for field, name in numbers:
        tag = re.search(rf'<input id="{field}" ([^>]*)>', html)[1]
        given = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        for bound in ("min", "max"):
            assert bound in given, f"{field} has no {bound}"
            ChatRequest.model_validate({**asked, name: number(given[bound])})
        assert f'id="{field}-error"' in html


def number(text):
    return float(text) if "." in text else int(text)


def test_both_colour_schemes_define_the_same_colours():
    light = re.search(r":root \{(.*?)\n\}", read("style.css"), re.S)[1]
    dark = re.search(r':root\[data-theme="dark"\] \{(.*?)\n\}', read("style.css"), re.S)[1]
    colours = re.compile(r"(--[\w-]+): #")
    assert set(colours.findall(light)) == set(colours.findall(dark))
    used = set(re.findall(r"var\((--[\w-]+)\)", read("style.css")))
    assert used <= set(re.findall(r"(--[\w-]+):", light))


def test_the_package_data_names_every_file():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["blockdraft.server"]
    found = {path for pattern in patterns for path in page.FOLDER.parent.glob(pattern) if path.is_file()}
    assets = {path for path in found if path.suffix != ".py"}
    assert assets == {page.FOLDER / name for name in OWN + VENDORED}


@pytest.mark.slow
def test_a_wheel_holds_the_page(tmp_path):
    # The oldest that knows pyproject's `license`; a fresh environment of Python 3.11 has an older one.
    pytest.importorskip("setuptools", minversion="77")
    from setuptools.build_meta import build_wheel

    with pytest.MonkeyPatch.context() as patch:
        source = tmp_path / "source"
        copy_tree(ROOT, source)
        patch.chdir(source)
        name = build_wheel(str(tmp_path))
    names = set(zipfile.ZipFile(tmp_path / name).namelist())
    assert {f"blockdraft/server/page/{file}" for file in OWN + VENDORED} <= names
    assert "blockdraft/server/page/live_page.py" in names


def copy_tree(root, to):
    for path in [
        root / "pyproject.toml",
        root / "LICENSE",
        root / "README.md",
        *root.glob("blockdraft/**/*"),
    ]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = to / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
