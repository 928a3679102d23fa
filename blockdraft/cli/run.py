"""blockdraft run: another name of `blockdraft chat`."""

from __future__ import annotations

from blockdraft.cli.chat import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "SUMMARY", "USAGE", "add_arguments", "run"]

SUMMARY = "the same as chat"
USAGE = "blockdraft run [MODEL | URL] [flags]"
