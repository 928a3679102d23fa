"""Talk in the terminal to a model: another name of `blockdraft chat`."""

from __future__ import annotations

from blockdraft.cli.chat import add_arguments, run

__all__ = ["SUMMARY", "USAGE", "add_arguments", "run"]

SUMMARY = "the same as chat"
USAGE = "blockdraft run [MODEL | URL] [flags]"
