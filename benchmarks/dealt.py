"""`blockdraft` with another rule on widths: `python -m benchmarks.dealt {each,one} serve FLAGS`.

each: rows get widths of their own, also on a CPU. one: all rows have one width, also on a GPU.
"""

import sys

from blockdraft.__main__ import main
from blockdraft.engine import allocation

RULES = ("each", "one")


def command(rule: str | None) -> list[str]:
    """Return the command that runs `blockdraft` with a rule; None: as it is."""
    module = ["blockdraft"] if rule is None else ["benchmarks.dealt", rule]
    return [sys.executable, "-m", *module]


if __name__ == "__main__":
    rule = sys.argv.pop(1)
    assert rule in RULES, rule
    allocation.deals_widths = lambda models: rule == "each"  # the engine's process is forked from this one
    sys.exit(main())
