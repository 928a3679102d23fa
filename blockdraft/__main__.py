"""Runs `blockdraft` and `python -m blockdraft`. Ctrl-C prints no traceback, however early it comes."""

# `signal` itself takes so long to import that Ctrl-C could interrupt the import.
import _signal as signal  # type: ignore[import-not-found]

EXIT_INTERRUPT = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Run the command. Before and after the command, Ctrl-C ends the process without a traceback."""
    catches = signal.getsignal(signal.SIGINT)  # SIG_IGN if a shell started us in the background
    if catches is not signal.default_int_handler:
        return _command()
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from blockdraft.cli import main as command

        signal.signal(signal.SIGINT, catches)
        code = command.main()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    return code


def _command() -> int:
    from blockdraft.cli import main as command

    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
