"""The entry point, of `python -m mlapatch` too. Nothing is imported here: Ctrl-C may come while the rest is."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from mlapatch.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
