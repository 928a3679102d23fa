"""Code, prose and qa in one load: a width of its own for each row, one width for all, and plain decoding.

    python -m benchmarks.mixed [--streams 64,256] [--rounds 3] [--json FILE] [-- FLAGS OF SERVE]

Two servers share the device, one with each rule (benchmarks/dealt.py). `blockdraft bench` loads them over
HTTP in turns, with drafts and without; prompts of the classes alternate. Prints medians over the rounds, the
first of which is not counted: it captures.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import dealt
from benchmarks.record import context, save, table
from benchmarks.soak import CLASSES, prompts_of, wait_until_ready
from blockdraft.machine.machine import free_port

PER_STREAM = 4  # requests of each stream in a measurement
PLAIN = "plain"
Found = defaultdict[tuple[int, str], list[float]]  # tokens per second, by streams and rule


@contextlib.contextmanager
def serving(rule: str, flags: list[str]) -> Iterator[str]:
    """Yield the URL of a server with this rule, once it is ready."""
    port = free_port()
    command = [*dealt.command(rule), "serve", "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=sys.stderr) as server:
        try:
            wait_until_ready(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def write_prompts(folder: str) -> Path:
    """Write the prompts of the classes by turns."""
    file = Path(folder) / "mixed.jsonl"
    lines = []
    for number, turn in enumerate(zip(*map(prompts_of, CLASSES), strict=False)):
        for name, prompt in zip(CLASSES, turn, strict=True):
            messages = [{"role": "user", "content": prompt}]
            lines.append(json.dumps({"id": f"{name}-{number}", "category": name, "messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def measure(url: str, prompts: Path, num_streams: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the cells of a report of `bench`."""
    command = [*dealt.command(None), "bench", url, "--workload", str(prompts)]
    command += ["--concurrency", str(num_streams), "--num-prompts", str(PER_STREAM * num_streams)]
    command += ["--max-tokens", str(max_tokens), "--no-headroom", "--out", "none", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"`bench` ended with {done.returncode}")
    return json.loads(done.stdout)["cells"]  # type: ignore[no-any-return]


def add(found: Found, committed: Found, rule: str, cells: list[dict[str, Any]]) -> None:
    """Add the speeds of a report, and the tokens that each class commits per step."""
    for cell in cells:
        key = cell["key"]
        if cell["num_failed"]:
            raise SystemExit(f"{cell['num_failed']} requests failed: {cell['errors']}")
        if key["category"] == "all":
            arm = rule if cell["arm"] != PLAIN else f"{rule}, {PLAIN}"
            found[key["concurrency"], arm].append(cell["tokens_per_s"]["value"])
        elif cell["arm"] != PLAIN:
            value = cell["speculation"]["committed_per_step"]["value"]
            committed[key["concurrency"], f"{rule}, {key['category']}"].append(value)


def lines(found: Found, streams: list[int]) -> list[list[object]]:
    """Return medians, and ratios: each server is compared with plain decoding by itself."""
    rows: list[list[object]] = []
    for count in streams:
        arms = [name for rule in dealt.RULES for name in (rule, f"{rule}, {PLAIN}")]
        own, its_plain, one, one_plain = (statistics.median(found[count, arm]) for arm in arms)
        speeds = [f"{speed:,.0f}" for speed in (own, its_plain, one, one_plain)]
        rows.append([count, *speeds, own / one, own / its_plain, one / one_plain])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of serve, behind --")
    options = parser.parse_args()
    streams, result = [int(one) for one in options.streams.split(",")], context()
    found: Found = defaultdict(list)
    committed: Found = defaultdict(list)
    with contextlib.ExitStack() as stack:
        prompts = write_prompts(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {rule: stack.enter_context(serving(rule, options.flags)) for rule in dealt.RULES}
        for number in range(options.rounds + 1):
            for count in streams:
                for rule, url in urls.items():
                    cells = measure(url, prompts, count, options.max_tokens)
                    if number > 0:
                        add(found, committed, rule, cells)
    header = [
        "streams",
        "own widths, tok/s",
        PLAIN,
        "one width",
        PLAIN,
        "own / one",
        "own / plain",
        "one / plain",
    ]
    print(table(header, lines(found, streams)))
    per_step = [[f"{count}, {name}", statistics.fmean(values)] for (count, name), values in committed.items()]
    print(table(["streams, rule, class", "committed per step"], per_step))
    speeds = {f"{count}, {rule}": values for (count, rule), values in found.items()}
    save(options.json, result | {"settings": vars(options), "tokens_per_s": speeds, "committed": per_step})


if __name__ == "__main__":
    main()
