"""Takes docs/page.png, a picture of the live page of a running server.

blockdraft serve                                        # the default pair
python -m scripts.take_screenshot http://127.0.0.1:8000

It needs playwright and the machine's own Chromium (Debian: apt-get install chromium). Every figure on the
picture is the server's: some questions are asked through the page, one after the other, and the last answer
is shown with its drafts marked.
"""

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

PICTURE = Path(__file__).parent.parent / "docs/page.png"
QUESTIONS = (
    "Write a Python function that counts the vowels of a string.",
    "How does binary search work?",
    "Write a Python function that adds the numbers from 1 to n.",
)
MAX_TOKENS = 200
ANSWER_MS = 300_000  # a busy machine is slow, and that is all


def take(page: Page, url: str, out: Path) -> None:
    page.goto(url)
    expect(page.locator("#status")).to_have_text("ready", timeout=ANSWER_MS)
    page.click("#settings-button")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(MAX_TOKENS))
    page.click("#settings-button")
    page.click("#drafts")
    for question in QUESTIONS:
        page.click("#new-chat")
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("#send")).to_be_visible(timeout=ANSWER_MS)
    page.wait_for_timeout(500)
    page.screenshot(path=out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.take_screenshot", description=__doc__)
    parser.add_argument("url", help="of a server with a drafter")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        take(browser.new_page(viewport={"width": 1280, "height": 800}), given.url, given.out)
        browser.close()
    print(f"{given.out}: {given.out.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
