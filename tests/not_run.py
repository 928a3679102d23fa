"""What a run of the suite left out, in one line at its end: tests for a card, for a browser, and slow ones.

Hooks of pytest, which tests/conftest.py takes over. With several processes each of them deselects the same
tests, and the first that ends says which; skipped tests are known to the one that reports.
"""

from collections import Counter

import pytest

KINDS = {"card": "for a GPU", "browser": "for a browser", "engine": "for vLLM or SGLang", "slow": "slow"}
DESELECTED = pytest.StashKey[Counter]()
WORKERS_DESELECTED = "deselected by kind"


def kind_of(name, keywords, reason=""):
    """A key of KINDS; None: it was left out for another reason."""
    if "gpu" in keywords or "CUDA device" in reason or "Hopper" in reason:
        return "card"
    if "test_browser" in name:
        return "browser"
    if reason.startswith("Skipped: wants"):
        return "engine"
    return "slow" if "slow" in keywords else None


def line(counts, *, has_browser_file=True):
    """None: nothing was left out. A whole file that was skipped counts as one, so its number is not said."""
    parts = []
    for kind, what in KINDS.items():
        if counts[kind]:
            number = f"{counts[kind]} " if kind != "browser" or has_browser_file else "those "
            parts.append(f"{number}{what}")
    if not parts:
        return None
    return f"Not run: {', '.join(parts)}. `make test-all` runs all that this machine can (docs/develop.md)."


def pytest_deselected(items):
    for item in items:
        counts = item.config.stash.setdefault(DESELECTED, Counter())
        counts[kind_of(item.nodeid, item.keywords)] += 1


def pytest_sessionfinish(session):
    counts = session.config.stash.get(DESELECTED, None)
    if counts and hasattr(session.config, "workeroutput"):
        counts.pop(None, None)
        session.config.workeroutput[WORKERS_DESELECTED] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if counts := getattr(node, "workeroutput", {}).get(WORKERS_DESELECTED):
        node.config.stash[DESELECTED] = Counter(counts)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # behind all else that is summed up
def pytest_terminal_summary(terminalreporter, config):
    result = yield
    counts = Counter(config.stash.get(DESELECTED, {}))
    skipped = terminalreporter.stats.get("skipped", [])
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        keywords = report.keywords if isinstance(report, pytest.TestReport) else {}
        counts[kind_of(report.nodeid, keywords, reason)] += 1
    is_whole_file = any("test_browser" in one.nodeid and "::" not in one.nodeid for one in skipped)
    if text := line(counts, has_browser_file=not is_whole_file):
        terminalreporter.write_line(text)
    return result
