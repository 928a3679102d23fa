"""Fixtures of the tests that open the page in Chromium: Playwright is imported when one is asked for."""

import os

import pytest

from tests.server.fake import Fake, serve


@pytest.fixture(scope="module")
def browser():
    from tests.server.browsing import BROWSER, sync_api

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def url(fake):
    with serve(fake.app()) as url:
        yield url


@pytest.fixture
def open_page(browser, url):
    """Opens the page; afterwards, nothing may have gone wrong in it, the security policy included."""
    from tests.server.browsing import DESKTOP

    problems, contexts = [], []

    def on_console(message):
        # The browser itself reports every answer that is not 2xx; those are what some tests ask for.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            problems.append(message.text)

    def open_page(viewport=DESKTOP, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page):
    from tests.server.browsing import expect

    page = open_page()
    expect(page.locator("#status")).to_have_text("ready")
    return page
