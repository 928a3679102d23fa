"""python -m blockdraft."""

from blockdraft.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
