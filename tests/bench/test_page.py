"""The page: whole, closed, and safe against what servers and prompts say; in a real browser as well."""

import os
import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockdraft.bench import page
from blockdraft.bench.charts import Axis, Bar, Strip, bars, linear_ticks, lying_bars, strips
from blockdraft.bench.page import render
from blockdraft.bench.records import Prompt
from blockdraft.bench.report import build
from tests.bench.answers import HOSTILE, answer, arms, facts, group, prompt, prompts, workloads

VOID = {"meta", "br", "line", "rect", "circle", "path"}


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


def hostile_report():
    """Everything that others choose is a script."""
    both = arms(6, workload=HOSTILE)
    for one in both:
        one.answers[0] = answer(
            Prompt(HOSTILE, HOSTILE, (HOSTILE,)), arm=one.key.arm, text=one.key.arm + HOSTILE
        )
    both[0].answers[1].error = HOSTILE
    names = dict.fromkeys(("kind", "version", "model", "drafter", "drafter_hash"), HOSTILE)
    given = facts(endpoint={**names, "url": "http://x/" + HOSTILE}, notes=[HOSTILE], date=HOSTILE)
    given["options"] = {HOSTILE: [HOSTILE], "seed": 1}
    given["machine"] = {"platform": HOSTILE, "cpu": HOSTILE, "gpus": [{"name": HOSTILE}]}
    given["startup"] = [{"label": HOSTILE, "phases": {HOSTILE: 1.0}}]
    return build(both, **given)


def test_the_page_is_one_file_that_asks_nobody():
    html = render(build(workloads(), **facts()))
    tree = parsed(html)
    assert not {"script", "link", "img", "iframe", "object", "form", "a"} & set(tree.tags)
    assert not [
        name for name, _ in tree.attributes if name in ("src", "href", "style") or name.startswith("on")
    ]
    assert "url(" not in html
    assert "http" not in re.sub(r"http-equiv|http://127\.0\.0\.1:8000", "", html)
    assert "default-src 'none'" in html


def test_what_others_say_is_text():
    html = render(hostile_report())
    tree = parsed(html)
    assert "script" not in tree.tags
    assert "<script" not in html
    assert "\x1b" not in html
    assert sum("alert(1)" in text for text in tree.texts) > 15


def test_a_text_that_is_no_unicode_can_be_written(tmp_path):
    both = arms(4)
    both[0].answers[0].text = "half a \ud83d"
    (tmp_path / "page.html").write_text(render(build(both, **facts())), encoding="utf-8")


def test_every_chart_is_there():
    html = render(build(workloads(), **facts()))
    tree = parsed(html)
    labels = [value for name, value in tree.attributes if name == "aria-label"]
    assert labels == [
        "Throughput of code, T 0",
        "Throughput of prose, T 0",
        "Speedup, concurrency 1, T 0",
        "Speedup, concurrency 8, T 0",
        "Acceptance of code, T 0",
        "Acceptance of prose, T 0",
        "TTFT, concurrency 1, T 0",
        "TTFT, concurrency 8, T 0",
        "TPOT, concurrency 1, T 0",
        "TPOT, concurrency 8, T 0",
    ]
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
    assert "nan" not in re.sub(r"finance", "", html.split("</style>")[1]).lower().replace("drafter", "")


@pytest.mark.parametrize("high", [0.0, 0.003, 0.99, 1.0, 1.01, 7, 99, 1234, 5e6])
def test_ticks_begin_at_zero_and_reach_the_top(high):
    ticks = linear_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * 0.999999
    assert 2 <= len(ticks) <= 11


def test_bars_are_as_tall_as_their_values():
    chart = bars(
        [("1", [Bar(50.0, "speculative", "", [40.0, 60.0]), Bar(25.0, "plain", ""), Bar(None, "plain", "")])],
        title="t",
        unit="u",
    )
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', chart)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert len(heights) == 2
    low, high = map(float, re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", chart)[0])
    assert low - high == pytest.approx(heights[0] * 20 / 50, abs=0.2)


def test_the_line_at_one_lies_where_a_bar_of_one_ends():
    chart = lying_bars(
        [("a", Bar(1.0, "unclear", "")), ("b", Bar(3.0, "speculative", ""))], title="t", unit="u", mark_at=1.0
    )
    x, width = map(float, re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', chart)[0])
    assert x + width == pytest.approx(float(re.findall(r'class="mark" x1="([\d.]+)"', chart)[0]), abs=0.1)


def test_times_that_span_decades_get_a_logarithmic_axis():
    def of(high):
        quantiles = [1 + (high - 1) * step / 20 for step in range(21)]
        return strips([Strip("a", "plain", quantiles, high, "")], title="t", unit="ms")

    assert "logarithmic" not in of(20)
    assert "logarithmic" in of(1000)
    axis = Axis.logarithmic(1, 100)
    assert axis.place(10) - axis.place(1) == pytest.approx(axis.place(100) - axis.place(10))
    assert axis.place(0) == axis.place(1)


def test_the_templates_travel_with_the_package():
    project = tomllib.loads((Path(page.__file__).parents[2] / "pyproject.toml").read_text())
    assert "page/*" in project["tool"]["setuptools"]["package-data"]["blockdraft.bench"]
    assert sorted(file.name for file in page.FOLDER.iterdir()) == ["report.html", "style.css"]


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
    assert opened.locator("svg").count() >= 5
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(15, 18, 20)") == (scheme == "dark")
    for chart in opened.locator(".chart svg").all():
        box, of = chart.bounding_box(), chart.locator("xpath=..").bounding_box()
        assert box["width"] <= of["width"]
    texts_inside = """() => [...document.querySelectorAll('svg text')].every(text => {
        const svg = text.ownerSVGElement.getBoundingClientRect(), box = text.getBoundingClientRect();
        return box.left >= svg.left - 2 && box.right <= svg.right + 2; })"""
    assert opened.evaluate(texts_inside), "a label leaves its chart"
    context.close()
    assert problems == []
    assert asked == [file.as_uri()]
