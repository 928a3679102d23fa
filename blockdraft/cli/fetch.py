"""Download models (targets or drafters) into the cache before their first use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from blockdraft.cli.flags import add_verbose, reporter

SUMMARY = "download models before their first use"
USAGE = "blockdraft fetch [MODEL ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", default=["default"], metavar="MODEL", help="hub ids (default: the default model)"
    )
    add_verbose(parser)


def run(args: argparse.Namespace) -> int:
    return fetch_models(args.models, args)


def fetch_models(names: Sequence[str], args: argparse.Namespace) -> int:
    from blockdraft.checkpoints.opening import open_checkpoint

    for name in names:
        open_checkpoint(name, report=reporter(args)).close()
        print(f"'{name}' is ready")
    return 0
