"""The page in Chromium, driven by Playwright: what its tests share. Their fixtures are in conftest.py."""

import shutil
import time

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # of a busy machine; only a failure waits for so long
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium"),
]
DESKTOP = {"width": 1280, "height": 800}
MARKDOWN = r"""# Title

| fruit | price |
|:--|--:|
| *apple* | `1` |

- outer
  1. inner
     - innermost
- [x] done

> quoted **words**

A [link](https://example.com/a), a [trap](javascript:alert(1)), ![picture](https://example.com/p.png)
&amp; ~~old~~.
<img src=x onerror=alert(1)>

\(a_1 + b_1\)

```python
def f(x):  # comment
    return "text"
```

```nolanguage
<b>
```
"""


def ask(page, text="Explain it."):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finish(page):
    expect(page.locator("#send")).to_be_visible()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
