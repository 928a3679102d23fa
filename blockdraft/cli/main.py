"""The command `blockdraft`. Heavy imports are inside the commands, so --help never loads torch."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Container, Sequence
from typing import NoReturn

from blockdraft import __version__
from blockdraft.errors import BlockdraftError
from blockdraft.settings.known_names import as_our_flags, command_hint, flag_hint
from blockdraft.settings.settings import suggestion
from blockdraft.start.driver_warmup import ended_by_ctrl_c

COMMANDS = (
    *("chat", "run", "generate", "serve", "bench", "train", "fit"),
    *("fetch", "models", "recipes", "settings", "plan", "doctor", "kv", "prove", "replay"),
)
ALIASES = {"run": "chat"}
EXIT_ERROR = 2
EXIT_INTERRUPT = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # a full disk, or a file at its size limit


class Parser(argparse.ArgumentParser):
    """An argparse parser that suggests the likely name for an unknown one."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        hint = "" if wrong is None else suggestion(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        super().error(message + hint)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error about the first unknown flag, or the first unknown argument."""
        name = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            hint = ": put the prompt in quotes" if self.prog.endswith(" generate") else ""
            self.error(f"unexpected argument '{name}'{hint}")
        known = flag_hint(name)
        hint = f": {known}" if known else suggestion(name, list(self._option_string_actions))
        self.error(f"unknown flag {name}{hint}")

    def flags(self) -> Container[str]:
        return self._option_string_actions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse's own errors raise SystemExit(2)."""
    try:
        with ended_by_ctrl_c():
            args = parse(sys.argv[1:] if argv is None else argv)
        code: int = args.run(args)
        sys.stdout.flush()
    except BlockdraftError as error:
        print("blockdraft: error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        _forget_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _forget_output()
        what = "the output" if error.filename is None else f"'{error.filename}'"
        reason = f"cannot write {what} ({error.strerror}): choose another place."
        print("blockdraft: error:", reason, file=sys.stderr)
        return EXIT_ERROR
    return code


def _forget_output() -> None:
    """Redirect stdout to /dev/null, because Python's flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    title = "Serve language models with lossless block-diffusion speculative decoding (DFlash)."
    parser = Parser(prog="blockdraft", description=title, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"blockdraft {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    parsers = {}
    for name in [argv[0]] if argv and argv[0] in COMMANDS else COMMANDS:  # import only the named command
        ours = ALIASES.get(name, name)
        command = importlib.import_module(f"blockdraft.cli.{ours}")
        summary = command.SUMMARY if name == ours else f"the same as {ours}"
        usage = command.USAGE.replace(f"blockdraft {ours}", f"blockdraft {name}")
        about = {"help": summary, "usage": usage, "description": command.__doc__}
        parsers[name] = commands.add_parser(name, allow_abbrev=False, **about)
        command.add_arguments(parsers[name])
        parsers[name].set_defaults(run=command.run)
    if argv and argv[0].startswith("-") and argv[0] not in parser.flags():
        parser.refuse(argv[:1])
    if argv and (hint := command_hint(argv[0])) is not None:
        parser.error(hint)
    if argv and argv[0] in parsers:
        argv, notes = as_our_flags(argv, parsers[argv[0]].flags())
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parsers[args.command].refuse(unknown)
    return args
