"""The page: whole, closed, and safe against what servers and prompts say; in a real browser as well."""

import json
import os
import re
import shutil
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from blockdraft.bench.html_page import render
from blockdraft.bench.layout import acceptance
from blockdraft.bench.records import Prompt
from blockdraft.bench.report import build
from tests.bench.answers import HOSTILE, answer, arms, facts, group, prompt, prompts, workloads

VOID = {"meta", "br"}


class Tree(HTMLParser):
    """Tags that close in order, and all that occur."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(html):
    tree = Tree()
    tree.feed(html)
    tree.close()
    assert tree.open == []
    return tree


def charts_of(html):
    """The one JSON object of the page, by the charts' titles."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return {chart["title"]: chart for chart in json.loads(data)["charts"]}


def without_scripts(html):
    return re.sub(r"<script.*?</script>|<style>.*?</style>", "", html, flags=re.DOTALL)


def hostile_report():
    """Everything that others choose is a script."""
    both = arms(6, workload=HOSTILE)
    for one in both:
        one.answers[0] = answer(Prompt(HOSTILE, HOSTILE, (HOSTILE,)), arm=one.arm, text=one.arm + HOSTILE)
    both[0].answers[1].error = HOSTILE
    names = dict.fromkeys(("kind", "version", "model", "drafter", "drafter_hash"), HOSTILE)
    given = facts(endpoint={**names, "url": "http://x/" + HOSTILE}, notes=[HOSTILE], date=HOSTILE)
    given["options"] = {HOSTILE: [HOSTILE], "seed": 1}
    given["machine"] = {"platform": HOSTILE, "cpu": HOSTILE, "gpus": [{"name": HOSTILE}]}
    times = dict.fromkeys(("ready_s", "first_ttft_s", "first_latency_s"))
    given["startup"] = [{"label": HOSTILE, "phases": [{"name": HOSTILE, "seconds": 1.0}], **times}]
    return build(both, **given)


def test_the_page_is_one_file_that_asks_nobody():
    html = render(build(workloads(), **facts()))
    tree = parsed(html)
    assert tree.tags.count("script") == 3
    assert not {"link", "img", "iframe", "object", "form", "a"} & set(tree.tags)
    assert not [
        name for name, _ in tree.attributes if name in ("src", "href", "style") or name.startswith("on")
    ]
    assert "url(" not in without_scripts(html)
    assert "http" not in re.sub(r"http-equiv|http://127\.0\.0\.1:8000", "", without_scripts(html))
    assert "default-src 'none'" in html
    assert "MIT License" in html  # of uPlot, which travels in the page


def test_the_policy_allows_the_two_scripts_of_ours_and_no_other():
    html = render(build(workloads(), **facts()))
    hashes = [
        f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"
        for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    ]
    (allowed,) = re.findall(r"script-src ([^;]*);", html)
    assert (len(hashes), allowed) == (2, " ".join(f"'{one}'" for one in hashes))


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        (
            {"model": "default", "title": "SmolLM2-135M-Instruct"},
            "SmolLM2-135M-Instruct with drafter a/drafter",
        ),
        (
            {"model": "/srv/models/Some-4B", "drafter": "/srv/drafters/some-b16"},
            "Some-4B with drafter some-b16",
        ),
        ({}, "a/model with drafter a/drafter"),
    ],
)
def test_the_title_names_models_and_no_paths(changes, title):
    endpoint = facts()["endpoint"] | changes
    html = render(build(workloads(), **facts(endpoint=endpoint)))
    assert f"<h1>{title}, blockdraft" in html


def test_what_others_say_is_text():
    html = render(hostile_report())
    tree = parsed(html)
    assert tree.tags.count("script") == 3
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert sum("alert(1)" in text for text in tree.texts) > 15
    names = [name for chart in charts_of(html).values() for name, _ in chart["groups"]]
    assert any("</script>" in name for name in names)  # and ends no script
    assert not any("\x1b" in name for name in names)


def test_a_text_that_is_no_unicode_can_be_written(tmp_path):
    both = arms(4)
    both[0].answers[0].text = "half a \ud83d"
    (tmp_path / "page.html").write_text(render(build(both, **facts())), encoding="utf-8")


def test_every_chart_is_there():
    html = render(build(workloads(), **facts()))
    tree = parsed(html)
    labels = [value for name, value in tree.attributes if name == "aria-label"]
    assert labels == [
        "Throughput of code",
        "Throughput of prose",
        "Speedup, concurrency 1",
        "Speedup, concurrency 8",
        "code: 2.50 ±0.00 committed per step",
        "prose: 2.50 ±0.00 committed per step",
        "TTFT, concurrency 1",
        "TTFT, concurrency 8",
        "TPOT, concurrency 1",
        "TPOT, concurrency 8",
    ]
    assert list(charts_of(html)) == labels  # charts.js finds the place of each by this order
    for part in (
        "All cells",
        "What the figures mean",
        "How it was run",
        "2/12",
        "a/drafter",
        "22 of 22 equal",
    ):
        assert part in html


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [group([answer(prompt(), error="refused")], busy_s=0.0)],
        [group([answer(prompt(), tokens=0)])],
        [group([answer(prompt(), ttft_s=0.0, latency_s=0.0)], busy_s=0.0)],
        [group([answer(one, speculation=None) for one in prompts(3)], rate=0.5)],
        arms(3),
    ],
    ids=["nothing", "failed", "no tokens", "no time", "unknown acceptance", "pair"],
)
def test_a_page_of_little_is_whole(groups):
    html = render(build(groups, **facts()))
    parsed(html)
    assert "nan" not in re.sub(r"finance", "", without_scripts(html)).lower().replace("drafter", "")
    charts_of(html)


def test_charts_carry_the_figures_of_the_report():
    report = build(workloads(), **facts())
    charts = charts_of(render(report))
    bars = charts["Throughput of code"]["groups"]
    assert [name for name, _ in bars] == ["1", "8"]
    for mark, cell in zip(bars[0][1], report["cells"][:2], strict=True):
        assert (mark["style"], mark["box"]) == (cell["arm"], [0, cell["tokens_per_s"]["value"]])
        assert mark["line"] == cell["tokens_per_s"]["interval"]
    gains = charts["Speedup, concurrency 1"]
    assert (gains["is_horizontal"], gains["mark_at"]) == (True, 1.0)
    assert gains["groups"][0][1][0]["box"][1] == report["pairs"][0]["speedup"]["tokens_per_s"]["value"]
    times = charts["TPOT, concurrency 1"]
    (mark,) = times["groups"][0][1]
    of = report["cells"][0]["tpot_s"]
    assert [mark["tick"], mark["dot"]] == pytest.approx([1000 * of["p50"], 1000 * of["p99"]])
    assert [*mark["line"], *mark["box"]] == pytest.approx(
        [1000 * of["quantiles"][at] for at in (1, 19, 5, 15)]
    )
    shares = charts["code: 2.50 ±0.00 committed per step"]["groups"]
    assert [(name, mark["box"][1]) for name, (mark,) in shares] == [("1", 1.0), ("2", 0.5), ("3", 0.0)]


def test_what_charts_show_stands_in_tables_too():
    table = acceptance(build(workloads(), **facts()))
    assert table.rows[0] == ("code at 1", "2.50 ±0.00", "100.0%", "50.0%", "0.0%")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("is_hostile", [False, True])
def test_in_a_browser(browser, tmp_path, scheme, width, is_hostile):
    report = hostile_report() if is_hostile else build(workloads(), **facts())
    file = tmp_path / "page.html"
    file.write_text(render(report), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened, problems, asked = context.new_page(), [], []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: problems.append("a dialog") or dialog.dismiss())
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(file.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    num_charts = opened.locator(".plot").count()
    assert num_charts >= 5
    assert opened.locator(".plot canvas").count() == num_charts
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(15, 18, 20)") == (scheme == "dark")
    for chart in opened.locator(".plot").all():
        box, of = chart.locator("canvas").bounding_box(), chart.locator("xpath=..").bounding_box()
        assert 0 < box["width"] <= of["width"]
    is_drawn = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
        .data.some(value => value)"""
    for canvas in opened.locator(".plot canvas").all():
        assert canvas.evaluate(is_drawn), "an empty chart"
    over = opened.locator(".plot .u-over").first
    over.hover(position={"x": 40, "y": 60})
    assert "tok/s, 95 %" in opened.locator("figcaption").first.inner_text()
    context.close()
    assert problems == []
    assert asked == [file.as_uri()]
